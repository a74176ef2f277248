"""Permits for serving streams. Their number is limited, in all and per peer, and a peer that moves nothing
soon loses its permit.

A peer that stops reading or asking holds resources: memory, an open file, one of the permits. So a permit
ends once nothing has moved for some seconds, and earlier if another peer waits for one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

import trio

from crypto.identity import PeerId
from crypto.registers import Budget, Register
from node.seams import Clock


class Permit:
    """The permit to serve one stream. It can be taken away only while the node waits for its peer."""

    def __init__(self, moved: Callable[["Permit"], None], clock: Clock) -> None:
        self._tell_moved = moved
        self._clock = clock
        self._has_waited = False
        self.silent_since = inf
        """See `crypto.registers.PlaceHolder`."""
        self.scope = trio.CancelScope()

    def waits(self, seconds: float) -> None:
        """Record that something has moved. The peer has `seconds` to move something again."""
        if self._has_waited:
            self._tell_moved(self)
        self._has_waited = True
        self.silent_since = self._clock.monotonic()
        self.scope.deadline = trio.current_time() + seconds

    def works(self) -> None:
        """Record that this node itself has work to do; the time does not count against the peer."""
        self.silent_since = self.scope.deadline = inf


class Permits:
    """All permits: `permits_max` in total, and `per_peer_max` for one peer. When none is left, one is taken
    from a peer that has moved nothing for a while: `patience_seconds` for a peer that has already read
    something, less for an unknown peer (`crypto.registers`)."""

    def __init__(self, permits_max: int, per_peer_max: int, *, patience_seconds: float, clock: Clock) -> None:
        self._clock = clock
        # The peers' source addresses are not known here, so each peer counts as its own source.
        self._taken: Register[Permit] = Register(
            Budget(permits_max, per_peer_max, permits_max, patience_seconds)
        )

    def __len__(self) -> int:
        return len(self._taken)

    @contextmanager
    def take(self, peer: PeerId) -> Iterator[Permit | None]:
        """Yield a permit for the duration of the context, or None if there are too many. If the permit is
        taken away, the context ends early."""
        permit = Permit(self._taken.credit, self._clock)
        evicted = self._taken.admit(self._clock.monotonic(), permit, peer, peer)
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
