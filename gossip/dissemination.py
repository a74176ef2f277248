"""The facts waiting to be passed on, each a bounded number of times (SWIM section 4.1).

Least passed on first, the newest first among equals, so that news overtakes what many know. A
newer fact about a member replaces the older ones, except that several accusers' suspicions of
one member wait side by side: they are independent confirmations (Lifeguard).
"""

from collections.abc import Iterator, Sequence

import msgspec

from crypto.facts import Fact
from crypto.identity import PeerId
from gossip.messages import FACTS_MAX, fact_bytes

_SMALLEST_BYTES = 110
"""No Ed25519 fact is smaller; with less room left it is not worth looking on."""
_MISFITS_MAX = 16
"""After so many facts too large for the room left, a message is full enough."""


class _Item(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A fact that waits; `size` as in a message, `sent` so often. Small, for where a swarm starts all facts
    of all wait at all; and no part of a cycle."""

    subject: PeerId
    fact: Fact
    size: int
    sent: int = 0


class Dissemination:
    """A queue in tiers: tier t holds the facts sent t times, oldest first. A fact goes by its signature.

    `waits` says whether anything is in it.
    """

    def __init__(self) -> None:
        self.waits = False
        self._tiers: list[dict[bytes, _Item]] = []
        self._items: dict[bytes, _Item] = {}
        # Per subject the keys of its waiting facts; bounded by members and confirmations.
        self._keys_of: dict[PeerId, tuple[bytes, ...]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def put(self, subject: PeerId, fact: Fact, *, beside: bool = False) -> None:
        """Let `fact` about `subject` travel; it replaces older ones unless it stands `beside` them."""
        if not beside:
            self.drop(subject)
        key = fact.signature
        if key not in self._items:
            self._keys_of[subject] = (*self._keys_of.get(subject, ()), key)
            item = self._items[key] = _Item(subject, fact, fact_bytes(fact))
            self.waits = True
            self._tier(0)[key] = item

    def drop(self, subject: PeerId) -> None:
        """Pass on nothing more about `subject`."""
        for key in self._keys_of.get(subject, ()):
            self._remove(key)

    def take(self, transmits_max: int, bytes_max: int, first: Sequence[Fact] = ()) -> tuple[Fact, ...]:
        """Facts for one message of at most `bytes_max`: `first`, then those due. Counts them as sent.

        A fact sent `transmits_max` times is dropped.
        """
        if not self._items:
            return tuple(first)
        chosen = list(first)
        room = bytes_max - sum(map(fact_bytes, chosen))
        taken = [fact.signature for fact in chosen if fact.signature in self._items]
        misfits = 0
        for key, item in self._due():
            if len(chosen) >= FACTS_MAX or room < _SMALLEST_BYTES or misfits >= _MISFITS_MAX:
                break
            if item.size > room:
                misfits += 1
            elif not first or item.fact not in first:
                room -= item.size
                chosen.append(item.fact)
                taken.append(key)
        for key in taken:
            self._sent(key, transmits_max)
        return tuple(chosen)

    def _due(self) -> Iterator[tuple[bytes, _Item]]:
        for tier in self._tiers:
            if tier:
                yield from reversed(tier.items())

    def _sent(self, key: bytes, transmits_max: int) -> None:
        item = self._items[key]
        if item.sent + 1 >= transmits_max:
            self._remove(key)
        else:
            del self._tiers[item.sent][key]
            again = _Item(item.subject, item.fact, item.size, item.sent + 1)
            self._items[key] = self._tier(again.sent)[key] = again

    def _tier(self, sent: int) -> dict[bytes, _Item]:
        while len(self._tiers) <= sent:
            self._tiers.append({})
        return self._tiers[sent]

    def _remove(self, key: bytes) -> None:
        item = self._items.pop(key)
        del self._tiers[item.sent][key]
        keys = tuple(other for other in self._keys_of.pop(item.subject) if other != key)
        if keys:
            self._keys_of[item.subject] = keys
        if not self._items:
            # Fresh ones: a dict keeps its size when it is emptied, and is slow to walk where it was.
            self._tiers, self._items, self._keys_of = [], {}, {}
            self.waits = False
