"""How long a run waits for processes that load torch, and the cost of a spare process.

Three nodes in separate processes on 127.0.0.1, and a small GPT in two stages. Seconds are from the event that
a plan is in force to the commit of the first step, as the requester sees them:

    fresh     the nodes have just started: a stage's process begins to load when its lease is given
    spare     every node already has a loaded process, as after 20 s without work
    off       fresh nodes with `spare_process = false`
    move      one stage's process is stopped half of the time, until some of its layers move to the other one;
              the seconds are from the last step before the move to the first one after it, with a checkpoint
              in between

`spare_mb` is the memory of a spare process, `spare_processor_seconds` the time to load it. `others` is the
share of the machine that other programs used meanwhile. If it is above a tenth, the goals do not apply,
because they are for a quiet machine.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from _figures import Goal, arguments, leave, report

from node.cli.capture import capture_to
from node.cli.client import ask, request
from node.demo.processes import SwarmProcesses
from node.protocols.run_file import RunFile, TrainTable

NAMES = ("a", "b", "c")
FIRST_STEP_GOAL, MOVE_GOAL = 4.0, 3.0
QUIET_SHARE_MAX = 0.1
SPARE_SECONDS_MAX = 120.0
MOVE_SECONDS_MAX = 150.0
MEETING_SECONDS_MAX = 60.0
STOPPED_SECONDS = 0.05
STEPS_BEFORE = 3
OPTIONS: dict[str, Any] = {"layers": 10, "width": 128, "heads": 4}
RUN = """\
model = "gpt"
data = "text"
options = {{ layers = {layers}, width = {width}, heads = {heads} }}
[train]
steps = {steps}
batch = 16
microbatch = 2
window = 64
seed = {seed}
[plan]
stages = 2
replicas = 1
checkpoint_every = 0
"""


@dataclass
class Followed:
    """The observations of one run."""

    first_seconds: float = 0.0
    move_seconds: float = 0.0
    layers: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    kept: bool = False
    others: float = 0.0


class Others:
    """The share of the machine that other programs use."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._at, self._busy, self._mine = time.monotonic(), _machine_seconds(), self._mine_seconds()

    def share(self) -> float:
        """Return the share since this object was created."""
        seconds = (time.monotonic() - self._at) * (os.cpu_count() or 1)
        theirs = _machine_seconds() - self._busy - (self._mine_seconds() - self._mine)
        return round(max(0.0, theirs) / seconds, 2)

    def _mine_seconds(self) -> float:
        found = 0.0
        for each in (self._own, *self._own.children(recursive=True)):
            with suppress(psutil.Error):
                times = each.cpu_times()
                found += times.user + times.system + times.children_user + times.children_system
        return found


def _machine_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


class Swarm:
    """The nodes, and the runs that one of them requests."""

    def __init__(self, folder: Path, *, spare: bool) -> None:
        folder.mkdir()
        self._folder = folder
        self._seed = 0
        (folder / "text").write_bytes(bytes(97 + number * number % 26 for number in range(64 * 64)))
        self._swarm = SwarmProcesses(folder, "starts", time.sleep, preset="local", calibrate=False)
        flags = [] if spare else ["--no-spare-process"]
        try:
            self._swarm.launch(NAMES)
            join = None
            for name in NAMES:
                join = self._swarm.start(name, join, flags).address
            until = time.monotonic() + MEETING_SECONDS_MAX
            while any(self._swarm.status(name)["members_alive"] < len(NAMES) - 1 for name in NAMES):
                assert time.monotonic() < until, "the nodes did not connect"
                time.sleep(0.05)
        except BaseException:
            self.close()
            raise

    def spare_cost(self) -> dict[str, float]:
        """Wait until every node has a spare process; return the mean costs."""
        until = time.monotonic() + SPARE_SECONDS_MAX
        while not all(self._swarm.status(name)["spare_process"]["memory_bytes"] for name in NAMES):
            assert time.monotonic() < until, "no spare process was loaded"
            time.sleep(0.2)
        seconds = -1.0
        while (now := self._spare_seconds()) > seconds:  # until the process has loaded
            seconds = now
            time.sleep(1.0)
        held = sum(self._swarm.status(name)["spare_process"]["memory_bytes"] for name in NAMES)
        return {"spare_mb": round(held / len(NAMES) / 1e6), "spare_processor_seconds": round(seconds / 3, 2)}

    def _spare_seconds(self) -> float:
        return sum(
            sum(child.cpu_times()[:2])
            for node in self._swarm.nodes.values()
            for child in _stage_processes(node.process.pid)
        )

    def run(self, *, with_move: bool = False) -> Followed:
        """Train some steps; with a move, until it has happened."""
        self._seed += 1
        found, others, planned_at, committed_at = Followed(), Others(), 0.0, 0.0
        slowed: _Slowed | None = None
        steps, left = 0, 100_000 if with_move else STEPS_BEFORE
        arguments = self._arguments(left)
        pids = {node.peer: node.process.pid for node in self._swarm.nodes.values()}
        until = time.monotonic() + MOVE_SECONDS_MAX
        run, holders = "", [""]
        try:
            for reply in request(self._swarm.nodes["a"].data_dir, "train", arguments):
                event = reply.get("event", {"kind": ""})
                now = time.monotonic()
                if event["kind"] == "RunPlanned":
                    run, planned_at = event["run"], now
                    holders = [peers[0] for peers in event["stages"]]
                    found.layers.append(tuple(tuple(row) for row in event["layers"]))
                    if slowed is not None:
                        slowed.end()
                elif event["kind"] == "StepCommitted":
                    if not found.first_seconds:
                        found.first_seconds = now - planned_at
                    if len(set(found.layers)) > 1:
                        found.move_seconds = now - committed_at
                        break
                    steps, committed_at = steps + 1, now
                    if with_move and slowed is None and steps == STEPS_BEFORE:
                        found.others = others.share()
                        slowed = _Slowed(pids[holders[-1]])
                        others = Others()
                elif event["kind"] == "RunEnded":
                    assert event["outcome"] == "done", event["detail"]
                assert time.monotonic() < until, "no layer moved"
        finally:
            if slowed is not None:
                found.kept = slowed.end()
        found.others = max(found.others, others.share())
        if with_move:
            ask(self._swarm.nodes["a"].data_dir, "runs.stop", {"run": run})
        return found

    def _arguments(self, steps: int) -> dict[str, str]:
        text = RUN.format(steps=steps, seed=self._seed, **OPTIONS)
        path, graph = self._folder / f"{self._seed}.toml", self._folder / "model.peerloom"
        path.write_text(text)
        if not graph.exists():
            table = TrainTable(window=64)
            capture_to(graph, RunFile("gpt", "text", OPTIONS, table), path, path.name)
        return {"text": text, "path": str(path), "name": path.name, "graph": str(graph)}

    def close(self) -> None:
        self._swarm.close()


def _stage_processes(node: int) -> list[psutil.Process]:
    found = []
    with suppress(psutil.Error):
        for child in psutil.Process(node).children():
            with suppress(psutil.Error):
                if "node.stages.process" in child.cmdline():
                    found.append(child)
    return found


class _Slowed:
    """A node's stage that is stopped half of the time."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._before = {process.pid for process in _stage_processes(node)}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            for pid in self._before:
                self._signal(pid, signal.SIGSTOP)
            self._over.wait(STOPPED_SECONDS)
            for pid in self._before:
                self._signal(pid, signal.SIGCONT)
            self._over.wait(STOPPED_SECONDS)

    def _signal(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def end(self) -> bool:
        """Let the process run again; return whether it is still the one that computes."""
        self._over.set()
        self._thread.join()
        return bool(self._before & {process.pid for process in _stage_processes(self._node)})


def main() -> int:
    """Measure and report."""
    flags = arguments(__doc__ or "")
    rows: list[dict[str, Any]] = []
    seconds: dict[str, list[float]] = {}

    def note(kind: str, found: Followed, **more: Any) -> None:
        seconds.setdefault(kind, []).append(found.first_seconds)
        rows.append(
            {"kind": kind, "first_step_seconds": round(found.first_seconds, 2)}
            | more
            | {"others": found.others}
        )

    with tempfile.TemporaryDirectory(prefix="peerloom-starts-", ignore_cleanup_errors=True) as name:
        swarm = Swarm(Path(name) / "on", spare=True)
        try:
            note("fresh", swarm.run())
            for _ in range(1 if flags.quick else 3):
                cost = swarm.spare_cost()
                found = swarm.run(with_move=True)
                moved = " -> ".join(
                    "+".join(str(last - first) for first, last in each) for each in found.layers
                )
                more = {"move_seconds": round(found.move_seconds, 2), "layers": moved}
                more |= {"process_kept": found.kept, **cost}
                note("spare", found, **more)
                seconds.setdefault("move", []).append(found.move_seconds)
        finally:
            swarm.close()
        if not flags.quick:
            swarm = Swarm(Path(name) / "off", spare=False)
            try:
                note("off", swarm.run())
            finally:
                swarm.close()
    is_quiet = all(row["others"] <= QUIET_SHARE_MAX for row in rows)
    goals = []
    if is_quiet:
        goals.append(
            Goal(
                "first step with a spare, seconds after its plan",
                max(seconds["spare"]),
                "<=",
                FIRST_STEP_GOAL,
            )
        )
        goals.append(Goal("seconds without a step when layers move", max(seconds["move"]), "<=", MOVE_GOAL))
    else:
        rows.append(
            {
                "kind": "goals",
                "not held": "goals do not apply: other programs used more than a tenth of the machine",
            }
        )
    return report("quick_starts", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
