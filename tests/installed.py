"""The console script as an installer writes it, and a shell to run it in."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.source import ROOT

SECONDS_MAX = 60.0
"""Seconds allowed for one command on a busy machine."""
_SCRIPT = """\
#!/bin/sh
'''exec' '{python}' "$0" "$@"
' '''
import sys
from {module} import {function}
if __name__ == "__main__":
    sys.exit({function}())
"""
"""The form that pip writes if the interpreter's path is too long for a `#!` line, or contains blanks."""


def console_script(folder: Path, name: str = "peerloom") -> Path:
    """Write the console script of pyproject.toml into `folder`; return its path."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["peerloom"].partition(":")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(_SCRIPT.format(python=sys.executable, module=module, function=function))
    path.chmod(0o755)
    return path


def environment(home: Path, path: Sequence[Path] = (), **more: str) -> dict[str, str]:
    """Return an environment with `path` in front of PATH, `home` for data, and this checkout's packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PEERLOOM_", "XDG_"))}
    folders = os.pathsep.join([*map(str, path), "/usr/bin", "/bin"])
    return kept | {"HOME": str(home), "PATH": folders, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"} | more


def typed(
    line: str, folder: Path, path: Sequence[Path] = (), *, seconds: float = SECONDS_MAX, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a line in a shell in `folder`, which is also the home."""
    return subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=folder,
        env=environment(folder, path, **more),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
