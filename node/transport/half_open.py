"""The queue of half-open connections, which have connected but not yet shaken hands.

Its places are few, and a connection can lose its place. An attacker may connect and stay silent, send slowly,
or connect a thousand times. If a full queue refused the newest connection, the attacker could exclude all
others for as long as it likes. So the newest connection enters, and displaces the oldest connection of the
source with the most places. An honest peer needs only a few round trips, so it has shaken hands before it can
be displaced.
"""

from typing import Generic, TypeVar

from node.transport.settings import TRANSPORT

Who = TypeVar("Who")


class HalfOpenQueue(Generic[Who]):
    """The half-open connections, grouped by source, with room for new ones."""

    def __init__(self, places_max: int = TRANSPORT.half_open_max) -> None:
        self.places_max = places_max
        # The connections by source, the oldest first.
        self._standing: dict[bytes, dict[Who, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, who: Who, source: bytes) -> Who | None:
        """Give a connection from a source a place. Return the connection that was displaced if all places
        were taken."""
        gone = self._make_room() if self._count >= self.places_max else None
        self._standing.setdefault(source, {})[who] = None
        self._count += 1
        return gone

    def leave(self, who: Who, source: bytes) -> None:
        """Remove a connection, if it still has its place."""
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
