"""The weighted mean gives the same bytes in any order of decoding, with only a few members' chunks in memory
at a time.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from crypto.identity import PeerId
from gossip.averaging.robust.reduction import BLOCK_ITEMS, MEMBERS_AT_ONCE, Vector, weighted_mean

SIZES = (2 * BLOCK_ITEMS, 2 * BLOCK_ITEMS, BLOCK_ITEMS + 77)


@dataclass
class _Part:
    """A member's chunks. Each is decoded anew at each use, as with a lossy codec; `alive` counts the decoded
    chunks still in memory."""

    peer: PeerId
    weight: float
    vectors: list[Vector]
    alive: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def chunk_count(self) -> int:
        return len(self.vectors)

    def chunk(self, number: int) -> Vector:
        decoded = self.vectors[number].copy()
        self.alive[0] += 1
        self.alive[1] = max(self.alive)
        weakref.finalize(decoded, self._dropped)
        return decoded

    def _dropped(self) -> None:
        self.alive[0] -= 1


def parts_of(count: int, dtype: str) -> list[_Part]:
    draws = np.random.default_rng(count)
    alive = [0, 0]
    return [
        _Part(
            PeerId(bytes([number]) * 32),
            float(draws.uniform(0.1, 50)),
            [draws.standard_normal(size).astype(dtype) for size in SIZES],
            alive,
        )
        for number in range(count)
    ]


def one_by_one(parts: Sequence[_Part], number: int) -> Vector:
    """Return the sum by definition: in float64, member after member."""
    sums = parts[0].vectors[number].astype(np.float64) * parts[0].weight
    for part in parts[1:]:
        sums += part.vectors[number].astype(np.float64) * part.weight
    mean: Vector = (sums / sum(part.weight for part in parts)).astype(parts[0].vectors[number].dtype)
    return mean


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [1, 2, MEMBERS_AT_ONCE, MEMBERS_AT_ONCE + 1, 3 * MEMBERS_AT_ONCE, 64])
def test_the_mean_is_exact_with_few_chunks_decoded_at_once(count: int, dtype: str) -> None:
    parts = parts_of(count, dtype)
    found = list(weighted_mean(parts))
    assert [chunk.dtype for chunk in found] == [np.dtype(dtype)] * len(SIZES)
    for number, chunk in enumerate(found):
        assert chunk.tobytes() == one_by_one(parts, number).tobytes()
    assert parts[0].alive[1] == min(count, MEMBERS_AT_ONCE)


def test_the_mean_of_equal_vectors_is_that_vector() -> None:
    parts = parts_of(7, "float32")
    for part in parts:
        part.vectors = parts[0].vectors
    for vector, chunk in zip(parts[0].vectors, weighted_mean(parts), strict=True):
        assert np.allclose(vector, chunk, rtol=1e-6)
