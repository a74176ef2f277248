"""The queue of half-open connections, which have connected but not yet shaken hands.

Its places are few and can be lost. A stranger may connect and stay silent, send slowly, or connect a thousand
times; a limit that refused the newest would let it exclude all others for as long as it likes. So the newest
gets in, and displaces the oldest connection of the source that has most places. An honest peer needs a few
round trips, and is through before its turn comes.
"""

from typing import Generic, TypeVar

from node.transport.settings import TRANSPORT

Who = TypeVar("Who")


class HalfOpenQueue(Generic[Who]):
    """The half-open connections by source; makes room for new ones."""

    def __init__(self, places_max: int = TRANSPORT.half_open_max) -> None:
        self.places_max = places_max
        # The connections by source, the oldest first.
        self._standing: dict[bytes, dict[Who, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, who: Who, source: bytes) -> Who | None:
        """Return a place for a connection from a source, and the connection that lost its place for it if all
        were taken."""
        gone = self._make_room() if self._count >= self.places_max else None
        self._standing.setdefault(source, {})[who] = None
        self._count += 1
        return gone

    def leave(self, who: Who, source: bytes) -> None:
        """Remove a connection; it may have lost its place already."""
        standing = self._standing.get(source)
        if standing is None or who not in standing:
            return
        del standing[who]
        self._count -= 1
        if not standing:
            del self._standing[source]

    def _make_room(self) -> Who:
        source = max(self._standing, key=lambda source: len(self._standing[source]))
        who = next(iter(self._standing[source]))
        self.leave(who, source)
        return who
