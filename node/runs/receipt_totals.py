"""One node's measurements of others' work, and the part that they have not signed yet."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from crypto.identity import PeerId
from node.runs.receipts_file import EARNED_MAX
from partition.run.receipts import FLOPS_MAX, SIZE_BYTES_MAX, Kind, ReceiptRow

TOTALS_MAX = 2 * EARNED_MAX
"""Totals of runs and peers; the oldest are forgotten, and start at zero if they return."""

Key = tuple[bytes, PeerId, Kind]
"""A run, another peer, and the kind of contribution."""
Counts = dict[tuple[int, int], int]
"""Micro-batches by the layers of a stage."""


@dataclass
class Total:
    """The total measured contribution of one provider in one run."""

    requester: PeerId
    flops: int = 0
    microbatches: int = 0
    size_bytes: int = 0
    signed_bytes: int = 0

    def add_work(self, flops: int, microbatches: int) -> None:
        """Add micro-batches that the provider computed."""
        self.flops = min(FLOPS_MAX, self.flops + flops)
        self.microbatches = min(FLOPS_MAX, self.microbatches + microbatches)

    def add_bytes(self, size_bytes: int) -> None:
        """Add bytes that the provider sent."""
        self.size_bytes = min(SIZE_BYTES_MAX, self.size_bytes + size_bytes)

    def is_due(self, bytes_min: int) -> bool:
        """Return whether the unsigned part is large enough to be signed: some work, or enough bytes."""
        return bool(self.flops) or self.size_bytes - self.signed_bytes >= bytes_min


@dataclass
class Totals:
    """The totals of one node. `counts` wait until the cost of their micro-batches is known."""

    counts: dict[tuple[bytes, PeerId], Counts] = field(default_factory=dict)
    unsigned: dict[Key, int] = field(default_factory=dict)
    issued_bytes_min: int = 1
    """The number of failed attempts to have each of these signed."""
    _all: dict[Key, Total] = field(default_factory=dict)

    def load(self, key: Key, row: ReceiptRow) -> None:
        """Continue a total from a receipt."""
        self._all[key] = Total(row.requester, row.flops, row.microbatches, row.size_bytes, row.size_bytes)

    def of(self, key: Key) -> Total:
        """Return the total of a key that is `unsigned`."""
        return self._all[key]

    def grow(self, key: Key, requester: PeerId) -> Total:
        """Return the total of a key and mark it as unsigned."""
        total = self._all.setdefault(key, Total(requester))
        self.unsigned[key] = 0
        while len(self._all) > TOTALS_MAX:
            oldest = next(iter(self._all))
            del self._all[oldest]
            self.unsigned.pop(oldest, None)
        return total

    def count(self, run: bytes, peer: PeerId, layers: tuple[int, int], microbatches: int) -> None:
        """Add micro-batches of a stage."""
        counted = self.counts.setdefault((run, peer), {})
        counted[layers] = counted.get(layers, 0) + microbatches

    def take_counts(self) -> dict[tuple[bytes, PeerId], Counts]:
        """Return the micro-batches counted since the last call."""
        counts, self.counts = self.counts, {}
        return counts

    def due(self) -> Iterator[Key]:
        """Yield the keys with a large enough unsigned part."""
        return (key for key in list(self.unsigned) if self._all[key].is_due(self.issued_bytes_min))

    def is_of(self, run: bytes) -> bool:
        """Return whether a run has an unsigned part."""
        return any(key[0] == run for key in (*self.counts, *self.unsigned))
