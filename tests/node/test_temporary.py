"""A command's temporary folder is removed with the command, however the command ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node.stages.scratch import remove_forgotten
from tests.source import ROOT

COMMAND = """
import sys, time
from node.cli.temporary import command_folder
with command_folder() as folder:
    (folder / "model").write_bytes(b"x")
    print(folder, flush=True)
    time.sleep(60)
"""


def begin(temporary: Path) -> tuple["subprocess.Popen[str]", Path]:
    environment = dict(os.environ) | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_command_leaves_no_temporary_folder(tmp_path: Path, number: signal.Signals) -> None:
    process, folder = begin(tmp_path)
    with process:
        assert (folder / "model").is_file()
        process.send_signal(number)
        process.wait(30)
    assert list(tmp_path.iterdir()) == []


def test_only_temporary_folders_of_killed_commands_are_removed(tmp_path: Path) -> None:
    killed, left = begin(tmp_path)
    with killed:
        killed.kill()
        killed.wait(30)
    assert left.is_dir()
    living, folder = begin(tmp_path)
    with living:
        assert list(tmp_path.iterdir()) == [folder]
        remove_forgotten(str(tmp_path))
        assert (folder / "model").is_file()
        living.terminate()
        living.wait(30)
