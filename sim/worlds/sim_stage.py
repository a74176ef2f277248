"""A member's stage of a run in a world of cores: its replica core, its sums, its all-reduce.

It drives a `partition.steps.replica.Replica` with a stage that sums integers. It computes one item at a time,
in virtual time; reducing, or fetching missing data, ends when the others have answered.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.allreduce import AllReduce, Part
from partition.codecs.codec import Payload, TensorHeader
from partition.plan.plan import FIRST_VALUES, HASH_BYTES, Plan
from partition.steps import replica as core
from partition.steps.frames import Direction, FrameHeader, OpenedFrame, Outgoing
from partition.steps.messages import Sends, Work
from sim.events import SamplesCounted
from sim.observers import Broken
from sim.worlds.integer_stage import (
    IntegerState,
    SummingSpan,
    first_state,
    hashed,
    joined,
    loss_of,
    samples_of,
    vector_bytes,
)
from sim.worlds.run_context import Setting

EARLY_PARTS_MAX = 4_096
"""Maximum number of kept parts of reductions that this replica has not begun, as in the node."""
FRAME_BYTES = 16 * 1024
"""The size of a frame on the network, as for the activations of a small model."""
_TENSORS = (TensorHeader("uint8", (32,)),)
_NO_DIGEST = bytes(HASH_BYTES)

Then = Callable[[IntegerState | None], None]


@dataclass(frozen=True, slots=True)
class SimFrameDraft:
    """A frame without its signed part for a plan, so that it can be sent again under a new plan."""

    step: int
    microbatch: int
    stage: int
    direction: Direction
    train: bool
    data: bytes

    def opened(self, author: PeerId, plan: bytes, attempt: int) -> OpenedFrame:
        """Return the frame as its receiver has it after verification."""
        header = FrameHeader(
            plan,
            self.step,
            attempt,
            self.microbatch,
            self.stage,
            self.direction,
            self.train,
            (1,),
            _TENSORS,
            "raw",
            _NO_DIGEST,
        )
        payload = Payload((1,), _TENSORS, "raw", _NO_DIGEST, memoryview(self.data))
        return OpenedFrame(author, header, payload)


class Hosted:
    """One stage of one run at one peer, from its opening to its closing."""

    def __init__(
        self,
        setting: Setting,
        me: PeerId,
        plan: Plan,
        *,
        step: int | None,
        later: Callable[[float, Callable[[], None]], None],
        send: Callable[[PeerId, Any], None],
        save: Callable[[Plan, int, IntegerState], None],
        fetch: Callable[[Sequence[PeerId], bytes, int, Then], None],
        restore: Callable[[bytes, Sequence[int], int, Then], None],
        failed: Callable[["Hosted"], None],
    ) -> None:
        """`save` keeps a copy of the stage of a plan. `fetch` gets its state after a step from other peers,
        and `restore` from a checkpoint. `failed` is called with this stage when it cannot continue."""
        number = plan.stage_of(me)
        assert number is not None
        self.stage = SummingSpan(plan, number, setting.training.stages, setting.run)
        self.core = setting.cores.replica(me, plan, step=step, awaits_gradient=number < len(plan.stages) - 1)
        self._setting = setting
        self._me = me
        self._later = later
        self._send = send
        self._save = save
        self._fetch = fetch
        self._restore = restore
        self._failed = failed
        self._work: core.WorkItem | None = None
        self._reduction: AllReduce | None = None
        self._key_now = b""
        self._parts_sent: list[tuple[PeerId, Part]] = []
        self._early_parts: deque[tuple[PeerId, Part]] = deque(maxlen=EARLY_PARTS_MAX)
        self._busy_seconds = 0.0
        self.is_failed = False

    # Input

    def adopt(self, plan: Plan) -> None:
        """Adopt a new plan in force."""
        self.core.adopt(plan)
        self._pass_on([])

    def receive(self, sender: PeerId, message: Any) -> None:
        """Handle a step message, a frame or a part of the all-reduce. Raises RemoteProtocolError."""
        if not isinstance(message, Part):
            self._pass_on(self.core.receive(self._setting.ground.now, sender, message))
        elif self._reduction is None or message.key != self._key_now:
            self._early_parts.append((sender, message))  # of a reduction that is ahead of us, or has finished
        elif self.core.is_replica(sender):
            self._take_part(sender, message)

    def reconnected(self, peer: PeerId) -> None:
        """Repeat the messages that may have been lost, because a stream to `peer` is open again."""
        self._pass_on(self.core.reconnected(peer))
        for receiver, part in self._parts_sent:
            if receiver == peer:
                self._send(receiver, part)

    def state(self, step: int) -> IntegerState | None:
        """Return the state for others to copy; None if it is that of a different step."""
        return self.stage.state if self.core.step == step == self.stage.state.step else None

    def _pass_on(self, sends: Sequence[tuple[PeerId, Any]]) -> None:
        events, self.core.events[:] = list(self.core.events), []
        for event in events:
            match event:
                case core.ReduceVoided() | core.FillVoided():
                    self._work = self._reduction = None
                    self._parts_sent.clear()
                case core.ReduceAsked() if self._reduction is not None:
                    unsummed = self._reduction.unsummed
                    peers = unsummed or self._reduction.missing
                    waiting = event.answer(self._reduction.left, peers, for_sums=not unsummed)
                    sends = [*sends, *self.core.waits(waiting)]
        for peer, message in sends:
            if isinstance(message, Outgoing):
                assert isinstance(message.frame, SimFrameDraft)
                message = message.frame.opened(self._me, message.plan, message.attempt)
            self._send(peer, message)
        self.go_on()

    # Work for the core

    def go_on(self) -> None:
        """Begin the next work item, unless one is in progress."""
        while self._work is None and not self.is_failed:
            work = self._work = self.core.next(self._setting.ground.now)
            if work is None:
                return
            self._begin(work)

    def _begin(self, work: core.WorkItem) -> None:
        match work:
            case core.ForwardReady():
                # The last stage runs its backward pass immediately.
                self._compute(work, 3 if work.train and self.core.is_last else 1)
            case core.BackwardReady():
                self._compute(work, 2)
            case core.SubtractReady():
                self._compute(work, 3)
            case core.ReduceReady():
                self._reduce(work)
            case core.FillReady():
                self._fill(work)
            case _:
                self._finish(work)

    def _compute(self, work: core.WorkItem, passes: int) -> None:
        seconds = passes * self._setting.training.pass_seconds * self._setting.slowness(self._me)
        self._busy_seconds += seconds
        self._later(seconds, lambda: self._finish(work))

    def _finish(self, work: core.WorkItem) -> None:
        if self._work is not work:
            return
        self._work = None
        match work:
            case core.ForwardReady():
                sends = self._forward(work)
            case core.BackwardReady():
                gradient = self.stage.backward(work.microbatch, bytes(work.gradient.data))
                sends = self.core.backwarded(work, gradient=self._draft(work, gradient, -1, "gradient"))
            case core.SubtractReady():
                after = work.labels if self.core.is_last else work.gradient
                assert after is not None
                self.stage.remove(work.microbatch, bytes(work.input.data), bytes(after.data))
                sends = self.core.forgotten(work)
            case core.ForgetReady():
                self.stage.forget(work.microbatch)
                sends = self.core.forgotten(work)
            case core.ApplyReady():
                sends = self._apply(work)
            case core.SaveReady():
                self._save(self.core.plan, self.core.stage, self.stage.state)
                sends = self.core.saved(work)
            case core.StepDiscarded():
                self.stage.discard()
                sends = self.core.discarded(work)
            case _:
                raise AssertionError(f"{work} is not ended by a timer")
        self._pass_on(sends)

    def _forward(self, work: core.ForwardReady) -> Sends:
        labels = None if work.labels is None else bytes(work.labels.data)
        output, gradient = self.stage.forward(
            work.microbatch, work.train, bytes(work.input.data), labels if self.core.is_last else None
        )
        is_last = self.core.is_last
        sends: Sends = self.core.forwarded(
            work,
            output=None if is_last else self._draft(work, output, +1, "input", train=work.train),
            gradient=self._draft(work, gradient, -1, "gradient"),
            samples=samples_of(work.microbatch) if is_last else 0,
            loss=loss_of(output) if is_last else 0.0,
            metrics=(),
        )
        return sends

    def _draft(
        self,
        work: core.ForwardReady | core.BackwardReady,
        data: bytes | None,
        towards: int,
        direction: Direction,
        *,
        train: bool = True,
    ) -> SimFrameDraft | None:
        if data is None:
            return None
        return SimFrameDraft(work.step, work.microbatch, self.core.stage + towards, direction, train, data)

    def _apply(self, work: core.ApplyReady) -> Sends:
        setting, stage = self._setting, self.stage
        counted = tuple(sorted(stage.counted))
        setting.publish(self._me, SamplesCounted(setting.run, work.plan, work.step, stage.index, counted))
        digest = stage.apply(work.samples, work.squared_norm)
        if stage.state != setting.truth.state(work.step + 1, stage.units):
            raise Broken(
                "sums",
                f"{setting.name(self._me)} has different sums from the undisturbed run after step {work.step}"
                f" of run {setting.number}, in stage {stage.index + 1} of {stage.stages}",
            )
        self._reduction = None
        self._parts_sent.clear()
        self._early_parts.clear()
        spent, self._busy_seconds = Work(int(self._busy_seconds * 1e9)), 0.0
        sends: Sends = self.core.applied(work, digest, spent)
        return sends

    # The sum over the replicas

    def _reduce(self, work: core.ReduceReady) -> None:
        members = work.members[self.core.stage]
        self._key_now = work.plan + work.step.to_bytes(8, "big") + work.attempt.to_bytes(8, "big")
        sums = np.array(self.stage.sums, np.float64)
        self._reduction = AllReduce(self._me, members, self._key_now, sums)
        self._parts_sent.clear()
        self._send_parts(self._reduction.start())
        early = list(self._early_parts)
        self._early_parts.clear()
        for sender, part in early:
            self.receive(sender, part)
        self._end_reduction()

    def _take_part(self, sender: PeerId, part: Part) -> None:
        assert self._reduction is not None
        try:
            self._send_parts(self._reduction.receive(sender, part))
        except RemoteProtocolError:
            return  # the part does not fit, so the sum continues without it
        self._end_reduction()

    def _send_parts(self, sends: list[tuple[PeerId, Part]]) -> None:
        self._parts_sent += sends
        for peer, part in sends:
            self._send(peer, part)

    def _end_reduction(self) -> None:
        work, reduction = self._work, self._reduction
        if not isinstance(work, core.ReduceReady) or reduction is None or not reduction.done:
            return
        # The reduction is kept until the next one, because a member may still need our parts.
        self._work = None
        total = tuple(int(number) for number in reduction.total)
        squared_norm = self.stage.total(total)
        self._pass_on(self.core.reduced(work, hashed(vector_bytes(total)), squared_norm))

    # State from other peers

    def _fill(self, work: core.FillReady) -> None:
        def take(state: IntegerState | None) -> None:
            if self._work is not work:
                return  # a new plan names different sources, or a different checkpoint
            if state is None:
                self.fail(f"no peer handed over the state of step {work.step}")
                return
            self._work = None
            self.stage.restore(state)
            self._pass_on(self.core.filled(work, state.digest))

        if work.checkpoint == FIRST_VALUES:
            take(joined([first_state(self._setting.run, unit) for unit in self.stage.units]))
        elif work.sources:
            self._fetch(work.sources, work.plan, work.step, take)
        else:
            self._restore(work.checkpoint, self.stage.units, work.step, take)

    def fail(self, reason: str) -> None:
        """Fail; the committer then asks for a plan without this stage."""
        self.is_failed = True
        self._failed(self)
        for peer, message in self.core.failed(reason):
            self._send(peer, message)
