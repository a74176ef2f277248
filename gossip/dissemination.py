"""The facts waiting to be passed on, each a bounded number of times (SWIM section 4.1).

Least passed on first, the newest first among equals, so that news overtakes what many know. A
newer fact about a member replaces the older ones, except that several accusers' suspicions of
one member wait side by side: they are independent confirmations (Lifeguard).
"""

from collections.abc import Iterator, Sequence

from crypto.facts import Fact
from crypto.identity import PeerId
from gossip.messages import FACTS_MAX, fact_bytes

_SMALLEST_BYTES = 110
"""No Ed25519 fact is smaller; with less room left it is not worth looking on."""
_MISFITS_MAX = 16
"""After so many facts too large for the room left, a message is full enough."""


class Dissemination:
    """A queue in tiers: tier t holds the facts sent t times, oldest first."""

    def __init__(self) -> None:
        self._tiers: list[dict[bytes, Fact]] = []
        self._tier_of: dict[bytes, int] = {}
        # Per subject the keys (signatures) of its waiting facts; bounded by members and confirmations.
        self._keys_of: dict[PeerId, list[bytes]] = {}
        self._subject_of: dict[bytes, PeerId] = {}

    def __len__(self) -> int:
        return len(self._tier_of)

    def put(self, subject: PeerId, fact: Fact, *, beside: bool = False) -> None:
        """Let `fact` about `subject` travel; it replaces older ones unless it stands `beside` them."""
        if not beside:
            self.drop(subject)
        key = fact.signature
        if key not in self._tier_of:
            self._keys_of.setdefault(subject, []).append(key)
            self._subject_of[key] = subject
            self._place(key, fact, 0)

    def drop(self, subject: PeerId) -> None:
        """Pass on nothing more about `subject`."""
        for key in list(self._keys_of.get(subject, ())):
            self._remove(key)

    def take(self, transmits_max: int, bytes_max: int, first: Sequence[Fact] = ()) -> tuple[Fact, ...]:
        """Facts for one message of at most `bytes_max`: `first`, then those due. Counts them as sent.

        A fact sent `transmits_max` times is dropped.
        """
        chosen = list(first)
        room = bytes_max - sum(fact_bytes(fact) for fact in chosen)
        taken = [(fact.signature, fact) for fact in chosen if fact.signature in self._tier_of]
        misfits = 0
        for key, fact in self._due():
            if len(chosen) >= FACTS_MAX or room < _SMALLEST_BYTES or misfits >= _MISFITS_MAX:
                break
            if fact_bytes(fact) > room:
                misfits += 1
            elif fact not in first:
                room -= fact_bytes(fact)
                chosen.append(fact)
                taken.append((key, fact))
        for key, fact in taken:
            self._sent(key, fact, transmits_max)
        return tuple(chosen)

    def _due(self) -> Iterator[tuple[bytes, Fact]]:
        for tier in self._tiers:
            yield from reversed(tier.items())

    def _sent(self, key: bytes, fact: Fact, transmits_max: int) -> None:
        tier = self._tier_of[key] + 1
        if tier >= transmits_max:
            self._remove(key)
        else:
            del self._tiers[tier - 1][key]
            self._place(key, fact, tier)

    def _place(self, key: bytes, fact: Fact, tier: int) -> None:
        while len(self._tiers) <= tier:
            self._tiers.append({})
        self._tiers[tier][key] = fact
        self._tier_of[key] = tier

    def _remove(self, key: bytes) -> None:
        del self._tiers[self._tier_of.pop(key)][key]
        subject = self._subject_of.pop(key)
        keys = self._keys_of[subject]
        keys.remove(key)
        if not keys:
            del self._keys_of[subject]
