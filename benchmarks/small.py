"""Whether a run of two members survives: real nodes, idle neighbours, and one machine that is killed or
stopped.

A requester feeds, and one peer holds the only stage. There are one, two or four additional idle nodes, one of
which is a witness. One node is killed with SIGKILL, or stopped with SIGSTOP for 40 s, while the run is
placed, while it trains, while a checkpoint is on its way, or as it ends. The run must continue by itself and
end with the weights of the undisturbed run. If no majority of voters is alive, it must pause instead and name
the nodes that would end the pause. `--full` plays every cell; by default every combination of role, signal
and phase is played once, with varying numbers of idle nodes. `--cells` plays the cells with these numbers,
counted from 0; all of them take over an hour.

`stalled_seconds` is the longest time after the signal without a committed step or the end, according to a
survivor's own events. `reported_seconds` is the longest stall that the run reports, and
`report_error_seconds` its difference from the clock time between signal and event. While a run is placed no
step is due, so the undisturbed run's time to its first step is subtracted. If the requester is killed before
it has told any node of its run, the run is lost; if it is stopped at that point, the others wait. Not
measured here: two machines on a network.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
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
from node.protocols.run_file import RunFile

STALL_GOAL_SECONDS = 10.0
REPORT_GOAL_SECONDS = 0.5
STOP_SECONDS, SETTLE_SECONDS = 40.0, 5.0
STEPS, STEPS_QUICK = 120, 60
PHASES = ("placing", "training", "checkpoint", "ending")
AFTER = {"training": 14, "checkpoint": 20}
"""The steps, counted from 0, after which the signal is sent; every tenth step makes a checkpoint. In the
phase of placing it is sent as soon as there is a plan; at the end, after the last step."""
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
    """In a run of two members with this many `idle` nodes, `role` gets a signal in `phase`; "" means that no
    node gets one."""

    idle: int
    role: str = ""
    how: str = "kill"
    phase: str = "training"

    @property
    def name(self) -> str:
        """Return a readable name."""
        return f"{self.idle} idle, {self.how} the {self.role}, {self.phase}" if self.role else "nobody"


UNDISTURBED = Case(1)
ROLES = ("requester", "replica", "witness", "idle")
"""The roles. The requester is also the trainer, and commits. "idle" is a node that is not a witness, if there
is one."""
IDLE = (1, 2, 4)
HOW = ("kill", "stop")


def sample() -> list[Case]:
    """Return every role with every signal in every phase, once, sorted by the number of nodes, because no
    node is ended between cases."""
    cells = enumerate(product(HOW, ROLES, PHASES))
    found = [
        Case(IDLE[(n + n // len(IDLE)) % len(IDLE)], role, how, phase) for n, (how, role, phase) in cells
    ]
    return sorted(found, key=lambda case: case.idle)


def every() -> list[Case]:
    """Return all cells. With one idle node, which is the witness, there is no "idle" role."""
    cells = [Case(idle, role, how, phase) for idle, how, role, phase in product(IDLE, HOW, ROLES, PHASES)]
    return [case for case in cells if (case.role, case.idle) != ("idle", 1)]


QUICK = (Case(1, "witness", "kill", "checkpoint"), Case(2, "replica"))


class Machines(Nodes):
    """Nodes that may be stopped for a while; all run again from `resumes_at` on."""

    resumes_at = 0.0

    def halt(self, names: Iterable[str], seconds: float) -> float:
        """Send SIGSTOP to nodes and their stages, and SIGCONT after `seconds`; return the time of the SIGSTOP
        in unix seconds."""
        at = time.time()
        self.resumes_at = at + seconds
        for name in names:
            group = self._processes.nodes[name].process.pid
            os.killpg(group, signal.SIGSTOP)
            timer = threading.Timer(seconds, os.killpg, (group, signal.SIGCONT))
            timer.daemon = True
            timer.start()
        return at


def members(watch: Watch) -> dict[str, str]:
    """Return the node in each role, according to the first plan."""
    plan, nodes = watch.plan, watch.nodes
    found = {"requester": watch.requester, "replica": nodes.name_of(plan["stages"][0][0])}
    found |= {"witness": nodes.name_of(peer) for peer in plan["witnesses"][:1]}  # noqa: B035
    others = [name for name in nodes.living if name not in found.values()]
    return found | {"idle": others[0] if others else found["witness"]}


def play(
    nodes: Machines, case: Case, folder: Path, steps: int, first: dict[str, Any] | None
) -> tuple[dict[str, Any], Any]:
    """Play one run; return its row and its final tensors; `first` is the row of the undisturbed run. Raises
    Stalled."""
    nodes.refill(case.idle + 2)
    nodes.heard.clear()
    player = survival.Play(nodes, survival.Shape(0, 1, 1, case.idle), folder)
    begun = time.time()
    watch = player._submit()
    alive = watch.requester
    if case.role:
        alive = _strike(nodes, case, watch, steps)
        if case.phase == "placing" and case.role == "requester" and case.how == "kill":
            nodes.hear(lambda: bool(watch.events("RunPlanned", alive)), STALL_GOAL_SECONDS)
            if not watch.events("RunPlanned", alive):
                return {"case": case.name, "outcome": "nobody was told"}, None
    if not nodes.hear(lambda: bool(watch.events("RunEnded", alive)), STEP_SECONDS_MAX):
        raise Stalled(
            f"{case.name}: no end, {len(watch.events('StepCommitted', alive))} steps{_said(watch, alive)}"
        )
    (end,) = watch.events("RunEnded", alive)
    if end["outcome"] != "done":
        raise Stalled(f"{case.name}: {end['detail']}")
    tensors = player._weights(watch, {alive: end})
    row: dict[str, Any] = {"case": case.name, "outcome": "done"}
    if case.role:
        row |= _figures(watch, alive, 0.0 if first is None else first["placed_seconds"], case)
    else:
        row["placed_seconds"] = round(watch.events("StepCommitted", alive)[0]["at_seconds"] - begun, 2)
    return row, tensors


def _strike(nodes: Machines, case: Case, watch: Watch, steps: int) -> str:
    """Send the signal when it is due; return the name of a surviving member."""
    requester = watch.requester

    def is_due() -> bool:
        done = len(watch.events("StepCommitted", requester))
        if case.phase == "placing":
            return bool(watch.events("RunPlanned", requester))
        return done >= steps if case.phase == "ending" else done > AFTER[case.phase]

    if not nodes.hear(is_due, PLACE_SECONDS_MAX):
        raise Stalled(f"{case.name}: only {len(watch.events('StepCommitted'))} steps before the signal")
    roles = members(watch)
    victim = roles[case.role]
    watch.killed = [victim]
    watch.killed_at = nodes.kill([victim]) if case.how == "kill" else nodes.halt([victim], STOP_SECONDS)
    return next(name for name in roles.values() if name != victim)


def _said(watch: Watch, alive: str) -> str:
    rows = watch.events("RunChanged", alive)
    return f"; it says {rows[-1]['state']}: {rows[-1]['reason']}" if rows else ""


def _figures(watch: Watch, alive: str, placed: float, case: Case) -> dict[str, Any]:
    at = watch.killed_at
    marks = [*watch.events("StepCommitted", alive), *watch.events("RunEnded", alive)]
    steps = sorted(row["at_seconds"] for row in marks if row["at_seconds"] > at)
    gaps = [late - early for early, late in zip([at, *steps], steps, strict=False)]
    if gaps and case.phase == "placing":
        gaps[0] = max(0.0, gaps[0] - placed)
    resumed = [row for row in watch.events("RunResumed", alive) if row["at_seconds"] > at]
    longest = max(resumed, key=lambda row: float(row["seconds"]), default=None)
    paused = [row for row in watch.events("RunChanged", alive) if row["state"] == "paused"]
    return {
        "stalled_seconds": round(max(gaps), 2) if gaps else None,
        "reported_seconds": None if longest is None else round(longest["seconds"], 2),
        # If it is not a witness, nothing stalls, and the report is a change of plans.
        "report_error_seconds": None
        if longest is None or case.role in ("witness", "idle")
        else round(abs(longest["seconds"] - (longest["at_seconds"] - at)), 2),
        "paused": "; ".join(row["reason"] for row in paused),
        "lost_steps": sum(row["lost_steps"] for row in resumed),
    }


def goals_of(row: dict[str, Any]) -> list[Goal]:
    """Return the goals of one case."""
    name, infinite = row["case"], float("inf")
    goals = [Goal(f"{name}: largest difference from the undisturbed run", row["difference"], "<=", EXACT)]
    if "stalled_seconds" in row:
        stalled = infinite if row["stalled_seconds"] is None else row["stalled_seconds"]
        goals.append(Goal(f"{name}: seconds without a step", stalled, "<=", STALL_GOAL_SECONDS))
    if row.get("report_error_seconds") is not None:
        error = row["report_error_seconds"]
        goals.append(Goal(f"{name}: error of the reported stall, seconds", error, "<=", REPORT_GOAL_SECONDS))
    return goals


def prepare(folder: Path, steps: int) -> None:
    """Write the text, the run's file and the captured model."""
    text = "".join(f"{n} and {n} are {2 * n}, {n} times {n} is {n * n}.\n" for n in range(120))
    (folder / "text.txt").write_text(text)
    path = folder / "RUN.toml"
    path.write_text(RUN_FILE.format(steps=steps))
    capture_to(folder / "gpt.peerloom", toml.parse(path.read_text(), RunFile, name=path.name).value, path, "")


def main() -> int:
    """Play the cases and report."""
    cells = {"cells": "the numbers of the cells to play"}
    flags = arguments(__doc__ or "", cells, full="play every cell, which takes an hour and more")
    steps = STEPS_QUICK if flags.quick else STEPS
    wanted = [every()[number] for number in flags.cells]
    cases = [UNDISTURBED, *(wanted or (QUICK if flags.quick else every() if flags.full else sample()))]
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    expected: Any = None
    try:
        with survival.swarm(Machines) as (nodes, folder):
            prepare(folder, steps)
            for case in cases:
                try:
                    row, tensors = play(nodes, case, folder, steps, rows[0] if rows else None)
                except (Stalled, PeerloomError) as error:
                    row = {"case": case.name, "outcome": str(error)}
                else:
                    expected = expected or tensors
                if "stalled_seconds" in row or not case.role:
                    row["difference"] = float(f"{difference(tensors, expected):.1e}")
                    goals += goals_of(row)
                rows.append(row)
                # A stopped node must run again before the next case counts the live nodes.
                time.sleep(max(0.0, nodes.resumes_at + SETTLE_SECONDS - time.time()))
                print("  ".join(f"{key} {value}" for key, value in row.items()), file=sys.stderr, flush=True)
    except Stopped:
        return EXIT_FORCED
    done = sum(row["outcome"] in ("done", "nobody was told") for row in rows)
    goals.insert(0, Goal("runs that ended well", done, ">=", len(cases)))
    return report("small", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
