"""The doorway: who stands in it has connected and has not yet shaken hands. Its places are few, and not kept.

A stranger may connect and say nothing, or drip, or come a thousand times; a limit that turned away the
newest would let it shut out everybody for as long as it likes. So the newest gets in, and who leaves for it
is of the source that takes up most room, the one that has stood there longest. An honest peer needs a few
trips, and is through before its turn comes.
"""

from typing import Generic, TypeVar

from node.transport.settings import TRANSPORT

Who = TypeVar("Who")


class HalfOpenQueue(Generic[Who]):
    """Knows who is half-open, by source, and makes room."""

    def __init__(self, places_max: int = TRANSPORT.half_open_max) -> None:
        self.places_max = places_max
        # By source those who stand there, longest first.
        self._standing: dict[bytes, dict[Who, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, who: Who, source: bytes) -> Who | None:
        """A place for somebody from there, until it leaves; and who has lost its own for that, if there was
        none to be had."""
        gone = self._make_room() if self._count >= self.places_max else None
        self._standing.setdefault(source, {})[who] = None
        self._count += 1
        return gone

    def leave(self, who: Who, source: bytes) -> None:
        """It goes, or has lost its place already."""
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
