"""The shell around a `partition.steps.replica.Replica`: its stage process, its frames, its all-reduce.

One task computes, strictly in the order in which the core asked; messages are taken in between, so
a probe or a Drop never waits for a product of matrices.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from gossip.allreduce import Part
from node.errors import StageFailed
from node.runs.admission import TRAIN
from node.runs.reduction import Reduction, Share
from node.runs.requests import GroupPart
from node.seams import Executor, Stage
from partition import stage as api
from partition.codec import Payload
from partition.codecs.choice import Frames, narrowest
from partition.plan.plan import Plan
from partition.steps import replica as core
from partition.steps.frames import PAYLOAD_BYTES_MAX, Direction, Frame, make_frame

EARLY_PARTS_MAX = 4_096
"""All-reduce parts of a reduction that this replica has not begun: others may be a little ahead. As many
as the largest stage (4 GiB) has."""

Send = Callable[[PeerId, Any], None]


@dataclass
class _Export:
    """Somebody waits for the stage's parameters."""

    ready: trio.Event = field(default_factory=trio.Event)
    data: bytes | None = None


class ReplicaShell:
    """Hosts one stage of one run on this node."""

    def __init__(
        self,
        signer: Signer,
        plan: Plan,
        specification: api.StageSpecification,
        parts: Sequence[Share],
        stage: Stage,
        executor: Executor,
        send: Send,
        frames: Frames = "exact",
    ) -> None:
        entry = specification.graph.entry(TRAIN)
        self.core = core.Replica(signer.peer, plan, awaits_gradient=bool(entry.backward_outputs))
        self._forward_codec = narrowest(frames, is_gradient=self.core.stage == len(plan.stages) - 1)
        self._backward_codec = narrowest(frames, is_gradient=True)
        self._signer = signer
        self._dtype = specification.dtype
        self._shares = parts
        self._stage = stage
        self._executor = executor
        self._send = send
        self._work: deque[Any] = deque()
        self._more = trio.Event()
        self._reduction: Reduction | None = None
        self._reducing: core.ReduceReady | None = None
        self._parts_sent: list[tuple[PeerId, Part]] = []
        self._early_parts: deque[tuple[PeerId, Part]] = deque(maxlen=EARLY_PARTS_MAX)
        self._is_over = False
        self.dropped = trio.Event()

    async def run(self) -> None:
        """Compute what the core asks for, in order, until the stage fails or the plan drops us."""
        try:
            while True:
                while self._work:
                    await self._perform(self._work.popleft())
                self._more = trio.Event()
                if not self._work:
                    await self._more.wait()
        except StageFailed as error:
            self._pass_on(self.core.failed(str(error)))
            self.dropped.set()
        finally:
            self._is_over = True
            for work in self._work:
                if isinstance(work, _Export):
                    work.ready.set()

    async def aclose(self) -> None:
        """End the stage's process."""
        await self._stage.aclose()

    def adopt(self, plan: Plan) -> None:
        """A new plan has come into force."""
        self.core.adopt(plan)

    def receive(self, now: float, sender: PeerId, message: Any) -> None:
        """A step message, an opened frame or an all-reduce part. Raises RemoteProtocolError."""
        if isinstance(message, Part):
            if not self.core.is_replica(sender):
                raise RemoteProtocolError("a part from a peer that holds no stage")
            self._queue((sender, message))
        else:
            self._pass_on(self.core.receive(now, sender, message))

    def reconnected(self, peer: PeerId) -> None:
        """A link to `peer` was opened anew: send again what it may have lost."""
        self._pass_on(self.core.reconnected(peer))
        for receiver, part in self._parts_sent:
            if receiver == peer:
                self._send(receiver, GroupPart(part))

    async def export(self) -> bytes:
        """The stage's parameters as a safetensors file. Raises StageFailed."""
        request = _Export()
        if not self._is_over:
            self._queue(request)
            await request.ready.wait()
        if request.data is None:
            raise StageFailed("the stage has ended")
        return request.data

    def _pass_on(self, sends: list[tuple[PeerId, object]]) -> None:
        events = self.core.events[:]
        self.core.events.clear()
        for event in events:
            match event:
                case core.ReduceVoided():
                    self._reduction = self._reducing = None
                    self._parts_sent.clear()
                case core.ReplicaDropped():
                    self.dropped.set()
                case _:
                    self._queue(event)
        for peer, message in sends:
            self._send(peer, message)

    def _queue(self, work: Any) -> None:
        self._work.append(work)
        self._more.set()

    async def _perform(self, work: Any) -> None:
        match work:
            case core.ForwardReady():
                await self._forward(work)
            case core.BackwardReady():
                await self._backward(work)
            case core.ReduceReady():
                await self._reduce(work)
            case (sender, Part() as part):
                await self._part(sender, part)
            case core.ApplyReady():
                await self._apply(work)
            case core.StepDiscarded():
                await self._stage.call(api.Discard())
            case _Export():
                try:
                    exported = await self._stage.call(api.Export())
                    assert isinstance(exported, api.Exported)
                    work.data = exported.data
                finally:
                    work.ready.set()

    async def _forward(self, work: core.ForwardReady) -> None:
        done = await self._stage.call(
            api.Forward(work.step, work.microbatch, work.train, work.input, work.labels, self._forward_codec)
        )
        assert isinstance(done, api.Forwarded)
        sends = self.core.forwarded(
            work,
            output=self._frame(work, done.output, +1, "input", train=work.train),
            gradient=self._frame(work, done.gradient, -1, "gradient", train=True),
            samples=done.samples,
            loss=done.loss,
            metrics=done.metrics,
        )
        self._pass_on(sends)

    async def _backward(self, work: core.BackwardReady) -> None:
        done = await self._stage.call(
            api.Backward(work.step, work.microbatch, work.gradient, self._backward_codec)
        )
        assert isinstance(done, api.BackwardDone)
        frame = self._frame(work, done.gradient, -1, "gradient", train=True)
        self._pass_on(self.core.backwarded(work, gradient=frame))

    def _frame(
        self,
        work: core.ForwardReady | core.BackwardReady,
        payload: Payload | None,
        towards: int,
        direction: Direction,
        *,
        train: bool,
    ) -> Frame | None:
        if payload is None:
            return None
        if len(payload.data) > PAYLOAD_BYTES_MAX:
            raise StageFailed(
                f"a frame of {len(payload.data)} bytes, at most {PAYLOAD_BYTES_MAX} can be sent"
            )
        return make_frame(
            self._signer,
            payload,
            plan=work.plan,
            step=work.step,
            microbatch=work.microbatch,
            stage=self.core.stage + towards,
            direction=direction,
            train=train,
        )

    async def _reduce(self, work: core.ReduceReady) -> None:
        sums = np.frombuffer(self._stage.vector("gradients"), dtype=self._dtype)
        reduction, sends = await self._executor.run(
            lambda: _begin_reduction(self.core.me, work, self._shares, sums)
        )
        self._reduction, self._reducing = reduction, work
        self._parts_sent.clear()
        self._send_parts(sends)
        early = list(self._early_parts)
        self._early_parts.clear()
        for sender, part in early:
            await self._part(sender, part)
        await self._finish_reduction()

    async def _part(self, sender: PeerId, part: Part) -> None:
        reduction, reducing = self._reduction, self._reducing
        if reduction is None or reducing is None or not reduction.is_of(part):
            # Ahead of us, or of a reduction that is over; the key tells which once ours begins.
            self._early_parts.append((sender, part))
            return
        try:
            sends = await self._executor.run(lambda: reduction.receive(sender, part))
        except RemoteProtocolError:
            return  # a part that fits nowhere: the sum goes on without it
        self._send_parts(sends)
        await self._finish_reduction()

    def _send_parts(self, sends: list[tuple[PeerId, Part]]) -> None:
        self._parts_sent += sends
        for peer, part in sends:
            self._send(peer, GroupPart(part))

    async def _finish_reduction(self) -> None:
        reduction, reducing = self._reduction, self._reducing
        if reduction is None or reducing is None or not reduction.done:
            return
        totals = np.frombuffer(self._stage.vector("totals"), dtype=self._dtype)
        digest = await self._executor.run(lambda: reduction.finish(totals))
        # The machine stays until the next one: a member may still have to hear our parts.
        self._reducing = None
        # Also where nothing is clipped: what is not finite in one stage must keep all others from applying.
        normed = await self._stage.call(api.Norm())
        assert isinstance(normed, api.Normed)
        self._pass_on(self.core.reduced(reducing, digest, normed.squared_norm))

    async def _apply(self, work: core.ApplyReady) -> None:
        done = await self._stage.call(api.Apply(work.step, work.samples, work.squared_norm))
        assert isinstance(done, api.Applied)
        self._reduction = None
        self._parts_sent.clear()
        self._early_parts.clear()
        self._pass_on(self.core.applied(work, done.digest))


def _begin_reduction(
    me: PeerId, work: core.ReduceReady, parts: Sequence[Share], sums: "np.ndarray[Any, np.dtype[Any]]"
) -> tuple[Reduction, list[tuple[PeerId, Part]]]:
    reduction = Reduction(me, work, parts, sums)
    return reduction, reduction.start()
