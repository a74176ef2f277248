"""A run of whole nodes under a partition and crashes, drawn from a seed, and the checker that watches the
run.

The run is real: protocol, plans, checkpoints, arithmetic. The network, the clock and the disks are virtual; a
crash keeps the disk. `faults` judges only by the events of all nodes.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import trio

from crypto.identity import PeerId
from node.checkpoints.weights import weights_name
from node.events import CheckpointKept, RunEnded, RunPlanned, StepCommitted
from node.protocols.manifest import Manifest, Run
from partition.plan.chain import Chain
from partition.plan.plan import NO_HASH, Plan, committee, plan_hash
from partition.plan.quorum import decides
from sim.seams import SimClock
from sim.seeds import seeded_rng
from sim.worlds.scheduling import run_repeatably
from tests.stack import Swarm, _live, assert_equal, manifest, prepare, reference, swarm, weights

NAMES = "abcdefg"
PASS_SECONDS = 0.3
"""Modelled seconds of a pass. With this, a step takes 2 to 3 s, and a run lasts longer than its troubles."""
SPLIT_SECONDS = 60.0
RESUME_SECONDS_MAX = 10.0
"""Seconds after healing within which a step must be committed again."""
SPREAD_SECONDS = 1.0
"""Seconds for which news of events just before a split may still be in transit."""
TAKEOVER_SECONDS_MAX = 20.0
"""Seconds after a split within which the larger side must continue, if it has a replica of every stage."""
END_SECONDS_MAX = 400.0
CRASHES_MAX = 3


@dataclass(frozen=True)
class Crash:
    """`name` dies `at` seconds after the first step, and restarts with its disk at `back`."""

    at: float
    back: float
    name: str


@dataclass(frozen=True)
class Troubles:
    """The troubles of a run; times are in seconds after its first committed step."""

    split: float
    minority: str
    crashes: tuple[Crash, ...]

    @property
    def heal(self) -> float:
        return self.split + SPLIT_SECONDS


def draw_troubles(seed: int) -> Troubles:
    """Draw troubles: at most a minority is down at once, and all are back by the time of healing."""
    rng = seeded_rng(seed, "troubles")
    split = rng.uniform(0, 8)
    minority = "".join(sorted(rng.sample(NAMES, rng.randint(1, len(NAMES) // 2))))
    crashes: list[Crash] = []
    for _ in range(rng.randint(0, CRASHES_MAX)):
        at = rng.uniform(0, split + SPLIT_SECONDS - 3)
        back = min(at + rng.uniform(0.5, 20), split + SPLIT_SECONDS - 1)
        crashes.append(_crash(rng, crashes, at, back))
    if rng.random() < 0.5:
        at = split + SPLIT_SECONDS + RESUME_SECONDS_MAX + rng.uniform(0, 10)
        crashes.append(_crash(rng, crashes, at, at + rng.uniform(0.5, 20)))
    return Troubles(split, minority, tuple(crashes))


def _crash(rng: Random, before: Sequence[Crash], at: float, back: float) -> Crash:
    busy = {crash.name for crash in before if crash.at < back + 1 and at < crash.back + 1}
    return Crash(at, back, rng.choice([name for name in NAMES if name not in busy]))


def run_manifest(**changes: Any) -> Manifest:
    """Return a run of three stages with two replicas each, and with little arithmetic."""
    fields: dict[str, Any] = {
        "steps": 32,
        "microbatch": 8,
        "microbatches": 2,
        "test_samples": 16,
        "stages": 3,
        "save_every": 4,
    }
    return manifest(**(fields | changes))


@dataclass
class World:
    """A swarm with a run in it. Times are by the clock that all simulated nodes share."""

    group: Swarm
    run: Run
    nursery: trio.Nursery
    seed: int = 1
    pass_seconds: float = PASS_SECONDS
    plans: dict[str, Plan] = field(default_factory=dict)
    split_at: float | None = None
    healed_at: float | None = None
    minority: frozenset[str] = frozenset()
    down: set[str] = field(default_factory=set)

    @property
    def now(self) -> float:
        return SimClock().wall()

    def split(self, minority: str) -> None:
        """Disconnect these nodes from all others."""
        nodes = self.group.nodes
        self.minority, self.split_at = frozenset(minority), self.now
        self.group.medium.split(
            [nodes[name].peer for name in nodes if name in self.minority],
            [nodes[name].peer for name in nodes if name not in self.minority],
        )

    def heal(self) -> None:
        self.group.medium.heal()
        self.healed_at = self.now

    def crash(self, name: str) -> None:
        self.group.kill(name)
        self.down.add(name)

    async def restart(self, name: str) -> None:
        """Restart a node with its disk, through a live node on its side."""
        group = self.group
        others = [other for other in group.nodes if other != name and other not in self.down]
        near = [
            other for other in others if group.medium.reaches(group.nodes[other].peer, group.nodes[name].peer)
        ]
        storage = group.storages[name]
        through = (near or others or list(group.nodes))[0]
        await self.nursery.start(_live, group, name, through, self.seed, self.pass_seconds, storage)
        self.down.discard(name)

    def begin(self) -> None:
        """Let the requester submit the run, in a task that dies with the requester."""
        requester = self.group.nodes[self.group.name_of(self.run.requester)]
        requester.runs.start_task(requester.runs.submit, self.run, of=self.run)
        self.nursery.start_soon(self.note_plans)

    async def note_plans(self) -> None:
        """Record every plan that a node knows, until cancelled."""
        while True:
            for name, node in self.group.nodes.items():
                member = node.runs.members.get(self.run.id)
                if name not in self.down and member is not None and member._chain is not None:
                    core = member._chain.core
                    if core.head_hash.hex()[:16] not in self.plans:
                        for plan in Chain(core.base, core.chain).plans:
                            self.plans[plan_hash(plan).hex()[:16]] = plan
            await trio.sleep(0.5)

    def commits(self, since: float = 0.0) -> list[StepCommitted]:
        """Return all commits by time, as reported by their committers and by all others."""
        found = [
            event
            for events in self.group.events.values()
            for event in events
            if isinstance(event, StepCommitted) and event.at > since
        ]
        return sorted(found, key=lambda event: event.at)

    def ends(self) -> dict[str, RunEnded]:
        """Return the end of the run as each node reports it."""
        return {
            name: event
            for name, events in self.group.events.items()
            for event in events
            if isinstance(event, RunEnded)
        }

    async def committed(self, since: float, seconds: float) -> float | None:
        """Return the seconds from `since` to the first step committed after it; None if that is too late."""
        with trio.move_on_after(seconds):
            while not (found := self.commits(since)):  # noqa: ASYNC110 - virtual time
                await trio.sleep(0.1)
            return found[0].at - since
        return None

    async def reached(self, step: int, seconds: float = END_SECONDS_MAX) -> None:
        """Wait for this many committed steps."""
        with trio.fail_after(seconds):
            while not any(event.step + 1 >= step for event in self.commits()):  # noqa: ASYNC110 - virtual time
                await trio.sleep(0.1)

    async def kept(self, step: int, seconds: float = END_SECONDS_MAX) -> None:
        """Wait for a complete checkpoint of this step."""
        with trio.fail_after(seconds):
            while not any(  # noqa: ASYNC110 - virtual time
                isinstance(event, CheckpointKept) and event.step == step
                for events in self.group.events.values()
                for event in events
            ):
                await trio.sleep(0.1)

    async def ended(self, seconds: float = END_SECONDS_MAX) -> bool:
        """Return whether the run ends in time at every live node that takes part."""
        with trio.move_on_after(seconds):
            while not self.ends() or any(  # noqa: ASYNC110 - virtual time
                self.run.id in node.runs.members
                for name, node in self.group.nodes.items()
                if name not in self.down
            ):
                await trio.sleep(0.5)
            return True
        return False


# The checker


@dataclass(frozen=True)
class _Step:
    """A step as one node learnt of it, with its plan and time."""

    name: str
    plan: str
    height: int
    is_own: bool
    event: StepCommitted


def faults(world: World) -> list[str]:
    """Return the violations in a run without forks; empty if there are none."""
    found = _plan_faults(world)
    steps = _steps(world)
    found += _step_faults(world, steps)
    found += _minority_faults(world, steps)
    found += _planned_by_a_minority(world)
    found += _end_faults(world)
    return list(dict.fromkeys(found))


def _plan_faults(world: World) -> list[str]:
    found = []
    at_height: dict[int, str] = {}
    for name, events in sorted(world.group.events.items()):
        for event in events:
            if not isinstance(event, RunPlanned):
                continue
            other = at_height.setdefault(event.height, event.plan)
            if other != event.plan:
                found.append(f"height {event.height}: {name} has plan {event.plan}, others {other}")
            plan = world.plans.get(event.plan)
            if plan is not None and plan.height and plan.parent.hex()[:16] not in world.plans:
                found.append(f"height {event.height}: no node had the parent of {event.plan}")
    return found


def _steps(world: World) -> list[_Step]:
    found = []
    for name, events in world.group.events.items():
        plan: RunPlanned | None = None
        for event in events:
            if isinstance(event, RunPlanned):
                plan = event
            elif isinstance(event, StepCommitted):
                assert plan is not None, f"{name} has a step without a plan"
                is_own = plan.trainer == world.group.nodes[name].peer
                found.append(_Step(name, plan.plan, plan.height, is_own, event))
    return sorted(found, key=lambda step: step.event.at)


def _step_faults(world: World, steps: Sequence[_Step]) -> list[str]:
    """Check that no step is twice in the chain, except for steps that a checkpoint took back."""
    found = []
    restored = {
        event.height: event.restored_step
        for events in world.group.events.values()
        for event in events
        if isinstance(event, RunPlanned) and event.restored_step is not None
    }
    heights: dict[int, set[int]] = {}
    for step in steps:
        heights.setdefault(step.event.step, set()).add(step.event.height)
    for number, under in heights.items():
        for before, after in zip(sorted(under), sorted(under)[1:], strict=False):
            if not any(before < height <= after and restored[height] <= number for height in restored):
                found.append(f"step {number} was committed under plan {before} and again under {after}")
    for name in world.group.events:
        mine = [(step.event.height, step.event.step) for step in steps if step.name == name]
        found += [
            f"{name} reports twice that step {row[1]} was committed" for row in mine if mine.count(row) > 1
        ]
    losses: dict[tuple[int, int], set[float]] = {}
    for step in steps:
        losses.setdefault((step.event.height, step.event.step), set()).add(step.event.loss)
    found += [
        f"step {number} has several losses under plan {height}"
        for (height, number), values in losses.items()
        if len(values) > 1
    ]
    return found


def _minority_faults(world: World, steps: Sequence[_Step]) -> list[str]:
    """Check that during the split, a committer has all replicas of its plan on its own side."""
    found = []
    for step in steps:
        if _is_parted(world, step.event.at):
            stages = world.plans[step.plan].stages
            if len({_side(world, peer) for stage in stages for peer in stage.replicas}) > 1:
                found.append(f"step {step.event.step} was committed by replicas that cannot reach each other")
    return found


def _planned_by_a_minority(world: World) -> list[str]:
    """Check that during the split, only the side with a majority of the votes adopts a new plan."""
    found = []
    known_at: dict[str, float] = {}
    rows = sorted(
        ((event.at, name, event) for name, events in world.group.events.items() for event in events),
        key=lambda row: row[0],
    )
    for at, name, event in rows:
        if not isinstance(event, RunPlanned):
            continue
        since = known_at.setdefault(event.plan, at)
        plan = world.plans.get(event.plan)
        parent = world.plans.get(plan.parent.hex()[:16]) if plan is not None else None
        if parent is None or not _is_parted(world, since) or not _is_parted(world, at):
            continue
        voters = committee(parent)
        here = [peer for peer in voters if _side(world, peer) == (name in world.minority)]
        if not decides(voters, here, world.run.tie_breaker):
            found.append(f"{name} has plan {event.height}, which its side cannot have decided alone")
    return found


def _is_parted(world: World, at: float) -> bool:
    until = world.healed_at if world.healed_at is not None else float("inf")
    return world.split_at is not None and world.split_at + SPREAD_SECONDS < at < until


def _side(world: World, peer: bytes) -> bool:
    return world.group.name_of(PeerId(peer)) in world.minority


def _end_faults(world: World) -> list[str]:
    ends = world.ends()
    found = [f"{name}: {end.outcome}: {end.detail}" for name, end in ends.items() if end.outcome != "done"]
    if len({end.weights for end in ends.values()}) > 1:
        found.append("members that report success name different weights")
    kept = {
        name: world.group.storages[name].read(weights_name(world.run.text))
        for name, end in ends.items()
        if end.outcome == "done" and not end.detail
    }
    if len(set(kept.values())) > 1 or None in kept.values():
        found.append("members that report success do not keep the same weights")
    return found


# A whole trial


@dataclass(frozen=True)
class Trial:
    """The outcome of one seed: seconds from healing to the next step (None if too late), the number of steps
    during the split, and whether the run went back to a checkpoint."""

    seed: int
    resumed_seconds: float | None
    steps_parted: int
    is_restored: bool
    faults: tuple[str, ...]


async def try_seed(seed: int, report: list[Trial]) -> None:
    """Play a run under the troubles of a seed, and return all violations."""
    troubles = draw_troubles(seed)
    async with swarm(NAMES, seed=seed, stage_seconds=PASS_SECONDS) as group, trio.open_nursery() as nursery:
        run = prepare(group.nodes[NAMES[-1]], run_manifest())
        world = World(group, run, nursery, seed)
        world.begin()
        wrong = []
        if await world.committed(0.0, END_SECONDS_MAX) is None:
            wrong.append("no step was committed even before any trouble")
        resumed = await _befall(world, troubles)
        assert world.healed_at is not None
        was_over = any(end.outcome == "done" and end.at <= world.healed_at for end in world.ends().values())
        if resumed is None and not was_over:
            wrong.append(f"no step within {RESUME_SECONDS_MAX:.0f} s of healing")
        if not await world.ended():
            wrong.append(f"the run did not end: {standing(world)}")
        wrong += faults(world) + _stood_still(world, troubles) + result_faults(world)
        restored = any(plan.restored != NO_HASH for plan in world.plans.values())
        steps = {event.step for event in world.commits() if _is_parted(world, event.at)}
        report.append(Trial(seed, resumed, len(steps), restored, tuple(wrong)))
        nursery.cancel_scope.cancel()


async def _befall(world: World, troubles: Troubles) -> float | None:
    """Play the troubles; return how long after healing the next step was committed."""
    began = trio.current_time()
    todo: list[tuple[float, str, str]] = [
        (troubles.split, "split", troubles.minority),
        (troubles.heal, "heal", ""),
        *((crash.at, "crash", crash.name) for crash in troubles.crashes),
        *((crash.back, "restart", crash.name) for crash in troubles.crashes),
    ]
    resumed = None
    for at, what, name in sorted(todo):
        await trio.sleep_until(began + at)
        match what:
            case "split":
                world.split(name)
            case "crash":
                world.crash(name)
            case "restart":
                await world.restart(name)
            case _:
                world.heal()
                resumed = await world.committed(world.now, RESUME_SECONDS_MAX)
    return resumed


def _stood_still(world: World, troubles: Troubles) -> list[str]:
    """Check that the larger side continued, if it had all it needed and no member crashed."""
    first = next(plan for plan in world.plans.values() if plan.height == 0)
    has_all = all(any(not _side(world, peer) for peer in stage.replicas) for stage in first.stages)
    if not has_all or any(crash.at < troubles.heal for crash in troubles.crashes):
        return []
    assert world.split_at is not None
    later = world.commits(world.split_at + SPREAD_SECONDS)
    gone_on = bool(later) and later[0].at < world.split_at + TAKEOVER_SECONDS_MAX
    return [] if gone_on else ["the larger side stood still though every stage had a replica there"]


def result_faults(world: World) -> list[str]:
    """Check that the result equals that of one process: repeated steps use the same micro-batches."""
    done = [name for name, end in world.ends().items() if end.outcome == "done" and not end.detail]
    if not done:
        return ["nobody has a result"]
    try:
        assert_equal(weights(world.group, done[0], world.run), reference(world.run), "float64")
    except AssertionError as error:
        return [f"the result is not that of one process: {error}"]
    return []


def repeatably(seed: int, scenario: Callable[[], Awaitable[None]]) -> None:
    """Simulate so that the same seed repeats the same run; trio's scheduler draws from the seed too."""
    run_repeatably(scenario, Random(seed))


def standing(world: World) -> str:
    """Return the state of all nodes, to show why a run hangs."""
    rows = []
    for name, node in sorted(world.group.nodes.items()):
        member = node.runs.members.get(world.run.id)
        if name in world.down or member is None:
            rows.append(f"{name} {'down' if name in world.down else 'not in it'}")
            continue
        core = None if member.duties.committer is None else member.duties.committer.core
        phase = "" if core is None else f" {core.phase} step {core.step}"
        rows.append(
            f"{name} {member.state} plan {None if member.plan is None else member.plan.height}{phase}"
        )
    return "; ".join(rows)
