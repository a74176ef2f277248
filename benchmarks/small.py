"""What a run of two members survives: real nodes, idle neighbours, one machine killed or stopped.

A requester that feeds and one peer that holds the only stage, with one, two or four idle nodes beside them,
of which one is a witness. One of the three is killed with SIGKILL, or stopped with SIGSTOP for 40 s, in the
first steps, in the middle, or while a checkpoint is on its way. The run must go on by itself and end with the
weights of the undisturbed run.

`stalled_seconds` is the longest time without a committed step from then on, as a survivor's own events tell
it; `reported_seconds` is the longest stall that the run reports, and `report_error_seconds` how far that is
from the clock: from the signal to the event. Not measured here: two machines on a network.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import survival
from _figures import Goal, arguments, leave, report
from survival import EXACT, PLACE_SECONDS_MAX, STEP_SECONDS_MAX, Nodes, Stalled, Watch, difference

from node import toml
from node.cli.capture import capture_to
from node.cli.signals import Stopped
from node.errors import EXIT_FORCED, PeerloomError
from node.protocols.manifest import RunFile

STALL_GOAL_SECONDS = 10.0
REPORT_GOAL_SECONDS = 0.5
STOP_SECONDS = 40.0
PHASES = {"first steps": 1, "middle": 14, "checkpoint": 20}
"""The step, counted from 0, after which the signal comes. A checkpoint is made of every tenth."""
RUN_FILE = """\
model = "gpt"
data = "text.txt"

[options]
layers = 2
heads = 2
width = 16

[train]
steps = {steps}
batch = 16
microbatch = 2
window = 16
optimizer = "adam"
learning_rate = 0.003
dtype = "float64"
seed = 5

[plan]
stages = 1
replicas = 1
checkpoint_every = 10
"""


@dataclass(frozen=True)
class Case:
    """`role` of a run of two with so many `idle` nodes gets a signal in a `phase`; "" for nobody."""

    idle: int
    role: str = ""
    how: str = "kill"
    phase: str = "middle"

    @property
    def name(self) -> str:
        """For a person."""
        return f"{self.idle} idle, {self.how} the {self.role}, {self.phase}" if self.role else "nobody"


UNDISTURBED = Case(1)
ROLES = ("replica", "requester", "witness")
CASES = (
    UNDISTURBED,
    *(Case(1, role, "kill", phase) for role, phase in zip(ROLES, PHASES, strict=True)),
    *(Case(1, role, "stop", "middle") for role in ROLES),
    *(Case(2, role, "kill", phase) for role, phase in zip(ROLES, reversed(PHASES), strict=True)),
    *(Case(4, role, how, "checkpoint") for role, how in zip(ROLES, ("kill", "stop", "kill"), strict=True)),
)
QUICK = (UNDISTURBED, Case(2, "replica"))


class Machines(Nodes):
    """Nodes that may be stopped for a while too."""

    def halt(self, names: Iterable[str], seconds: float) -> float:
        """SIGSTOP to nodes and their stages, and SIGCONT after `seconds`; when, in unix seconds."""
        at = time.time()
        for name in names:
            group = self._processes.nodes[name].process.pid
            os.killpg(group, signal.SIGSTOP)
            timer = threading.Timer(seconds, os.killpg, (group, signal.SIGCONT))
            timer.daemon = True
            timer.start()
        return at


def members(watch: Watch) -> dict[str, str]:
    """The node in each role, by the first plan."""
    plan = watch.plan
    found = {"requester": watch.requester, "replica": watch.nodes.name_of(plan["stages"][0][0])}
    return found | {"witness": watch.nodes.name_of(peer) for peer in plan["witnesses"][:1]}  # noqa: B035


def play(nodes: Machines, case: Case, folder: Path, expected: Any) -> tuple[dict[str, Any], Any]:
    """One run, and the tensors that it came to. Raises Stalled."""
    nodes.refill(case.idle + 2)
    nodes.heard.clear()
    player = survival.Play(nodes, survival.Shape(0, 1, 1, case.idle), folder)
    watch = player._submit()
    alive = watch.requester
    if case.role:
        wanted = PHASES[case.phase]
        if not nodes.hear(lambda: len(watch.events("StepCommitted", alive)) > wanted, PLACE_SECONDS_MAX):
            raise Stalled(f"{case.name}: only {len(watch.events('StepCommitted'))} steps before the signal")
        roles = members(watch)
        victim = roles[case.role]
        alive = next(name for role, name in roles.items() if role != case.role)
        watch.killed = [victim]
        watch.killed_at = nodes.kill([victim]) if case.how == "kill" else nodes.halt([victim], STOP_SECONDS)
    if not nodes.hear(lambda: bool(watch.events("RunEnded", alive)), STEP_SECONDS_MAX):
        raise Stalled(f"{case.name}: no end, {len(watch.events('StepCommitted', alive))} steps")
    (end,) = watch.events("RunEnded", alive)
    if end["outcome"] != "done":
        raise Stalled(f"{case.name}: {end['detail']}")
    tensors = player._weights(watch, {alive: end})
    row: dict[str, Any] = {"case": case.name, "outcome": "done"}
    if case.role:
        row |= _figures(watch, alive)
    row["difference"] = float(f"{difference(tensors, expected or tensors):.1e}")
    if case.how == "stop":
        # It must be up again before the next case counts the living.
        time.sleep(max(0.0, watch.killed_at + STOP_SECONDS + 5 - time.time()))
    return row, tensors


def _figures(watch: Watch, alive: str) -> dict[str, Any]:
    at = watch.killed_at
    steps = [row["at_seconds"] for row in watch.events("StepCommitted", alive) if row["at_seconds"] > at]
    gaps = [late - early for early, late in zip([at, *steps], steps, strict=False)]
    resumed = [row for row in watch.events("RunResumed", alive) if row["at_seconds"] > at]
    longest = max(resumed, key=lambda row: float(row["seconds"]), default=None)
    paused = [row for row in watch.events("RunChanged", alive) if row["state"] == "paused"]
    return {
        "stalled_seconds": round(max(gaps), 2) if gaps else None,
        "reported_seconds": None if longest is None else round(longest["seconds"], 2),
        "report_error_seconds": None
        if longest is None
        else round(abs(longest["seconds"] - (longest["at_seconds"] - at)), 2),
        "paused": "; ".join(row["reason"] for row in paused),
        "lost_steps": sum(row["lost_steps"] for row in resumed),
    }


def goals_of(row: dict[str, Any]) -> list[Goal]:
    """What is held of one case."""
    name, infinite = row["case"], float("inf")
    goals = [Goal(f"{name}: largest difference to the undisturbed run", row["difference"], "<=", EXACT)]
    if "stalled_seconds" in row:
        stalled = infinite if row["stalled_seconds"] is None else row["stalled_seconds"]
        goals.append(Goal(f"{name}: seconds without a step", stalled, "<=", STALL_GOAL_SECONDS))
    if row.get("report_error_seconds") is not None:
        error = row["report_error_seconds"]
        goals.append(Goal(f"{name}: seconds by which the report errs", error, "<=", REPORT_GOAL_SECONDS))
    return goals


def prepare(folder: Path, steps: int) -> None:
    """The text, the run's file and the captured model."""
    text = "".join(f"{n} and {n} are {2 * n}, {n} times {n} is {n * n}.\n" for n in range(120))
    (folder / "text.txt").write_text(text)
    path = folder / "RUN.toml"
    path.write_text(RUN_FILE.format(steps=steps))
    capture_to(folder / "gpt.peerloom", toml.parse(path.read_text(), RunFile, name=path.name).value, path, "")


def main() -> int:
    """Play, report."""
    flags = arguments(__doc__ or "")
    cases, steps = (QUICK, 60) if flags.quick else (CASES, 300)
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    try:
        expected: Any = None
        with survival.swarm(Machines) as (nodes, folder):
            prepare(folder, steps)
            for case in cases:
                try:
                    row, tensors = play(nodes, case, folder, expected)
                except (Stalled, PeerloomError) as error:
                    rows.append({"case": case.name, "outcome": str(error)})
                    continue
                expected = expected or tensors
                rows.append(row)
                goals += goals_of(row)
    except Stopped:
        return EXIT_FORCED
    done = sum(row["outcome"] == "done" for row in rows)
    goals.insert(0, Goal("runs that ended done", done, ">=", len(cases)))
    return report("small", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
