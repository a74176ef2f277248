"""The replica's side of exact mode: one stage's share of one step, as a pure state machine.

A step is a set of numbered micro-batches. An Open assigns them to replicas. A replica keeps every frame that
it sent or received until the step is applied, and counts a micro-batch once its gradient is in its sums. A
later Open may give a micro-batch to another owner, or may come from the next plan. Then the same frames go to
the new owner, and micro-batches that were begun here but not counted are forgotten. A micro-batch that two
replicas have counted is taken out again if the commit names the other replica. The open step survives the end
of a plan: sums, frames and a total that is ready stay, and only a reduction in progress is void. If a plan
restores a checkpoint, everything is dropped.

    Sync -> Open -> counting -> StepCommit -> reducing -> Apply -> applied -> Open ...
              ^        |            |             |
              +--------+-- another Open, or the next plan's Sync

The driver does the computing: whenever the stage is idle, the driver calls `next`, does that work
(`partition.steps.replica_events`), and reports back.
"""

from math import inf
from typing import Any

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import NO_HASH, Plan, plan_hash
from partition.steps.frames import Direction, OpenedFrame, Outgoing
from partition.steps.messages import (
    REASON_LENGTH_MAX,
    Applied,
    Apply,
    Counted,
    Failed,
    Fill,
    Open,
    Reduced,
    Save,
    Sends,
    StallQuestion,
    StepCommit,
    StepMessage,
    Sync,
    Synced,
    Waiting,
    Work,
)
from partition.steps.replica_events import (
    ApplyReady,
    BackwardReady,
    FillReady,
    FillVoided,
    ForgetReady,
    ForwardReady,
    ReduceAsked,
    ReduceReady,
    ReduceVoided,
    ReplicaEvent,
    SaveReady,
    StepDiscarded,
    SubtractReady,
    WorkItem,
    apply_ready,
)
from partition.steps.reports import SentReports, diverged, evaluated, progress, unusable
from partition.steps.routes import Routes, attempts, check_commit, check_frame
from partition.steps.schedule import EvaluationBatches, Microbatch, Schedule, StepSchedule
from partition.steps.sent_frames import KeptFrames, Key
from partition.steps.throughput import StepPace

__all__ = ["ApplyReady", "BackwardReady", "FillReady", "FillVoided", "ForgetReady", "ForwardReady"]
__all__ += ["ReduceAsked", "ReduceReady", "ReduceVoided", "Replica", "SaveReady", "SubtractReady"]
__all__ += ["StepDiscarded", "WorkItem"]

_MOVING = (BackwardReady, SubtractReady, ForgetReady, ApplyReady, ReduceReady, FillReady)
"""While one of these, or a forward pass, is in progress, this replica cannot report its state."""


class Replica:
    """One stage replica, under one plan after another. `step` is the number of steps applied; None if it has
    no state.

    Long because it is one state machine: the meaning of a message depends on the frames, sums, counts and the
    reduction of the open step.
    """

    deadline = inf

    def __init__(
        self,
        me: PeerId,
        plan: Plan,
        *,
        step: int | None = 0,
        awaits_gradient: bool = True,
        in_flight_max: int = 64,
        schedule: Schedule = "1f1b",
    ) -> None:
        """`awaits_gradient`: whether the next stage sends gradients. It sends none if nothing before it is
        trained. `in_flight_max` is the number of micro-batches between their two passes for which there is
        memory."""
        self.me = me
        self.step = step
        self.events: list[ReplicaEvent] = []
        self._awaits_gradient = awaits_gradient
        self._memory_max = in_flight_max
        self._schedule = schedule
        self._busy: WorkItem | None = None
        self._fill: FillReady | None = None
        self._fill_message: Fill | None = None
        self._save: int | None = None
        self._saved: int | None = None
        self._apply: Apply | None = None
        self._applied: Apply | None = None
        self._digest = NO_HASH
        self._reduced: int | None = None
        self._held_out, self._kept = EvaluationBatches(), KeptFrames()
        self._reports, self._pace = SentReports(), StepPace()
        self._discard = self._sync_asked = False
        self._routes: Routes | None = None
        self._commit: StepCommit | None = None
        self._commit_attempt = -1
        self._named: frozenset[int] = frozenset()
        self._diverged: set[int] = set()
        self._order = StepSchedule(schedule, is_last=me in plan.stages[-1].replicas)
        self._take_plan(plan)

    def adopt(self, plan: Plan) -> None:
        """Adopt a plan that has come into force. Its committer's Sync will follow. Adopting the same plan
        again changes nothing.

        A peer that gets another stage, or returns after it was lost, begins with a new Replica instead.
        """
        if plan_hash(plan) == self.plan_hash:
            return
        if plan.stage_of(self.me) != self.stage:
            raise LocalProtocolError("this replica does not hold its stage in the plan")
        self._void_reduction()
        if self._fill is not None and (self._fill.sources or plan.restored != NO_HASH):
            self._void_fill()
        self._take_plan(plan)

    @property
    def attempt(self) -> int:
        """The attempt in force, for which frames are signed."""
        return self._routes.attempt if self._routes else attempts(self.plan).start

    def is_replica(self, peer: PeerId) -> bool:
        """Return whether `peer` holds a stage of the plan: the same stage as this replica, or one that may
        share weights."""
        return self.plan.stage_of(peer) is not None

    def receive(self, now: float, sender: PeerId, message: object) -> Sends:  # noqa: ARG002 - the shape of a core
        """Handle a step message, or an opened frame, from `sender`."""
        if isinstance(message, OpenedFrame):
            self._frame(sender, message)
            return []
        if not isinstance(message, StepMessage) or message.plan != self.plan_hash:
            return []  # the message's plan has ended, or is not in force here yet: the sender will repeat it
        if sender != self.plan.committer:
            raise RemoteProtocolError("a step message came from a peer that is not the committer")
        match message:
            case Sync():
                self._sync_asked = self._routes is None
                return self._answer_sync()
            case Open():
                return self._open(message)
            case StepCommit():
                return self._take_commit(message)
            case Apply():
                return self._take_apply(message)
            case Fill():
                return self._take_fill(message)
            case StallQuestion():
                return self._answer(message)
            case Save():
                if message.step == self.step and self._saved != message.step and self._apply is None:
                    self._save = message.step
                return []
        raise RemoteProtocolError(f"a {type(message).__name__} is not for a replica")

    def wake(self, now: float) -> Sends:  # noqa: ARG002 - the shape of a core
        """Do nothing: the committer and SWIM decide which peers are gone."""
        return []

    def reconnected(self, peer: PeerId) -> Sends:
        """Send again what `peer` may have lost, because its stream broke and is open again."""
        sends: Sends = [(peer, self._outgoing(frame)) for frame in self._kept.sent_to(peer, self.plan_hash)]
        if peer == self.plan.committer:
            sends += self._reports.all()
        return sends

    # The stage's next work

    def next(self, now: float) -> WorkItem | None:  # noqa: ARG002 - the shape of a core
        """Return the stage's next work; None while the stage is busy, or if there is no work."""
        if self._busy is not None:
            return None
        self._busy = self._choose()
        return self._busy

    def _choose(self) -> WorkItem | None:
        if self._discard:
            return StepDiscarded(self.plan_hash)
        if self._fill is not None:
            return self._fill
        if self.step is None:
            return None
        if self._save is not None:
            return SaveReady(self.plan_hash, self._save)
        if self._apply is not None:
            return apply_ready(self._apply)
        if self._commit is None and self._routes is None:
            return None
        if self._commit is None and self._routes is not None and not self._routes.train:
            return self._held_out_pass()  # training work of the step waits until the evaluation is over
        if (number := self._order.not_owned(self._owns)) is not None:
            return ForgetReady(self.plan_hash, self.step, number)
        return self._committed(self.step) if self._commit is not None else self._pass(self.step)

    def _committed(self, step: int) -> WorkItem:
        assert self._commit is not None
        doubles = self._order.counted.keys() - self._named
        if doubles:
            number = min(doubles)
            state = self._order.microbatches[number]
            labels, gradient = state.payload("labels"), state.payload("gradient")
            return SubtractReady(self.plan_hash, step, number, state.given("input"), labels, gradient)
        members = tuple(tuple(PeerId(peer) for peer in stage.replicas) for stage in self.plan.stages)
        return ReduceReady(self.plan_hash, step, self._commit.attempt, members)

    def _pass(self, step: int) -> WorkItem | None:
        chosen = self._order.next_pass(self._owns, self.in_flight_max)
        if chosen is None:
            return None
        kind, number = chosen
        state = self._order.microbatches[number]
        if kind == "forward":
            return self._forward_of(number, state, train=True)
        return BackwardReady(self.plan_hash, step, self.attempt, number, state.given("gradient"))

    def _held_out_pass(self) -> WorkItem | None:
        number, waiting = self._held_out.next_forward(self._owns, self.is_last), self._held_out.microbatches
        return None if number is None else self._forward_of(number, waiting[number], train=False)

    def _forward_of(self, number: int, state: Microbatch, *, train: bool) -> ForwardReady:
        assert self.step is not None
        given, labels = state.given("input"), state.payload("labels")
        return ForwardReady(self.plan_hash, self.step, self.attempt, number, train, given, labels)

    def _owns(self, number: int) -> bool:
        if self._commit is not None:
            return number in self._named
        return self._routes is not None and self._routes.owner(self.stage, number) == self.me

    @property
    def in_flight_max(self) -> int:
        """The maximum number of micro-batches that may be between their two passes here."""
        if self._schedule == "gpipe":
            return self._memory_max
        return min(self._memory_max, len(self.plan.stages) - self.stage)

    # Reports of the driver

    def forwarded(
        self,
        done: ForwardReady,
        *,
        output: object | None,
        gradient: object | None,
        samples: int,
        loss: float,
        metrics: tuple[float, ...],
    ) -> Sends:
        """Note the end of a forward pass. The last stage has also done the backward pass, and hands in the
        `gradient` frame."""
        if not self._take_back(done):
            return []
        if not done.train:
            return self._evaluated(done, output, samples, loss, metrics)
        number = done.microbatch
        if output is not None:
            self._kept.keep((True, number, "input"), output)
        if self.is_last or not self._awaits_gradient:
            return self._count(number, gradient, samples, loss)
        self._order.hold(number)
        message = progress(self.plan_hash, done, self.stage)
        return self._send((True, number, "input")) + self._report_mine("progress", number, message)

    def backwarded(self, done: BackwardReady, *, gradient: object | None) -> Sends:
        """Note the end of a backward pass. `gradient` is the frame for the previous stage, None in the first
        stage."""
        return self._count(done.microbatch, gradient, 0, 0.0) if self._take_back(done) else []

    def refused(
        self, done: ForwardReady | BackwardReady, direction: Direction, reason: str, of_values: bool = False
    ) -> Sends:
        """Note that the stage refused its input and is unchanged. Return the report, which names the sender
        of the frame."""
        if not self._take_back(done):
            return []
        number, is_held_out = done.microbatch, isinstance(done, ForwardReady) and not done.train
        refuse = self._held_out.refuse if is_held_out else self._order.refuse
        frame = refuse(number, direction)
        if frame is None or frame.header.plan != self.plan_hash:
            # the frame will be sent again under the plan in force, or is no longer needed
            return self._answer_sync()
        message = unusable(self.plan_hash, frame, reason, of_values=of_values)
        return self._reports.say(f"unusable {direction}", number, message) + self._answer_sync()

    def diverged(self, done: ForwardReady | SaveReady, reason: str) -> Sends:
        """Note that the stage's result, or its state, is not finite. It is not tried again under this
        plan."""
        if not self._take_back(done):
            return []
        if isinstance(done, SaveReady):
            self._save, self._saved = None, done.step
        elif done.train:
            self._diverged.add(done.microbatch)
        message = diverged(self.plan_hash, done, reason)
        return self._reports.say("diverged", message.microbatch or 0, message) + self._answer_sync()

    def forgotten(self, done: ForgetReady | SubtractReady) -> Sends:
        """Note that neither the stage nor its sums contain the micro-batch any more."""
        if not self._take_back(done):
            return []
        self._order.forget(done.microbatch)
        return self._answer_sync()

    removed = forgotten

    def reduced(self, done: ReduceReady, digest: bytes, squared_norm: float | None = None) -> Sends:
        """Note the stage's total and its squared norm."""
        if not self._take_back(done):
            return []
        self._commit, self._reduced = None, done.attempt
        named: dict[str, Any] = {"plan": self.plan_hash, "step": done.step, "attempt": done.attempt}
        message = Reduced(digest=digest, squared_norm=squared_norm, **named)
        return self._reports.say("reduced", 0, message)

    def applied(self, done: ApplyReady, digest: bytes, work: Work) -> Sends:
        """Note that the optimizer has stepped, so the step is final here."""
        if not self._take_back(done):
            return []
        self._pace.measured(self.me, work, len(self._order.counted))
        self._applied, self._digest = self._apply, digest
        self.step = done.step + 1
        self._clear()
        message = Applied(plan=self.plan_hash, step=done.step, digest=digest, work=work)
        # If a new plan has come into force since the Apply, its committer's Sync has waited for this.
        return (
            self._reports.say("applied", 0, message) if done.plan == self.plan_hash else self._answer_sync()
        )

    def saved(self, done: SaveReady) -> Sends:
        """Note that the copy of the state is made."""
        if not self._take_back(done):
            return []
        self._save, self._saved = None, done.step
        return self._answer_sync()

    def discarded(self, done: StepDiscarded) -> Sends:
        """Note that the stage's sums are zero again."""
        if self._busy is done:
            self._busy, self._discard = None, False
        return []

    def filled(self, done: FillReady, digest: bytes) -> Sends:
        """Note that the stage has the state of its sources or of the checkpoint, after `step` steps."""
        if self._busy is not done:
            return []
        self._busy = self._fill = None
        if done.digest not in (NO_HASH, digest):
            return self.failed(f"the fetched parameters of step {done.step} do not have the expected digest")
        self.step, self._digest = done.step, digest
        self._applied = self._fill_message.applied if done.sources and self._fill_message else None
        self._sync_asked = self._sync_asked or bool(done.sources)
        return self._answer_sync()

    def failed(self, reason: str, *, step: int | None = None) -> Sends:
        """Note that the stage process is gone or has refused to continue; `step` is set if it was computing
        that step. The committer will ask for a plan without this replica."""
        message = Failed(plan=self.plan_hash, reason=reason[:REASON_LENGTH_MAX], step=step)
        return self._reports.say("failed", 0, message)

    def _take_back(self, done: WorkItem) -> bool:
        """Return whether a report is about the present work, and still matters."""
        if self._busy is not done:
            return False
        self._busy = None
        return not self._discard

    def _count(self, number: int, gradient: object | None, samples: int, loss: float) -> Sends:
        self._order.count(number, samples, loss)
        if gradient is not None:
            self._kept.keep((True, number, "gradient"), gradient)
        assert self.step is not None
        where: dict[str, Any] = {"plan": self.plan_hash, "step": self.step, "stage": self.stage}
        message = Counted(microbatch=number, samples=samples, loss=loss, **where)
        sends = self._send((True, number, "input")) + self._send((True, number, "gradient"))
        return sends + self._report_mine("counted", number, message)

    def _evaluated(
        self, done: ForwardReady, output: object | None, samples: int, loss: float, metrics: tuple[float, ...]
    ) -> Sends:
        number = done.microbatch
        if done.plan != self.plan_hash or not self._held_out.finish(number):
            return self._answer_sync()  # the committer has moved on, or a new committer will ask again
        if output is None:
            result = evaluated(self.plan_hash, done, samples, loss, metrics)
            return self._reports.say("evaluated", number, result)
        self._kept.keep((False, number, "input"), output)
        message = progress(self.plan_hash, done, self.stage)
        return self._send((False, number, "input")) + self._reports.say("held out", number, message)

    # Messages of the committer

    def _answer_sync(self) -> Sends:
        """Report this replica's state, once no work is in progress that would change it."""
        forwards = isinstance(self._busy, ForwardReady) and self._busy.train
        moving = forwards or isinstance(self._busy, _MOVING) or self._apply is not None
        if not self._sync_asked or moving or self._fill is not None:
            return []
        self._sync_asked = False
        if self.step is None:
            return self._reports.say("synced", 0, Synced(plan=self.plan_hash, step=None))
        message = Synced(
            plan=self.plan_hash,
            step=self.step,
            **self._order.told(),
            reduced=self._reduced,
            applied=self._applied,
            digest=self._digest,
            pace_nanoseconds=self._pace.nanoseconds(self.me),
        )
        return self._reports.say("synced", 0, message)

    def _open(self, message: Open) -> Sends:
        routes = Routes(self.plan, message)
        if self.step is None or routes.step > self.step:
            raise RemoteProtocolError("an Open is for a step that this replica has not reached")
        repeated = self._routes is not None and routes.attempt <= self._routes.attempt
        if routes.step < self.step or self._apply is not None or repeated:
            return []
        if routes.attempt <= self._commit_attempt:
            return []
        self._void_reduction()
        if routes.train:  # what was validated before the step is no longer needed
            self._held_out.clear()
            self._kept.drop(lambda key: not key[0])
        self._routes = routes
        if not routes.train:
            self._forget_held_out(routes.numbers.start)
        self._order.offer(self._order.microbatches)
        sends = [send for key in self._kept.keys() for send in self._send(key)]  # noqa: SIM118 - no dict
        # Repeat reports of unusable frames: the committer ignored them while another replica owned the
        # micro-batch.
        return sends + self._reports.useless(self._owns)

    def _take_commit(self, message: StepCommit) -> Sends:
        if self.step is None or message.step > self.step or message.attempt not in attempts(self.plan):
            raise RemoteProtocolError("a commit is for a step that this replica has not reached")
        if message.step < self.step or self._apply is not None:
            return []
        if message.attempt <= self._commit_attempt:
            return self._reports.again("reduced")
        if self._routes is not None and message.attempt < self._routes.attempt:
            return []  # a later Open has overtaken this commit
        check_commit(self.plan, message)
        (mine,) = (frozenset(row.microbatches) for row in message.replicas if row.replica == self.me)
        if not mine <= self._order.counted.keys():
            return self.failed(
                f"step {self.step}: the commit names micro-batches that this replica has not counted"
            )
        self._void_reduction()
        self._reduced = None
        self._reports.drop("reduced")
        self._commit, self._named, self._commit_attempt = message, mine, message.attempt
        return []

    def _take_apply(self, message: Apply) -> Sends:
        if self.step is None:
            raise RemoteProtocolError("an Apply came to a replica without a state")
        if message.step < self.step:
            return self._reports.again("applied")
        if self._apply is not None:
            return []
        has_total = self._reduced is not None and message.attempt == self._reduced
        if message.step > self.step or not (has_total or message.skipped):
            raise RemoteProtocolError("an Apply came before the totals were reduced")
        if message.skipped:
            self._void_reduction()
        self._apply = message
        return []

    def _answer(self, message: StallQuestion) -> Sends:
        """Report what this replica still waits for. Only the driver knows which peers a reduction waits
        for."""
        asked = ReduceAsked(self.plan_hash, message.step, message.attempt)
        if self.step is None or message.step > self.step:
            return []
        if message.step < self.step:
            return self._reports.again("applied")
        if self._reduced == message.attempt and self._apply is None:
            return self._reports.again("reduced")
        if isinstance(self._busy, ReduceReady) and message.attempt == self._busy.attempt:
            self.events.append(asked)
            return []
        # Each micro-batch that is taken out takes two passes. The reduction or the optimizer step follows.
        return self.waits(asked.answer(1 + len(self._order.counted.keys() - self._named)))

    def waits(self, message: Waiting) -> Sends:
        """Report how much work is left, and which peers this replica waits for."""
        return self._reports.say("waiting", 0, message)

    def _take_fill(self, message: Fill) -> Sends:
        if message == self._fill_message:
            return self._reports.again("synced") if self._fill is None else []
        if self.me in message.sources or not set(message.sources) <= set(
            self.plan.stages[self.stage].replicas
        ):
            raise RemoteProtocolError("a Fill names sources that do not hold this stage")
        self._void_reduction()
        self._void_fill()
        self._empty()
        self._fill_message = message
        self._fill = FillReady(
            self.plan_hash, message.step, message.digest, tuple(PeerId(peer) for peer in message.sources)
        )
        return []

    # Frames

    def _frame(self, sender: PeerId, frame: OpenedFrame) -> None:
        header = frame.header
        if header.plan != self.plan_hash or self.step is None or header.step < self.step:
            return
        if self._apply is not None:
            return  # the frame would be summed into the wrong step
        check_frame(self.plan, self.stage, self.step, sender, header)
        # A frame of a later attempt than this replica knows waits, because only owned micro-batches are
        # computed.
        if header.train:
            self._order.put(frame)
        else:
            self._forget_held_out(self._held_out.put(frame))

    def _send(self, key: Key) -> Sends:
        """Send a kept frame if this replica owns its micro-batch and the receiver has not been sent it under
        this plan."""
        if self._routes is None or self._routes.owner(self.stage, key[1]) != self.me:
            return []
        receiver, frame = self._kept.wanted(key, self._routes, self.stage, self.plan_hash)
        return [] if frame is None or receiver is None else [(receiver, self._outgoing(frame))]

    def _outgoing(self, frame: object) -> Outgoing:
        return Outgoing(frame, self.attempt, self.plan_hash)

    def _forget_held_out(self, first: int) -> None:
        """Forget held-out micro-batches before `first`, which are done in all stages."""
        self._held_out.forget(first)
        self._kept.drop(lambda key: not key[0] and key[1] < first)
        self._reports.forget_held_out(first)

    # Bookkeeping

    def _report_mine(self, name: str, number: int, message: StepMessage) -> Sends:
        """Report on a micro-batch. The committer accepts the report only from the owner; before an Open, the
        Synced contains it."""
        sends = self._reports.say(name, number, message) if self._routes and self._owns(number) else []
        return sends + self._answer_sync()

    def _void_reduction(self) -> None:
        """Make a commit void. A total that is ready stays, because others may have applied theirs."""
        if isinstance(self._busy, ReduceReady):
            self.events.append(ReduceVoided(self._busy.plan, self._busy.step))
            self._busy = None
        self._commit = None

    def _void_fill(self) -> None:
        if isinstance(self._busy, FillReady):
            self.events.append(FillVoided(self._busy.plan, self._busy.step))
            self._busy = None
        self._fill = None

    def _empty(self) -> None:
        """Make the stage's state void until it is filled."""
        self._clear()
        self.step = self._applied = self._save = self._saved = None
        self._digest = NO_HASH
        self._discard = True

    def _take_plan(self, plan: Plan) -> None:
        stage = plan.stage_of(self.me)
        if stage is None:
            raise LocalProtocolError("a replica must hold a stage of its plan")
        self.plan = plan
        self.plan_hash = plan_hash(plan)
        self.stage = stage
        self.is_last = stage == len(plan.stages) - 1
        self._routes = self._commit = self._fill_message = self._saved = None
        self._commit_attempt = -1
        self._sync_asked = False
        self._reports.begin(plan.committer)
        self._held_out.clear()
        for number in self._diverged & self._order.microbatches.keys():
            self._order.forget(number)  # the new committer must hear of the divergence again
        self._diverged.clear()
        self._kept.drop(lambda key: not key[0])
        if plan.restored != NO_HASH:
            self._empty()
            self._fill = FillReady(self.plan_hash, plan.step, NO_HASH, (), plan.restored)

    def _clear(self) -> None:
        """Clear everything that belongs to the step in progress."""
        self._order.clear()
        self._diverged.clear()
        self._held_out.clear()
        self._kept.clear()
        self._reports.clear()
        self._routes = self._commit = self._apply = self._reduced = None
        self._commit_attempt = -1
