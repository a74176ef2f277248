"""Real nodes, of which one process dies by SIGKILL in the middle of a run, and a check of what remains.

Nothing may remain: no endless run, no stage's process, no occupied slot, no file of a dead process.
`tests.test_kills` decides which process dies when.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import psutil

from node.demo.processes import SwarmProcesses
from node.errors import NoNode
from tests.source import ROOT

OVER = ("done", "failed", "stopped")
RUN_SECONDS_MAX = 120.0
"""Seconds allowed for a run: six steps take ten seconds on a quiet machine."""
WAIT = "20s"
"""Seconds until peers have freed everything. Promises to a dead requester for its first plan are held for ten
seconds more; a slot that was never returned would be held for minutes.
"""
NAMES = "abc"
RUN = """
model = "model.peerloom"
[train]
steps = {steps}
batch = 32
microbatch = 4
{more}
[plan]
stages = 1
replicas = {replicas}
trainers = 2
"""
Ready = Callable[["Command"], bool]


class Command:
    """`peerloom train` as a process, whose events are read as they come."""

    def __init__(self, folder: Path, data_dir: Path, *, steps: int, replicas: int, more: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._lines: Queue[str | None] = Queue()
        file = folder / f"run-{steps}.toml"
        file.write_text(RUN.format(steps=steps, replicas=replicas, more=more))
        self.out = folder / f"out-{steps}.safetensors"
        self._errors = folder / "command.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")}
        with self._errors.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "node", "train", str(file), "--json", "--out", str(self.out),
                 "--data-dir", str(data_dir), "--wait", WAIT],
                stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def until(self, ready: Ready) -> None:
        """Read events until one satisfies the condition."""
        until = time.monotonic() + RUN_SECONDS_MAX
        while not ready(self):
            assert time.monotonic() < until, f"{self.events[-1:]}, {self.errors}"
            with suppress(Empty):
                line = self._lines.get(timeout=0.02)
                assert line is not None, f"the command ended: {self.events[-1:]}, {self.errors}"
                self.events.append(json.loads(line))

    def last(self, kind: str) -> dict[str, Any] | None:
        """Return the newest event of this kind."""
        return next((event for event in reversed(self.events) if event.get("kind") == kind), None)

    def end(self) -> int:
        """Wait for the command to end; return its exit code."""
        return self.process.wait(RUN_SECONDS_MAX)

    def close(self) -> None:
        """Kill the process, whatever its state."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def errors(self) -> list[str]:
        return self._errors.read_text().splitlines()


class Playground:
    """Three nodes and the command that starts a run."""

    def __init__(self, folder: Path, model: bytes) -> None:
        self.folder = folder
        (folder / "model.peerloom").write_bytes(model)
        self.swarm = SwarmProcesses(folder, "kills", time.sleep, calibrate=False)
        self.killed: set[str] = set()
        self._stages: set[psutil.Process] = set()
        self._commands: list[Command] = []

    def start(self) -> None:
        """Start the nodes, and wait until they know each other."""
        self.swarm.launch(NAMES)
        first = self.swarm.start(NAMES[0], None)
        for name in NAMES[1:]:
            self.swarm.start(name, first.address)
        self._wait(
            lambda: all(self.swarm.status(name)["members_alive"] == len(NAMES) - 1 for name in NAMES),
            "the nodes do not find each other",
        )

    @property
    def living(self) -> list[str]:
        return [name for name in NAMES if name not in self.killed]

    def train(self, *, steps: int, replicas: int = 2, more: str = "") -> Command:
        """Start a run on the first live node; the lines `more` are added to its [train] table."""
        data_dir = self.swarm.nodes[self.living[0]].data_dir
        command = Command(self.folder, data_dir, steps=steps, replicas=replicas, more=more)
        self._commands.append(command)
        return command

    def stages(self, name: str) -> list[psutil.Process]:
        """Return the processes below a node."""
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.swarm.nodes[name].process.pid).children(recursive=True)
            self._stages |= set(found)
            return [each for each in found if "node.stages.process" in " ".join(_words(each))]
        return []

    def name_of(self, peer: str) -> str:
        return next(name for name, node in self.swarm.nodes.items() if node.peer == peer)

    def kill_node(self, name: str) -> None:
        """Send SIGKILL only to a node's own process; its stages must end by themselves."""
        self.stages(name)
        self.killed.add(name)
        self.swarm._ended.add(name)
        process = self.swarm.nodes[name].process
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def kill_stage(self) -> None:
        """Send SIGKILL to a stage's process as soon as there is one."""
        self._wait(lambda: any(self.stages(name) for name in self.living), "no stage began")
        next(stage for name in self.living for stage in self.stages(name)).kill()

    def settle(self) -> list[str]:
        """Wait until the runs of all live nodes are over; return their outcomes, and the reasons of all runs
        that did not succeed."""
        for name in self.living:
            self.stages(name)
        self._wait(lambda: all(run["status"] in OVER for run in self._runs()), "a run goes on")
        runs = self._runs()
        for run in runs:
            assert run["status"] == "done" or run["detail"], f"the run gives no reason: {run}"
        return [run["status"] for run in runs]

    def assert_clean(self) -> None:
        """Assert that nothing is left over: a new run finds its slots, and dead processes left no files."""
        after = self.train(steps=2, replicas=len(self.living) - 1)
        assert after.end() == 0, after.errors
        self._wait(lambda: not any(map(_runs, self._stages)), "a process is left")
        self._wait(lambda: not any(self.stages(name) for name in self.living), "a stage is left")
        # A node removes a stage's folder right after its process has ended.
        self._wait(lambda: not self._files(), f"files are left: {self._files()}")
        for name in self.living:
            drafts = [path for path in (self.folder / name).rglob("*") if path.name.endswith(".half")]
            assert not drafts, f"drafts are left on {name}: {drafts}"

    def close(self) -> None:
        """End every process."""
        for command in self._commands:
            command.close()
        self.swarm.close()

    def _files(self) -> list[str]:
        return [path.name for path in (self.folder / "tmp").iterdir()]

    def _runs(self) -> list[dict[str, Any]]:
        return [run for name in self.living for run in self.swarm.status(name)["runs"]]

    def _wait(self, ready: Callable[[], bool], otherwise: str) -> None:
        until = time.monotonic() + RUN_SECONDS_MAX
        while True:
            with suppress(NoNode):  # a live process still uses it
                if ready():
                    return
            if time.monotonic() > until:
                told = [(run["run"], run["status"], run["reason"]) for run in self._runs()]
                raise AssertionError(f"{otherwise}: {told}")
            self.swarm._pause(0.05)


@contextmanager
def playground(folder: Path, model: bytes) -> Iterator[Playground]:
    """Yield three nodes."""
    found = Playground(folder, model)
    try:
        found.start()
        yield found
    finally:
        found.close()


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return list(process.cmdline())
    return []


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    return False
