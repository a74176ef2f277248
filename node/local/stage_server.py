"""A stage of this node that works for the head of a column: the counterpart of `node.local.column` at the
holder.

Not here: the choice of the head (`partition.run.local.seat`).
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import PayloadRefused, StageDiverged, StageFailed, StreamClosed
from node.seams import Stage, Stream, StreamLimits
from partition import stage as api
from partition.run.local.column_messages import (
    MESSAGE_BYTES_MAX,
    Attach,
    Attached,
    ColumnRefusal,
    Did,
    Do,
    Question,
    Work,
)
from partition.run.local.seat import HEAD_SECONDS_MAX, SeatedHead, StageSeat
from partition.stage import REASON_LENGTH_MAX

HELD_MAX = 8
"""Maximum number of stages of a run that one node holds. Each has its own process, which takes another 0.3
GB."""
STREAMS = StreamLimits(message_bytes_max=MESSAGE_BYTES_MAX, streams_per_peer_max=HELD_MAX + 4)


async def close(stream: Stream) -> None:
    """Close a stream, even if this task is cancelled."""
    with trio.CancelScope(shield=True), trio.move_on_after(1):
        await stream.aclose()


class StageServer:
    """A member's stage that works for one head at a time. `stage` is open, and used only here.

    `between` is called after each step of the head, before the reply; it may change the parameters. `settle`
    is called before the parameters are evaluated or handed over, when they must be final. While there is no
    head, holding `lock` prevents a head from beginning.
    """

    def __init__(
        self,
        stage: Stage,
        seat: StageSeat,
        *,
        accept: Callable[[PeerId, Attach], Attached | ColumnRefusal],
        apply: Callable[[int, int], None],
        payload_bytes_max: int,
        now: Callable[[], float],
    ) -> None:
        """`accept` raises RemoteProtocolError for a peer that is not a member. `apply` is called with the
        head's number of steps, and the number of samples of the latest step."""
        self.seat = seat
        self.lock = trio.Lock()
        self._stage = stage
        self._accept = accept
        self._apply = apply
        self._payload_bytes_max = payload_bytes_max
        self._now = now
        self.between: Callable[[], Awaitable[None]] | None = None
        self.settle: Callable[[], Awaitable[None]] | None = None

    @property
    def number(self) -> int:
        """The stage's number."""
        return self.seat.number

    @property
    def head(self) -> PeerId | None:
        """The current head."""
        return self.seat.head

    async def serve(self, stream: Stream, attach: Attach) -> None:
        """Work for the head at the other end of `stream`, until it ends or is silent for too long."""
        if attach.stage != self.number:
            await stream.send(encode(ColumnRefusal("this node holds a different stage")))
            return
        attached = self._accept(stream.peer, attach)
        if isinstance(attached, ColumnRefusal):
            await stream.send(encode(attached))
            return
        scope = trio.CancelScope()
        head = SeatedHead(stream.peer, scope.cancel)
        column = [PeerId(peer) for peer in attach.column]
        if not self.seat.take(self._now(), head, keeps_copies=attach.keeps, column=column):
            await stream.send(encode(ColumnRefusal("busy: it works for another head")))
            return
        with scope:
            try:
                async with self.lock:
                    await self._stage.call(api.Discard())
                    await self._stage.call(api.Restore(attach.step))
                    self._apply(attach.step, 0)
                await stream.send(encode(attached))
                while True:
                    await self._answer(stream, head)
            except StageFailed as error:
                self.seat.failure = str(error)
            finally:
                if self.seat.leave(head):
                    with trio.CancelScope(shield=True), suppress(StageFailed):
                        async with self.lock:
                            await self._stage.call(api.Discard())

    async def _answer(self, stream: Stream, head: SeatedHead) -> None:
        try:
            with trio.fail_after(HEAD_SECONDS_MAX), head.silence.waiting(self._now):
                message, data = await stream.receive_with_payload(self._payload_bytes_max)
        except trio.TooSlowError:
            raise StreamClosed("a head that sends no request") from None
        question: Question = decode(message, Question, bytes_max=MESSAGE_BYTES_MAX)
        if not isinstance(question, Do):
            raise RemoteProtocolError("a head that attaches twice")
        request: Work = decode(bytes(data), Work, bytes_max=self._payload_bytes_max)
        try:
            async with self.lock:
                worked = await self._do(request)
        except PayloadRefused as error:  # the data is unusable, because of the head or an earlier stage
            await stream.send(encode(ColumnRefusal(str(error)[:REASON_LENGTH_MAX])))
            raise StreamClosed("a payload that cannot be used") from None
        except StageDiverged as error:
            await stream.send(encode(ColumnRefusal(str(error)[:REASON_LENGTH_MAX], is_diverged=True)))
            return
        except StageFailed as error:
            await stream.send(encode(ColumnRefusal(str(error)[:REASON_LENGTH_MAX])))
            raise
        if isinstance(request, api.Apply):
            self.seat.stepped(head)
        try:
            with trio.fail_after(HEAD_SECONDS_MAX), head.silence.waiting(self._now):
                await stream.send(encode(Did()), encode(worked))
        except trio.TooSlowError:
            raise StreamClosed("a head that does not read its answer") from None

    async def work_for(self, head: PeerId, step: int) -> None:
        """Begin to work for a head on this node itself, after this number of steps. Raises StageFailed."""
        if self.seat.is_vacant and self.between is not None:
            async with self.lock:
                await self._stage.call(api.Discard())
                await self._stage.call(api.Restore(step))
                self._apply(step, 0)
                self.seat.work_here(head)

    async def work(self, request: Work) -> object:
        """Answer a request of a head on this node itself. Raises PayloadRefused, StageDiverged,
        StageFailed."""
        async with self.lock:
            return await self._do(request)

    async def rest(self) -> None:
        """Stop working for a head on this node itself for now, and drop the unfinished step."""
        self.seat.rest()
        with suppress(StageFailed):
            async with self.lock:
                await self._stage.call(api.Discard())

    def close(self) -> None:
        """Stop working for any head."""
        self.seat.close()

    async def _do(self, request: Work) -> object:
        if isinstance(request, api.Norm):
            totals, gradients = self._stage.vector("totals"), self._stage.vector("gradients")
            totals[:] = gradients
        is_result = isinstance(request, api.Export) or (
            isinstance(request, api.Forward) and not request.train
        )
        if is_result and self.settle is not None:
            await self.settle()
        worked = await self._stage.call(request)
        if isinstance(request, api.Apply):
            self._apply(request.step + 1, request.samples)
            if self.between is not None:
                await self.between()
        return worked
