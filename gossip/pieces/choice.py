"""The choice of the pieces to request from a peer: first the most urgent, then the rarest, then the
requesting peer's own share.

Among equally rare pieces, each peer begins with its own share, which is determined by a hash of the piece's
number. So peers that know little of each other's requests seldom ask a source for the same piece.
"""

from random import Random
from typing import Any

import numpy as np

Bits = np.ndarray[Any, np.dtype[np.bool_]]
Counts = np.ndarray[Any, np.dtype[np.int64]]

_RARITY_MAX = (1 << 12) - 1
_SHARES_MAX = 1 << 10
_NOISE = 1 << 16


class Choice:
    """One peer's order of preference over `count` pieces."""

    def __init__(self, count: int, rng: Random) -> None:
        # A multiplicative hash (Knuth), the same for all peers.
        self._mixed = (np.arange(count, dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(7)).astype(
            np.int64
        )
        self._noise = np.frombuffer(rng.randbytes(2 * count), "<u2").astype(np.int64)

    def pick(
        self,
        possible: Bits,
        urgency: Counts,
        holders: Counts,
        *,
        place: int,
        shares: int,
        limit: int,
    ) -> list[int]:
        """Return at most `limit` of the `possible` pieces, best first.

        A piece with a lower `urgency` is needed sooner; `holders` counts the holders of each piece. This peer
        is number `place` of the `shares` peers that fetch.
        """
        found = np.flatnonzero(possible)
        if not len(found) or limit <= 0:
            return []
        shares = min(max(1, shares), _SHARES_MAX)
        rank = (self._mixed[found] - place) % shares
        score = urgency[found]
        score = score * (_RARITY_MAX + 1) + np.minimum(holders[found], _RARITY_MAX)
        score = (score * _SHARES_MAX + rank) * _NOISE + self._noise[found]
        if len(found) > limit:
            best = np.argpartition(score, limit - 1)[:limit]
            found, score = found[best], score[best]
        return [int(number) for number in found[np.argsort(score, kind="stable")]]
