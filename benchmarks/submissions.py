"""A hundred runs submitted together to twenty nodes over loopback; each node is a process with one slot.

    python benchmarks/submissions.py [--nodes 20] [--runs 100] [--times 1]

Three of the nodes each request a third of the runs. The goals: all runs end well; no node has two stages at
the same time (judged by its processes and by its reports of the slot); and each requester gets its share as
long as all have waiting runs. `tests.test_submissions` plays the same in virtual time.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from _figures import Goal, leave, report

from node.cli.client import ask
from node.demo.processes import SwarmProcesses
from node.errors import NoNode
from tests.submissions import Served, Told, most_at_once, served, shares

REQUESTERS = 3
OFF_MAX = 0.1
MEET_SECONDS_MAX = 180.0
DRAIN_SECONDS_MAX = 1_800.0
LOOK_SECONDS = 0.5
RUN = """
model = "model.peerloom"
[train]
steps = {steps}
batch = 32
microbatch = 32
seed = {seed}
[plan]
stages = 1
replicas = 1
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="twelve runs on four nodes")
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    nodes, runs = (4, 12) if options.quick else (options.nodes, options.runs)
    rows = [play(nodes, runs, options.steps) for _ in range(options.times)]
    goals = [
        Goal("runs that did not end well", sum(row["failed"] for row in rows), "<=", 0),
        Goal("maximum simultaneous stages of a node", max(row["processes_at_once"] for row in rows), "<=", 1),
        Goal(
            "seconds between the grant of a slot and the report of the previous end",
            max(row["overlap"] for row in rows),
            "<=",
            5,
        ),
    ]
    if not options.quick:  # with a dozen runs, the three requesters can only get whole ones
        goals.append(
            Goal("largest deviation from the fair share", max(row["off"] for row in rows), "<=", OFF_MAX)
        )
    return report("submissions", rows, goals, as_json=options.json)


def play(nodes: int, runs: int, steps: int) -> dict[str, Any]:
    """Start the nodes, submit the runs, and wait until all have ended."""
    from partition.capture.models.model_spec import capture_built_in

    names = [f"n{number}" for number in range(nodes)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder = Path(made)
        graph = folder / "model.peerloom"
        graph.write_bytes(capture_built_in("simple-cnn", (1, 8, 8), 10).data)
        group = SwarmProcesses(folder, "submissions", time.sleep, preset="lan", calibrate=False)
        try:
            _start(group, names)
            begun, whose = time.time(), {}
            for number in range(runs):
                name = names[number % REQUESTERS]
                text = RUN.format(steps=steps, seed=number)
                arguments: dict[str, Any] = {"text": text, "path": str(folder / "run.toml")}
                arguments |= {
                    "graph": str(graph),
                    "name": "run.toml",
                    "follow": False,
                    "wait_seconds": DRAIN_SECONDS_MAX,
                }
                found = ask(group.nodes[name].data_dir, "train", arguments, seconds=60.0)
                whose[found["run"]] = name
            submitted = time.time() - begun
            processes_at_once = _drain(group, names, whose)
            seconds = time.time() - begun
            told = [each for name in names for each in _told(group, name)]
            outcomes = _outcomes(group, names[:REQUESTERS])
        finally:
            group.close()
    rows = served(each for each in told if not each.is_end or each.provider in _leased(told, each.run))
    found_shares = shares(rows, whose)
    return {
        "nodes": nodes,
        "runs": runs,
        "submitted_seconds": round(submitted, 1),
        "seconds": round(seconds, 1),
        "failed": sum(outcomes.get(run) != "done" for run in whose),
        "processes_at_once": processes_at_once,
        "slots_at_once": max(most_at_once(rows).values()),
        "overlap": round(_overlap(rows), 3),
        "off": round(max(abs(share - 1) for share in found_shares.values()), 3),
        "longest_wait": round(max(row.begun for row in rows) - begun, 1),
    }


def _overlap(rows: Sequence[Served]) -> float:
    """Return the longest time by which a node granted its slot to a new run before it reported the end of the
    previous one, whose stage was closed before."""
    ordered = sorted(rows, key=lambda row: (row.provider, row.begun))
    pairs = [(one, other) for one, other in pairwise(ordered) if one.provider == other.provider]
    return max((one.ended - other.begun for one, other in pairs), default=0.0)


def _start(group: SwarmProcesses, names: Sequence[str]) -> None:
    group.launch(names)
    join = None
    for name in names:
        join = group.start(name, join).address
    until = time.monotonic() + MEET_SECONDS_MAX
    while not all(group.status(name)["members_alive"] == len(names) - 1 for name in names):
        if time.monotonic() > until:
            raise SystemExit("the nodes did not connect")
        time.sleep(LOOK_SECONDS)


def _drain(group: SwarmProcesses, names: Sequence[str], whose: dict[str, str]) -> int:
    """Wait until all runs have ended; return the maximum number of stage processes that a node had at the
    same time. An ended process may overlap the next one for a moment, so only counts seen twice in a row
    matter."""
    until, most, before = time.monotonic() + DRAIN_SECONDS_MAX, 0, dict.fromkeys(names, 0)
    while not whose.keys() <= _outcomes(group, names[:REQUESTERS]).keys():
        if time.monotonic() > until:
            raise SystemExit("some runs wait for ever")
        now = {name: _stages(group.nodes[name].process.pid) for name in names}
        most = max(most, *(min(now[name], before[name]) for name in names))
        before = now
        time.sleep(LOOK_SECONDS)
    return most


def _stages(process: int) -> int:
    found = 0
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process).children():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                found += "node.stages.process" in " ".join(child.cmdline())
    return found


def _events(group: SwarmProcesses, name: str, *kinds: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    arguments = {"kinds": list(kinds), "since": 0.0, "follow": False}
    with suppress(NoNode):  # the node is busy, so ask again
        ask(group.nodes[name].data_dir, "events", arguments, found.append, seconds=60.0)
    return found


def _outcomes(group: SwarmProcesses, names: Sequence[str]) -> dict[str, str]:
    return {event["run"]: event["outcome"] for name in names for event in _events(group, name, "RunEnded")}


def _told(group: SwarmProcesses, name: str) -> list[Told]:
    return [
        Told(name, event["run"], datetime.fromisoformat(event["at"]).timestamp(), event["kind"] == "RunEnded")
        for event in _events(group, name, "StageLeased", "RunEnded")
    ]


def _leased(told: Sequence[Told], run: str) -> set[str]:
    return {each.provider for each in told if each.run == run and not each.is_end}


if __name__ == "__main__":
    leave(main())
