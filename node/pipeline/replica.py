"""The shell around a `partition.steps.replica.Replica`: its stage process, its frames, its all-reduce.

One task computes, in the order that the core decides. Messages are handled in between, so a probe or a new
plan never waits for a matrix multiplication.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from gossip.allreduce import Part
from node.errors import PayloadRefused, StageDiverged, StageFailed
from node.pipeline.codec_choice import LinkCodecs
from node.pipeline.frame_store import FRAMES_BYTES_MAX
from node.pipeline.spans import Spans
from node.pipeline.stage_frames import StageFrames
from node.pipeline.stage_reduction import StageReduction
from node.pipeline.state_transfer import fill
from node.pipeline.work_meter import WorkMeter
from node.placement.admission import TRAIN
from node.protocols.runs import FetchState
from node.seams import Seams, Stage
from partition import stage as api
from partition.plan.plan import FIRST_VALUES, Plan
from partition.steps import replica as core
from partition.steps.frame_archive import FrameArchive
from partition.steps.frames import (
    OpenedFrame,
    Outgoing,
    check_signed,
)
from partition.steps.messages import BadFrame
from partition.steps.schedule import Schedule
from partition.steps.shares import Share

Send = Callable[..., None]
"""Sends a message like `node.runs.context.RunService.send`."""
Save = Callable[[Plan, int, int, Stage], Awaitable[None]]
"""Stores a copy of a stage; takes the plan, the stage's number, the number of steps applied, and the
stage."""
Restore = Callable[[Plan, bytes, int, Stage], Awaitable[None]]
"""Restores this node's stage from a checkpoint; takes the plan, the checkpoint's name, its step, and the
stage."""


@dataclass
class _Export:
    """A request for the stage's parameters."""

    ready: trio.Event = field(default_factory=trio.Event)
    data: bytes | None = None


_Vector = np.ndarray[Any, np.dtype[Any]]


class ReplicaShell:
    """Hosts one stage of one run on this node."""

    def __init__(
        self,
        signer: Signer,
        plan: Plan,
        specification: api.StageSpecification,
        parts: Sequence[Share],
        stage: Stage,
        seams: Seams,
        send: Send,
        *,
        refuse: Callable[[PeerId, RemoteProtocolError], None],
        step: int | None,
        in_flight_max: int,
        schedule: Schedule,
        codecs: LinkCodecs,
        save: Save,
        restore: Restore,
        spans: Spans,
        archive: FrameArchive,
        frames_bytes_max: int = FRAMES_BYTES_MAX,
    ) -> None:
        """`refuse` is called for a peer whose frame is unusable but not signed, so that it proves nothing.
        `save` stores a copy of the stage after a step, and `restore` returns to one. `archive` keeps received
        and sent frames."""
        entry = specification.graph.entry(TRAIN)
        self.core: core.Replica = seams.core(
            core.Replica,
            signer.peer,
            plan,
            step=step,
            awaits_gradient=bool(entry.backward_outputs),
            in_flight_max=in_flight_max,
            schedule=schedule,
        )
        self._signer = signer
        self._dtype = specification.dtype
        self._stage = stage
        self._seams = seams
        self._send = send
        self._refuse = refuse
        self._spans = spans
        self._archive = archive
        self._save = save
        self._restore = restore
        self._parts: deque[tuple[PeerId, Part]] = deque()
        self._reduction = seams.part(StageReduction)(
            signer.peer, parts, stage, specification.dtype, seams.executor, send, self._reduced
        )
        self._meter = WorkMeter()
        self._exports: deque[_Export] = deque()
        self._more = trio.Event()
        self._is_over = False
        self._filling = trio.CancelScope()
        self._is_changing = self._is_changed = False
        self._frames = StageFrames(
            signer, self.core, seams, send, codecs, archive, self._meter, frames_bytes_max
        )
        self._failure: StageFailed | None = None
        self._computing: int | None = None
        self.failed = trio.Event()

    async def run(self) -> None:
        """Execute the core's requests, until the stage fails."""
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._parts:
                    await self._reduction.take(*self._parts.popleft())
                elif (work := self.core.next(self._seams.clock.monotonic())) is not None:
                    await self._perform(work)
                elif self._exports:
                    await self._export(self._exports.popleft())
                else:
                    self._more = trio.Event()
                    await self._more.wait()
        except StageFailed as error:
            self._pass_on(self.core.failed(str(error), step=self._computing))
            self.failed.set()
        finally:
            self._is_over = True
            for request in self._exports:
                request.ready.set()

    @property
    def stage(self) -> Stage:
        """The stage that computes."""
        return self._stage

    async def aclose(self) -> None:
        """End the stage's process."""
        await self._stage.aclose()

    def adopt(self, plan: Plan) -> None:
        """Follow a new plan that has come into force."""
        self.core.adopt(plan)
        self._pass_on([])

    def receive(self, now: float, sender: PeerId, message: Any) -> None:
        """Handle a step message, an opened frame or an all-reduce part. Raises RemoteProtocolError."""
        if isinstance(message, Part):
            if self.core.plan.stage_of(sender) is None:
                raise RemoteProtocolError("a part from a peer that holds no stage")
            self._parts.append((sender, message))
            self._more.set()
        else:
            self._pass_on(self.core.receive(now, sender, message))

    async def keep(self, frame: OpenedFrame) -> OpenedFrame | None:
        """Return a received frame in memory that it may stay in until its step is applied. If there is no
        room, the stage fails, and None is returned."""
        try:
            return await self._frames.keep(frame)
        except StageFailed as error:
            self._failure = error
            self._more.set()
            return None

    def reconnected(self, peer: PeerId) -> None:
        """Resend what a broken link to `peer` may have lost."""
        self._pass_on(self.core.reconnected(peer))
        self._reduction.repeat_to(peer)

    async def export(self) -> bytes:
        """Return the stage's parameters as a safetensors file. Raises StageFailed."""
        request = _Export()
        if not self._is_over:
            self._exports.append(request)
            self._more.set()
            await request.ready.wait()
        if request.data is None:
            raise StageFailed("the stage has ended")
        return request.data

    async def read_state(self, request: FetchState) -> bytes | None:
        """Return a range of an arena after the requested step; None if the arena is at a different step."""
        if not self._is_at(request.step):
            return None
        vector = self._stage.vector(request.arena)
        part = vector[request.offset : request.offset + request.length]
        data = await self._seams.executor.run(lambda: bytes(part))
        # The arena may have been overwritten meanwhile.
        return data if self._is_at(request.step) else None

    def _is_at(self, step: int) -> bool:
        return self.core.step == step and not self._is_changing

    def _pass_on(self, sends: list[tuple[PeerId, object]]) -> None:
        events = self.core.events[:]
        self.core.events.clear()
        for event in events:
            match event:
                case core.ReduceVoided():
                    self._reduction.void()
                case core.FillVoided():
                    self._filling.cancel()
                case core.ReduceAsked():
                    left, peers, for_sums = self._reduction.waits()
                    sends = sends + self.core.waits(event.answer(left, peers, for_sums=for_sums))
        for peer, message in sends:
            if isinstance(message, Outgoing):
                self._frames.send(peer, message)
            elif not isinstance(message, BadFrame) or self._is_proof(message):
                self._send(peer, message)
        self._more.set()

    def _is_proof(self, message: BadFrame) -> bool:
        """Return whether the reported frame proves its author's fault; an unsigned frame counts as not
        received."""
        try:
            check_signed(self._signer, message.frame)
        except RemoteProtocolError as error:
            self._refuse(PeerId(message.frame.author), error)
            return False
        return True

    # The core's requests

    async def _perform(self, work: core.WorkItem) -> None:
        is_save_or_fill = isinstance(work, core.StepDiscarded | core.FillReady | core.SaveReady)
        self._computing = None if is_save_or_fill else self.core.step
        match work:
            case core.ForwardReady() | core.BackwardReady():
                await self._pass(work)
            case core.SubtractReady():
                await self._remove(work)
            case core.ForgetReady():
                await self._call(api.Forget(work.step, work.microbatch))
                self._pass_on(self.core.forgotten(work))
            case core.ReduceReady():
                await self._reduction.begin(work)
            case core.ApplyReady():
                await self._apply(work)
            case core.StepDiscarded():
                await self._call(api.Discard())
                self._pass_on(self.core.discarded(work))
            case core.FillReady():
                await self._fill(work)
            case core.SaveReady():
                await self._copy(work)

    async def _call(self, request: api.Request) -> object:
        began, begun = self._seams.clock.monotonic(), self._seams.clock.wall()
        reply = await self._stage.call(request)
        # Use the process's own figure, if it has one, since waiting for the process is not busy time.
        busy = getattr(reply, "busy_nanoseconds", 0)
        lasted = self._seams.clock.monotonic() - began
        self._meter.busy_seconds += busy / 1e9 if busy else lasted
        self._spans.record(self.core.plan, self.core.stage, self.core.step, request, begun, lasted, busy)
        return reply

    async def _pass(self, work: core.ForwardReady | core.BackwardReady) -> None:
        try:
            if isinstance(work, core.ForwardReady):
                await self._forward(work)
            else:
                await self._backward(work)
        except PayloadRefused as error:
            self._pass_on(self.core.refused(work, error.part, str(error), of_values=error.of_values))
        except StageDiverged as error:
            if isinstance(work, core.BackwardReady):
                raise  # gradients may be non-finite, so only the forward pass is checked
            self._pass_on(self.core.diverged(work, str(error)))

    async def _forward(self, work: core.ForwardReady) -> None:
        done = await self._call(
            api.Forward(
                work.step,
                work.microbatch,
                work.train,
                work.input,
                work.labels,
                codec=self._frames.codec_towards(-1 if self.core.is_last else +1),
            )
        )
        assert isinstance(done, api.Forwarded)
        self._meter.rounded(done.rounding, is_gradient=self.core.is_last)
        sends = self.core.forwarded(
            work,
            output=await self._frames.draft(work, done.output, +1, "input", train=work.train),
            gradient=await self._frames.draft(work, done.gradient, -1, "gradient", train=True),
            samples=done.samples,
            loss=done.loss,
            metrics=done.metrics,
        )
        self._pass_on(sends)

    async def _backward(self, work: core.BackwardReady) -> None:
        done = await self._call(
            api.Backward(work.step, work.microbatch, work.gradient, codec=self._frames.codec_towards(-1))
        )
        assert isinstance(done, api.BackwardDone)
        self._meter.rounded(done.rounding, is_gradient=True)
        draft = await self._frames.draft(work, done.gradient, -1, "gradient", train=True)
        self._pass_on(self.core.backwarded(work, gradient=draft))

    async def _remove(self, work: core.SubtractReady) -> None:
        """Replay, with the opposite sign, a micro-batch that another replica counts, to remove it from the
        sums."""
        await self._call(api.Forward(work.step, work.microbatch, True, work.input, work.labels, sign=-1))
        if work.gradient is not None:
            await self._call(api.Backward(work.step, work.microbatch, work.gradient, sign=-1))
        self._pass_on(self.core.removed(work))

    async def _fill(self, work: core.FillReady) -> None:
        digest = work.digest
        with trio.CancelScope() as self._filling:
            if work.sources:
                digest = await fill(
                    self._seams.network,
                    self._seams.executor,
                    self._stage,
                    plan=work.plan,
                    step=work.step,
                    sources=work.sources,
                    digest=work.digest,
                )
            elif work.checkpoint != FIRST_VALUES:
                await self._restore(self.core.plan, work.checkpoint, work.step, self._stage)
            elif self._is_changed:
                raise StageFailed("it has already trained, and all begin again")
        if self._filling.cancelled_caught:
            return  # a new plan names different sources, or a different checkpoint
        await self._call(api.Restore(work.step))
        self._is_changed = work.checkpoint != FIRST_VALUES
        self._pass_on(self.core.filled(work, digest))

    async def _copy(self, work: core.SaveReady) -> None:
        """Store a copy of the state, unless it has a value that is not finite, so that no training could
        continue from it."""
        arenas = [
            np.frombuffer(self._stage.vector(name), dtype=self._dtype) for name in ("parameters", "moments")
        ]
        if await self._seams.executor.run(lambda: all(map(_is_finite, arenas))):
            await self._save(self.core.plan, self.core.stage, work.step, self._stage)
            self._archive.marked(self.core.plan.run, work.step)
            self._pass_on(self.core.saved(work))
        else:
            self._pass_on(self.core.diverged(work, "a parameter or moment is not finite"))

    # The step

    async def _reduced(self, reducing: core.ReduceReady, digest: bytes) -> None:
        # Even without clipping, a non-finite value in one stage must keep all others from applying the step.
        normed = await self._call(api.Norm())
        assert isinstance(normed, api.Normed)
        self._pass_on(self.core.reduced(reducing, digest, normed.squared_norm))

    async def _apply(self, work: core.ApplyReady) -> None:
        self._is_changing = self._is_changed = True
        try:
            done = await self._call(
                api.Apply(work.step, work.samples, work.squared_norm, work.is_skipped, work.rate)
            )
        finally:
            self._is_changing = False
        assert isinstance(done, api.Applied)
        self._archive.committed(self._seams.clock.monotonic(), self.core.plan.run, work.step)
        self._reduction.clear()
        self._pass_on(self.core.applied(work, done.digest, self._meter.take()))

    async def _export(self, request: _Export) -> None:
        try:
            exported = await self._stage.call(api.Export())
            assert isinstance(exported, api.Exported)
            request.data = exported.data
        finally:
            request.ready.set()


def _is_finite(vector: _Vector) -> bool:
    """Return whether all elements are finite, without copying them."""
    return not vector.size or bool(np.isfinite(vector.min()) and np.isfinite(vector.max()))
