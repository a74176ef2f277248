"""What one node measured of others' work, and what of it they have not signed yet."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from crypto.identity import PeerId
from node.runs.receipts_file import EARNED_MAX
from partition.run.receipts import FLOPS_MAX, SIZE_BYTES_MAX, Kind, Row

ISSUED_BYTES_MIN = 1 << 20
"""Less is not worth two signatures and a call; it is added to what comes later."""
TOTALS_MAX = 2 * EARNED_MAX
"""Totals of runs and peers; the oldest are forgotten, and count from nothing if they come again."""

Key = tuple[bytes, PeerId, Kind]
"""A run, another peer, and what was done."""
Counts = dict[tuple[int, int], int]
"""Micro-batches by the layers of a stage."""


@dataclass
class Total:
    """What was measured of one provider in one run, in all."""

    requester: PeerId
    flops: int = 0
    microbatches: int = 0
    size_bytes: int = 0
    signed_bytes: int = 0

    def add_work(self, flops: int, microbatches: int) -> None:
        """Count micro-batches that the provider had."""
        self.flops = min(FLOPS_MAX, self.flops + flops)
        self.microbatches = min(FLOPS_MAX, self.microbatches + microbatches)

    def add_bytes(self, size_bytes: int) -> None:
        """Count bytes that it sent."""
        self.size_bytes = min(SIZE_BYTES_MAX, self.size_bytes + size_bytes)

    @property
    def is_due(self) -> bool:
        """Whether there is enough that is not signed."""
        return bool(self.flops) or self.size_bytes - self.signed_bytes >= ISSUED_BYTES_MIN


@dataclass
class Totals:
    """Those of one node. `counts` wait for what their micro-batches take to be known."""

    counts: dict[tuple[bytes, PeerId], Counts] = field(default_factory=dict)
    unsigned: dict[Key, int] = field(default_factory=dict)
    """How often it was tried in vain to have these signed."""
    _all: dict[Key, Total] = field(default_factory=dict)

    def load(self, key: Key, row: Row) -> None:
        """Go on from a receipt."""
        self._all[key] = Total(row.requester, row.flops, row.microbatches, row.size_bytes, row.size_bytes)

    def of(self, key: Key) -> Total:
        """Return the total of a key that is `unsigned`."""
        return self._all[key]

    def grow(self, key: Key, requester: PeerId) -> Total:
        """Return the total of a key, which is to be signed again."""
        total = self._all.setdefault(key, Total(requester))
        self.unsigned[key] = 0
        while len(self._all) > TOTALS_MAX:
            oldest = next(iter(self._all))
            del self._all[oldest]
            self.unsigned.pop(oldest, None)
        return total

    def count(self, run: bytes, peer: PeerId, layers: tuple[int, int], microbatches: int) -> None:
        """Note micro-batches of a stage."""
        counted = self.counts.setdefault((run, peer), {})
        counted[layers] = counted.get(layers, 0) + microbatches

    def take_counts(self) -> dict[tuple[bytes, PeerId], Counts]:
        """Return the micro-batches since the last time."""
        counts, self.counts = self.counts, {}
        return counts

    def due(self) -> Iterator[Key]:
        """The keys of which enough is not signed."""
        return (key for key in list(self.unsigned) if self._all[key].is_due)

    def is_of(self, run: bytes) -> bool:
        """Return whether something of a run is not signed."""
        return any(key[0] == run for key in (*self.counts, *self.unsigned))
