"""Streams of averaging attempts that this node does not know yet, or will never take part in.

A member whose group has formed may send before this node has learnt of the group, so its stream waits
briefly. Meanwhile only its opening is read, so it costs a socket and a hash, and no chunk. The number of
waiting streams is limited for each peer and in total. If the limit is reached, a peer that has completed a
round displaces one that has not, and a participant displaces an unknown peer, so that a crowd of ids cannot
shut out members.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from crypto.identity import PeerId
from node.errors import StreamClosed

EARLY_SECONDS_MAX = 15.0
"""How long a stream of an unknown attempt waits, since news of its group may still arrive."""
STREAMS_MAX = 128
"""Maximum number of waiting streams in total: twice the members of the largest group."""
STREAMS_PER_PEER_MAX = 4
"""Maximum number of waiting streams of one peer: it is in one group of a run at a time, and in few runs with
this node."""
STRANGERS_MAX = 16
"""Maximum number of waiting streams of peers in no list of participants here. A new participant may be in a
group before it is listed."""

Rank = Callable[[PeerId], int]
"""0 for an unknown peer, 1 for a participant, 2 for a peer that has completed a round here."""


@dataclass(eq=False)
class _Place:
    peer: PeerId
    rank: int
    scope: trio.CancelScope


class EarlyStreams:
    """All waiting streams."""

    def __init__(self, rank: Rank, *, seconds_max: float = EARLY_SECONDS_MAX) -> None:
        self._rank = rank
        self._seconds_max = seconds_max
        self._places: list[_Place] = []

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def place(self, peer: PeerId) -> Iterator[None]:
        """Keep the peer's stream waiting during the block. Raises StreamClosed if there is no room, if
        another peer's stream displaces it, or when the time is over."""
        rank = self._rank(peer)
        if sum(each.peer == peer for each in self._places) >= STREAMS_PER_PEER_MAX:
            raise StreamClosed("too many streams of attempts that are not known here")
        strangers = sum(not each.rank for each in self._places)
        if (not rank and strangers >= STRANGERS_MAX) or not self._make_room(rank):
            raise StreamClosed("no room for streams of attempts that are not known here")
        place = _Place(peer, rank, trio.CancelScope())
        self._places.append(place)
        try:
            with trio.move_on_after(self._seconds_max) as patience, place.scope:
                yield
        finally:
            if place in self._places:
                self._places.remove(place)
        if patience.cancelled_caught or place.scope.cancelled_caught:
            raise StreamClosed("an attempt that is not known here")

    def _make_room(self, rank: int) -> bool:
        if len(self._places) < STREAMS_MAX:
            return True
        lowest = min(self._places, key=lambda place: place.rank)  # the oldest with the lowest rank
        if lowest.rank >= rank:
            return False
        self._places.remove(lowest)
        lowest.scope.cancel()
        return True
