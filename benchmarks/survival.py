"""The cost of a death: real nodes train, some of them are killed with SIGKILL in a step, and the run
continues.

A node is a separate process group with one core; a kill includes its stage, as in a power cut. The swarm has
three stages of two replicas, the requester, and spare nodes. It trains a tiny GPT in float64 on a text made
here. The first run is undisturbed, and every other result is compared with it, even after a stage went back
to a checkpoint, because the repeated arithmetic is the same except for the order of sums.

For each scenario: `stalled_seconds` is the longest time without a committed step after the kill; `noticed`
and `planned` are the times when the first survivor declared the victim dead and when the new plan came into
force; `lost` counts the steps committed before the kill and again after it; `replayed` counts the
micro-batches whose sums were lost, and `frames_again` the frames sent a second time for them. Not measured
here: networks between machines.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import safetensors.numpy
from _figures import Goal, arguments, leave, report
from blake3 import blake3

from node import toml
from node.cli.capture import capture_to
from node.cli.client import ask, request
from node.cli.signals import StopFlag, Stopped
from node.demo.processes import SwarmProcesses
from node.errors import EXIT_FORCED, PeerloomError, RunFailed
from node.protocols.run_file import RunFile

STAGES, REPLICAS, SPARES = 3, 2, 2
CHECKPOINT_EVERY = 6
KILL_STEP = 8
"""The step of the kill, counted from 0: in the middle between two checkpoints, and late enough that one
checkpoint is on other disks."""
STALL_GOAL_SECONDS = 15.0
EXACT = 1e-9
"""Tolerance relative to a tensor's largest value in float64; it allows for a different order of sums."""
MEET_SECONDS_MAX, PLACE_SECONDS_MAX, STEP_SECONDS_MAX, END_SECONDS_MAX = 60.0, 180.0, 120.0, 60.0
"""Time limits; a scenario that exceeds one has failed."""
RUN_FILE = """\
model = "gpt"
data = "text.txt"

[options]
layers = 3
heads = 2
width = 16
dropout = 0.1

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
stages = {stages}
replicas = {replicas}
trainers = 2
checkpoint_every = {every}
"""
"""Settings with two trainers, because only the requester has the data, in a file, and may die."""

Event = dict[str, Any]
Tensors = Mapping[str, "np.ndarray[Any, np.dtype[Any]]"]


@dataclass(frozen=True)
class Shape:
    """The size of a run."""

    steps: int
    stages: int
    replicas: int
    spares: int
    every: int = CHECKPOINT_EVERY

    @property
    def nodes(self) -> int:
        return self.stages * self.replicas + 1 + self.spares


class Nodes:
    """The live nodes of one swarm, and all their events about runs in order of arrival."""

    def __init__(self, folder: Path, stop: StopFlag) -> None:
        self.heard: list[tuple[str, Event]] = []
        self._processes = SwarmProcesses(folder, f"survival-{folder.name[-8:]}", stop.pause)
        self._stop = stop
        self._inbox: SimpleQueue[tuple[str, Event]] = SimpleQueue()
        self._living: list[str] = []
        self._started = 0

    @property
    def living(self) -> list[str]:
        """Return the names of the live nodes, the oldest first."""
        return list(self._living)

    def name_of(self, peer: str) -> str:
        return next(node.name for node in self._processes.nodes.values() if node.peer == peer)

    def ask(self, name: str, command: str, values: Mapping[str, object] | None = None) -> Any:
        """Return a node's answer to a client's command."""
        return ask(self._processes.nodes[name].data_dir, command, values, seconds=STEP_SECONDS_MAX)

    def refill(self, count: int) -> None:
        """Start new nodes for the missing ones, and wait until all are connected."""
        names = [f"n{self._started + number}" for number in range(count - len(self._living))]
        self._started += len(names)
        self._processes.launch(names)
        for name in names:
            through = self._processes.nodes[self._living[0]].address if self._living else None
            self._processes.start(name, through)
            self._living.append(name)
            threading.Thread(target=self._listen, args=(name,), daemon=True).start()
        until = time.monotonic() + MEET_SECONDS_MAX
        while any(self._processes.status(name)["members_alive"] != count - 1 for name in self._living):
            if time.monotonic() > until:
                raise RunFailed(f"{count} nodes did not connect within {MEET_SECONDS_MAX:.0f} s")
            self._stop.pause(0.1)

    def kill(self, names: Iterable[str]) -> float:
        """Send SIGKILL to nodes and their stages; return the time in unix seconds."""
        at = time.time()
        for name in names:
            self._living.remove(name)
            self._processes.kill(name)
        return at

    def hear(self, until: Callable[[], bool], seconds: float) -> bool:
        """Read the nodes' output until a condition holds; return False if there is no output for this
        long."""
        while not until():
            end = time.monotonic() + seconds
            while True:
                self._stop.pause()
                try:
                    self.heard.append(self._inbox.get(timeout=0.1))
                    break
                except Empty:
                    self._processes.check()
                    if time.monotonic() > end:
                        return False
        return True

    def close(self) -> None:
        """Let every node say goodbye, and kill those that do not end."""
        self._processes.close()

    def kill_all(self) -> None:
        """Kill all processes immediately."""
        self._processes.kill_all()

    def _listen(self, name: str) -> None:
        with suppress(PeerloomError):  # the end of a node; `check` judges whether it was wanted
            for reply in request(self._processes.nodes[name].data_dir, "events"):
                if "event" in reply:
                    self._inbox.put((name, reply["event"]))


@dataclass
class Watch:
    """One run, as reported by the nodes of its first plan."""

    nodes: Nodes
    run: str
    requester: str
    killed: list[str] = field(default_factory=list)
    killed_at: float = 0.0

    def events(self, kind: str, name: str = "") -> list[Event]:
        """Return the events of a kind that one node published, by default the first witness."""
        name = name or self.witness
        return [
            event
            for teller, event in self.nodes.heard
            if teller == name and event["kind"] == kind and event.get("run") == self.run
        ]

    @property
    def plan(self) -> Event:
        """Return the first plan."""
        return self.events("RunPlanned", self.requester)[0]

    @property
    def members(self) -> list[str]:
        """Return the members of the first plan: the requester, then replica by replica."""
        stages = self.plan["stages"]
        return [self.requester, *(self.nodes.name_of(peer) for stage in stages for peer in stage)]

    @property
    def witness(self) -> str:
        """Return the live member that has seen the most steps."""
        if not self.killed:
            return self.requester
        living = [name for name in self.members if name in self.nodes.living]
        return max(living, key=lambda name: len(self.events("StepCommitted", name)))

    @property
    def endings(self) -> dict[str, Event]:
        """Return the run's end, by the node that reports it."""
        found = {name: self.events("RunEnded", name) for name in self.nodes.living}
        return {name: rows[0] for name, rows in found.items() if rows}

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended on every node that took it up and did not give it back."""
        held = [
            len(self.events("RunAccepted", name)) - len(self.events("RunReleased", name))
            for name in self.nodes.living
        ]
        return len(self.endings) >= max(1, sum(count > 0 for count in held))

    # Cost

    def figures(self) -> dict[str, Any]:
        """Return the figures that the module's docstring explains."""
        commits = [row["at_seconds"] for row in self.events("StepCommitted")]
        after = [at for at in commits if at > self.killed_at]
        gaps = [late - early for early, late in zip([self.killed_at, *after], after, strict=False)]
        plans = [row for row in self.events("RunPlanned") if row["height"]]
        lost = [row for name in self.nodes.living for row in self._lost(name)]
        noticed = [row["at_seconds"] for row in lost]
        return {
            "stalled_seconds": round(max(gaps), 2) if gaps else None,
            "noticed_seconds": round(min(noticed) - self.killed_at, 2) if noticed else None,
            "planned_seconds": round(plans[0]["at_seconds"] - self.killed_at, 2) if plans else None,
            "lost_steps": self._lost_steps(),
            "replayed": sum(row["replayed"] for row in self._resumed()),
            "frames_again": sum(
                row["replayed"] for row in self.events("StepCommitted") if row["at_seconds"] > self.killed_at
            ),
            "plans": len(plans),
            "held_for_dead": len({row["peer"] for row in lost}),
            "restored": sum(row["restored_step"] is not None for row in plans),
        }

    def _lost(self, name: str) -> list[Event]:
        return [
            event
            for teller, event in self.nodes.heard
            if teller == name and event["kind"] == "MemberLost" and event["at_seconds"] > self.killed_at
        ]

    def _resumed(self) -> list[Event]:
        return self.events("RunResumed")

    def _lost_steps(self) -> int:
        """Return how many steps were committed twice: the larger of this witness's and the committers'
        count."""
        steps: list[int] = [row["step"] for row in self.events("StepCommitted")]
        counted: int = sum(row["lost_steps"] for row in self._resumed())
        return max(len(steps) - len(set(steps)), counted)


Choose = Callable[[Watch], list[str]]


def replica_of(stage: int) -> Choose:
    """Choose the first replica of a stage, which also saves it."""
    return lambda watch: [watch.nodes.name_of(watch.plan["stages"][stage][0])]


def all_of(stage: int) -> Choose:
    """Choose every replica of a stage."""
    return lambda watch: [watch.nodes.name_of(peer) for peer in watch.plan["stages"][stage]]


def requester(watch: Watch) -> list[str]:
    """Choose the requester: it feeds and commits."""
    return [watch.requester]


def planner(watch: Watch) -> list[str]:
    """Choose the member that is first in line to propose the next plan, even a plan without itself."""
    return [watch.nodes.name_of(watch.plan["planner"])]


def keeper(watch: Watch) -> list[str]:
    """Choose a member that keeps copies of the most stages, excluding those that other scenarios kill
    anyway."""
    others = [name for name in watch.members if [name] not in (requester(watch), planner(watch))]
    return [max(others, key=lambda name: _stages_kept(watch, name))]


def _stages_kept(watch: Watch, name: str) -> int:
    rows = watch.nodes.ask(name, "checkpoint.list")["checkpoints"]
    return max((len(row["stages_here"]) for row in rows if row["run"] == watch.run), default=0)


@dataclass(frozen=True)
class Scenario:
    """The nodes that die in a step. `stall_goal`: whether STALL_GOAL_SECONDS limits the run's stall."""

    name: str
    choose: Choose | None
    stall_goal: bool = False


UNDISTURBED = Scenario("nobody", None)
SCENARIOS = (
    UNDISTURBED,
    *(Scenario(f"a replica of stage {n + 1}", replica_of(n), stall_goal=True) for n in range(STAGES)),
    Scenario("both replicas of stage 2", all_of(1)),
    Scenario("the requester, who commits", requester),
    Scenario("the first in line to propose", planner),
    Scenario("a keeper of checkpoints", keeper),
)
QUICK: tuple[Scenario, ...] = (UNDISTURBED, Scenario("a replica of stage 2", replica_of(1), stall_goal=True))


class Stalled(Exception):
    """A run that did not end."""


Kind = TypeVar("Kind", bound=Nodes)


class Play:
    """Plays scenarios in one swarm; `folder` holds the run's file, its data and its model."""

    def __init__(self, nodes: Nodes, shape: Shape, folder: Path) -> None:
        self._nodes = nodes
        self._shape = shape
        self._folder = folder
        self._expected: Tensors | None = None

    def scenario(self, scenario: Scenario) -> dict[str, Any]:
        """Play one run, from its placement to its weights; return its cost. Raises Stalled."""
        self._nodes.refill(self._shape.nodes)
        self._nodes.heard.clear()
        watch = self._submit()
        self._train(watch, scenario)
        nodes = self._nodes
        if not nodes.hear(lambda: bool(watch.endings), STEP_SECONDS_MAX):
            raise Stalled(f"{scenario.name}: no end, {len(watch.events('StepCommitted'))} steps")
        if not nodes.hear(lambda: watch.is_over, END_SECONDS_MAX):
            raise Stalled(f"{scenario.name}: the run has ended only on {', '.join(watch.endings)}")
        ends = watch.endings
        outcomes = {row["outcome"] for row in ends.values()}
        if outcomes != {"done"}:
            raise Stalled(f"{scenario.name}: {'; '.join(str(row['detail']) for row in ends.values())}")
        tensors = self._weights(watch, ends)
        if self._expected is None:
            self._expected = tensors
        steps = [row["seconds"] for row in watch.events("StepCommitted")]
        return {
            "killed": scenario.name,
            "outcome": "done",
            **(watch.figures() if watch.killed else {}),
            "difference": float(f"{difference(tensors, self._expected):.1e}"),
            "loss": round(watch.events("RunEvaluated")[-1]["loss"], 6),
            "step_median_seconds": round(float(np.median(steps)), 3),
        }

    def _submit(self) -> Watch:
        name = self._nodes.living[-1]
        path = self._folder / "RUN.toml"
        values = {"text": path.read_text(), "path": str(path), "name": path.name, "follow": False}
        run = self._nodes.ask(name, "train", values | {"graph": str(self._folder / "gpt.peerloom")})["run"]
        return Watch(self._nodes, run, name)

    def _train(self, watch: Watch, scenario: Scenario) -> None:
        """Train until the chosen nodes have been killed, in the middle of a step."""

        def is_due() -> bool:
            steps = watch.events("StepCommitted")
            return len(steps) > KILL_STEP and any(row["step"] for row in watch.events("CheckpointKept"))

        if scenario.choose is None:
            return
        if not self._nodes.hear(is_due, PLACE_SECONDS_MAX):
            raise Stalled(f"{scenario.name}: only {len(watch.events('StepCommitted'))} steps before the kill")
        chosen = scenario.choose(watch)
        time.sleep(0.4 * watch.events("StepCommitted")[-1]["seconds"])
        watch.killed = chosen
        watch.killed_at = self._nodes.kill(chosen)

    def _weights(self, watch: Watch, ends: Mapping[str, Event]) -> Tensors:
        """Return the weights kept by the last survivor. Raises Stalled if they are wrong."""
        name, end = list(ends.items())[-1]
        out = self._folder / f"{watch.run}.safetensors"
        self._nodes.ask(name, "runs.fetch", {"run": watch.run, "out": str(out)})
        data = out.read_bytes()
        if blake3(data).hexdigest() != end["weights"]:
            raise Stalled(f"{name} keeps weights that differ from those of the run's end")
        tensors: Tensors = safetensors.numpy.load(data)
        return tensors


def difference(found: Tensors, expected: Tensors) -> float:
    """Return the largest difference over all tensors, relative to the tensor's largest value."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(
        float(np.abs(found[name] - expected[name]).max() / max(1e-12, float(np.abs(expected[name]).max())))
        for name in expected
    )


def goals_of(row: Mapping[str, Any], scenario: Scenario, shape: Shape) -> list[Goal]:
    name = scenario.name
    goals = [Goal(f"{name}: largest difference from the undisturbed run", row["difference"], "<=", EXACT)]
    if scenario.choose is not None:
        goals.append(Goal(f"{name}: steps lost", row["lost_steps"], "<=", shape.every))
    if scenario.stall_goal:
        stalled = float("inf") if row["stalled_seconds"] is None else row["stalled_seconds"]
        goals.append(Goal(f"{name}: seconds without a step", stalled, "<=", STALL_GOAL_SECONDS))
    return goals


def prepare(folder: Path, shape: Shape) -> None:
    """Write the text, the run's file and the captured model."""
    text = "".join(f"{n} and {n} are {2 * n}, {n} times {n} is {n * n}.\n" for n in range(120))
    (folder / "text.txt").write_text(text)
    capture(
        folder,
        RUN_FILE.format(steps=shape.steps, stages=shape.stages, replicas=shape.replicas, every=shape.every),
    )


def capture(folder: Path, run_file: str) -> None:
    """Write the run's file and its model."""
    path = folder / "RUN.toml"
    path.write_text(run_file)
    capture_to(folder / "gpt.peerloom", toml.parse(path.read_text(), RunFile, name=path.name).value, path, "")


@contextmanager
def swarm(kind: type[Kind]) -> Iterator[tuple[Kind, Path]]:
    """Yield a swarm without nodes yet, and a folder. No process and no file is left behind in any case."""
    folder = Path(tempfile.mkdtemp(prefix="peerloom-survival-"))
    stop = StopFlag()
    nodes = kind(folder, stop)

    def force() -> None:
        nodes.kill_all()
        shutil.rmtree(folder, ignore_errors=True)

    with stop.heeded(force):
        try:
            yield nodes, folder
        finally:
            nodes.close()
            shutil.rmtree(folder, ignore_errors=True)


def measure(scenarios: Sequence[Scenario], shape: Shape) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Play all scenarios in one swarm, until one fails."""
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    with swarm(Nodes) as (nodes, folder):
        prepare(folder, shape)
        play = Play(nodes, shape, folder)
        for scenario in scenarios:
            try:
                row = play.scenario(scenario)
            except (Stalled, PeerloomError) as error:
                rows.append({"killed": scenario.name, "outcome": str(error)})
                break
            rows.append(row)
            goals += goals_of(row, scenario, shape)
    done = sum(row["outcome"] == "done" for row in rows)
    return rows, [Goal("runs that ended well", done, ">=", len(scenarios)), *goals]


def main() -> int:
    """Play the scenarios and report."""
    flags = arguments(__doc__ or "")
    scenarios, shape = SCENARIOS, Shape(steps=80, stages=STAGES, replicas=REPLICAS, spares=SPARES)
    if flags.quick:
        scenarios, shape = QUICK, Shape(steps=15, stages=2, replicas=2, spares=0)
    try:
        rows, goals = measure(scenarios, shape)
    except Stopped:
        return EXIT_FORCED
    return report("survival", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
