"""Drives the all-reduces of a stage's steps on one replica, one attempt after another.

Large sums are computed in threads; `node.pipeline.gradient_sum` has the arithmetic. Parts of an attempt that
has not begun here are kept until it begins. Sent parts are kept until the step is applied, for peers whose
streams break.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.allreduce import Part
from node.pipeline.gradient_sum import Reduction
from node.protocols.runs import GroupPart
from node.seams import Executor, Stage
from partition.steps.replica import ReduceReady
from partition.steps.shares import Share

INLINE_BYTES_MAX = 1 << 20
"""Maximum size of a stage whose sums are computed on the event loop, where they take less than half a
millisecond."""
EARLY_PARTS_MAX = 4_096
"""Maximum number of stored parts of a reduction that this replica has not begun, because others may be a
little ahead. The largest stage (4 GiB) has this many parts."""

_T = TypeVar("_T")
_Vector = np.ndarray[Any, np.dtype[Any]]


class StageReduction:
    """The reductions of one replica. `done` is called with an attempt and the digest of its total, once that
    is known."""

    def __init__(
        self,
        me: PeerId,
        shares: Sequence[Share],
        stage: Stage,
        dtype: str,
        executor: Executor,
        send: Callable[..., None],
        done: Callable[[ReduceReady, bytes], Awaitable[None]],
    ) -> None:
        self._me = me
        self._shares = shares
        self._stage = stage
        self._dtype = dtype
        self._executor = executor
        self._send = send
        self._done = done
        self._sum: Reduction | None = None
        self._reducing: ReduceReady | None = None
        self._starting: ReduceReady | None = None
        self._void: ReduceReady | None = None
        self._parts_sent: list[tuple[PeerId, Part]] = []
        self._early_parts: deque[tuple[PeerId, Part]] = deque(maxlen=EARLY_PARTS_MAX)

    async def begin(self, work: ReduceReady) -> None:
        """Begin an attempt: send this replica's sums, and add those of the others."""
        self._starting = work
        sums, totals = self._vector("gradients"), self._vector("totals")
        begun, sends, digest = await self._compute(lambda: _begin(self._me, work, self._shares, sums, totals))
        if self._void is work:
            return  # a new plan came into force meanwhile
        self._sum, self._reducing = begun, work
        self._parts_sent.clear()
        if digest:
            await self._end(work, digest)
            return
        self._send_parts(sends)
        early = list(self._early_parts)
        self._early_parts.clear()
        for sender, part in early:
            await self.take(sender, part)
        await self._finish()

    async def take(self, sender: PeerId, part: Part) -> None:
        """Handle a part from another replica."""
        current, reducing = self._sum, self._reducing
        if current is None or reducing is None or not current.is_of(part):
            # The part is from a later reduction or a finished one; its key decides once ours begins.
            self._early_parts.append((sender, part))
            return
        try:
            sends = await self._compute(lambda: current.receive(sender, part))
        except RemoteProtocolError:
            return  # a part of no known reduction: the sum continues without it
        self._send_parts(sends)
        await self._finish()

    def waits(self) -> tuple[int, tuple[PeerId, ...], bool]:
        """Return the missing parts, as `Reduction.waits` does. While sums or the total are being copied, no
        senders are missing."""
        return self._sum.waits() if self._reducing and self._sum else (1, (), False)

    def repeat_to(self, peer: PeerId) -> None:
        """Resend messages that `peer` may have lost."""
        for receiver, part in self._parts_sent:
            if receiver == peer:
                self._send(receiver, GroupPart(part))

    def void(self) -> None:
        """Give up the attempt that is under way or about to begin."""
        self._void = self._starting
        self._sum = self._reducing = None
        self._parts_sent.clear()

    def clear(self) -> None:
        """Drop everything about a step that has been applied."""
        self._sum = None
        self._parts_sent.clear()
        self._early_parts.clear()

    async def _finish(self) -> None:
        current, reducing = self._sum, self._reducing
        if current is None or reducing is None or not current.done:
            return
        totals = self._vector("totals")
        await self._end(reducing, await self._compute(lambda: current.finish(totals)))

    async def _end(self, work: ReduceReady, digest: bytes) -> None:
        # Keep the reduction until the next one begins, because a member may still need our parts.
        self._reducing = None
        await self._done(work, digest)

    def _send_parts(self, sends: list[tuple[PeerId, Part]]) -> None:
        self._parts_sent += sends
        for peer, part in sends:
            self._send(peer, GroupPart(part))

    def _vector(self, arena: str) -> _Vector:
        return np.frombuffer(self._stage.vector(arena), dtype=self._dtype)

    async def _compute(self, function: Callable[[], _T]) -> _T:
        """Run a part of the sum. It runs in a thread unless the stage is so small that switching threads
        takes longer."""
        if len(self._stage.vector("totals")) <= INLINE_BYTES_MAX:
            await trio.lowlevel.checkpoint()
            return function()
        return await self._executor.run(function)


def _begin(
    me: PeerId, work: ReduceReady, shares: Sequence[Share], sums: _Vector, totals: _Vector
) -> tuple[Reduction, list[tuple[PeerId, Part]], bytes]:
    """Return the reduction, its messages and, if there are no other members, the digest of the total, because
    a second switch to a thread would take longer than the sum."""
    begun = Reduction(me, work, shares, sums)
    sends = begun.start()
    return begun, sends, begun.finish(totals) if begun.done else b""
