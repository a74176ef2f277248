"""The part of a swarm that one peer lists: all members, or the neighbourhood of its own key.

Every peer has a key (that of the DHT, whose function is an argument). A neighbourhood is all peers whose keys
begin with the same bits as ours. Each peer chooses its depth, the number of these bits, so that its
neighbourhood has a few hundred peers, however large the swarm is. The limits on the number are farther apart
than the change caused by one step, so that the depth settles. If two peers have different depths, one scope
contains the other, and both list the smaller one.

Pure arithmetic on keys. The consequences of a scope are in `gossip.state_table` and `gossip.push_pull`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from crypto.identity import PeerId

KEY_BITS = 160
"""The width of the DHT's keys."""
DEPTH_MAX = 128
"""Maximum number of bits in a prefix, beyond any swarm's size. A message with more is refused while
decoding."""

LOPSIDED_SHARE = 8
"""A half with less than one part in this many of a scope's members counts as unknown."""

Place = Callable[[PeerId], int]
"""A function that returns the key of a peer as a number of KEY_BITS bits, as evenly spread as a hash. It is
called often, for all listed peers, so it should cache."""


@dataclass(frozen=True, slots=True)
class KeyRegion:
    """All peers whose keys share their first `depth` bits with `key`."""

    place: Place
    key: int
    depth: int

    def among(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Return those of `peers` that are in the region."""
        place, key, end = self.place, self.key, 1 << KEY_BITS - self.depth
        return [peer for peer in peers if key ^ place(peer) < end]


class Scope:
    """The scope of the peer `me`. Without `place` it is always the whole swarm.

    `joining`: the peer has found no other peer of its neighbourhood yet, so it lists only itself. `admits`
    decides which ids may be listed at all.
    """

    __slots__ = (
        "_key",
        "_me",
        "_members_max",
        "_members_min",
        "_place",
        "admits",
        "depth",
        "joining",
        "whole",
    )

    def __init__(self, me: PeerId, place: Place | None, *, members_min: int, members_max: int) -> None:
        self.whole = place is None
        self.joining = False
        self.admits: Callable[[PeerId], bool] | None = None
        self.depth = 0
        self._me = me
        self._place = place or _everywhere
        self._key = self._place(me)
        self._members_min = members_min
        self._members_max = members_max

    def may_list(self, peer: PeerId) -> bool:
        """Return whether this id may be listed at all."""
        return self.admits is None or self.admits(peer)

    def holds(self, peer: PeerId) -> bool:
        """Return whether `peer` is in our scope, so that we list it if it is alive."""
        if not self.may_list(peer):
            return False
        if self.joining:
            return peer == self._me
        return self.depth == 0 or self._shared(peer) >= self.depth

    def held_by(self, peer: PeerId, depth: int) -> bool:
        """Return whether we are in the scope of `peer`, if that scope has this depth."""
        return self._shared(peer) >= depth

    def common(self, peer: PeerId, depth: int) -> KeyRegion | None:
        """Return the region shared by our scope and that of `peer`, which has this depth; None if they do not
        overlap."""
        if self._shared(peer) < min(depth, self.depth):
            return None
        return self.around(peer, depth) if depth > self.depth else self.around(self._me, self.depth)

    def around(self, peer: PeerId, depth: int) -> KeyRegion:
        """Return the neighbourhood of `peer` at this depth."""
        return KeyRegion(self._place, self._place(peer), depth)

    def fit(self, live: Iterable[PeerId]) -> int:
        """Return the depth for these `live` members: deeper, unchanged, or one step less deep.

        It is deeper if there are too many members, or if nearly all are in our own half, which shows that
        most of the other half is unknown. In both cases enough members must be left.
        """
        place, key = self._place, self._key
        shared = [KEY_BITS - (key ^ place(peer)).bit_length() for peer in live]
        inside = [bits for bits in shared if bits >= self.depth]
        if len(inside) < self._members_min:
            return max(self.depth - 1, 0)
        # Half way between the minimum and half of the maximum, so that one step deeper is not too deep.
        enough = (self._members_min + self._members_max / 2) / 2
        depth = self.depth
        while depth < DEPTH_MAX:
            nearer = [bits for bits in inside if bits > depth]
            farther = len(inside) - len(nearer)
            # The halves may differ by chance, but not by four standard deviations.
            fits = len(inside) <= self._members_max and farther >= len(inside) / 2 - 2 * math.sqrt(
                len(inside)
            )
            if fits or len(nearer) < enough:
                break
            depth, inside = depth + 1, nearer
        return depth

    def lopsided(self, live: Iterable[PeerId]) -> bool:
        """Return whether far too few of the `live` members are in the other half of the scope. By chance,
        this happens to one in a thousand such lists of eight, and to none of two hundred."""
        shared = [KEY_BITS - (self._key ^ self._place(peer)).bit_length() for peer in live]
        inside = sum(bits >= self.depth for bits in shared)
        farther = sum(bits == self.depth for bits in shared)
        return inside >= self._members_min and farther * LOPSIDED_SHARE < inside

    def crowded(self, live: int) -> bool:
        return not self.whole and live > self._members_max

    def lonely(self, live: int) -> bool:
        return self.depth > 0 and live < self._members_min

    def own_key(self) -> bytes:
        """Return the key whose neighbours are nearest to us."""
        return _as_bytes(self._key)

    def key_beyond(self) -> bytes:
        """Return the nearest key in the other half of our scope."""
        return _as_bytes(self._key ^ 1 << KEY_BITS - 1 - self.depth)

    def random_key(self, rng: Random) -> bytes:
        """Return a random key in our scope."""
        free = KEY_BITS - self.depth
        return _as_bytes(self._key >> free << free | rng.getrandbits(free))

    def _shared(self, peer: PeerId) -> int:
        return KEY_BITS - (self._key ^ self._place(peer)).bit_length()


def _everywhere(_peer: PeerId) -> int:
    return 0


def _as_bytes(key: int) -> bytes:
    return key.to_bytes(KEY_BITS // 8, "big")
