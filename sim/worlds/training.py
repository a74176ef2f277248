"""The runs of a world of cores: real plan and step cores of every member, with stages that sum integers.

Starts, stops, freezes and slow-downs of peers, and events of their membership cores, are received as they are
published; everything else happens on the world's agenda. A peer's own membership core decides which peers are
alive for it. Results are compared with the undisturbed run after every applied step, in every stage, and at
the end of the run: `Broken` names the difference.

Not here: placement (the first plan is given to the peers that are up at the start), leases and data.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from crypto.identity import PeerId
from gossip.member import MemberDown, MemberForgotten, MemberLeft, MemberSuspected, MemberUp
from node.protocols.runs import PIPELINE_PROTOCOL
from node.services.driver import Core
from partition.plan.change import Change
from partition.plan.plan import NO_HASH, Plan, StagePlan
from partition.run.provider import StageProvider
from partition.run.settings import RunSettings
from partition.run.slots import Slots
from sim.events import PeerFrozen, PeerSlowed, PeerStarted, PeerStopped
from sim.network.instants import instant
from sim.scenario import TrainingScenario
from sim.seeds import draw, seeded_rng
from sim.worlds.integer_stage import Truth
from sim.worlds.life import Life, WorldEnvironment
from sim.worlds.members import RATE, SimMember
from sim.worlds.run_context import Setting
from sim.worlds.run_messages import Disk, Question
from sim.worlds.streams import Answer, Streams

LAYERS = 4
"""Number of layers of each stage, whose borders may move."""
LOOK_SECONDS = 0.1
"""Interval at which a leaving peer checks whether the others continue without it."""
AGAIN_SECONDS = 1.0
"""How long to wait before a run is tried again that cannot be placed because too few members are up."""


class RunsGround(WorldEnvironment, Protocol):
    """A world of cores as seen by its runs."""

    @property
    def peers(self) -> Sequence[PeerId]: ...
    def name(self, peer: PeerId) -> str: ...
    def latency_seconds(self, one: PeerId, other: PeerId) -> float: ...
    def host(self, life: Life, core: Core, protocol: str) -> None:
        """Let a core act for the peer from now on."""

    def local_now(self, peer: PeerId) -> float:
        """Return the time of the peer's own clock."""

    def carry(
        self, sender: PeerId, receiver: PeerId, size_bytes: int, land: Callable[[float], None]
    ) -> None: ...


class TrainingRuns:
    """All runs of a scenario in one world. The world calls `network_changed`; everything else arrives as
    events. The class is also the environment of the streams (`sim.worlds.streams.StreamEnvironment`)."""

    def __init__(self, ground: RunsGround) -> None:
        self.counters: Counter[str] = Counter()
        self.settings = RunSettings()
        self._ground = ground
        self._alive: dict[PeerId, dict[PeerId, bool]] = {}
        self._slowness: dict[PeerId, float] = {}
        self._thaws: dict[PeerId, float] = {}
        self._runs: list[_Run] = []
        self._providers: dict[PeerId, StageProvider] = {}
        self._of: dict[PeerId, list[_Run]] = {}
        peers, first = ground.peers, 0
        for number, training in enumerate(ground.scenario.runs):
            count = min(training.members, len(peers))
            pool = tuple(peers[(first + place) % len(peers)] for place in range(count))
            first += count
            self._runs.append(_Run(self, ground, training, number, pool))
            for peer in pool:
                self._of.setdefault(peer, []).append(self._runs[-1])
        for kind in (MemberUp, MemberDown, MemberLeft, MemberForgotten, MemberSuspected):
            ground.on(kind, self._learn)
        ground.on(PeerStarted, self._started)
        ground.on(PeerStopped, self._stopped)
        ground.on(PeerFrozen, self._froze)
        ground.on(PeerSlowed, self._slowed)

    # Events of the world

    def network_changed(self) -> None:
        """React to the beginning or end of a split, or to a deafened peer."""
        for run in self._runs:
            run.streams.changed()

    def _learn(self, life: Life, event: Any) -> None:
        """Handle an event of a peer's membership core."""
        known = self._alive.get(life.peer)
        if known is None or event.peer not in self._of:
            return
        match event:
            case MemberUp():
                known[event.peer] = True
            case MemberDown() | MemberLeft():
                known[event.peer] = False
                self.provider(life.peer).slots.release_all(self.now, event.peer)
                for run in self._of[life.peer]:
                    run.planner_lost(life.peer, event.peer)
            case MemberForgotten():
                known.pop(event.peer, None)
            case MemberSuspected():
                for run in self._of[life.peer]:
                    run.suspected(life.peer, event.peer)
                return
        for run in self._of[life.peer]:
            run.members_changed(life.peer, event.peer)

    def _started(self, life: Life, event: PeerStarted) -> None:
        if life.peer in self._of:
            self._alive[life.peer] = {life.peer: True}  # the new membership core knows no other peer yet
            for run in self._of[life.peer]:
                run.started(life.peer, remembers=event.remembers)

    def _stopped(self, life: Life, event: PeerStopped) -> None:  # noqa: ARG002 - the shape of a handler
        for run in self._of.get(life.peer, ()):
            run.stopped(life.peer)
        if life.peer in self._providers:  # the provider's disk holds only its promises for stages
            self._providers[life.peer] = self._provider(life.peer, self.provider(life.peer).slots)
        self._thaws.pop(life.peer, None)

    def _froze(self, life: Life, event: PeerFrozen) -> None:
        self._thaws[life.peer] = max(self.thaws(life.peer), instant(self.now + event.seconds))

    def _slowed(self, life: Life, event: PeerSlowed) -> None:
        self._slowness[life.peer] = event.factor

    def leave(self, peer: PeerId, then: Callable[[], None]) -> None:
        """Make other members take over the parts of `peer` in its runs. `then` is called once they have, or
        after a node's time limit."""
        members = [member for run in self._of.get(peer, ()) if (member := run.member(peer)) is not None]
        until = self.now + self.settings.leave_seconds_max

        def look() -> None:
            if self.now < until and any(not member.is_out for member in members):
                self.at(instant(self.now + LOOK_SECONDS), look)
            else:
                then()

        for member in members:
            member.turn(member.leave)
        look()

    def standing(self, number: int) -> Mapping[PeerId, str]:
        """Return a text about the state of each live member of a run, to find out why the run hangs."""
        return self._runs[number].standing

    # Environment of streams

    @property
    def now(self) -> float:
        return self._ground.now

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._ground.at(when, action)

    def connected(self, one: PeerId, other: PeerId) -> bool:
        ground = self._ground
        is_up = one in ground.lives and other in ground.lives
        return is_up and ground.reaches(one, other) and ground.reaches(other, one)

    def carry(self, sender: PeerId, receiver: PeerId, size_bytes: int, land: Callable[[float], None]) -> None:
        self.counters[f"messages {PIPELINE_PROTOCOL}"] += 1
        self.counters[f"bytes {PIPELINE_PROTOCOL}"] += size_bytes
        self._ground.carry(sender, receiver, size_bytes, land)

    def thaws(self, peer: PeerId) -> float:
        return self._thaws.get(peer, 0.0)

    # For the runs

    def is_up(self, peer: PeerId) -> bool:
        """Return whether the peer runs."""
        return peer in self._ground.lives

    def publish(self, peer: PeerId, event: Any) -> None:
        """Publish an event to all watchers. Raises Broken, from a watcher."""
        self._ground.tell(self._ground.lives[peer], event)

    def alive(self, peer: PeerId) -> Mapping[PeerId, bool]:
        """Return which peers of any run are alive according to `peer`."""
        return self._alive.get(peer, {})

    def slowness(self, peer: PeerId) -> float:
        """Return the factor by which the peer computes slower than normal."""
        return self._slowness.get(peer, 1.0)

    def recut(self, peer: PeerId, wanted: Callable[[Plan], Change | None]) -> None:
        """Make `peer` move borders or add stages in the runs that it commits. `wanted` decides on the change
        from the plan in force."""
        for run in self._of.get(peer, ()):
            member = run.member(peer)
            if member is not None and member.plan is not None and (change := wanted(member.plan)) is not None:
                member.turn(partial(member.recut, change))

    def is_busy(self, peer: PeerId) -> bool:
        """Return whether the peer holds a stage of any run, or has promised to."""
        return not self.provider(peer).slots.free(self.now)

    def provider(self, peer: PeerId) -> StageProvider:
        """Return the provider of a peer's only slot, shared by all its runs."""
        if peer not in self._providers:
            slots = Slots(1, lambda: [run.name for run in self._of[peer] if run.hosts(peer)])
            self._providers[peer] = self._provider(peer, slots)
        return self._providers[peer]

    def _provider(self, peer: PeerId, slots: Slots) -> StageProvider:
        def witnessing() -> int:
            return sum(run.has_witness(peer) for run in self._of[peer])

        return StageProvider(peer, slots, witnessing, partial(self._gone, peer), self.settings)

    def _gone(self, peer: PeerId) -> list[PeerId]:
        return [other for other, is_alive in self.alive(peer).items() if not is_alive]


class _Run:
    """One run: its members and their shared state."""

    def __init__(
        self,
        runs: TrainingRuns,
        ground: RunsGround,
        training: TrainingScenario,
        number: int,
        pool: tuple[PeerId, ...],
    ) -> None:
        self._runs = runs
        self._seed = seed = ground.seed
        self._members: dict[PeerId, SimMember] = {}
        self._disks: dict[PeerId, Disk] = {}
        self._lives: Counter[PeerId] = Counter()
        self._forgetful: set[PeerId] = set()
        self._has_begun = False
        self.name = name = draw(seed, "run", number)[: len(NO_HASH)]
        self.streams = Streams(runs, seed, self._deliver, self._reconnected)
        self._setting = Setting(
            number=number,
            run=name,
            training=training,
            seed=seed,
            pool=pool,
            cores=ground.cores,
            truth=Truth(name, training.stages, training.microbatches),
            ground=runs,
            streams=self.streams,
            publish=runs.publish,
            name=ground.name,
            alive=runs.alive,
            slowness=runs.slowness,
            put=self._put,
            counters=runs.counters,
            provider=runs.provider,
            settings=runs.settings,
        )
        runs.at(training.at_seconds, self._begin)

    # The beginning

    def _begin(self) -> None:
        """Give the first plan to all live members; retry later if they are too few."""
        setting = self._setting
        up = [peer for peer in setting.pool if self._runs.is_up(peer)]
        plan = first_plan(setting.run, setting.training, setting.requester, up)
        if plan is None:
            self._runs.at(self._runs.now + AGAIN_SECONDS, self._begin)
            return
        self._has_begun = True
        self._setting = setting = replace(setting, first=plan)
        for peer in setting.pool:
            if self._runs.is_up(peer):
                self._make(peer, has_forgotten=False)
        for peer in plan.members:
            begin = _beginning(self._members[peer], plan)
            if peer == plan.committer:
                self._runs.at(self._runs.now, begin)
            else:
                self._runs.carry(plan.committer, peer, 0, _landing(self._runs, begin))

    def _make(self, peer: PeerId, *, has_forgotten: bool) -> SimMember:
        self._lives[peer] += 1
        setting = self._setting
        rng = seeded_rng(self._seed, "agreement", setting.number, peer, self._lives[peer])
        disk = self._disks.setdefault(peer, Disk())
        member = self._members[peer] = SimMember(
            setting, peer, disk, rng, has_forgotten=has_forgotten, is_busy=self._runs.is_busy
        )
        return member

    # Events of its peers

    def started(self, peer: PeerId, *, remembers: bool) -> None:
        if self._has_begun:
            disk = self._disks.get(peer)
            if disk is not None and not remembers:
                # In the run before the restart, it may have voted on a plan that is no longer known here.
                self._disks[peer] = Disk()
                self._forgetful.add(peer)
            member = self._make(peer, has_forgotten=peer in self._forgetful)
            if self._disks[peer].chain:
                member.turn(member.restart)
        self.streams.changed()

    def stopped(self, peer: PeerId) -> None:
        member = self._members.pop(peer, None)
        if member is not None:
            member.stop()
        self.streams.stopped(peer)

    def members_changed(self, peer: PeerId, about: PeerId) -> None:
        member = self._members.get(peer)
        if member is not None and about in self._setting.pool:
            member.turn(member.members_changed)

    def suspected(self, peer: PeerId, about: PeerId) -> None:
        member = self._members.get(peer)
        if member is not None and about in self._setting.pool:
            member.turn(lambda: member.suspected(about))

    def member(self, peer: PeerId) -> SimMember | None:
        return self._members.get(peer)

    def planner_lost(self, peer: PeerId, lost: PeerId) -> None:
        member = self._members.get(peer)
        if member is not None and lost in self._setting.pool:
            member.turn(partial(member.planner_lost, lost))

    def has_witness(self, peer: PeerId) -> bool:
        """Return whether `peer` votes in this run of another peer, without a stage."""
        member = self._members.get(peer)
        plan = None if member is None else member.plan
        return peer != self._setting.requester and plan is not None and plan.stage_of(peer) is None

    def hosts(self, peer: PeerId) -> bool:
        member = self._members.get(peer)
        return member is not None and member.hosts

    @property
    def standing(self) -> Mapping[PeerId, str]:
        return {peer: standing_of(member) for peer, member in sorted(self._members.items())}

    # Messages of its members

    def _deliver(self, sender: PeerId, receiver: PeerId, message: Any) -> None:
        member = self._members.get(receiver)
        if member is not None:
            member.receive(sender, message)

    def _reconnected(self, sender: PeerId, receiver: PeerId) -> None:
        member = self._members.get(sender)
        if member is not None:
            member.reconnected(receiver)

    def _put(self, asker: PeerId, peer: PeerId, question: Question, answer: Answer) -> None:
        member = self._members.get(peer)
        if member is None:
            answer(None)
        else:
            member.answer(asker, question, answer)


def first_plan(
    run: bytes, training: TrainingScenario, requester: PeerId, up: Sequence[PeerId]
) -> Plan | None:
    """Return the plan of height 0 with the live peers; None while they are too few.

    The requester commits. Stages are dealt to the others in turn, and to the requester as well if they are
    too few. The remaining peers are on the roster without a stage. Each additional trainer is a replica.
    """
    others = [peer for peer in up if peer != requester]
    wanted = training.stages * training.replicas
    holders = (others if len(others) >= wanted else [*others, requester])[:wanted]
    if requester not in up or len(holders) < training.stages:
        return None
    stages = tuple(
        StagePlan(LAYERS * number, LAYERS * (number + 1), replicas, (RATE,) * len(replicas))
        for number in range(training.stages)
        for replicas in (tuple(holders[number :: training.stages]),)
    )
    return Plan(
        run=run,
        parent=NO_HASH,
        height=0,
        roster=tuple(sorted(up)),
        trainers=(requester, *[peer for peer in holders if peer != requester][: training.trainers - 1]),
        microbatches=training.microbatches,
        stages=stages,
    )


def _beginning(member: SimMember, plan: Plan) -> Callable[[], None]:
    def begin() -> None:
        if plan.committer == member.me:
            member.place()
        member.begin(plan)

    return lambda: member.turn(begin)


def _landing(runs: TrainingRuns, action: Callable[[], None]) -> Callable[[float], None]:
    return lambda due: runs.at(due, action)


def standing_of(member: SimMember) -> str:
    """Describe a member's activity: it commits, or holds a stage."""
    plan, trainer, hosted = member.plan, member.trainer, member.hosting.hosted
    if plan is None:
        return member.outcome or "not in it"
    if trainer is not None and trainer.core is not None:
        return f"plan {plan.height}: {trainer.core.phase} step {trainer.core.step}"
    waits = "waits" if member.is_paused else "follows"
    held = f", holds stage {hosted.stage.index} after step {hosted.stage.state.step}" if hosted else ""
    return f"plan {plan.height}: {waits}{held}"
