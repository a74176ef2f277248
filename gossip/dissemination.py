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


class _Item:
    """A fact that waits; `size` as in a message, `sent` so often. Small, for where a swarm starts all facts
    of all wait at all."""

    __slots__ = ("fact", "sent", "size", "subject")

    def __init__(self, subject: PeerId, fact: Fact) -> None:
        self.subject = subject
        self.fact = fact
        self.size = fact_bytes(fact)
        self.sent = 0


class Dissemination:
    """A queue in tiers: tier t holds the facts sent t times, oldest first. A fact goes by its signature.

    `waits` says whether anything is in it.
    """

    __slots__ = ("_about", "_count", "_tiers", "waits")

    def __init__(self) -> None:
        self.waits = False
        self._count = 0
        self._tiers: list[dict[bytes, _Item]] = []
        # What waits about each subject; bounded by members and confirmations.
        self._about: dict[PeerId, tuple[_Item, ...]] = {}

    def __len__(self) -> int:
        return self._count

    def put(self, subject: PeerId, fact: Fact, *, beside: bool = False) -> None:
        """Let `fact` about `subject` travel; it replaces older ones unless it stands `beside` them."""
        if not beside:
            self.drop(subject)
        others = self._about.get(subject, ())
        if any(other.fact.signature == fact.signature for other in others):
            return
        item = _Item(subject, fact)
        self._about[subject] = (*others, item)
        self._tier(0)[fact.signature] = item
        self._count += 1
        self.waits = True

    def drop(self, subject: PeerId) -> None:
        """Pass on nothing more about `subject`."""
        for item in self._about.get(subject, ()):
            self._remove(item)

    def take(self, transmits_max: int, bytes_max: int, first: Sequence[Fact] = ()) -> tuple[Fact, ...]:
        """Facts for one message of at most `bytes_max`: `first`, then those due. Counts them as sent.

        A fact sent `transmits_max` times is dropped.
        """
        if not self.waits:
            return tuple(first)
        chosen = list(first)
        room = bytes_max - sum(map(fact_bytes, chosen))
        taken = [item for fact in chosen for tier in self._tiers if (item := tier.get(fact.signature))]
        misfits = 0
        for item in self._due():
            if len(chosen) >= FACTS_MAX or room < _SMALLEST_BYTES or misfits >= _MISFITS_MAX:
                break
            if item.size > room:
                misfits += 1
            elif not first or item.fact not in first:
                room -= item.size
                chosen.append(item.fact)
                taken.append(item)
        for item in taken:
            self._sent(item, transmits_max)
        return tuple(chosen)

    def _due(self) -> Iterator[_Item]:
        for tier in self._tiers:
            if tier:
                yield from reversed(tier.values())

    def _sent(self, item: _Item, transmits_max: int) -> None:
        if item.sent + 1 >= transmits_max:
            self._remove(item)
        else:
            key = item.fact.signature
            del self._tiers[item.sent][key]
            item.sent += 1
            self._tier(item.sent)[key] = item

    def _tier(self, sent: int) -> dict[bytes, _Item]:
        while len(self._tiers) <= sent:
            self._tiers.append({})
        return self._tiers[sent]

    def _remove(self, item: _Item) -> None:
        del self._tiers[item.sent][item.fact.signature]
        rest = tuple(other for other in self._about.pop(item.subject) if other is not item)
        if rest:
            self._about[item.subject] = rest
        self._count -= 1
        if not self._count:
            # Fresh ones: a dict keeps its size when it is emptied, and is slow to walk where it was.
            self._tiers, self._about = [], {}
            self.waits = False
