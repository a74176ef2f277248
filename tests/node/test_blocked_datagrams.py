"""Two machines whose firewalls discard UDP but let TCP through: whole nodes, as processes in namespaces."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from node import config
from node.cli.client import ask
from node.doctor.local_checks import Scene, look_here
from node.doctor.steps import CheckStep, Steps
from node.errors import NoNode
from node.transport.datagram_paths import KNOCK_SECONDS
from tests.node.namespaces import Machine, two_machines

pause = time.sleep
"""Time limit of a test: real processes run in real time."""
PORT = 9747
TROUBLE = ("MemberSuspected", "MemberLost", "MemberDegraded")


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as found:
        yield found


@contextmanager
def running(machine: Machine, folder: Path, *arguments: str) -> Iterator[Path]:
    """Run a node on a machine, and yield its data folder once the node answers."""
    data = folder / machine.name
    usual = ["--listen", f"{machine.host_4}:{PORT}", "--no-lan", "--web", "off", "--observer"]
    with machine.start("node", "--json", "--data-dir", str(data), *usual, *arguments) as process:
        try:
            wait(lambda: answers(data))
            yield data
        finally:
            process.kill()


def answers(data: Path) -> bool:
    try:
        return bool(ask(data, "status")["addresses"])
    except NoNode:
        return False


def wait(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        pause(0.05)


def block(*machines: Machine) -> None:
    """Discard each datagram to these machines without an answer, as a firewall does."""
    for machine in machines:
        # The rule for packets to the machine itself comes first (0). Move it behind the new rule.
        machine.ip("rule", "add", "pref", "20", "lookup", "local")
        machine.ip("rule", "add", "pref", "10", "iif", "cable", "ipproto", "udp", "blackhole")
        machine.ip("rule", "delete", "pref", "0")


def unblock(*machines: Machine) -> None:
    for machine in machines:
        machine.ip("rule", "delete", "pref", "10")


def alive(data: Path) -> int:
    return int(ask(data, "status")["members_alive"])


def events(data: Path, *kinds: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    ask(data, "events", {"since": 0.0, "follow": False, "kinds": list(kinds)}, found.append)
    return found


def datagrams(data: Path) -> tuple[int, int]:
    found = ask(data, "status")["datagrams"] or {"blocked": [], "of": 0}
    return len(found["blocked"]), found["of"]


def doctor(data: Path) -> list[CheckStep]:
    steps = Steps(lambda _: None)
    trio.run(look_here, steps, Scene(config.Config(data_dir=data, join=config.JoinSettings(lan=False))))
    return steps.all


def test_nodes_without_udp_join_stay_members_and_find_records(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    one, other = machines
    block(one, other)
    with running(one, tmp_path) as a, running(other, tmp_path, "--join", f"{one.host_4}:{PORT}") as b:
        wait(lambda: alive(a) == alive(b) == 1)
        ask(b, "dht.put", {"key": "k", "value": b"v".hex()})
        assert ask(a, "dht.get", {"key": "k"})["value"] == b"v".hex()
        assert [events(data, *TROUBLE) for data in (a, b)] == [[], []]


@pytest.mark.skipif(
    os.environ.get("PEERLOOM_PROCESSES") != "1", reason=("takes half a minute: set PEERLOOM_PROCESSES=1")
)
def test_no_peer_is_suspected_when_udp_is_blocked_and_unblocked(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    one, other = machines
    with running(one, tmp_path) as a, running(other, tmp_path, "--join", f"{one.host_4}:{PORT}") as b:
        wait(lambda: alive(a) == alive(b) == 1)
        block(one, other)
        wait(lambda: datagrams(a) == datagrams(b) == (1, 1))
        (found,) = (step for step in doctor(b) if step.name == "datagrams")
        assert found.outcome == "failed"
        assert found.detail.startswith("datagrams do not get through to 1 of 1 peers")
        assert f"UDP port {PORT}" in found.remedy
        unblock(one, other)
        wait(lambda: datagrams(a) == datagrams(b) == (0, 1), 2 * KNOCK_SECONDS)
        assert [events(data, *TROUBLE) for data in (a, b)] == [[], []]
