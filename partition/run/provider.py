"""A provider's answers to planners that want to use one of its slots: hold the slot, open the stage, begin,
release the slot.

A planner asks in this order, and each answer depends on earlier promises. Between `on_hold` and `promise` the
driver makes the decisions that need the machine, the disk or the owner's settings: which run has priority,
whether the graph fits, and whether the promise is stored.
"""

from collections import deque
from collections.abc import Callable, Collection
from math import ceil
from typing import NamedTuple, Protocol

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import Plan, plan_hash
from partition.run.asks import Declined, Done
from partition.run.settings import RunSettings
from partition.run.slots import Promise, Slots
from partition.run.witnesses import WITNESSED_MAX, WitnessPromises

RELEASED_MAX = 256
"""Maximum number of recently given-up plans that are remembered."""
OVER = "the run is over"
BEHIND = "it does not know yet how the run went on"
NO_LEASE = "no lease for this stage"
BUSY = "busy"


class KnownMember(Protocol):
    """The part of a `partition.run.member.Member` that the answers need."""

    @property
    def plan(self) -> Plan | None: ...
    def is_behind(self, sender: PeerId, plan: Plan) -> bool: ...
    def on_start(self, sender: PeerId, plan: Plan) -> Done | Declined | None: ...


class KnownRun(NamedTuple):
    """This node's knowledge of the run in question; `member` is None if this node has no part in the run."""

    requester: PeerId
    is_over: bool
    member: KnownMember | None


class Hold(NamedTuple):
    """A request for a slot that meets no objection so far. `given_up` counts how often its plan was given up
    before; `was_gone` is whether this node already believed its planner gone. `keeps_slot`: the run has a
    slot here already, and its stage will hold other layers."""

    plan: Plan
    stage: int | None
    planner: PeerId
    given_up: int
    was_gone: bool
    keeps_slot: bool


class StageProvider:
    """One node's provider, over all its runs. `now` is in the clock of `slots`. `witnessing` returns the
    number of other nodes' runs in which this node has a vote and no stage; `gone` returns the peers that are
    dead or have left."""

    def __init__(
        self,
        me: PeerId,
        slots: Slots,
        witnessing: Callable[[], int],
        gone: Callable[[], Collection[PeerId]],
        settings: RunSettings,
    ) -> None:
        self.slots = slots
        self._me = me
        self._witnessing = witnessing
        self._gone = gone
        self._silence_seconds_max = settings.silence_seconds_max
        self._witnessed = WitnessPromises()
        # Hashes of recently released plans: a planner may give up a plan before a slow lease for it is
        # answered.
        self._released: deque[bytes] = deque(maxlen=RELEASED_MAX)

    def supersede(self, asker: PeerId, plan: Plan, known: KnownRun) -> list[bytes]:
        """Forget promises for plans of this run that can no longer be decided, because `asker` wants a slot
        for `plan`. Call this before `on_hold`. Return the forgotten plans' hashes: a stage opened for one of
        them must be closed."""
        if known.is_over or plan.stage_of(self._me) is None:
            return []
        return [promise.plan for promise in self.slots.supersede(plan.run, asker, plan.height)]

    def on_hold(
        self,
        now: float,
        asker: PeerId,
        plan: Plan,
        stage: int | None,
        known: KnownRun,
        turn: Callable[[], Declined | None],
    ) -> Hold | Declined:
        """Answer a planner that wants a slot for `stage`; None for a witness, which needs no slot. `turn`
        returns a refusal if another run has priority. Raises RemoteProtocolError."""
        if plan.stage_of(self._me) != stage:
            raise RemoteProtocolError(
                "a lease was asked for a stage that the plan does not give to this node"
            )
        if known.is_over:
            return Declined(OVER)
        keeps_slot = stage is not None and self._has_stage(plan, known)
        if stage is not None and not keeps_slot and (waits := turn()) is not None:
            return waits
        if stage is not None and not keeps_slot and not self.slots.is_free_for(now, plan.run):
            lapsing = self.slots.lapsing(now).values()
            return Declined(BUSY, ceil(min(lapsing)) if lapsing else None)
        if known.member is not None and known.member.is_behind(asker, plan):
            return Declined(BEHIND)
        if stage is None and self._witnesses_enough:
            return Declined("busy: a witness of too many runs")
        given_up = self._released.count(plan_hash(plan))
        return Hold(plan, stage, asker, given_up, asker in self._gone(), keeps_slot)

    def promise(self, now: float, hold: Hold) -> Promise | Declined:
        """Return the promise that answers `hold`, for the driver to keep in `slots`; or a refusal, if another
        run got the slot meanwhile or the planner no longer waits. A witness's promise is kept here."""
        plan, name = hold.plan, plan_hash(hold.plan)
        until = now + self._silence_seconds_max
        promise = Promise(plan.run, name, hold.stage, hold.planner, until, plan.height)
        is_awaited = self._released.count(name) == hold.given_up
        is_awaited = is_awaited and (hold.was_gone or hold.planner not in self._gone())
        if hold.stage is None:
            self._witnessed.promise(now, plan.run, name, hold.planner, self._silence_seconds_max)
        elif not is_awaited or not (hold.keeps_slot or self.slots.is_free_for(now, plan.run)):
            return Declined(BUSY)
        return promise

    def on_release(self, asker: PeerId, plan: bytes) -> bool:
        """Forget the promise to `asker` for the plan with this hash; return whether the slots have
        changed."""
        self._witnessed.release(plan, asker)
        self._released.append(plan)
        return self.slots.release(plan, asker)

    def on_open(self, now: float, asker: PeerId, plan: Plan, known: KnownRun) -> Done | Declined | None:
        """Answer a planner whose plan may soon be decided. None: open the stage that the plan gives to this
        node."""
        if known.is_over:
            return Declined(OVER)
        if known.member is not None and known.member.is_behind(asker, plan):
            return Declined(BEHIND)
        if plan.stage_of(self._me) is None and self._has_agreed(now, plan, known):
            return Done()
        return None if self._holds(now, plan) else Declined(NO_LEASE)

    def on_start(self, now: float, asker: PeerId, plan: Plan, known: KnownRun) -> Done | Declined | None:
        """Answer a peer that reports a plan in force. None: begin with this plan."""
        if known.is_over:
            return Declined(OVER)
        answer = None if known.member is None else known.member.on_start(asker, plan)
        if answer is not None:
            return answer
        if plan.stage_of(self._me) is not None:
            return None if self._holds(now, plan) else Declined(NO_LEASE)
        if not self._has_agreed(now, plan, known):
            return Declined("this node was not asked to take part in this run")
        # Check the limit again, because other runs may have begun since the promise.
        is_full = known.requester != self._me and self._witnesses_enough
        return Declined("busy: too many runs") if is_full else None

    def _has_stage(self, plan: Plan, known: KnownRun) -> bool:
        """Return whether a stage of the run is open here, or being opened, under the parent of `plan`."""
        held = None if known.member is None else known.member.plan
        is_held = held is not None and held.stage_of(self._me) is not None and plan_hash(held) == plan.parent
        return is_held and self.slots.hosts(plan.run)

    def _holds(self, now: float, plan: Plan) -> bool:
        """Return whether the slot is promised to the stage that `plan` gives to this node."""
        stage = plan.stage_of(self._me)
        return stage is not None and self.slots.holds(now, plan.run, plan_hash(plan), stage)

    def _has_agreed(self, now: float, plan: Plan, known: KnownRun) -> bool:
        """Return whether this node has agreed to be a member under `plan` without a stage."""
        return known.requester == self._me or self._witnessed.holds(now, plan.run, plan_hash(plan))

    @property
    def _witnesses_enough(self) -> bool:
        return self._witnessing() >= WITNESSED_MAX
