"""The error that a user gets on an unsupported system."""

import subprocess
import sys

import pytest

from tests.source import ROOT

WINDOWS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "pwd", "resource"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Missing())
for name in ("fcntl", "pwd", "resource"):
    sys.modules.pop(name, None)
sys.platform = "win32"
"""
COMMAND = WINDOWS + (
    "import runpy\nmodule = sys.argv[0] = sys.argv.pop(1)\nrunpy.run_module(module, run_name='__main__')"
)
LIBRARY = WINDOWS + (
    "import node\n"
    "from node.errors import UsageError\n"
    "try: getattr(node, sys.argv[1])\n"
    "except UsageError as error: print(f'{error}; {error.do}')"
)
SAID = "Windows is not supported yet"


def ended(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", ["node", "node status", "node doctor --json", "node --version", "sim"])
def test_on_windows_one_line_says_that_wsl_is_supported(arguments: str) -> None:
    process = ended(COMMAND, *arguments.split())
    assert (process.returncode, process.stdout) == (2, "")
    lines = process.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"error: {SAID}")
    assert "WSL" in lines[1]


@pytest.mark.parametrize("name", ["Node", "sync", "run", "plan"])
def test_the_library_reports_the_same_on_windows(name: str) -> None:
    process = ended(LIBRARY, name)
    assert process.stderr == ""
    assert process.stdout.startswith(SAID)
    assert "WSL" in process.stdout
