"""The replica's side of exact mode: one stage's share of one step, as a pure state machine.

A step is a set of numbered micro-batches. A replica computes those that reach it, keeps the bytes of
every frame it sent until the step is applied, and counts a micro-batch once its gradient is in its
sums. When a peer is dropped, frames whose receiver has changed are sent again from the kept bytes,
so a dead replica's micro-batches are replayed on its stage alone: the stage before sends the inputs
again, the stage after sends the gradients again (ARCHITECTURE, a step).

Messages of one sender come in order, but for those a broken link lost: these come again, after what
was queued behind them. Messages of two senders come in any order, so a frame may be ahead of the
Drop that sent it here; it waits until this replica owns its micro-batch.

    counting --StepCommit--> reducing --reduced()--> reduced --Apply--> applying --applied()--> counting
        ^                        |                      |
        +--------- Drop ---------+----------------------+        (the sums stay; only the total is void)

Computing is the shell's: it drains `events`, runs them in order on the stage, and reports back.
"""

from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.codec import Payload
from partition.plan.plan import Plan, plan_hash
from partition.plan.schedule import Routes
from partition.steps.frames import Direction, Frame, OpenedFrame
from partition.steps.messages import (
    EVALUATIONS_IN_FLIGHT_MAX,
    REASON_LENGTH_MAX,
    Applied,
    Apply,
    Counted,
    Drop,
    Evaluated,
    Failed,
    Reduced,
    Sends,
    StepCommit,
    StepMessage,
    Sync,
    Synced,
)


@dataclass(frozen=True)
class ForwardReady:
    """All a forward pass needs is here. The shell answers with `forwarded`."""

    plan: bytes
    step: int
    microbatch: int
    train: bool
    input: Payload
    labels: Payload | None


@dataclass(frozen=True)
class BackwardReady:
    """The gradient of this micro-batch's output is here. The shell answers with `backwarded`."""

    plan: bytes
    step: int
    microbatch: int
    gradient: Payload


@dataclass(frozen=True)
class ReduceReady:
    """Sum the stage's gradients over the replicas that hold them. The shell answers with `reduced`.

    `members` are those of every stage, each in the plan's order: what is tied is summed over stages too.
    """

    plan: bytes
    step: int
    attempt: int
    members: tuple[tuple[PeerId, ...], ...]


@dataclass(frozen=True)
class ReduceVoided:
    """A member of this stage or of another died: the reduction under way is to be forgotten."""

    plan: bytes
    step: int


@dataclass(frozen=True)
class ApplyReady:
    """Step the optimizer on the totals. The shell answers with `applied`."""

    plan: bytes
    step: int
    samples: int
    squared_norm: float | None


@dataclass(frozen=True)
class StepDiscarded:
    """Forget what is in flight and zero the sums: a new plan begins the step again."""


@dataclass(frozen=True)
class ReplicaDropped:
    """The plan goes on without this replica."""


@dataclass
class _Microbatch:
    """What this replica has of one micro-batch: of the current step, or held out."""

    input: Payload | None = None
    labels: Payload | None = None
    gradient: Payload | None = None
    forward: Literal["waiting", "running", "done"] = "waiting"
    backward: Literal["waiting", "running", "done"] = "waiting"


@dataclass(frozen=True)
class _Kept:
    """A frame sent, to be sent again if `stage` gets another owner for it."""

    stage: int
    microbatch: int
    frame: Frame
    receiver: PeerId


class Replica:
    """One stage replica under one plan after another. `step` counts the steps applied."""

    deadline = inf

    def __init__(self, me: PeerId, plan: Plan, *, awaits_gradient: bool = True) -> None:
        """`awaits_gradient`: whether the stage after this one sends gradients; it has none to send where
        nothing before it is trained."""
        self.me = me
        self._awaits_gradient = awaits_gradient
        self.step = 0
        self.events: list[Any] = []
        self.dropped: tuple[PeerId, ...] = ()
        self._applied: Apply | None = None
        self._reducing: int | None = None
        self._reduced: int | None = None
        self._named: frozenset[bytes] = frozenset()
        self._applying = False
        self._synced = False
        self._microbatches: dict[int, _Microbatch] = {}
        self._evaluations: dict[int, _Microbatch] = {}
        self._newest_evaluation = -1
        self._counted: set[int] = set()
        self._kept: dict[tuple[bool, int, Direction], _Kept] = {}
        self._reports: dict[str, StepMessage] = {}
        self._take_plan(plan)

    def adopt(self, plan: Plan) -> None:
        """A new plan has come into force; the trainer's Sync will follow. The same plan changes nothing."""
        if plan_hash(plan) == self.plan_hash:
            return
        if self._reducing is not None and self._reduced is None:
            self.events.append(ReduceVoided(self.plan_hash, self.step))
        self._take_plan(plan)

    def receive(self, now: float, sender: PeerId, message: Any) -> Sends:  # noqa: ARG002 - the shape of a core
        """A step message, or an opened frame, that arrived from `sender`."""
        if isinstance(message, OpenedFrame):
            return self._frame(sender, message)
        if not isinstance(message, StepMessage) or message.plan != self.plan_hash:
            return []  # of a plan that has ended, or has not begun here: its sender will send again
        if sender != self.plan.trainer:
            raise RemoteProtocolError("a step message from a peer that is not the trainer")
        match message:
            case Sync():
                return self._sync(message)
            case Drop():
                return self._drop(message)
            case StepCommit():
                return self._commit(message)
            case Apply():
                return self._apply(message)
        raise RemoteProtocolError(f"a {type(message).__name__} is not for a replica")

    def wake(self, now: float) -> Sends:  # noqa: ARG002 - the shape of a core
        """Nothing here is timed: the trainer and SWIM decide who is gone."""
        return []

    def reconnected(self, peer: PeerId) -> Sends:
        """The stream to `peer` broke and is open again: what it may have lost is sent again."""
        sends: Sends = [(peer, kept.frame) for kept in self._kept.values() if kept.receiver == peer]
        if peer == self.plan.trainer:
            sends += [(peer, message) for message in self._reports.values()]
        return sends

    def is_replica(self, peer: PeerId) -> bool:
        """Whether `peer` holds a stage of the plan: this replica's own, or one that may share weights."""
        return self.plan.stage_of(peer) is not None

    # What the shell reports back

    def forwarded(
        self,
        done: ForwardReady,
        *,
        output: Frame | None,
        gradient: Frame | None,
        samples: int,
        loss: float,
        metrics: tuple[float, ...],
    ) -> Sends:
        """A forward pass ended. The last stage has run backward too and hands the `gradient` frame."""
        if done.plan != self.plan_hash or done.step != self.step or self._applying:
            return []
        if not done.train:
            return self._evaluated(done, output, samples, loss, metrics)
        state = self._microbatches[done.microbatch]
        state.forward = "done"
        if output is not None:
            sends = self._keep(self.stage + 1, done.microbatch, "input", output, train=True)
            if self._awaits_gradient:
                return sends + self._start_backward(done.microbatch)
            state.backward = "done"
            return sends + self._report_counted(done.microbatch, 0, 0.0)
        state.backward = "done"
        sends = self._keep_gradient(done.microbatch, gradient)
        return sends + self._report_counted(done.microbatch, samples, loss)

    def backwarded(self, done: BackwardReady, *, gradient: Frame | None) -> Sends:
        """A backward pass ended; `gradient` is for the stage before, None on the first."""
        if done.plan != self.plan_hash or done.step != self.step or self._applying:
            return []
        self._microbatches[done.microbatch].backward = "done"
        sends = self._keep_gradient(done.microbatch, gradient)
        return sends + self._report_counted(done.microbatch, 0, 0.0)

    def reduced(self, done: ReduceReady, digest: bytes, squared_norm: float | None = None) -> Sends:
        """The stage's total is ready; its squared norm too."""
        if (done.plan, done.step, done.attempt) != (self.plan_hash, self.step, self._reducing):
            return []
        self._reduced = done.attempt
        message = Reduced(
            plan=self.plan_hash,
            step=self.step,
            attempt=done.attempt,
            digest=digest,
            squared_norm=squared_norm,
        )
        return self._report("reduced", message)

    def applied(self, done: ApplyReady, digest: bytes) -> Sends:
        """The optimizer has stepped: the step is final here."""
        if done.step != self.step or not self._applying or self._reduced is None:
            return []
        self._applied = Apply(
            plan=done.plan,
            step=done.step,
            attempt=self._reduced,
            samples=done.samples,
            squared_norm=done.squared_norm,
        )
        self.step += 1
        self._applying, self._reduced = False, None
        self._clear()
        sends = self._report("applied", Applied(plan=self.plan_hash, step=done.step, digest=digest))
        # A Sync that came meanwhile has waited for this.
        return sends if done.plan == self.plan_hash else sends + self._answer_sync()

    def failed(self, reason: str) -> Sends:
        """The stage process is gone or refused; the trainer will drop this replica."""
        return self._report("failed", Failed(plan=self.plan_hash, reason=reason[:REASON_LENGTH_MAX]))

    # Messages of the trainer

    def _sync(self, message: Sync) -> Sends:
        if not self._take_dropped(message.dropped):
            return []
        if not self._synced:
            # A total that was ready stays ready: others of the stage may have applied theirs.
            self.events.append(StepDiscarded())
            self._synced = True
        # While a step of the plan before is being applied, where this replica is has no answer yet.
        return self._send_rerouted() + ([] if self._applying else self._answer_sync())

    def _answer_sync(self) -> Sends:
        if not self._synced:
            return []
        message = Synced(plan=self.plan_hash, step=self.step, reduced=self._reduced, applied=self._applied)
        return self._report("synced", message)

    def _drop(self, message: Drop) -> Sends:
        if not self._take_dropped(message.dropped):
            return []
        if message.step != self.step or self._applying:
            return []  # of the step after the one whose totals are all ready
        # A repeated Drop, or one that comes after the commit without the dropped, voids nothing.
        if self._reducing is not None and not self._named.isdisjoint(self.dropped):
            self.events.append(ReduceVoided(self.plan_hash, self.step))
            self._reducing = self._reduced = None
            self._reports.pop("reduced", None)
        return self._send_rerouted()

    def _take_dropped(self, peers: tuple[bytes, ...]) -> bool:
        """Learn who is out. False if this replica is."""
        dropped = tuple(PeerId(peer) for peer in peers)
        if dropped[: len(self.dropped)] != self.dropped:
            raise RemoteProtocolError("peers once dropped are taken back")
        if self.me in dropped:
            self.events.append(ReplicaDropped())
            return False
        if dropped != self.dropped:
            routes = Routes(self.plan, dropped)
            if not all(routes.live(stage) for stage in range(len(self.plan.stages))):
                raise RemoteProtocolError("a stage is left without a replica")
            self.dropped, self._routes = dropped, routes
        return True

    def _send_rerouted(self) -> Sends:
        """Kept frames whose receiver has changed, as they were sent; and begin what is now ours."""
        for microbatch in list(self._microbatches):
            self._start_forward(microbatch, train=True)
        for microbatch in list(self._evaluations):
            self._start_forward(microbatch, train=False)
        sends: Sends = []
        for key, kept in self._kept.items():
            receiver = self._routes.owner(kept.stage, kept.microbatch)
            if receiver != kept.receiver:
                self._kept[key] = _Kept(kept.stage, kept.microbatch, kept.frame, receiver)
                sends.append((receiver, kept.frame))
        return sends

    def _commit(self, message: StepCommit) -> Sends:
        if message.step != self.step or self._applying:
            return []
        if self._reducing is not None and message.attempt <= self._reducing:
            return self._repeat("reduced")
        members = self._members(message)
        mine = [row for row in message.replicas if row.stage == self.stage and row.replica == self.me]
        if len(mine) != 1 or set(mine[0].microbatches) != self._counted:
            return self.failed(f"step {self.step}: the commit does not name what this replica has summed")
        self._named = frozenset(row.replica for row in message.replicas)
        self._reducing, self._reduced = message.attempt, None
        self.events.append(ReduceReady(self.plan_hash, self.step, message.attempt, members))
        return []

    def _members(self, message: StepCommit) -> tuple[tuple[PeerId, ...], ...]:
        """Who takes part, by stage, each in the plan's order: sums are added up in it."""
        named = {(row.stage, row.replica) for row in message.replicas}
        members = tuple(
            tuple(PeerId(peer) for peer in stage.replicas if (number, peer) in named)
            for number, stage in enumerate(self.plan.stages)
        )
        if sum(len(row) for row in members) != len(message.replicas) or not all(members):
            raise RemoteProtocolError("a commit that names strangers, a replica twice, or none of a stage")
        return members

    def _apply(self, message: Apply) -> Sends:
        if message.step != self.step:
            return self._repeat("applied")
        if self._applying:
            return []
        if self._reduced is None or message.attempt != self._reduced:
            raise RemoteProtocolError("an Apply before the totals were reduced")
        self._applying = True
        self.events.append(ApplyReady(self.plan_hash, self.step, message.samples, message.squared_norm))
        return []

    # Frames

    def _frame(self, sender: PeerId, frame: OpenedFrame) -> Sends:
        header = frame.header
        if header.plan != self.plan_hash or header.step < self.step:
            return []
        if not self._synced or self._applying:
            return []  # not from who has heard the trainer; it would be summed into the wrong step
        self._check_frame(sender, frame)
        if not header.train:
            return self._frame_to_evaluate(frame)
        state = self._microbatches.setdefault(header.microbatch, _Microbatch())
        if header.direction == "gradient":
            state.gradient = state.gradient or frame.payload
            return self._start_backward(header.microbatch)
        self._put_half(state, frame)
        return self._start_forward(header.microbatch, train=True)

    def _check_frame(self, sender: PeerId, frame: OpenedFrame) -> None:
        header = frame.header
        count = self.plan.microbatches
        if header.step > self.step or header.stage != self.stage:
            raise RemoteProtocolError("a frame for another stage or a step that has not begun")
        if header.train and not self.step * count <= header.microbatch < (self.step + 1) * count:
            raise RemoteProtocolError("a frame for a micro-batch outside its step")
        match header.direction:
            case "input" if self.stage > 0:
                allowed = sender in self.plan.stages[self.stage - 1].replicas
            case "gradient":
                allowed = not self.is_last and sender in self.plan.stages[self.stage + 1].replicas
            case "labels":
                allowed = self.is_last and sender == self.plan.trainer
            case _:
                allowed = sender == self.plan.trainer
        if not allowed or (header.direction == "gradient" and not header.train):
            raise RemoteProtocolError(f"a frame of {header.direction} from a peer that has none to send")

    def _frame_to_evaluate(self, frame: OpenedFrame) -> Sends:
        number = frame.header.microbatch
        self._newest_evaluation = max(self._newest_evaluation, number)
        done = self._newest_evaluation - EVALUATIONS_IN_FLIGHT_MAX
        for old in [old for old in self._evaluations if old <= done]:
            del self._evaluations[old]
            self._kept.pop((False, old, "input"), None)
            self._reports.pop(f"evaluated {old}", None)
        if number <= done:
            return []
        self._put_half(self._evaluations.setdefault(number, _Microbatch()), frame)
        return self._start_forward(number, train=False)

    def _put_half(self, state: _Microbatch, frame: OpenedFrame) -> None:
        if frame.header.direction == "input":
            state.input = state.input or frame.payload
        else:
            state.labels = state.labels or frame.payload

    def _is_complete(self, state: _Microbatch) -> bool:
        return state.input is not None and (state.labels is not None or not self.is_last)

    def _start_forward(self, microbatch: int, *, train: bool) -> Sends:
        state = (self._microbatches if train else self._evaluations)[microbatch]
        # Only the owner computes: a sum that counts more than the commit names would be worthless.
        mine = self._routes.owner(self.stage, microbatch) == self.me
        if mine and state.forward == "waiting" and self._is_complete(state):
            assert state.input is not None
            state.forward = "running"
            self.events.append(
                ForwardReady(self.plan_hash, self.step, microbatch, train, state.input, state.labels)
            )
        return []

    def _start_backward(self, microbatch: int) -> Sends:
        state = self._microbatches[microbatch]
        if state.gradient is not None and state.forward == "done" and state.backward == "waiting":
            state.backward = "running"
            self.events.append(BackwardReady(self.plan_hash, self.step, microbatch, state.gradient))
        return []

    def _evaluated(
        self, done: ForwardReady, output: Frame | None, samples: int, loss: float, metrics: tuple[float, ...]
    ) -> Sends:
        if done.microbatch not in self._evaluations:
            return []  # the trainer is far past it, so it has the result from elsewhere
        if output is not None:
            return self._keep(self.stage + 1, done.microbatch, "input", output, train=False)
        message = Evaluated(
            plan=self.plan_hash, microbatch=done.microbatch, samples=samples, loss=loss, metrics=metrics
        )
        return self._report(f"evaluated {done.microbatch}", message)

    # Bookkeeping

    def _keep_gradient(self, microbatch: int, gradient: Frame | None) -> Sends:
        if gradient is None:
            return []
        return self._keep(self.stage - 1, microbatch, "gradient", gradient, train=True)

    def _keep(self, stage: int, microbatch: int, direction: Direction, frame: Frame, *, train: bool) -> Sends:
        receiver = self._routes.owner(stage, microbatch)
        self._kept[train, microbatch, direction] = _Kept(stage, microbatch, frame, receiver)
        return [(receiver, frame)]

    def _report_counted(self, microbatch: int, samples: int, loss: float) -> Sends:
        self._counted.add(microbatch)
        message = Counted(
            plan=self.plan_hash,
            step=self.step,
            microbatch=microbatch,
            stage=self.stage,
            samples=samples,
            loss=loss,
        )
        return self._report(f"counted {microbatch}", message)

    def _report(self, name: str, message: StepMessage) -> Sends:
        self._reports[name] = message
        return [(PeerId(self.plan.trainer), message)]

    def _repeat(self, name: str) -> Sends:
        message = self._reports.get(name)
        return [] if message is None else [(PeerId(self.plan.trainer), message)]

    def _take_plan(self, plan: Plan) -> None:
        stage = plan.stage_of(self.me)
        assert stage is not None, "a plan is only given to its own replicas"
        self.plan = plan
        self.plan_hash = plan_hash(plan)
        self.stage = stage
        self.is_last = stage == len(plan.stages) - 1
        self.dropped = ()
        self._routes = Routes(plan, ())
        self._synced = False
        self._clear()

    def _clear(self) -> None:
        """Nothing of a step in flight is left, but for a total that is ready or being applied."""
        self._microbatches.clear()
        self._evaluations.clear()
        self._newest_evaluation = -1
        self._counted.clear()
        self._kept.clear()
        self._reports.clear()
        self._reducing = None
        self._named = frozenset()
