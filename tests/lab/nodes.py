"""Nodes in a laboratory: `python -m node` on each machine, asked over their control channels."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from node.cli.client import ask, is_running
from node.errors import NoNode
from node.paths import ENVIRONMENT_PREFIX
from tests.lab.network import Lab, Machine, python

PORT = 9747
START_SECONDS_MAX = 40.0
LOOK_SECONDS = 0.1
_pause = time.sleep
"""Seconds between two checks of other processes; every wait has a deadline of its own."""
SETTINGS = {
    "CALIBRATE": "false",
    "WEB": "off",
    "LAN": "false",
    "DEVICE": "cpu",
    "CORES": "1",
    "ALLOW_UNFENCED": "true",
}
"""There are no beacons: a node is found only through what others know of it."""


class LabNode:
    """One node, which may stop and restart with the same data folder."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self.name = machine.name
        self.data_dir = folder / machine.name
        self.output = folder / f"{machine.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, *arguments: str, **settings: str) -> None:
        """Start the process without waiting for it; `ready` waits. `settings` are passed in the
        environment."""
        assert not self.is_up
        environment = {f"{ENVIRONMENT_PREFIX}{name}": value for name, value in (SETTINGS | settings).items()}
        program = [python(), "-m", "node", "--data-dir", str(self.data_dir), "--name", self.name, *arguments]
        self.process = self.machine.start(program, environment=environment, output=self.output)

    def ready(self) -> "LabNode":
        """Wait until the node answers."""
        wait_until(
            lambda: self._answers, START_SECONDS_MAX, lambda: f"{self.name} did not start:\n{self.said}"
        )
        return self

    @property
    def _answers(self) -> bool:
        assert self.is_up, f"{self.name} has ended:\n{self.said}"
        with contextlib.suppress(NoNode):
            return is_running(self.data_dir) and bool(ask(self.data_dir, "status"))
        return False

    def kill(self) -> None:
        """Send SIGKILL to the node and its stages, like a power cut."""
        assert self.process is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def leave(self) -> None:
        """Send Ctrl-C, and wait until the process has ended."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        self.process.wait(START_SECONDS_MAX)

    @property
    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = ask(self.data_dir, "status")
        return document

    @property
    def members(self) -> dict[str, str]:
        """Return the status of each other member, by name."""
        return {peer["name"]: peer["status"] for peer in ask(self.data_dir, "peers")["peers"]}

    @property
    def said(self) -> str:
        """Return everything that the node has printed since its first start."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


class LabSwarm:
    """The nodes of a laboratory."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.nodes = {name: LabNode(machine, folder) for name, machine in lab.machines.items()}

    def __getitem__(self, name: str) -> LabNode:
        return self.nodes[name]

    def start(self, names: Sequence[str], *arguments: str, **settings: str) -> None:
        """Start several nodes concurrently, and wait for all of them."""
        for name in names:
            self[name].start(*arguments, **settings)
        for name in names:
            self[name].ready()

    def kill(self) -> None:
        """Kill all of them."""
        for node in self.nodes.values():
            if node.process is not None:
                node.kill()

    @property
    def up(self) -> list[LabNode]:
        return [node for node in self.nodes.values() if node.is_up]

    def views(self) -> dict[str, dict[str, str]]:
        """Return each node's view of the others."""
        return {node.name: node.members for node in self.up}

    def agrees(self) -> bool:
        """Return whether all running nodes see exactly the running nodes as alive."""
        names = {node.name for node in self.up}
        return all(
            {other for other, status in view.items() if status in ("alive", "suspect")} == names - {name}
            for name, view in self.views().items()
        )

    def converge(self, seconds: float) -> float:
        """Wait until all agree; return how long that took."""
        return wait_until(self.agrees, seconds, lambda: f"no agreement in {seconds:g} s: {self.views()}")

    def stay(self, seconds: float) -> None:
        """Assert that all nodes continue to agree for `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.agrees(), self.views()
            _pause(LOOK_SECONDS)


@contextmanager
def swarm(lab: Lab, folder: Path) -> Iterator[LabSwarm]:
    """Yield the nodes of this laboratory, none of them started; all are killed afterwards."""
    made = LabSwarm(lab, folder)
    try:
        yield made
    finally:
        made.kill()


def wait_until(condition: Callable[[], bool], seconds: float, failure: Callable[[], str]) -> float:
    """Check the condition repeatedly until it holds; return how long that took. Fail with the text that
    `failure` returns."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, failure()
        _pause(LOOK_SECONDS)
    return time.monotonic() - began
