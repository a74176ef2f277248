"""A run's file and its data are read only once, whether by the command, the page or a program.

A `sitecustomize` in every participating process records the files that Python reads.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from node.demo.processes import SwarmProcesses
from tests.source import ROOT

pytest.importorskip("sklearn")

TEXT = 'model = "simple-cnn"\n[train]\nsteps = 1\nbatch = 8\nmicrobatch = 8\n[plan]\nstages = 1\n'
COUNTING = """
import os, sys, tomllib

def note(what):
    with open({notes!r}, "a") as file:
        file.write(what + "\\n")

def loads(text, *, real=tomllib.loads, **more):
    if "simple-cnn" in text:
        note("toml")
    return real(text, **more)

def watch(event, arguments):
    if event == "open" and str(arguments[0]).endswith("digits.csv.gz"):
        note("digits")

tomllib.loads = loads
sys.addaudithook(watch)
"""
pause = time.sleep


class Reads:
    """Return a function that returns the paths read since its previous call, by processes of this user that
    start from now on."""

    def __init__(self, folder: Path) -> None:
        self._notes = folder / "notes"
        (folder / "sitecustomize.py").write_text(COUNTING.format(notes=str(self._notes)))

    def taken(self) -> Counter[str]:
        found = Counter(self._notes.read_text().split()) if self._notes.exists() else Counter()
        self._notes.unlink(missing_ok=True)
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reads")


@pytest.fixture(scope="module")
def reads(folder: Path) -> Iterator[Reads]:
    with pytest.MonkeyPatch.context() as patched:
        counted = Reads(folder)
        patched.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(folder))))
        yield counted


@pytest.fixture(scope="module")
def swarm(folder: Path, reads: Reads) -> Iterator[SwarmProcesses]:
    """Start one node, with a page, and a run file."""
    (folder / "RUN.toml").write_text(TEXT)
    processes = SwarmProcesses(folder, "reads", pause, with_page="a", calibrate=False)
    try:
        processes.launch("a")
        processes.start("a", None)
        reads.taken()
        yield processes
    finally:
        processes.close()


def until_done(swarm: SwarmProcesses) -> None:
    """Wait until every run of the node has ended, because by then everything that needs their data has read
    it."""
    deadline = time.monotonic() + 60
    while any(run["status"] != "done" for run in swarm.status("a")["runs"]):
        assert time.monotonic() < deadline
        pause(0.05)


def by_command(swarm: SwarmProcesses) -> None:
    words = [
        "train",
        "RUN.toml",
        "--detach",
        "--devices",
        "cpu",
        "--data-dir",
        str(swarm.nodes["a"].data_dir),
    ]
    subprocess.run([sys.executable, "-m", "node", *words], cwd=swarm.folder, check=True, capture_output=True)


def by_page(swarm: SwarmProcesses) -> None:
    link = urlsplit(swarm.page("a"))
    base = f"http://{link.netloc}"
    headers = {
        "content-type": "application/json",
        "origin": base,
        "x-peerloom-token": link.fragment.removeprefix("token="),
    }
    body = json.dumps({"text": TEXT}).encode()
    request = urllib.request.Request(f"{base}/api/actions/start", body, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert json.load(reply)["result"]["status"] == "running"


@pytest.mark.slow
def test_a_run_and_its_data_are_read_once(swarm: SwarmProcesses, reads: Reads) -> None:
    by_command(swarm)
    until_done(swarm)
    assert reads.taken() == {"toml": 1, "digits": 1}
    by_page(swarm)
    assert reads.taken() == {"toml": 1}, "the data was read although the node has the digits already"
