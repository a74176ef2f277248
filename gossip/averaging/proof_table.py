"""The proofs of lies that a node keeps, bounded in number: pure.

An identity costs nothing, so a liar could make many that each prove themselves liars, to push out its own
proof. Proofs are therefore evicted by how well this node knows their authors (`ProofStanding`), and only
among equals by age. So only as many proofs against
"""

from collections.abc import Callable, Iterable
from enum import IntEnum

import msgspec

from crypto.identity import PeerId
from gossip.averaging.evidence import Evidence

KEPT_MAX = 256
"""Proofs of all runs."""


class ProofStanding(IntEnum):
    """How well this node knows a peer in one run."""

    UNKNOWN = 0
    LISTED = 1
    """It is in the run's roster, admitted or not."""
    COMPLETED = 2
    """It was in rounds that this node completed."""


class KeptProof(msgspec.Struct, frozen=True, array_like=True):
    """A proof; `standing` is its author's when the proof came."""

    evidence: Evidence
    standing: ProofStanding


class ProofTable:
    """Kept proofs. `standing` returns a peer's standing in the run of a key."""

    def __init__(self, standing: Callable[[bytes, PeerId], ProofStanding], kept_max: int = KEPT_MAX) -> None:
        self._standing = standing
        self._kept_max = kept_max
        self._kept: dict[tuple[bytes, PeerId], KeptProof] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: object) -> bool:
        """Return whether (run, peer) has a proof here."""
        return key in self._kept

    @property
    def kept(self) -> tuple[KeptProof, ...]:
        """All kept proofs, the oldest first."""
        return tuple(self._kept.values())

    def of_run(self, run: bytes) -> list[tuple[PeerId, Evidence]]:
        """Return the proofs against liars of one run, by standing, among equals the newest first."""
        rows = [(liar, kept) for (each, liar), kept in self._kept.items() if each == run]
        rows.sort(key=lambda row: self._rank((run, row[0]), row[1]))
        return [(liar, kept.evidence) for liar, kept in reversed(rows)]

    def load(self, proofs: Iterable[tuple[PeerId, KeptProof]]) -> None:
        """Load the proofs kept before a restart."""
        for liar, kept in proofs:
            self._kept[kept.evidence.group.name, liar] = kept

    def add(self, liar: PeerId, evidence: Evidence) -> bool:
        """Keep a proof. If the table is full, it replaces one whose author has a lower standing, or the same
        and an older proof. Return whether it is kept."""
        run = evidence.group.name
        newest = KeptProof(evidence, self._standing(run, liar))
        if len(self._kept) >= self._kept_max and (run, liar) not in self._kept:
            lowest = min(self._kept, key=lambda key: self._rank(key, self._kept[key]))
            if self._rank(lowest, self._kept[lowest]) > newest.standing:
                return False
            del self._kept[lowest]
        self._kept[run, liar] = newest
        return True

    def _rank(self, key: tuple[bytes, PeerId], kept: KeptProof) -> ProofStanding:
        """Return the highest standing that an author was seen to have: when the proof came, or now."""
        return max(kept.standing, self._standing(*key))
