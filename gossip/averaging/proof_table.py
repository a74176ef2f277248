"""The proofs of lies that a node keeps, bounded in number: pure.

An identity costs nothing, so a liar could create many identities that prove themselves liars, in order to
push out its own proof. So the first proofs to be evicted are those whose authors this node knows least
(`ProofStanding`); only among equals the oldest goes first. The proof against a peer that completed rounds
with this node is evicted only if all proofs here are against such peers.
"""

from collections.abc import Callable, Iterable
from enum import IntEnum

import msgspec

from crypto.identity import PeerId
from gossip.averaging.evidence import Evidence

KEPT_MAX = 256
"""Maximum number of proofs, of all runs together."""


class ProofStanding(IntEnum):
    """How well this node knows a peer in one run."""

    UNKNOWN = 0
    LISTED = 1
    """The peer is in the run's roster, admitted or not."""
    COMPLETED = 2
    """The peer took part in rounds that this node completed."""


class KeptProof(msgspec.Struct, frozen=True, array_like=True):
    """A proof, and the `standing` of its author when the proof was received."""

    evidence: Evidence
    standing: ProofStanding


class ProofTable:
    """The proofs that are kept. `standing` is a function that returns a peer's standing in the run with the
    given key."""

    def __init__(self, standing: Callable[[bytes, PeerId], ProofStanding], kept_max: int = KEPT_MAX) -> None:
        self._standing = standing
        self._kept_max = kept_max
        self._kept: dict[tuple[bytes, PeerId], KeptProof] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: object) -> bool:
        """Return whether there is a proof for (run, peer)."""
        return key in self._kept

    @property
    def kept(self) -> tuple[KeptProof, ...]:
        """All proofs, the oldest first."""
        return tuple(self._kept.values())

    def of_run(self, run: bytes) -> list[tuple[PeerId, Evidence]]:
        """Return the proofs against liars of one run, ordered by standing; among equals the newest first."""
        rows = [(liar, kept) for (each, liar), kept in self._kept.items() if each == run]
        rows.sort(key=lambda row: self._rank((run, row[0]), row[1]))
        return [(liar, kept.evidence) for liar, kept in reversed(rows)]

    def load(self, proofs: Iterable[tuple[PeerId, KeptProof]]) -> None:
        """Load the proofs kept before a restart."""
        for liar, kept in proofs:
            self._kept[kept.evidence.group.name, liar] = kept

    def add(self, liar: PeerId, evidence: Evidence) -> bool:
        """Keep a proof, and return whether it was kept. If the table is full, it replaces the oldest of those
        with the lowest standing, unless that standing is higher than the standing of `liar`."""
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
        """Return the higher of an author's two standings: when the proof was received, and now."""
        return max(kept.standing, self._standing(*key))
