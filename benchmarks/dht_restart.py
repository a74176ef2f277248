"""All nodes of a swarm stop simultaneously and restart from their disks: measures which records are found
again.

    python benchmarks/dht_restart.py [--json] [--quick]

16 processes on real sockets, k=5. Each stores records of 200 bytes that last an hour, and some that last
seconds. Once all are saved, every process is killed (SIGKILL) and restarted with its folder and its port. The
nodes join only through their saved contacts. Each then looks up the records of a different node.
"""

import tempfile
import time
from itertools import chain
from typing import Any

from _figures import Goal, arguments, leave, report
from dht_sockets import PARALLEL, PROCESSES, Process, quantile

EACH = 40
SHORT_EACH = 5
SHORT_SECONDS = 8.0
"""Lifetime of the records that expire before they are looked up; it is a fault if one is still found."""
READY_SECONDS = 20.0
"""How long to wait until every node has recovered enough contacts."""


def begin(folder: str, ports: list[str]) -> list[Process]:
    """Start all nodes in their folders."""
    nodes = [Process("ours", number, f"{folder}/{number}", ports[number]) for number in range(PROCESSES)]
    for node in nodes:
        node.listen()
    return nodes


def shares(nodes: list[Process], what: str, names: str, count: int, **more: Any) -> list[list[float]]:
    """Let each node store `count` records of its own, or get as many of a different node; all nodes in
    parallel."""
    step = 0 if what == "store" else 7
    for place, node in enumerate(nodes):
        keys = [f"{names} {(place + step) % PROCESSES} {number}" for number in range(count)]
        node.tell(do=what, keys=keys, parallel=PARALLEL, **more)
    return [node.answer()["each"] for node in nodes]


def have(each: list[list[float]]) -> int:
    """Return how many operations succeeded."""
    return sum(seconds >= 0 for some in each for seconds in some)


def main() -> int:
    """Measure and report."""
    flags = arguments(__doc__ or "")
    count = EACH // 4 if flags.quick else EACH
    with tempfile.TemporaryDirectory(prefix="dht-restart-") as folder:
        nodes = begin(folder, ["0"] * PROCESSES)
        for node in nodes[1:]:
            node.ask(do="join", address=nodes[0].address)
        stored = have(shares(nodes, "store", "long", count))
        brief = have(shares(nodes, "store", "short", SHORT_EACH, lasts=SHORT_SECONDS))
        expired = time.monotonic() + SHORT_SECONDS
        held = sum(node.ask(do="count")["records"] for node in nodes)
        for node in nodes:
            node.ask(do="save")
        ports = [node.address.rpartition(":")[2] for node in nodes]
        for node in nodes:
            node.kill()
        begun = time.monotonic()
        nodes = begin(folder, ports)
        started = time.monotonic() - begun
        until = time.monotonic() + READY_SECONDS
        while min(node.ask(do="count")["contacts"] for node in nodes) < PROCESSES // 2:
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        ready = time.monotonic() - begun
        back = sum(node.ask(do="count")["records"] for node in nodes)
        time.sleep(max(0.0, expired - time.monotonic()))
        found = shares(nodes, "get", "long", count)
        stale = have(shares(nodes, "get", "short", SHORT_EACH))
        for node in nodes:
            node.end()
    row = {
        "processes": PROCESSES,
        "stored": stored,
        "replicas_before": held,
        "replicas_after": back,
        "found": have(found),
        "expired_stored": brief,
        "expired_found": stale,
        "started_seconds": round(started, 2),
        "contacts_back_seconds": round(ready, 2),
        "get_p50_ms": round(1_000 * quantile(list(chain(*found)), 0.5), 2),
    }
    goals = [
        Goal("stored", stored, ">=", PROCESSES * count),
        Goal("found after all were killed, share of all stored", have(found) / max(1, stored), ">=", 1.0),
        Goal("expired records found", stale, "<=", 0),
    ]
    return report("dht_restart", [row], goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
