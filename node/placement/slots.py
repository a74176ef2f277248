"""The one place for a stage that this node has, and to whom it is promised.

One stage a node, so that measured rates stay true. A promise is on disk before it is given, so that a node
that restarts does not promise the same slot twice.
"""

from functools import partial
from typing import Annotated

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.protocols.runs import LeaseBody
from node.seams import Seams
from partition.plan.plan import Peer

SLOT_NAME = "slot"
_PROMISE_BYTES_MAX = 1_024


class _Promise(msgspec.Struct, frozen=True, array_like=True):
    """`until` is a wall time in whole seconds: it must mean something after a restart."""

    body: LeaseBody
    planner: Peer
    until: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Slot:
    """At most one lease, which ends by itself unless its stage is opened in time."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self._promise: _Promise | None = None
        if (data := seams.storage.read(SLOT_NAME)) is not None:
            try:
                self._promise = decode(data, _Promise, bytes_max=_PROMISE_BYTES_MAX)
            except RemoteProtocolError:
                self._promise = None  # of another version, or damaged: it cannot be kept

    @property
    def is_free(self) -> bool:
        """Whether nothing is promised."""
        return self._live() is None

    async def promise(self, body: LeaseBody, planner: PeerId) -> None:
        """Hold the slot for `planner`'s plan; only a free one is promised. Raises OSError: it cannot be
        kept."""
        until = int(self._seams.clock.wall()) + body.silence_seconds_max
        self._promise = promise = _Promise(body, planner, until)
        await self._seams.executor.run(partial(self._seams.storage.write, SLOT_NAME, encode(promise)))

    def holds(self, run: bytes, plan: bytes, stage: int) -> bool:
        """Return whether it is promised to exactly this stage."""
        live = self._live()
        return live is not None and (live.body.run, live.body.plan, live.body.stage) == (run, plan, stage)

    def release(self, plan: bytes, planner: PeerId | None = None) -> None:
        """Forget what was promised for `plan` (to `planner`, if given)."""
        promise = self._promise
        if promise is not None and promise.body.plan == plan and planner in (None, promise.planner):
            self._forget()

    def release_run(self, run: bytes) -> None:
        """Forget what was promised for any plan of this run."""
        if self._promise is not None and self._promise.body.run == run:
            self._forget()

    def release_all(self, planner: PeerId) -> None:
        """Forget what was promised to a peer that is gone; others' promises stand."""
        if self._promise is not None and self._promise.planner == planner:
            self._forget()

    def _forget(self) -> None:
        # Not synced: what comes back after a crash holds the slot a little longer.
        self._promise = None
        self._seams.storage.delete(SLOT_NAME)

    def _live(self) -> _Promise | None:
        promise = self._promise
        return promise if promise is not None and self._seams.clock.wall() < promise.until else None
