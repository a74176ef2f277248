"""A member's own share of the training data, determined by rendezvous hashing over the members.

The data is divided into fixed buckets, and each belongs to the member with the lowest hash for it. So members
with the same view hold disjoint shards, a death spreads one shard over the others, and no messages are
needed.
"""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from blake3 import blake3

from crypto.identity import PeerId

BUCKETS_MAX = 1_024
"""Maximum number of buckets: enough that the shares of eight members are within some 10 % of each other."""


def own_buckets(run: bytes, buckets: int, me: PeerId, others: Collection[PeerId]) -> list[int]:
    """Return the buckets that belong to `me`: those for which its 64-bit weight is below all others'.

    A member's weights are one stream of BLAKE3 output, so that a change among a thousand members takes only
    milliseconds of the event loop.
    """

    def weights(peer: PeerId) -> "np.ndarray[Any, np.dtype[np.uint64]]":
        return np.frombuffer(blake3(run + peer).digest(length=8 * buckets), "<u8")

    mine = weights(me)
    is_own = np.ones(buckets, bool)
    for peer in others:
        theirs = weights(peer)
        is_own &= (mine < theirs) | ((mine == theirs) & (me < peer))
    return [int(bucket) for bucket in np.flatnonzero(is_own)]


class Shard:
    """The samples of the member `me`, drawn without end. Each pass has every sample once, in a new order."""

    def __init__(self, run: bytes, seed: int, samples: int, me: PeerId, *, is_whole: bool = False) -> None:
        """With `is_whole`, all samples belong to this member, however many others train."""
        self._is_whole = is_whole
        self._run = run
        self._me = me
        self._samples = samples
        self._rng = np.random.default_rng(
            int.from_bytes(blake3(run + me + seed.to_bytes(8, "big")).digest()[:16], "big")
        )
        self._buckets = min(BUCKETS_MAX, samples)
        # Neighbours in a file are often alike, so each bucket is drawn from the whole file.
        self._order = np.random.default_rng((seed, samples)).permutation(samples)
        self._members: frozenset[PeerId] = frozenset()
        self._rows: list[int] = []
        self._left: Iterator[int] = iter(())
        self.set_members([me])

    @property
    def rows(self) -> list[int]:
        """The samples of this shard, sorted."""
        return self._rows

    def set_members(self, members: Collection[PeerId]) -> None:
        """Set the members that train, including `me`. A change begins a new pass."""
        found = frozenset([self._me]) if self._is_whole else frozenset(members) | {self._me}
        if found == self._members:
            return
        self._members = found
        own = own_buckets(self._run, self._buckets, self._me, found - {self._me})
        # If there are more members than buckets, a member without a bucket draws from all samples.
        places = np.isin(np.arange(self._samples) % self._buckets, own or range(self._buckets))
        self._rows = sorted(int(row) for row in self._order[places])
        self._left = iter(())

    def take(self, count: int) -> list[int]:
        """Return the next samples."""
        found: list[int] = []
        while len(found) < count:
            row = next(self._left, None)
            if row is None:
                self._left = iter(self._rng.permutation(self._rows).tolist())
            else:
                found.append(row)
        return found
