"""One iterative lookup: from the nearest known peers to the nearest existing ones (Kademlia section 2.3).

A pure state machine without time: its driver asks the peers that `next` names and reports the answers. It
differs from the paper in these points, for real networks:
- There are no rounds. After each answer, and for each peer that is slower than usual, the lookup immediately
  asks one more peer. A silent peer is passed over, but its late answer still counts.
- If we have recently heard from all of the nearest known peers, they are probably the final ones, so all of
  them are asked immediately.
- When `alpha` answers in a row brought no nearer peer, all the nearest are asked together (the paper's last
  round).
- Hints are unverified. If the peers named by one peer do not answer, the other hints that came only from that
  peer are dropped. So a liar cannot keep a lookup busy with invented peers near the key.
- The number of requests, and of peers taken from each reply, is limited, so memory is bounded.
- At most `group_max` of the nearest may share an address group (`groups`), unless there are no others. So an
  attacker cannot surround a key with 20 ids from one network.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum

from kademlia.node import Node, NodeHeap

from crypto.identity import PeerId
from dht.groups import is_crowded, spread
from dht.keys import Key, node_key
from dht.records import Rank, Record
from dht.routing import Contact
from dht.settings import KademliaSettings

UNANSWERED_HINTS_MAX = 4
"""How many dead peers a peer may name before its hints are dropped. Each named peer that answers raises
its allowance by this number. An honest peer would be affected only if more than half of its contacts were
dead."""

ADDRESSES_MAX = 4
"""Maximum number of addresses kept for one candidate. Several are kept, so that one wrong hint cannot hide a
peer."""

Enough = Callable[[Mapping[PeerId, Record]], bool]
"""Returns whether these records, keyed by publisher, suffice to end the lookup."""


class CandidateState(Enum):
    """The state of a candidate in a lookup."""

    HEARD = "heard"
    ASKED = "asked"
    SLOW = "slow"
    PASSED_OVER = "passed over"
    ANSWERED = "answered"


class Shortlist(NodeHeap):  # type: ignore[misc]  # the package has no type hints
    """The package's heap by distance, plus a set so that a membership test does not scan the heap."""

    def __init__(self, key: Key, width: int, group_max: int) -> None:
        super().__init__(Node(key), width)
        self._ids: set[Key] = set()
        self._sorted: list[Contact] | None = None
        self._group_max = group_max
        # The cached result of `nearest`, and its count.
        self._near: tuple[int, list[Contact]] | None = None

    def __contains__(self, contact: Contact) -> bool:
        return contact.id in self._ids

    def nearest(self, count: int) -> list[Contact]:
        """Return the `count` nearest, nearest first, spread over address groups."""
        if self._sorted is None:  # reads are more frequent than changes
            self._sorted = [contact for _, contact in sorted(self.heap)]
            self._near = None
        if self._near is None or self._near[0] != count:
            self._near = count, nearest_spread(self._sorted, count, self._group_max)
        return self._near[1]

    def push(self, contact: Contact) -> None:
        key = contact.id
        if key not in self._ids:  # the same few are named again and again
            self._sorted = None
            super().push(contact)
            self._ids.add(key)

    def remove(self, ids: Collection[Key]) -> None:
        self._sorted = None
        super().remove(ids)
        self._ids.difference_update(ids)


class Lookup:
    """The state of one lookup of `key`, begun with `seeds`. With `values` it collects records.

    It ends when the k nearest live peers have answered.
    """

    def __init__(
        self,
        key: Key,
        own: PeerId,
        seeds: Iterable[Contact],
        settings: KademliaSettings,
        *,
        values: bool,
        width: int | None = None,
        enough: Enough | None = None,
        at_once: int = 0,
        counts_own: bool = False,
        taken: "dict[PeerId, Lookup] | None" = None,
    ) -> None:
        """`width`: how many of the nearest must answer; by default k, or `find_width` once a record has been
        found. `enough`: returns whether the records found so far end the lookup. `at_once`: how many peers to
        ask in parallel from the start (at least alpha), if the seeds are probably the nearest already.
        `counts_own`: count this node among the nearest; it is not asked. `taken`: the peers already asked on
        other paths of a disjoint lookup."""
        self.key = key
        self.values = values
        # From peers that answered: their write tokens, and their records.
        self.tokens: dict[PeerId, bytes] = {}
        self.shown: dict[PeerId, dict[PeerId, Rank]] = {}
        self.requests = 0
        self.records: dict[PeerId, Record] = {}
        self.addresses: dict[PeerId, tuple[str, ...]] = {}
        self.candidates: dict[PeerId, Contact] = {}
        self._own = own
        self._settings = settings
        self._wanted_width = width
        self._enough = enough
        self._own_distance = int.from_bytes(node_key(own), "big") ^ int.from_bytes(key, "big")
        self._counts_own = counts_own
        self._at_once = max(at_once, settings.alpha)
        self._taken = taken
        self._shortlist = Shortlist(key, settings.k, settings.group_max)
        self._standing: dict[PeerId, CandidateState] = {}
        # The length of the chain of hints that first led to a candidate. `rounds` is the longest such chain
        # to a peer that answered; it corresponds to the paper's rounds.
        self._depth: dict[PeerId, int] = {}
        self.rounds = 0
        self._answered: list[Contact] = []
        self._asked = 0
        self._slow = 0
        self._stopped = False
        self._barren = 0
        self._nearest: int | None = None
        # The peers that named each candidate, and for each peer the fate of the candidates it named:
        # (answered, ghosts).
        self._named_by: dict[PeerId, list[PeerId]] = {}
        self._word: dict[PeerId, tuple[int, int]] = {}
        for contact in seeds:
            self._push(contact)

    def next(self) -> list[Contact]:
        """Return the contacts to ask now; each is asked once."""
        if self.done:
            return []
        settings = self._settings
        # Near the end, waiting gains nothing, so all of the nearest are asked.
        places = settings.k if self._barren >= settings.alpha or self.records else self._at_once
        places = min(places - self._asked, settings.lookup_requests_max - self.requests)
        near = self._shortlist.nearest(self._width + self._slow)
        waiting = [contact for contact in near if self._standing[contact.peer] is CandidateState.HEARD]
        chosen = waiting[: max(places, 0)]
        for contact in chosen:
            self._standing[contact.peer] = CandidateState.ASKED
            if self._taken is not None:
                self._taken[contact.peer] = self
        self._asked += len(chosen)
        self.requests += len(chosen)
        return chosen

    def named(self, source: PeerId, hints: Iterable[Contact]) -> None:
        """Add the hints from `source`, a peer that was asked. The caller ensures at most HINTS_MAX."""
        before = self._nearest
        self._word.setdefault(source, (0, 0))
        for hint in hints:
            self._push(hint, source)
        self._barren = self._barren + 1 if self._nearest == before else 0

    def answered(self, contact: Contact) -> None:
        """Record a full answer, even if it comes after the contact was passed over."""
        standing = self._standing.get(contact.peer)
        if standing in (None, CandidateState.HEARD, CandidateState.ANSWERED):
            return
        self._leave_flight(contact.peer)
        self._standing[contact.peer] = CandidateState.ANSWERED
        self._answered.append(contact)
        self.rounds = max(self.rounds, self._depth[contact.peer] + 1)
        self._shortlist.push(contact)
        for source in self._named_by.get(contact.peer, ()):
            good, ghosts = self._word[source]
            self._word[source] = (good + 1, ghosts)

    def exclude(self, peer: PeerId) -> None:
        """Exclude a peer that was asked on another path."""
        if self._standing.get(peer) is CandidateState.HEARD:
            self._standing[peer] = CandidateState.PASSED_OVER
            self._shortlist.remove([node_key(peer)])

    def slow(self, peer: PeerId) -> None:
        """Record that `peer` is slow: keep waiting for it, but let the lookup ask one more peer meanwhile."""
        if self._standing.get(peer) is CandidateState.ASKED:
            self._leave_flight(peer)
            self._standing[peer] = CandidateState.SLOW
            self._slow += 1

    def passed_over(self, peer: PeerId) -> None:
        """Pass over a peer that took too long or is known to be dead."""
        if self._standing.get(peer) in (None, CandidateState.ANSWERED, CandidateState.PASSED_OVER):
            return
        self._leave_flight(peer)
        self._standing[peer] = CandidateState.PASSED_OVER
        self._shortlist.remove([node_key(peer)])
        for source in self._named_by.get(peer, ()):
            good, ghosts = self._word[source]
            self._word[source] = (good, ghosts + 1)
            if self._has_lost_word(source):
                self._drop_hearsay()

    def _leave_flight(self, peer: PeerId) -> None:
        self._asked -= self._standing[peer] is CandidateState.ASKED
        self._slow -= self._standing[peer] is CandidateState.SLOW

    def give_token(self, peer: PeerId, token: bytes) -> None:
        """Record the write token that `peer` gave."""
        self.tokens[peer] = token

    def candidate(self, peer: PeerId) -> Contact | None:
        """Return the contact of a candidate, as most recently named."""
        return self.candidates.get(peer)

    def places(self, peer: PeerId) -> tuple[str, ...] | None:
        """Return the addresses under which a candidate was named."""
        return self.addresses.get(peer)

    def show(self, peer: PeerId, record: Record) -> None:
        """Record that `peer` has handed out a record."""
        self.shown.setdefault(peer, {})[record.publisher] = record.rank
        self.learn(record)

    def learn(self, record: Record) -> None:
        """Keep a record if it is its publisher's newest so far."""
        kept = self.records.get(record.publisher)
        if kept is None and len(self.records) >= self._settings.found_max:
            return
        if kept is None or kept.rank < record.rank:
            self.records[record.publisher] = record

    def stop(self) -> None:
        """End the lookup with the results so far, because time is up."""
        self._stopped = True

    @property
    def done(self) -> bool:
        """Whether the nearest live peers have all answered, or a limit was reached."""
        if self._stopped or (self._enough is not None and self._enough(self.records)):
            return True
        if self.requests >= self._settings.lookup_requests_max and not (self._asked or self._slow):
            return True
        near = self._shortlist.nearest(self._width)
        return all(self._standing[contact.peer] is CandidateState.ANSWERED for contact in near)

    @property
    def nearest(self) -> list[Contact]:
        """The k nearest of the peers that answered, nearest first, spread over address groups."""
        return nearest_spread(self.answers, self._settings.k, self._settings.group_max)

    @property
    def _width(self) -> int:
        """How many of the nearest must answer before the lookup ends: fewer once it has found records."""
        if self._wanted_width is not None:
            return self._wanted_width
        width = self._settings.find_width if self.records else self._settings.k
        if not self._counts_own or width == 1:
            return width
        near = self._shortlist.nearest(width)
        is_own_near = len(near) == width and self._own_distance < self._shortlist.node.distance_to(near[-1])
        return width - is_own_near

    @property
    def answers(self) -> list[Contact]:
        """All peers that answered, nearest first."""
        return sorted(self._answered, key=Node(self.key).distance_to)

    def _push(self, contact: Contact, source: PeerId | None = None) -> None:
        peer = contact.peer
        standing = self._standing.get(peer)
        if standing is None:
            if peer == self._own or (self._taken is not None and self._taken.get(peer, self) is not self):
                return
            self._standing[peer] = CandidateState.HEARD
            self._depth[peer] = 0 if source is None else self._depth[source] + 1
            self.addresses[peer] = contact.addresses[:ADDRESSES_MAX]
        elif standing is not CandidateState.HEARD:
            return
        elif self.addresses[peer] != contact.addresses:
            merged = tuple(dict.fromkeys((*self.addresses[peer], *contact.addresses)))
            self.addresses[peer] = merged[:ADDRESSES_MAX]
        self.candidates[peer] = contact
        if source is not None and not self._note_source(peer, source, new=standing is None):
            return
        self._shortlist.push(contact)
        distance = self._shortlist.node.distance_to(contact)
        if self._nearest is None or distance < self._nearest:
            self._nearest = distance

    def _note_source(self, peer: PeerId, source: PeerId, *, new: bool) -> bool:
        # Seeds have no sources, so they are never dropped together with the hints of a distrusted peer.
        sources = self._named_by.setdefault(peer, []) if new else self._named_by.get(peer)
        if sources is None:
            return False
        if source not in sources:
            sources.append(source)
        return not self._has_lost_word(source)

    def _has_lost_word(self, source: PeerId) -> bool:
        good, ghosts = self._word[source]
        return ghosts >= UNANSWERED_HINTS_MAX * (good + 1)

    def _drop_hearsay(self) -> None:
        dropped = [
            contact.id
            for _, contact in self._shortlist.heap
            if self._standing[contact.peer] is CandidateState.HEARD
            and contact.peer in self._named_by
            and all(self._has_lost_word(name) for name in self._named_by[contact.peer])
        ]
        self._shortlist.remove(dropped)


def nearest_spread(contacts: list[Contact], count: int, group_max: int) -> list[Contact]:
    nearest = contacts[:count]
    return spread(contacts, count, group_max) if is_crowded(nearest, group_max) else nearest
