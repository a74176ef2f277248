"""One node's measurements of other peers' work, and the part of them that those peers have not signed yet."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from crypto.identity import PeerId
from node.runs.receipts_file import EARNED_MAX
from partition.run.receipts import FLOPS_MAX, SIZE_BYTES_MAX, Kind, ReceiptRow

TOTALS_MAX = 2 * EARNED_MAX
"""Maximum number of totals of a run and a peer. The oldest are forgotten; they restart at zero if more is
measured."""

Key = tuple[bytes, PeerId, Kind]
"""A run, the other peer, and the kind of contribution."""
Counts = dict[tuple[int, int], int]
"""Number of micro-batches by the layers of a stage."""


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
        """Return whether the unsigned part is worth a signature: any computing, or enough bytes."""
        return bool(self.flops) or self.size_bytes - self.signed_bytes >= bytes_min


@dataclass
class Totals:
    """The totals of one node. `counts` has micro-batches whose cost is not known yet; `unsigned` has, for
    each total with an unsigned part, the number of failed attempts to have it signed."""

    counts: dict[tuple[bytes, PeerId], Counts] = field(default_factory=dict)
    unsigned: dict[Key, int] = field(default_factory=dict)
    issued_bytes_min: int = 1
    """Minimum number of unsigned bytes that are worth a signature."""
    _all: dict[Key, Total] = field(default_factory=dict)

    def load(self, key: Key, row: ReceiptRow) -> None:
        """Restore a total from a receipt."""
        self._all[key] = Total(row.requester, row.flops, row.microbatches, row.size_bytes, row.size_bytes)

    def of(self, key: Key) -> Total:
        """Return the total of a key in `unsigned`."""
        return self._all[key]

    def grow(self, key: Key, requester: PeerId) -> Total:
        """Return the total of a key, creating it if necessary, and mark it as unsigned."""
        total = self._all.setdefault(key, Total(requester))
        self.unsigned[key] = 0
        while len(self._all) > TOTALS_MAX:
            oldest = next(iter(self._all))
            del self._all[oldest]
            self.unsigned.pop(oldest, None)
        return total

    def count(self, run: bytes, peer: PeerId, layers: tuple[int, int], microbatches: int) -> None:
        """Add micro-batches that a peer computed with these layers."""
        counted = self.counts.setdefault((run, peer), {})
        counted[layers] = counted.get(layers, 0) + microbatches

    def take_counts(self) -> dict[tuple[bytes, PeerId], Counts]:
        """Return the micro-batches counted since the previous call."""
        counts, self.counts = self.counts, {}
        return counts

    def due(self) -> Iterator[Key]:
        """Yield the keys whose unsigned part is worth a signature."""
        return (key for key in list(self.unsigned) if self._all[key].is_due(self.issued_bytes_min))

    def is_of(self, run: bytes) -> bool:
        """Return whether a run has unsigned or uncounted work."""
        return any(key[0] == run for key in (*self.counts, *self.unsigned))
