"""Scratch folders: removed with their stage, and abandoned ones by other processes."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from node.stages.scratch import Scratch, remove_forgotten


def test_a_killed_nodes_folder_is_removed_unless_still_in_use(tmp_path: Path) -> None:
    program = (
        "import os, signal; from node.stages.scratch import Scratch\n"
        "open(Scratch().path + '/left', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    mine = Scratch(below=str(tmp_path))
    assert len(os.listdir(tmp_path)) == 2
    remove_forgotten(str(tmp_path))
    assert os.listdir(tmp_path) == [Path(mine.path).name]
    mine.remove()
    mine.remove()
    assert os.listdir(tmp_path) == []


def test_a_new_folder_is_made_again_if_it_is_taken_for_abandoned(tmp_path: Path) -> None:
    is_over = threading.Event()

    def remove() -> None:
        while not is_over.is_set():
            remove_forgotten(str(tmp_path))

    with ThreadPoolExecutor(2) as threads:
        sweeps = [threads.submit(remove) for _ in range(2)]
        try:
            for _ in range(1_000):
                scratch = Scratch(below=str(tmp_path))
                assert os.path.isdir(scratch.path)
                scratch.remove()
        finally:
            is_over.set()
    assert [sweep.result() for sweep in sweeps] == [None, None]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a folder")
def test_a_folder_of_another_user_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "peerloom-stage-theirs").mkdir()
    os.chown(tmp_path / "peerloom-stage-theirs", 65_534, 65_534)
    remove_forgotten(str(tmp_path))
    assert os.listdir(tmp_path) == ["peerloom-stage-theirs"]
