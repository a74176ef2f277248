"""Permits to be served: so many in all, a few for one peer, and none for long to a peer that moves nothing.

A peer that stops reading or asking costs what serving it holds: memory, an open file, a share of what all
may have at once. So a permit ends once nothing has moved for some seconds, and earlier where another peer
waits for one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import trio

from crypto.identity import PeerId


class Permit:
    """To serve one stream. It can be taken away only while its peer is waited for."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.waiting_since = inf
        self.scope = trio.CancelScope()

    def waits(self, seconds: float) -> None:
        """Something has moved; from now on the peer has so long to move the next."""
        self.waiting_since = trio.current_time()
        self.scope.deadline = self.waiting_since + seconds

    def works(self) -> None:
        """This node has to do something itself, for which the peer pays nothing."""
        self.waiting_since = self.scope.deadline = inf


class Permits:
    """`permits_max` of them, `per_peer_max` for one peer. Where all are given out, one whose peer has moved
    nothing for `patience_seconds` is taken away, the longest first."""

    def __init__(self, permits_max: int, per_peer_max: int, *, patience_seconds: float) -> None:
        self._permits_max = permits_max
        self._per_peer_max = per_peer_max
        self._patience_seconds = patience_seconds
        self._taken: dict[Permit, None] = {}

    def __len__(self) -> int:
        return len(self._taken)

    @contextmanager
    def take(self, peer: PeerId) -> Iterator[Permit | None]:
        """One while the context lasts, which is left early once it is taken away; None: too many."""
        permit = self._enter(peer)
        if permit is None:
            yield None
            return
        try:
            with permit.scope:
                yield permit
        finally:
            self._taken.pop(permit, None)

    def _enter(self, peer: PeerId) -> Permit | None:
        if sum(permit.peer == peer for permit in self._taken) >= self._per_peer_max:
            return None
        if len(self._taken) >= self._permits_max:
            idle = min(self._taken, key=lambda permit: permit.waiting_since)
            if trio.current_time() - idle.waiting_since < self._patience_seconds:
                return None
            del self._taken[idle]
            idle.scope.cancel()
        permit = Permit(peer)
        self._taken[permit] = None
        return permit
