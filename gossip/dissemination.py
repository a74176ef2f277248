"""The queue of facts to be passed on, each a bounded number of times (SWIM section 4.1).

Facts with the fewest sends go first, among equals the newest, so that news overtakes known facts. A newer
fact about a member replaces older ones. The exception is suspicions of one member by several accusers, which
are kept together because they confirm it independently (Lifeguard). Users' broadcasts get the room that
membership facts leave.
"""

from collections.abc import Iterator, Sequence

from crypto.facts import Fact
from crypto.identity import PeerId
from crypto.token_buckets import Buckets, TokenBucket
from gossip.messages import FACTS_MAX, fact_bytes

_SMALLEST_BYTES = 110
"""The size of the smallest Ed25519 fact. The search ends when less room than this is left."""
_MISFITS_MAX = 16
"""A message counts as full after this many facts were too large for the remaining room."""

DEAD_SENDS = 6
"""Number of sends of a dead fact. A few are enough, because the peers that hold the suspicion end it at about
the same time, by their own probes."""
REFUTATION_SENDS = 4
"""Number of sends of a refutation. A few are enough, because only peers that suspect us need it, and they
pass it on."""
CHANGES_MAX = 2.0
CHANGE_INTERVALS = 300.0
"""Limit on passing on changes of one member (a new profile, a return, a goodbye), because each costs every
member some sends: the burst size, and the number of probe intervals after which one more is allowed. Further
changes spread only by Syncs."""
CHANGED_SENDS = 4
"""Number of sends of a change that follows another one soon. With four sends each, one change in fifty
spreads only by Syncs."""
ALL_CHANGES_MAX = 4.0
ALL_CHANGE_INTERVALS = 10.0
"""Limit on changes of all members that are sent in full: the burst size, and the number of probe intervals
after which one more is allowed. Beyond it a member's first change is sent CHANGED_SENDS times, and its second
not at all. So a minority that changes constantly costs the others little."""
SENDS_MAX = 1_000
"""Upper bound of `SwimSettings.retransmits`."""
OWN_SENDS_MIN = 12
"""Minimum number of our own sends. If facts are sent to a few random members, a received fact says little
about how widely it is known."""


class Changes:
    """Limits the rate at which changes of members' own descriptions are passed on."""

    __slots__ = ("_all", "_of")

    def __init__(self, interval_seconds: float, members_max: int, now: float) -> None:
        rate = 1 / (CHANGE_INTERVALS * interval_seconds)
        self._of: Buckets[PeerId] = Buckets(rate, CHANGES_MAX, members_max)
        rate = 1 / (ALL_CHANGE_INTERVALS * interval_seconds)
        self._all = TokenBucket(rate, ALL_CHANGES_MAX, ALL_CHANGES_MAX, now)

    def sends(self, member: PeerId, now: float) -> int:
        """Return how many times to send a change of `member`; 0 if it must not be sent."""
        bucket = self._of.of(member, now)
        is_first = bucket.left(now) >= CHANGES_MAX
        if not bucket.take(now):
            return 0
        if self._all.take(now):
            return SENDS_MAX if is_first else CHANGED_SENDS
        return CHANGED_SENDS if is_first else 0


class _Item:
    """A queued fact. `size` is its size in a message, `sent` the number of sends, `heard` the number of
    sends by others. It is kept small, because at the start of a swarm every member queues the facts of all
    members."""

    __slots__ = ("fact", "heard", "is_later", "sends", "sent", "size", "subject")

    def __init__(self, subject: PeerId, fact: Fact, *, is_later: bool) -> None:
        self.subject = subject
        self.fact = fact
        self.is_later = is_later
        self.size = fact_bytes(fact)
        self.sent = 0
        self.heard = 0
        self.sends = SENDS_MAX


class Dissemination:
    """A queue in tiers: tier t holds the facts sent t times, oldest first. Facts are identified by their
    signatures. A fact received from another peer counts as one send, because that peer knows it and spreads
    it. But at least half of all sends, and OWN_SENDS_MIN, must be our own, so that no peer can suppress a
    fact by sending it to us.

    `waits` says whether any fact is queued.
    """

    __slots__ = ("_about", "_items", "_later_tiers", "_tiers", "waits")

    def __init__(self) -> None:
        self.waits = False
        self._items: dict[bytes, _Item] = {}
        self._tiers: list[dict[bytes, _Item]] = []
        self._later_tiers: list[dict[bytes, _Item]] = []
        # Items about each subject; bounded by members and confirmations.
        self._about: dict[PeerId, tuple[_Item, ...]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def put(
        self,
        subject: PeerId,
        fact: Fact,
        *,
        beside: bool = False,
        sends: int = SENDS_MAX,
        is_later: bool = False,
    ) -> None:
        """Queue `fact` about `subject` for at most `sends` sends. It replaces older facts about the subject,
        unless `beside` is set. A fact that `is_later` gets only the room left by other facts."""
        if not beside:
            self.drop(subject)
        others = self._about.get(subject, ())
        if any(other.fact.signature == fact.signature for other in others):
            return
        item = _Item(subject, fact, is_later=is_later)
        self._about[subject] = (*others, item)
        item.sends = sends
        self._tier(item)[fact.signature] = item
        self._items[fact.signature] = item
        self.waits = True

    def heard(self, fact: Fact, transmits_max: int) -> None:
        """Count a send of this fact by another peer, if the fact is queued here."""
        item = self._items.get(fact.signature)
        if item is not None and item.heard < min(transmits_max // 2, transmits_max - OWN_SENDS_MIN):
            item.heard += 1
            self._sent(item, transmits_max)

    def drop(self, subject: PeerId) -> None:
        """Remove all facts about `subject`."""
        for item in self._about.get(subject, ()):
            self._remove(item)

    def take(self, transmits_max: int, bytes_max: int, first: Sequence[Fact] = ()) -> tuple[Fact, ...]:
        """Return the facts for one message of at most `bytes_max`, and count them as sent. `first` comes
        first, followed by the queued facts that are due.

        A fact that has been sent `transmits_max` times is removed.
        """
        if not self.waits:
            return tuple(first)
        chosen = list(first)
        room = bytes_max - sum(map(fact_bytes, chosen))
        taken = [item for fact in chosen if (item := self._items.get(fact.signature))]
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
        for tier in (*self._tiers, *self._later_tiers):
            if tier:
                yield from reversed(tier.values())

    def _sent(self, item: _Item, transmits_max: int) -> None:
        if item.sent + 1 >= min(transmits_max, item.sends):
            self._remove(item)
        else:
            key = item.fact.signature
            del self._tier(item)[key]
            item.sent += 1
            self._tier(item)[key] = item

    def _tier(self, item: _Item) -> dict[bytes, _Item]:
        tiers = self._later_tiers if item.is_later else self._tiers
        while len(tiers) <= item.sent:
            tiers.append({})
        return tiers[item.sent]

    def _remove(self, item: _Item) -> None:
        del self._tier(item)[item.fact.signature]
        rest = tuple(other for other in self._about.pop(item.subject) if other is not item)
        if rest:
            self._about[item.subject] = rest
        del self._items[item.fact.signature]
        if not self._items:
            # New containers, because an emptied dict keeps its size and is slow to iterate over.
            self._tiers, self._later_tiers, self._about = [], [], {}
            self.waits = False
