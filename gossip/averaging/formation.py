"""How peers agree on the group of one attempt, as a sans-IO core without a leader.

Each peer tells the others that it joins. Once all expected have, or a window is over, the one of those that
joined with the smallest hash(name, round, number, peer) writes the roster. A peer accepts one roster for an
attempt, and only one with its own entry in it, and hands it on to all members before anything else. So a
proposer that dies while it sends, or two proposers with different views, cost at most an attempt: the group
is in the attempt's name, and safety does not rest on agreement. A silent proposer is passed over.

Not here: who is expected. That is the caller's membership, or declarations in the DHT.
"""

from collections.abc import Iterable
from math import inf

import msgspec
from blake3 import blake3

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.averaging.group import GROUP_MEMBERS_MAX, Group, Member, Terms, fault_of
from gossip.averaging.messages import Join, Message, Roster

Sends = list[tuple[PeerId, Message]]
REPEATS_MAX = 64.0
"""Times the window: the longest pause between two announcements to a peer that has not answered."""


class Formation:
    """One peer's side of forming one group. `group` is set once a roster is accepted."""

    def __init__(
        self,
        me: PeerId,
        join: Join,
        expected: Iterable[PeerId],
        demoted: Iterable[PeerId],
        now: float,
        window_seconds: float,
    ) -> None:
        self._me = me
        self._join = join
        self._window_seconds = window_seconds
        self._expected = dict.fromkeys(peer for peer in expected if peer != me)
        self._demoted = frozenset(demoted)
        self._announced: dict[PeerId, None] = {}
        self._awaited: PeerId | None = None
        self._repeat_at = now
        self._repeat_seconds = window_seconds
        self._window_until = now + window_seconds
        self.joined: dict[PeerId, Member] = {me: join.member}
        self.refused: dict[PeerId, str] = {}
        """Peers that joined under other terms, with what differs."""
        self.group: Group | None = None

    @property
    def number(self) -> int:
        return self._join.number

    @property
    def deadline(self) -> float:
        if self.group is not None:
            return inf
        return min(self._window_until, self._repeat_at if self.missing else inf)

    @property
    def missing(self) -> tuple[PeerId, ...]:
        """Those expected that have not joined."""
        return tuple(p for p in self._expected if p not in self.joined and p not in self.refused)

    def wake(self, now: float) -> Sends:
        """Announce again, propose, or pass over a proposer that is silent."""
        if self.group is not None:
            return []
        sends: Sends = []
        if now >= self._repeat_at:
            sends += [(peer, self._join) for peer in self.missing]
            self._announced.update(dict.fromkeys(self.missing))
            self._repeat_at = now + self._repeat_seconds
            self._repeat_seconds = min(2 * self._repeat_seconds, REPEATS_MAX * self._window_seconds)
        if now >= self._window_until:
            sends += self._propose(now, is_over=True)
        return sends

    def receive(self, now: float, sender: PeerId, message: Join | Roster) -> Sends:
        """Take a message of this attempt. Raises RemoteProtocolError for what no correct peer sends."""
        if isinstance(message, Roster):
            return self._accept(sender, message.group)
        if self.group is not None:
            return []
        if message.terms != self._join.terms:
            self.refused[sender] = _difference(self._join.terms, message.terms)
            return []
        if sender in self.joined or len(self.joined) >= GROUP_MEMBERS_MAX:
            return []
        self.joined[sender] = message.member
        sends = self.announce_to(sender)
        if not self.missing and self._is_enough:
            return sends + self._propose(now, is_over=False)
        if self._window_until == inf:
            self._window_until = now + self._window_seconds
        return sends

    def announce_to(self, peer: PeerId) -> Sends:
        """Tell a peer that this one joins, once."""
        if peer in self._announced or len(self._announced) >= 4 * GROUP_MEMBERS_MAX:
            return []
        self._announced[peer] = None
        return [(peer, self._join)]

    def remove(self, now: float, peer: PeerId) -> Sends:
        """This peer is lost, or needs no group: neither expect it nor put it into the roster."""
        self._expected.pop(peer, None)
        self.joined.pop(peer, None)
        if self.group is None and not self.missing and self._is_enough:
            return self._propose(now, is_over=False)
        return []

    @property
    def _is_enough(self) -> bool:
        return fault_of(self._roster()) is None

    def _roster(self) -> Group:
        join = self._join
        members = tuple(self._entry(self.joined[peer]) for peer in sorted(self.joined))
        if not any(member.rate for member in members):
            members = tuple(self.joined[peer] for peer in sorted(self.joined))
        return Group(join.name, join.round, join.number, join.terms, members)

    def _entry(self, member: Member) -> Member:
        return msgspec.structs.replace(member, rate=0) if member.peer in self._demoted else member

    def _propose(self, now: float, *, is_over: bool) -> Sends:
        """Write the roster, or wait for the peer that is to; pass over it if it was waited for already."""
        while self._is_enough:
            group = self._roster()
            proposer = _proposer_of(group)
            if proposer == self._me:
                return self._accept(self._me, group)
            if self._awaited != proposer or not is_over:
                self._awaited = proposer
                self._window_until = now + 2 * self._window_seconds
                return []
            self.joined.pop(proposer)
            self._expected.pop(proposer, None)
        self._window_until = inf
        return []

    def _accept(self, sender: PeerId, group: Group) -> Sends:
        join = self._join
        own = next((member for member in group.members if member.peer == self._me), None)
        if (group.name, group.round, group.number) != (join.name, join.round, join.number):
            raise RemoteProtocolError("a roster of another attempt")
        if sender not in group.peers or own is None or group.terms != join.terms or fault_of(group):
            raise RemoteProtocolError("a roster without its sender or its receiver, or under other terms")
        if own != join.member and own != msgspec.structs.replace(join.member, rate=0):
            raise RemoteProtocolError("a roster with another entry for its receiver")
        if self.group is not None:
            return []
        self.group = group
        return [(peer, Roster(group)) for peer in group.peers if peer != self._me]


def _proposer_of(group: Group) -> PeerId:
    """The peer that is to write this roster."""
    key = group.name + b"\0" + group.round.to_bytes(8, "big") + group.number.to_bytes(8, "big")
    return min(group.peers, key=lambda peer: blake3(key + peer).digest())


def _difference(ours: Terms, theirs: Terms) -> str:
    for field in ("signature", "items", "dtype", "codec", "mode"):
        if getattr(ours, field) != getattr(theirs, field):
            what = "names, shapes or types of tensors" if field == "signature" else field
            return f"other {what}"
    return "the same terms"
