"""Where a node's data folder and its control file are, for the node and for client commands.

Kept apart from `node.config` because a client command must start at once: only the standard library.
"""

import os
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT_PREFIX = "PEERLOOM_"
CONTROL_NAME = "control.json"
"""In the data folder: how to reach the node that holds it (`node.control`)."""


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """`~/.local/share/peerloom/default`, or below XDG_DATA_HOME (XDG base directory specification)."""
    base = environ.get("XDG_DATA_HOME", "")
    # The specification: a relative path there is invalid and is to be ignored.
    data_home = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share"
    return data_home / "peerloom" / "default"


def short_path(path: Path | str) -> str:
    """A path as a person writes it: `~` for the home folder."""
    try:
        return str(Path("~") / Path(path).relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return str(path)
