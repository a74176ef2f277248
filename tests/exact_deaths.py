"""Kills a node in a named phase of a step, for `tests.test_exactness`. No tests are here.

A `Death` watches the machines of every node (a replica's next work, a committer's input and output) and kills
its victim exactly when the phase is reached, without timers. It records the state of all members at that
instant, and `check` asserts that it was the intended phase, according to the victim's own machine and to the
others' machines.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

import trio

from crypto.identity import PeerId
from gossip.allreduce import Part
from node.pipeline.committer import CommitterShell
from node.pipeline.feeder import FeederShell
from node.pipeline.replica import ReplicaShell
from node.seams import Parts
from partition import stage as api
from partition.plan.assignment import feeder_of
from partition.plan.plan import Plan
from partition.steps import replica as work
from partition.steps.committer import Committer
from partition.steps.feeder import FeedReady
from partition.steps.messages import Applied, Apply, Open, Progress, StepCommit
from tests.stack import Swarm

Phase = Literal[
    "before forward",
    "between forward and backward",
    "after backward",
    "during the all-reduce",
    "at the commit",
    "after the commit",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
COMMITTED: tuple[Phase, ...] = ("at the commit", "after the commit")
"""The phase in which an Apply has been sent: the step is final, so none of it is repeated."""

Sends = list[tuple[PeerId, object]]
Work = (
    work.ForwardReady
    | work.BackwardReady
    | work.SubtractReady
    | work.ForgetReady
    | work.ReduceReady
    | work.ApplyReady
    | work.SaveReady
    | work.FillReady
)
"""The work of a replica in a step."""


@dataclass(frozen=True)
class Standing:
    """One replica at one instant. `owned` are the micro-batches that the Open assigned to it."""

    peer: PeerId
    step: int | None
    owned: frozenset[int]
    in_flight: frozenset[int]
    counted: frozenset[int]
    computing: type | None
    has_commit: bool
    is_reduced: bool
    has_apply: bool
    is_last: bool

    @property
    def is_untouched(self) -> bool:
        """Return whether the replica has computed nothing of the open step so far."""
        return not self.in_flight and not self.counted

    @property
    def has_counted_all(self) -> bool:
        """Return whether all of the replica's micro-batches are in its sums."""
        return bool(self.owned) and self.counted == self.owned


def standing(shell: ReplicaShell) -> Standing:
    """Return the state of a replica now."""
    core = shell.core
    routes = core._routes
    owned = filter(core._owns, routes.numbers) if routes is not None and routes.train else ()
    return Standing(
        peer=core.me,
        step=core.step,
        owned=frozenset(owned),
        in_flight=frozenset(core._order.in_flight),
        counted=frozenset(core._order.counted),
        computing=None if core._busy is None else type(core._busy),
        has_commit=core._commit is not None,
        is_reduced=core._reduced is not None,
        has_apply=core._apply is not None,
        is_last=core.is_last,
    )


@dataclass(frozen=True)
class Sight:
    """The state of the swarm at one instant: every replica, the committer's phase and step, and how many
    micro-batches and reductions the committer knows to be counted."""

    replicas: tuple[Standing, ...]
    phase: str
    step: int
    counted: int
    reduced: int


def member_of(group: Swarm, name: str) -> Any:
    """Return this node's member of the only run; None if it has none."""
    return next(iter(group.nodes[name].runs.members.values()), None)


def look(group: Swarm) -> Sight:
    """Return the state of all members."""
    members = [member for name in group.nodes if (member := member_of(group, name)) is not None]
    shells = [member.hosting.replica for member in members]
    (committer,) = [member.duties.committer.core for member in members if member.duties.committer is not None]
    assert isinstance(committer, Committer)
    return Sight(
        replicas=tuple(standing(shell) for shell in shells if shell is not None),
        phase=committer.phase,
        step=committer.step,
        counted=sum(map(len, committer._ledger._counted)),
        reduced=len(committer._reduced),
    )


class Death:
    """Kills one node at one phase of one step, once.

    A machine calls each method whose name begins with `at` before the named action. The method returns
    whether the victim dies; in that case the victim does not act.
    """

    role = ""

    def __init__(self, phase: Phase, step: int) -> None:
        self.phase = phase
        self.step = step
        self.name = ""
        self.peer: PeerId | None = None
        self.sight: Sight | None = None
        self._group = Swarm()

    def begin(self, group: Swarm) -> None:
        """Watch these nodes."""
        self._group = group

    @property
    def plan(self) -> Plan | None:
        """Return the plan in force before the death; None before the run has a plan."""
        members = (member_of(self._group, name) for name in self._group.nodes)
        return next((m.plan for m in members if m is not None and m.plan is not None), None)

    def victim(self, plan: Plan) -> PeerId:
        """Return the member that is to die."""
        raise AssertionError("each subclass chooses its own victim")

    def awaits(self, peer: PeerId, step: int | None = None) -> bool:
        """Return whether this is the victim, alive, and in its last step."""
        plan = None if self.sight else self.plan
        return plan is not None and self.victim(plan) == peer and step in (None, self.step)

    def kill(self) -> None:
        """Kill the victim now; its unsent messages are lost."""
        plan = self.plan
        assert plan is not None
        self.sight = look(self._group)
        self.peer = self.victim(plan)
        self.name = self._group.name_of(self.peer)
        self._group.kill(self.name)

    def check(self) -> None:
        """Assert that the victim died in its phase."""
        assert self.sight is not None, "nobody was killed"
        assert self.sight.step == self.step

    def at_work(self, shell: ReplicaShell, item: Work) -> bool:
        """Called before a replica does an item of work."""
        return False

    def at_reply(self, shell: ReplicaShell, request: api.Request) -> bool:
        """Called after a stage has done a request, before its replica knows the result."""
        return False

    def at_done(self, shell: ReplicaShell, item: Work) -> bool:
        """Called after a replica has done an item of work."""
        return False

    def at_part(self, shell: ReplicaShell) -> bool:
        """Called when a summand or a sum of another replica arrives while a replica reduces."""
        return False

    def at_report(self, shell: CommitterShell, message: Any) -> bool:
        """Called when a message arrives at a committer."""
        return False

    def at_saying(self, shell: CommitterShell, sends: Sends) -> bool:
        """Called before a committer sends."""
        return False

    def said(self, shell: CommitterShell, sends: Sends) -> Sends:
        """Return the messages that are sent before the death."""
        return sends

    def holds_back(self, shell: FeederShell, ready: FeedReady) -> bool:
        """Return whether a trainer dies before it feeds this micro-batch."""
        return False


class ReplicaDeath(Death):
    """The death of a replica, defined by the work that it is computing. `place` is the stage's index; None
    means the stage that the second trainer holds."""

    def __init__(self, phase: Phase, step: int, place: int | None) -> None:
        super().__init__(phase, step)
        self._place = place
        self.role = {0: "a replica of the first stage", -1: "a replica of the last stage"}.get(
            place if place is not None else 1, "a second trainer"
        )

    def victim(self, plan: Plan) -> PeerId:
        if self._place is None:
            return PeerId(plan.trainers[1])
        return PeerId(plan.stages[self._place].replicas[self._place])

    def at_work(self, shell: ReplicaShell, item: Work) -> bool:
        if not self.awaits(shell.core.me, item.step):
            return False
        match self.phase, item:
            case "before forward", work.ForwardReady():
                return standing(shell).is_untouched
            case "between forward and backward", work.BackwardReady():
                return not standing(shell).counted
            case "at the commit", work.ApplyReady():
                return True
        return False

    def at_reply(self, shell: ReplicaShell, request: api.Request) -> bool:
        # The last stage runs both passes in one request, which is complete by now but not yet reported.
        is_due = self.phase == "between forward and backward" and shell.core.is_last
        is_pass = isinstance(request, api.Forward) and request.step == self.step
        return is_due and is_pass and self.awaits(shell.core.me)

    def at_done(self, shell: ReplicaShell, item: Work) -> bool:
        if not self.awaits(shell.core.me, item.step):
            return False
        match self.phase, item:
            case "after backward", work.ForwardReady() | work.BackwardReady():
                return standing(shell).has_counted_all
            case "after the commit", work.ApplyReady():
                return True
        return False

    def at_part(self, shell: ReplicaShell) -> bool:
        return self.phase == "during the all-reduce" and self.awaits(shell.core.me, shell.core.step)

    def check(self) -> None:
        super().check()
        sight = self.sight
        assert sight is not None
        (seen,) = [row for row in sight.replicas if row.peer == self.peer]
        assert seen.step == (self.step + 1 if self.phase == "after the commit" else self.step)
        match self.phase:
            case "before forward":
                assert (sight.phase, seen.computing) == ("counting", work.ForwardReady)
                assert seen.is_untouched
            case "between forward and backward":
                both = work.ForwardReady if seen.is_last else work.BackwardReady
                assert (sight.phase, seen.computing) == ("counting", both)
                assert seen.in_flight or seen.is_last
                assert not seen.counted
            case "after backward":
                assert (sight.phase, seen.computing) == ("counting", None)
                assert seen.has_counted_all
                assert not seen.has_commit
            case "during the all-reduce":
                assert (sight.phase, seen.computing) == ("committing", work.ReduceReady)
                assert seen.has_commit
                assert not seen.is_reduced
            case "at the commit":
                assert (sight.phase, seen.computing) == ("applying", work.ApplyReady)
                assert seen.has_apply
            case "after the commit":
                assert (sight.phase, seen.computing) == ("applying", None)
                assert not seen.has_apply


class CommitterDeath(Death):
    """The death of the committer, defined by its input and output. At the commit only one replica receives
    the message."""

    role = "the committer"

    def victim(self, plan: Plan) -> PeerId:
        return plan.committer

    def at_work(self, shell: ReplicaShell, item: Work) -> bool:
        # If every stage has one replica, no part is sent, and a sum is complete as soon as it begins.
        if self.phase != "during the all-reduce" or not isinstance(item, work.ReduceReady):
            return False
        is_alone = all(len(replicas) == 1 for replicas in item.members)
        return is_alone and item.step == self.step and self.sight is None

    def at_done(self, shell: ReplicaShell, item: Work) -> bool:
        is_due = self.phase == "at the commit" and isinstance(item, work.ApplyReady)
        return is_due and item.step == self.step and self.sight is None

    def at_part(self, shell: ReplicaShell) -> bool:
        is_due = self.phase == "during the all-reduce" and self.sight is None
        return is_due and shell.core.step == self.step

    def at_report(self, shell: CommitterShell, message: Any) -> bool:
        if not self.awaits(shell.core.me, getattr(message, "step", -1)):
            return False
        match self.phase, message:
            case "between forward and backward", Progress():
                return True
            case "after the commit", Applied():
                return True
        return False

    def at_saying(self, shell: CommitterShell, sends: Sends) -> bool:
        if not self.awaits(shell.core.me):
            return False
        for _, message in sends:
            match self.phase, message:
                case "before forward", Open(step=self.step):
                    return True
                case "after backward", StepCommit(step=self.step):
                    return True
        return False

    def said(self, shell: CommitterShell, sends: Sends) -> Sends:
        if self.phase != "at the commit" or not self.awaits(shell.core.me):
            return sends
        applies = [row for row in sends if isinstance(row[1], Apply) and row[1].step == self.step]
        return [row for row in sends if row not in applies[1:]]

    def check(self) -> None:
        super().check()
        sight = self.sight
        assert sight is not None
        replicas = sight.replicas
        match self.phase:
            case "before forward":
                assert (sight.phase, sight.counted) == ("counting", 0)
                assert all(row.step == self.step and row.is_untouched for row in replicas)
                assert not any(row.owned for row in replicas), "no member has the Open"
            case "between forward and backward":
                assert (sight.phase, sight.counted) == ("counting", 0)
                assert any(row.in_flight for row in replicas)
            case "after backward":
                assert sight.phase == "committing"
                assert all(row.has_counted_all and not row.has_commit for row in replicas)
            case "during the all-reduce":
                assert (sight.phase, sight.reduced) == ("committing", 0)
                assert any(row.computing == work.ReduceReady for row in replicas)
            case "at the commit":
                assert sight.phase == "applying"
                steps = Counter(row.step for row in replicas)
                assert steps == {self.step: len(replicas) - 1, self.step + 1: 1}
                assert not any(row.has_apply for row in replicas)
            case "after the commit":
                assert sight.phase == "applying"
                assert all(row.step == self.step + 1 or row.has_apply for row in replicas)


class FeedingDeath(Death):
    """The death of the second trainer while it feeds: one of its inputs has arrived, and the next one never
    does."""

    role = "a second trainer that feeds"

    def __init__(self, step: int, *, microbatches: int) -> None:
        """The first step, starting with `step`, in which the second trainer feeds two micro-batches."""
        super().__init__("before forward", step)
        self._from = step
        self._microbatches = microbatches
        self._fed: list[int] = []
        self._unfed: list[int] = []

    def victim(self, plan: Plan) -> PeerId:
        return PeerId(plan.trainers[1])

    def at_work(self, shell: ReplicaShell, item: Work) -> bool:
        is_due = isinstance(item, work.ForwardReady) and item.train and item.microbatch in self._fed
        return is_due and bool(self._unfed) and self.sight is None

    def at_done(self, shell: ReplicaShell, item: Work) -> bool:
        # Its earlier inputs arrive before it comes to the next one.
        return self.at_work(shell, item)

    def holds_back(self, shell: FeederShell, ready: FeedReady) -> bool:
        if not ready.train or ready.step < self._from or not self.awaits(shell.core.me):
            return False
        first = ready.step * self._microbatches
        numbers = range(first, first + self._microbatches)
        if sum(feeder_of(shell.core.plan, True, number) == shell.core.me for number in numbers) < 2:
            return False
        self.step = ready.step
        (self._unfed if self._fed else self._fed).append(ready.microbatch)
        return bool(self._unfed)

    def check(self) -> None:
        super().check()
        assert self.sight is not None
        assert self.sight.phase == "counting"
        assert (len(self._fed), len(self._unfed)) == (1, 1)
        assert not any(set(self._unfed) & row.counted for row in self.sight.replicas)


def watched_by(death: Death) -> Parts:
    """Return replacement classes for nodes that report all actions of their machines to the death."""
    return {**_watched_replicas(death), **_watched_trainers(death)}


def _watched_replicas(death: Death) -> dict[type, type]:
    class WatchedReplica(ReplicaShell):
        async def _perform(self, item: work.WorkItem) -> None:
            if isinstance(item, work.StepDiscarded):
                await super()._perform(item)
                return
            if death.at_work(self, item):
                death.kill()
                await trio.lowlevel.checkpoint()  # the victim stops here, if this is its own task
            await super()._perform(item)
            if death.at_done(self, item):
                death.kill()
                await trio.lowlevel.checkpoint()

        async def _call(self, request: api.Request) -> object:
            reply = await super()._call(request)
            if death.at_reply(self, request):
                death.kill()
                await trio.lowlevel.checkpoint()
            return reply

        def receive(self, now: float, sender: PeerId, message: Any) -> None:
            if isinstance(message, Part) and self._reduction._reducing is not None and death.at_part(self):
                death.kill()
            if self.core.me != death.peer:
                super().receive(now, sender, message)

    return {ReplicaShell: WatchedReplica}


def _watched_trainers(death: Death) -> dict[type, type]:
    class WatchedCommitter(CommitterShell):
        def receive(self, now: float, sender: PeerId, message: Any) -> None:
            if death.at_report(self, message):
                death.kill()
            if self.core.me != death.peer:
                super().receive(now, sender, message)

        def _pass_on(self, sends: Sends) -> None:
            if death.at_saying(self, sends):
                death.kill()
            if self.core.me != death.peer:
                super()._pass_on(death.said(self, sends))

    class WatchedFeeder(FeederShell):
        async def _feed(self, ready: FeedReady) -> None:
            if death.holds_back(self, ready):
                await trio.sleep_forever()
            await super()._feed(ready)

    return {CommitterShell: WatchedCommitter, FeederShell: WatchedFeeder}
