"""Whole nodes that come and go, in virtual time, for `benchmarks/churn_runs.py`. Records the sessions of
machines, and how each machine spends its time while a run trains.

A machine computes at the rate of its capacity, one micro-batch at a time. The node that requests the run is
an additional one: it stays, feeds and commits, and takes no stage.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import trio

from crypto.identity import Identity, PeerId
from node import config
from node.averaging_events import AveragingEnded
from node.events import Event, RunEnded, RunPlanned, StepCommitted
from node.protocols.manifest import Manifest, Run
from node.runtime import Node
from node.seams import Stage
from node.services.capacity import Capacity
from partition import stage as api
from partition.stage import OptimizerSettings
from sim.churn.model import Churn, Distribution
from sim.churn.schedule import PopulationChange, changes
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.network.pace import PeerPace
from sim.seams import SimClock, SimNetworkFabric
from sim.seeds import seeded_entropy, seeded_rng
from sim.storage import MemoryStorage
from sim.worlds.scheduling import run_virtually
from sim.worlds.stages import NodeExecutor
from tests.stack import manifest, prepare

MACHINES = 6
LIFE_SECONDS, ABSENCE_SECONDS = 300.0, 60.0
CRASH_SHARE = 0.7
"""The share of sessions that end without a goodbye."""
FLOPS = 3.0e7
"""The rate of every machine. With it a micro-batch takes half a second, which is long compared with a
message."""
MICROBATCH, MICROBATCHES = 4, 30
"""Samples in a micro-batch, and micro-batches in a step: divisible by five and by six machines. A step of all
machines takes some three seconds."""
LOCAL_MICROBATCHES = 2
"""Micro-batches in a step in local mode: a member's step takes a second, and the usual twenty between two
rounds take twenty."""
SAMPLE_SECONDS = 0.25
"""The interval at which each machine's activity is recorded."""
CALM_SECONDS, PHASE_LOOK_SECONDS = 15.0, 0.01
"""The time between a death in a given phase and the next event, and the interval at which the phase is
checked."""
STEPS_MAX = 1_000_000
READY_SECONDS_MAX = 120.0
NETWORK = NetworkModel()


@dataclass
class Death:
    """The death of a machine. `phase` is the committer's phase. `stalled_seconds` is the delay of the next
    committed step; in local mode no machine waits, so it is 0 there."""

    at: float
    why: str
    phase: str
    was_in_plan: bool
    lost_samples: int = 0
    stalled_seconds: float = 0.0


@dataclass
class Found:
    """The outcome of one play. `seconds` are machine-seconds by activity."""

    samples: int = 0
    microbatch_seconds: float = 0.0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    deaths: list[Death] = field(default_factory=list)
    plans: int = 0
    steps_again: int = 0
    joined_seconds: list[float] = field(default_factory=list)
    outcome: str = ""
    lasted_seconds: float = 0.0

    @property
    def share(self) -> float:
        """Return the number of samples in counted steps, as a share of the samples that the machines present
        could have computed."""
        return self.samples / MICROBATCH * self.microbatch_seconds / self.seconds["present"]


class BusyExecutor(NodeExecutor):
    """An executor that records whether a machine is computing, and what."""

    def __init__(self) -> None:
        super().__init__(FLOPS, 1.0, lambda _run: 0.0, PeerPace(), lambda *_: None)
        self.doing: Counter[str] = Counter()

        self.microbatch_seconds = 0.0
        """The time of a micro-batch through all layers, forward and back."""
        self.made: list[tuple[float, int]] = []
        """For each step made here: when, and the number of samples in all steps until then."""

    async def open_stage(self, specification: bytes) -> Stage:
        return _Watched(await super().open_stage(specification), self)


class _Watched:
    """A stage that counts its pending requests."""

    def __init__(self, stage: Stage, executor: BusyExecutor) -> None:
        self._stage = stage
        self._executor = executor

    async def call(self, request: object) -> object:
        with self._counted(_kind(request)):
            reply = await self._stage.call(request)
        if isinstance(reply, api.Forwarded) and isinstance(request, api.Forward) and request.train:
            self._executor.microbatch_seconds = reply.busy_nanoseconds / 1e9
        if isinstance(request, api.Apply) and not request.is_skipped:
            made = self._executor.made
            made.append((trio.current_time(), (made[-1][1] if made else 0) + request.samples))
        return reply

    @contextmanager
    def _counted(self, kind: str) -> Iterator[None]:
        doing = self._executor.doing
        doing[kind] += 1
        try:
            yield
        finally:
            doing[kind] -= 1

    def vector(self, name: str) -> memoryview:
        return self._stage.vector(name)

    async def aclose(self) -> None:
        await self._stage.aclose()


def _kind(request: object) -> str:
    match request:
        case api.Forward():
            return "training" if request.train else "evaluating"
        case api.Backward():
            return "training"
        case api.Norm() | api.Apply():
            return "applying"
    return "other"


@dataclass
class _Life:
    """One session of a machine, from its start to its end."""

    node: Node
    executor: BusyExecutor
    scope: trio.CancelScope
    goodbye: trio.Event
    since: float
    first_work: float | None = None
    kept_samples: int = 0

    def made_samples(self, until: float = inf) -> int:
        """Return how many samples of its steps it had processed by `until`."""
        return next((samples for at, samples in reversed(self.executor.made) if at <= until), 0)


class Play:
    """One run on machines that come and go, for some seconds from its first step on."""

    def __init__(
        self, wanted: dict[str, Any], seconds: float, seed: int, phases: tuple[str, ...] = ()
    ) -> None:
        """With `phases` no machine comes or goes by itself; instead one is killed in each of these phases of
        the committer."""
        self.found = Found()
        self._phases = phases
        self._wanted = wanted
        self._is_local = wanted.get("local") is not None
        self._seconds = seconds
        self._seed = seed
        self._medium = SimNetworkFabric(SimLinks(NETWORK, seed))
        self._lives: dict[int, _Life] = {}
        self._disks: dict[int, MemoryStorage] = {}
        self._serials: Counter[int] = Counter()
        self._asker: Node | None = None
        self._committed: dict[int, float] = {}
        self._gap_seconds = 0.0
        self._open: list[Death] = []
        self._plan: frozenset[PeerId] = frozenset()
        self._begun_at = 0.0
        self._is_over = False
        self._run: Run | None = None

    def play(self) -> Found:
        run_virtually(self._play)
        return self.found

    async def _play(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self._live, 0)
            for number in range(1, MACHINES + 1):
                await nursery.start(self._live, number)
            asker = self._asker = self._lives.pop(0).node
            with trio.fail_after(READY_SECONDS_MAX):
                while len(asker.membership.live) < MACHINES + 1:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            self._run = prepare(asker, _manifest(self._wanted))
            await asker.runs.submit(self._run)
            with trio.fail_after(READY_SECONDS_MAX):
                while not self._has_begun():  # noqa: ASYNC110 - virtual time
                    await trio.sleep(SAMPLE_SECONDS)
            self._begun_at = trio.current_time()
            nursery.start_soon(self._churn if not self._phases else self._kill_in_phases)
            await self._look()
            self._is_over = True
            for life in self._lives.values():
                self.found.microbatch_seconds = (
                    life.executor.microbatch_seconds or self.found.microbatch_seconds
                )
                if self._is_local:
                    self._keep(life, life.made_samples())
            nursery.cancel_scope.cancel()

    def _has_begun(self) -> bool:
        return bool(self._committed) or (
            self._is_local and any(life.executor.made for life in self._lives.values())
        )

    # Machines

    async def _live(self, number: int, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run a machine from its start to its end; number 0 is the requester."""
        serial = self._serials[number]
        self._serials[number] += 1
        identity = Identity(bytes([self._seed, number + 1]) * 16)
        disk = self._disks.get(number)
        if disk is None:
            disk = self._disks[number] = MemoryStorage()
            disk.write("identity.key", identity.seed)
            disk.write("static.key", bytes(32))
        executor, label = BusyExecutor(), (self._seed, identity.peer, serial)
        asker = self._asker or (self._lives[0].node if 0 in self._lives else None)
        heard = lambda event: self._heard(number, event)  # noqa: E731 - a name for the report below
        node = Node(
            config.Config(
                name=f"m{number}",
                swarm=config.SwarmSettings(name="churn", preset="lan"),
                resources=config.Resources(accept_runs="swarm" if number else "never"),
                data_dir=Path("/simulated"),
            ),
            join=[asker.network.addresses[0].short] if asker is not None else [],
            network=self._medium.attach(identity.peer),
            clock=SimClock(),
            rng=seeded_rng(*label),
            entropy=seeded_entropy(*label),
            executor=executor,
            storage=disk,
            capacity=Capacity("cpu", 1, 8 << 30, 16 << 30, FLOPS, ""),
            report=heard,
        )
        with trio.CancelScope() as scope:
            life = _Life(node, executor, scope, trio.Event(), trio.current_time())
            self._lives[number] = life
            async with node:
                task_status.started()
                await life.goodbye.wait()
        if self._lives.get(number) is life:
            del self._lives[number]

    async def _churn(self) -> None:
        churn = Churn(
            sessions=Distribution("exponential", LIFE_SECONDS),
            absences=Distribution("exponential", ABSENCE_SECONDS),
            permanent=1,
            crash_share=CRASH_SHARE,
        )
        for change in changes(churn, MACHINES + 1, self._seconds, self._seed):
            await trio.sleep_until(self._begun_at + change.time)
            await self._change(change)

    async def _kill_in_phases(self) -> None:
        """Kill a machine in each phase in turn, and restart it."""
        for phase in self._phases:
            await trio.sleep(CALM_SECONDS)
            victim = max(self._lives)
            while self._phase(self._lives[victim]) != phase:  # noqa: ASYNC110 - virtual time
                await trio.sleep(PHASE_LOOK_SECONDS)
            await self._change(PopulationChange(trio.current_time(), victim, False, "crash", True))
            await trio.sleep(CALM_SECONDS)
            await self._change(PopulationChange(trio.current_time(), victim, True, "return", True))

    async def _change(self, change: PopulationChange) -> None:
        if change.up:
            while change.number in self._lives:  # noqa: ASYNC110 - its goodbye is not over yet
                await trio.sleep(SAMPLE_SECONDS)
            await self._nursery.start(self._live, change.number)
            return
        life = self._lives.get(change.number)
        if life is None:
            return
        why = "leave" if change.why == "leave" else "crash"
        in_plan = self._is_local or life.node.peer in self._plan
        death = Death(trio.current_time(), why, self._phase(life), in_plan)
        self.found.deaths.append(death)
        if why == "leave":
            life.goodbye.set()
        else:
            self._medium.kill(life.node.peer)
            life.scope.cancel()
            del self._lives[change.number]
        if self._is_local:
            death.lost_samples = life.made_samples() - life.kept_samples
        elif in_plan:
            self._open.append(death)

    def _phase(self, life: _Life) -> str:
        """Return the phase of a death: the committer's phase, or in local mode that of the machine itself."""
        if self._is_local:
            doing = life.executor.doing
            return next((kind for kind in ("evaluating", "applying", "training") if doing[kind]), "between")
        assert self._asker is not None
        member = next(iter(self._asker.runs.members.values()), None)
        committer = None if member is None else member.duties.committer
        if committer is None:
            return "between"
        phase = committer.core.phase
        return phase if phase in ("counting", "committing", "applying", "evaluating") else "between"

    # Observations

    def _heard(self, number: int, event: Event) -> None:
        if self._is_over:
            return
        life = self._lives.get(number)
        now = trio.current_time()
        if isinstance(event, AveragingEnded) and event.outcome == "ok" and life is not None and number:
            self._keep(life, life.made_samples(now - event.seconds))
        if number:
            return
        match event:
            case StepCommitted() if not self._is_local and event.samples:
                self._step(event, now)
            case RunPlanned():
                self.found.plans += 1
                self._plan = frozenset(peer for stage in event.stages for peer in stage)
            case RunEnded():
                self.found.outcome = f"{event.outcome} {event.detail}".strip()
                for death in self._open:
                    death.stalled_seconds = now - death.at
                self._open = []

    def _step(self, event: StepCommitted, now: float) -> None:
        if event.step in self._committed:
            self.found.steps_again += 1
        else:
            self.found.samples += event.samples
        last = max(self._committed.values(), default=now)
        self._committed[event.step] = now
        gap = now - last
        if self._open:
            late = max(0.0, gap - self._gap_seconds)
            for death in self._open:
                death.stalled_seconds = late / len(self._open)
            self._open = []
        elif gap:
            self._gap_seconds = 0.8 * self._gap_seconds + 0.2 * gap if self._gap_seconds else gap

    def _keep(self, life: _Life, made: int) -> None:
        """Count the samples of a machine in local mode, once they have entered a mean."""
        self.found.samples += max(0, made - life.kept_samples)
        life.kept_samples = max(life.kept_samples, made)

    async def _look(self) -> None:
        """Record each machine's activity, until the time is over."""
        end = self._begun_at + self._seconds
        while trio.current_time() < end and not self.found.outcome:
            await trio.sleep(SAMPLE_SECONDS)
            self.found.lasted_seconds += SAMPLE_SECONDS
            for life in self._lives.values():
                self.found.seconds[self._doing(life)] += SAMPLE_SECONDS
                self.found.seconds["present"] += SAMPLE_SECONDS

    def _doing(self, life: _Life) -> str:
        doing = life.executor.doing
        if life.first_work is None and doing["training"]:
            life.first_work = trio.current_time()
            if life.since > self._begun_at:
                self.found.joined_seconds.append(life.first_work - life.since)
        for kind in ("training", "evaluating", "applying", "other"):
            if doing[kind]:
                return kind
        if life.first_work is None:
            return "joining"
        if not self._is_local and life.node.peer not in self._plan:
            return "not in the plan"
        return "waiting"


def _manifest(changes: dict[str, Any]) -> Manifest:
    fields: dict[str, Any] = {
        "dtype": "float32",
        "steps": STEPS_MAX,
        "stages": 1,
        "replicas": 0,
        "microbatch": MICROBATCH,
        "microbatches": MICROBATCHES,
        "test_samples": 64,
        "optimizer": OptimizerSettings(kind="adam", learning_rate=0.001),
    }
    return manifest(**(fields | changes))
