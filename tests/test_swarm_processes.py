"""Real processes on one machine: all are killed and restarted from their disks, one is frozen, and one is
killed.

There are four of them, or PEERLOOM_SWARM_PROCESSES (`make soak`: 16). The limits hold on a machine that is
busy with this suite; measurements are printed.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gossip.settings import PRESETS
from node.cli.client import ask
from node.demo.processes import SwarmProcesses

pause = time.sleep
"""Seconds allowed for real processes to freeze, to write to the disk, and to be probed again."""
COUNT = int(os.environ.get("PEERLOOM_SWARM_PROCESSES", "4"))
NAMES = [f"n{number}" for number in range(COUNT)]
HOST = PRESETS["host"]
FROZEN_SECONDS = 3.0
SLACK_SECONDS = 10.0
"""How many seconds later than the preset's limit a busy machine may be."""
RECORDS = 2 * COUNT


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwarmProcesses]:
    """Start processes that have all stored records, were killed, and were restarted."""
    folder = tmp_path_factory.mktemp("swarm")
    before, again = (SwarmProcesses(folder, "processes", time.sleep, calibrate=False) for _ in range(2))
    try:
        begin(before)
        for number in range(RECORDS):
            value = f"v{number}".encode().hex()
            stored = dht(before, NAMES[number % COUNT], "put", key=f"k{number}", value=value)
            assert stored["holders"] >= 3
        pause(6.0)  # records go to the disk every 5 s
        for name in NAMES:
            before.kill(name)
        begin(again)
        yield again
    finally:
        before.close()
        again.close()


def begin(processes: SwarmProcesses) -> None:
    """Start all processes, and wait until they know each other."""
    processes.launch(NAMES)
    first = processes.start(NAMES[0], None)
    for name in NAMES[1:]:
        processes.start(name, first.address)
    wait(
        lambda: all(
            sum(row["status"] == "alive" for row in peers(processes, each)) == COUNT - 1 for each in NAMES
        )
    )


def wait(holds: Callable[[], bool], seconds: float = 60.0) -> float:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds
        pause(0.05)
    return time.monotonic() - begun


def peers(processes: SwarmProcesses, name: str) -> list[dict[str, Any]]:
    document: dict[str, Any] = ask(processes.nodes[name].data_dir, "peers")
    return list(document["peers"])


def events(processes: SwarmProcesses, name: str, *kinds: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    ask(
        processes.nodes[name].data_dir,
        "events",
        {"since": 0.0, "follow": False, "kinds": list(kinds)},
        found.append,
    )
    return found


def test_every_record_is_found_after_all_processes_were_killed_and_restarted(
    swarm: SwarmProcesses,
) -> None:
    for number in range(RECORDS):
        found = dht(swarm, NAMES[(number + 1) % COUNT], "get", key=f"k{number}")
        assert bytes.fromhex(found["value"]) == f"v{number}".encode()


def test_no_peer_declares_a_frozen_process_dead_but_all_a_killed_one(swarm: SwarmProcesses) -> None:
    frozen, killed, others = NAMES[-1], NAMES[-2], NAMES[:-2]
    stopped = swarm.nodes[frozen].process.pid
    os.kill(stopped, signal.SIGSTOP)
    pause(FROZEN_SECONDS)
    os.kill(stopped, signal.SIGCONT)
    pause(2.0)
    lost = {name: events(swarm, name, "MemberLost") for name in NAMES}
    assert lost == {name: [] for name in NAMES}
    suspected = sum(bool(events(swarm, name, "MemberSuspected")) for name in others)
    assert suspected, "no probe failed, so the process was not frozen"

    peer = swarm.nodes[killed].peer
    at = swarm.kill(killed)
    bound = HOST.suspicion_bounds_seconds(COUNT)[1] + SLACK_SECONDS
    rest = [*others, frozen]
    wait(lambda: all(events(swarm, name, "MemberLost") for name in rest), bound)
    took = []
    for name in rest:
        (row,) = (row for row in peers(swarm, name) if row["peer"] == peer)
        assert row["status"] == "dead"
        assert "no ack for" in row["reason"]
        assert row["noticed_by"] in {node.peer for node in swarm.nodes.values()}
        (event,) = events(swarm, name, "MemberLost")
        assert event["peer"] == peer
        took.append(event["at_seconds"] - at)
    took_text = f"lost after {min(took):.1f} to {max(took):.1f} s"
    print(f"{COUNT} processes: {took_text}; frozen one suspected by {suspected}")  # noqa: T201


def dht(processes: SwarmProcesses, name: str, what: str, **arguments: object) -> dict[str, Any]:
    answer: dict[str, Any] = ask(processes.nodes[name].data_dir, f"dht.{what}", arguments)
    return answer
