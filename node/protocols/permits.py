"""Permits to be served: so many in all, a few for one peer, and none for long to a peer that moves nothing.

A peer that stops reading or asking costs what serving it holds: memory, an open file, a share of what all
may have at once. So a permit ends once nothing has moved for some seconds, and earlier where another peer
waits for one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

import trio

from crypto.identity import PeerId
from crypto.registers import Budget, Register


class Permit:
    """To serve one stream. It can be taken away only while its peer is waited for."""

    def __init__(self, moved: Callable[["Permit"], None]) -> None:
        self._tell_moved = moved
        self._has_waited = False
        self.silent_since = inf
        """See `crypto.registers.PlaceHolder`."""
        self.scope = trio.CancelScope()

    def waits(self, seconds: float) -> None:
        """Something has moved; from now on the peer has so long to move the next."""
        if self._has_waited:
            self._tell_moved(self)
        self._has_waited = True
        self.silent_since = trio.current_time()
        self.scope.deadline = self.silent_since + seconds

    def works(self) -> None:
        """This node has to do something itself, for which the peer pays nothing."""
        self.silent_since = self.scope.deadline = inf


class Permits:
    """`permits_max` of them, `per_peer_max` for one peer. Where all are given out, one whose peer has moved
    nothing for a while is taken away: `patience_seconds` for a peer that has taken something by now, less for
    a stranger (`crypto.registers`)."""

    def __init__(self, permits_max: int, per_peer_max: int, *, patience_seconds: float) -> None:
        # A peer's source is not known here: each counts as one of its own.
        self._taken: Register[Permit] = Register(
            Budget(permits_max, per_peer_max, permits_max, patience_seconds)
        )

    def __len__(self) -> int:
        return len(self._taken)

    @contextmanager
    def take(self, peer: PeerId) -> Iterator[Permit | None]:
        """One while the context lasts, which is left early once it is taken away; None: too many."""
        permit = Permit(self._taken.credit)
        evicted = self._taken.admit(trio.current_time(), permit, peer, peer)
        if evicted is None:
            yield None
            return
        for each in evicted:
            each.scope.cancel()
        try:
            with permit.scope:
                yield permit
        finally:
            self._taken.leave(permit)
