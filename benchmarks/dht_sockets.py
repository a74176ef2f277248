"""Store and get on real sockets: 16 processes on this machine, compared with the plain `kademlia` package.

    python benchmarks/dht_sockets.py [--json] [--quick]

Values have 200 bytes, k=5; one operation at a time, and eight at a time. Our nodes use authenticated sessions
and signed records; the package has neither. Both are measured in turns in one run, so that a busy machine
slows both. hivemind is measured too if PEERLOOM_HIVEMIND names the folders with it and its numpy (`pip
install --target FOLDER hivemind numpy==2.2.6`), because it works with no other numpy. This file is not named
`dht.py`, because that would hide the package `dht` from all benchmarks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import IO, Any

from _figures import Goal, arguments, leave, report

PROCESSES = 16
K = 5
PARALLEL = 8
HIVEMIND = os.environ.get("PEERLOOM_HIVEMIND", "")
NODE = Path(__file__).with_name("_dht_node.py")


class Process:
    """The process of one node, which accepts JSON commands."""

    def __init__(self, kind: str, number: int, *place: str) -> None:
        """`place`: optionally a folder for its records, and a port."""
        command = [sys.executable, str(NODE), kind, str(number), str(K), *place]
        environment = dict(os.environ)
        if kind == "hivemind":
            environment["PYTHONPATH"] = HIVEMIND
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.address = ""

    def listen(self) -> None:
        """Wait until the node listens."""
        self.address = self.answer()["address"]

    def ask(self, **order: Any) -> Any:
        """Send a command, and wait for its answer."""
        self.tell(**order)
        return self.answer()

    def tell(self, **order: Any) -> None:
        """Send a command."""
        pipe = self._pipe(self._process.stdin)
        pipe.write(json.dumps(order) + "\n")
        pipe.flush()

    def end(self) -> None:
        """End the process; hivemind's processes do not always end by themselves."""
        self.tell(do="end")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """Kill the process, as a power cut does."""
        self._process.kill()
        self._process.wait()

    def answer(self) -> Any:
        """Return the answer to a command."""
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError("a node ended before it answered")
        return json.loads(line)

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def start(kind: str) -> tuple[list[Process], list[float]]:
    """Start all nodes; each joins through the first."""
    nodes = [Process(kind, number) for number in range(PROCESSES)]
    for node in nodes:
        node.listen()
    if kind == "hivemind":
        nodes[0].address = nodes[0].ask(do="join", address="")["address"]
    return nodes, [node.ask(do="join", address=nodes[0].address)["seconds"] for node in nodes[1:]]


def quantile(values: list[float], share: float) -> float:
    """Return the value that a `share` of all values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(nodes: list[Process], label: str, count: int, parallel: int) -> dict[str, Any]:
    """Measure stores by one node and gets by a different one, in turns."""
    keys = [f"{label} {number}" for number in range(count)]
    row: dict[str, Any] = {}
    for what, node in (("store", nodes[3]), ("get", nodes[11])):
        done = node.ask(do=what, keys=keys, parallel=parallel)
        each = [seconds for seconds in done["each"] if seconds >= 0]
        row |= {
            f"{what}_p50_ms": round(1_000 * quantile(each, 0.5), 2),
            f"{what}_p95_ms": round(1_000 * quantile(each, 0.95), 2),
            f"{what}_failed": len(done["each"]) - len(each),
            f"{what}_per_second": round(len(each) / done["seconds"], 1),
        }
    return row


def main() -> int:
    """Measure and report."""
    flags = arguments(__doc__ or "")
    rounds, count = (2, 30) if flags.quick else (5, 100)
    rows: list[dict[str, Any]] = []
    kinds = ("ours", "package", "hivemind") if HIVEMIND else ("ours", "package")
    groups = {kind: start(kind) for kind in kinds}
    for turn in range(rounds):
        for kind, (nodes, joins) in groups.items():
            for parallel in (1, PARALLEL):
                row = measure(nodes, f"{kind} {turn} {parallel}", count, parallel)
                head = {"kind": kind, "turn": turn, "parallel": parallel}
                rows.append(head | row | {"join_p50_ms": round(1_000 * median(joins), 1)})
    for nodes, _ in groups.values():
        for node in nodes:
            node.end()

    def figure(kind: str, parallel: int, name: str) -> float:
        return float(median(row[name] for row in rows if row["kind"] == kind and row["parallel"] == parallel))

    store, get = figure("ours", 1, "store_p50_ms"), figure("ours", 1, "get_p50_ms")
    goals = [
        Goal("store, median ms", store, "<=", 5.0),
        Goal("get, median ms", get, "<=", 1.8),
        Goal(
            "failed",
            sum(row["store_failed"] + row["get_failed"] for row in rows if row["kind"] == "ours"),
            "<=",
            0,
        ),
    ]
    if HIVEMIND:  # a comparison is a goal only if both were measured in this run
        their_store, their_get = figure("hivemind", 1, "store_p50_ms"), figure("hivemind", 1, "get_p50_ms")
        goals += [
            Goal("store, times faster than hivemind", their_store / store, ">=", 5),
            Goal("get, times faster than hivemind", their_get / get, ">=", 5),
        ]
    return report("dht_sockets", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
