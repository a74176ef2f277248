"""How peers that want to average now agree on a group: a sans-IO core, one for each wish.

1. Ready: a peer that wants a group announces it to all known peers, twice a second, with a nonce drawn for
this wish.
2. Propose: the ready peer nearest to the hash of the key is the convener; peers that completed a round take
precedence (`rank`). Once all expected peers are ready, or its window is over, the convener sends the group to
its members. It has no other task, and if it is silent, the next peer in order replaces it.
3. A peer in a proposed group with its own nonce accepts it, once, and declines any other. In a numbered
round it answers later wishes with `Closed`, so that late peers do not form a second group.

The group's hash names the attempt (`gossip.averaging.group`). Members with different groups never mix their
values, so a lie or a lost message here costs only an attempt. With too few peers there is no group, and a
reason is reported. Based on hivemind's matchmaking, without its chains of followers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import assert_never

import msgspec
from blake3 import blake3

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.averaging.group import GROUP_MEMBERS_MAX, Group, GroupMember, fault_of
from gossip.averaging.lateness import RoundWaits
from gossip.early_wishes import EarlyWishes
from gossip.matchmaking_messages import Closed, Decline, Message, Propose, Ready

PROTOCOL = "/peerloom/matchmaking/2"
MESSAGE_BYTES_MAX = 16_384
"""Maximum size of a message; a full group takes about 5 KiB."""
READY_SECONDS = 0.5
"""Interval between two announcements of an open wish."""
SILENT_SECONDS = 2.0
"""How long a convener may take after its window, before the next peer in order replaces it."""
NEXT_SECONDS = 1.0
"""How long each further convener may take. It is short, because that peer is already ready and only has to
send a datagram."""
WISHES_MAX = 64
"""Maximum number of simultaneous wishes of one node."""
CLOSED_VOICES = 2
"""Number of peers that must report a closed group before this wish ends, if more than one peer is known."""
READY_MAX = 1_024
DISTANCES_MAX = 8 * READY_MAX
"""Maximum number of cached distances. Without the cache, hashing all ready peers at each message would
dominate the cost."""
ANSWER_SECONDS = 0.25
"""How long a wish waits for the answer of a peer that was ready earlier: a round trip on a busy machine."""
OTHERS_MAX = 1_024
"""Maximum number of unexpected peers to which a wish is announced: the size of a roster."""

Sends = list[tuple[PeerId, Message]]


@dataclass(frozen=True)
class Formed:
    """A group with this peer in it was formed."""

    key: bytes
    group: Group


@dataclass(frozen=True)
class NotFormed:
    """No group was formed; `reason` says why, for display: alone, late, silence."""

    key: bytes
    reason: str


@dataclass(frozen=True)
class GroupDeclined:
    """A member of a formed group declined it."""

    key: bytes
    attempt: bytes
    peer: PeerId


@dataclass(frozen=True)
class CameLate:
    """A peer announced that it is ready under a key whose wish has ended here without that peer."""

    key: bytes
    peer: PeerId


Event = Formed | NotFormed | GroupDeclined | CameLate
Make = Callable[[tuple[GroupMember, ...]], Group]


class GroupWish:
    """One peer's wish for a group under one key.

    `expected` are the peers that should come. Once all of them are ready, the window ends early. `others` may
    come, and the wish is announced to them too. If only the number of peers to come is known, `size_hoped` is
    that number, including this peer: with fewer ready peers the window runs to its end.

    `make` returns this peer's group for given members, including what it averages. A proposed group must
    equal `make` of its members, except in round and number. Groups of fewer than `size_min` or more than
    `size_max` are not proposed. If `is_exclusive`, there is one group under the key, and late peers get none;
    otherwise leftover peers form the next one.

    Peers that `admits` rejects are skipped, and a group with one of them is declined. Peers for which
    `leaves_out` holds are not proposed, and groups that they propose are declined. But a group with such a
    peer is accepted if a different peer proposes it, because the proposer does not know which peers are left
    out here. A peer with the lowest `rank` convenes. `waits` returns the deadline of each expected peer;
    without it, the deadline is the end of the window.
    """

    def __init__(
        self,
        me: GroupMember,
        key: bytes,
        expected: Sequence[PeerId],
        make: Make,
        now: float,
        *,
        window_seconds: float,
        patience_seconds: float,
        size_min: int = 2,
        size_max: int = GROUP_MEMBERS_MAX,
        is_exclusive: bool = True,
        others: Sequence[PeerId] = (),
        admits: Callable[[PeerId], bool] | None = None,
        size_hoped: int = 0,
        waits: RoundWaits | None = None,
        leaves_out: Callable[[PeerId], bool] | None = None,
        declines: Callable[[PeerId], bool] | None = None,
        rank: Callable[[PeerId], int] | None = None,
    ) -> None:
        self._size_hoped = size_hoped
        self._waits = waits
        self._early: dict[PeerId, float] = {}
        self.unanswered: set[PeerId] = set()
        """The peers that were ready before this wish and did not answer it in time."""
        self._held_up_until = inf
        self._leaves_out = leaves_out
        self._declines = declines
        self._rank = rank
        self.begun_at = now
        self.ready_at: dict[PeerId, float] = {}
        """The times at which other peers were first ready, until the end of this wish."""
        self.convener: PeerId | None = None
        """The peer that proposed the group that was formed."""
        self.key = key
        self._me = me
        self._peer = PeerId(me.peer)
        self._expected = dict.fromkeys(peer for peer in expected if peer != self._peer)
        self._others = dict.fromkeys(peer for peer in others if peer != self._peer)
        self._make = make
        self._size_min = size_min
        self._size_max = size_max
        self.is_exclusive = is_exclusive
        self._admits = admits
        self._ready: dict[PeerId, GroupMember] = {}
        self._passed_over: dict[PeerId, None] = {}
        self._closed_by: set[PeerId] = set()
        self._is_open = False
        self._window_ends_at = now + window_seconds
        self._pass_at = inf
        self._give_up_at = now + patience_seconds
        self._tell_at = now
        self.group: Group | None = None
        self.is_over = False
        self.events: list[Event] = []

    @property
    def deadline(self) -> float:
        if self.group is not None or self.is_over:
            return inf
        turn_at = self._pass_at if self._is_open else min(self._window_ends_at, self._held_up_until)
        return min(self._tell_at, turn_at, self._give_up_at)

    @property
    def awaited(self) -> tuple[PeerId, ...]:
        """The expected peers that are not ready yet, for a status line."""
        return tuple(peer for peer in self._expected if peer not in self._ready)

    @property
    def expected(self) -> tuple[PeerId, ...]:
        """The peers that should come, ready or not."""
        return tuple(self._expected)

    @property
    def passed_over(self) -> tuple[PeerId, ...]:
        """The peers that did not propose a group when it was their turn."""
        return tuple(self._passed_over)

    def heard_early(self, now: float, peer: PeerId) -> None:
        """Record that this peer was ready just before this wish was made. If the peer has completed a round,
        wait for its answer even if it is not expected: otherwise this peer would wait for a group that has
        formed without it."""
        is_proven = self._rank is None or self._rank(peer) == 0
        if is_proven and self._admitted([peer]) and not (self._leaves_out and self._leaves_out(peer)):
            self._early[peer] = now + ANSWER_SECONDS

    def expect(self, now: float, peers: Iterable[PeerId]) -> Sends:
        """Expect these peers too."""
        new = [peer for peer in self._admitted(peers) if peer != self._peer and peer not in self._expected]
        self._expected.update(dict.fromkeys(new))
        if self.group is not None or self.is_over:
            return []
        return [(peer, self._wish()) for peer in new] + self._advance(now)

    def introduce(self, peers: Iterable[PeerId]) -> Sends:
        """Announce the wish to these peers too, up to the limit, because they may come."""
        new = [peer for peer in self._admitted(peers) if peer != self._peer and peer not in self._others]
        new = new[: max(0, OTHERS_MAX - len(self._others))]
        self._others.update(dict.fromkeys(new))
        return [] if self.group is not None or self.is_over else [(peer, self._wish()) for peer in new]

    def lost(self, now: float, peer: PeerId) -> Sends:
        """Stop expecting this peer."""
        self._expected.pop(peer, None)
        self._ready.pop(peer, None)
        self._early.pop(peer, None)
        return self._advance(now)

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        """Handle one message under this key."""
        self._early.pop(sender, None)
        if self._admits is not None and not self._admits(sender):
            return []
        match message:
            case Ready():
                return self._take_ready(now, sender, message)
            case Propose(group=group):
                return self._take_group(sender, group)
            case Decline(attempt=attempt):
                if self.group is not None and attempt == self.group.id and sender in self.group.peers:
                    self.events.append(GroupDeclined(self.key, attempt, sender))
                return []
            case Closed():
                self._ready.pop(sender, None)  # it is in a group until it announces itself again
                self._take_closed(sender)
                return self._advance(now)
            case _:
                assert_never(message)

    def wake(self, now: float) -> Sends:
        """Announce, propose or give up, as is due."""
        if self.group is not None or self.is_over:
            return []
        if now >= self._give_up_at:
            self._end("nobody proposed a group" if self._candidates() else "nobody else was ready")
            return []
        sends: Sends = []
        if now >= self._tell_at:
            self._tell_at = now + READY_SECONDS
            told = self._admitted({**self._expected, **self._others, **self._ready, **self._early})
            sends += [(peer, self._wish()) for peer in told]
        return sends + self._advance(now)

    def withdraw(self) -> None:
        """End this wish; groups that are proposed later are declined."""
        if self.group is None and not self.is_over:
            self._end("withdrawn")

    def _admitted(self, peers: Iterable[PeerId]) -> list[PeerId]:
        return [peer for peer in peers if self._admits is None or self._admits(peer)]

    def _wish(self) -> Ready:
        me = self._me
        return Ready(self.key, me.nonce, me.rate, me.has_tensors, me.coordinate)

    def _take_ready(self, now: float, sender: PeerId, message: Ready) -> Sends:
        if self.group is not None:
            if _member(sender, message) in self.group.members:  # the sender has not received its group yet
                return [(sender, Propose(self.key, self.group))]
            self.events.append(CameLate(self.key, sender))
            return [(sender, Closed(self.key))]
        if self.is_over:
            self.events.append(CameLate(self.key, sender))
            return []
        if len(self._ready) >= READY_MAX and sender not in self._ready:
            return []
        is_new = sender not in self._ready
        self.ready_at.setdefault(sender, now)
        if self._waits is not None:
            self._waits.came(now, sender)
        self._ready[sender] = _member(sender, message)
        # The sender may have ignored this wish, because it had none of its own then.
        answer: Sends = [(sender, self._wish())] if is_new else []
        return answer + self._advance(now)

    def _take_closed(self, sender: PeerId) -> None:
        """Record a report that the group is closed. A single report does not end this wish, even though a
        numbered round has only one group."""
        known = self._expected.keys() | self._others.keys()
        if self.is_exclusive and self.group is None and not self.is_over and sender in known:
            self._closed_by.add(sender)
            if len(self._closed_by) >= min(CLOSED_VOICES, len(known)):
                self._end("the group of this round was formed without this peer")

    def _take_group(self, sender: PeerId, group: Group) -> Sends:
        if self.group is not None or self.is_over or self._me not in group.members:
            if self.group is not None and group.id == self.group.id:
                return []
            return [(peer, Decline(self.key, group.id)) for peer in group.peers if peer != self._peer]
        is_admitted = self._admits is None or all(p == self._peer or self._admits(p) for p in group.peers)
        if not is_admitted or self._is_trial_too_dear(sender, group) or self._is_declined(sender):
            return [(peer, Decline(self.key, group.id)) for peer in group.peers if peer != self._peer]
        own = msgspec.structs.replace(self._make(group.members), round=group.round, number=group.number)
        is_sound = sender in group.peers and not fault_of(group) and len(group.members) >= self._size_min
        if not is_sound or own != group:
            raise RemoteProtocolError("the proposed group differs from what this peer averages")
        self._form(group, sender)
        return []

    def _is_declined(self, sender: PeerId) -> bool:
        return self._declines is not None and self._declines(sender)

    def _is_trial_too_dear(self, sender: PeerId, group: Group) -> bool:
        """Return whether a left-out peer proposes a group that lacks a peer with which this one wants to
        average. The missing peer would have to wait for the end of this trial, and then for its own trial."""
        if self._leaves_out is None or not self._leaves_out(sender):
            return False
        missing = (self._expected.keys() | self._ready.keys()).difference(group.peers)
        return any(not self._leaves_out(peer) for peer in self._admitted(missing))

    def _advance(self, now: float) -> Sends:
        """Propose a group if it is this peer's turn."""
        if self.group is not None or self.is_over:
            return []
        ready = self._candidates()
        if not self._is_open:
            # A peer that is alone does not know how many will come, so the first arrival must not exclude the
            # ones right behind it.
            is_whole = self._is_whole(now) and bool(ready)
            if now < self._window_ends_at and not (is_whole and len(ready) + 1 >= self._size_hoped):
                return []
            self._is_open = True
            self._pass_at = now + SILENT_SECONDS
        by_distance = sorted((self._peer, *ready), key=self._distance)
        order = by_distance if self._rank is None else sorted(by_distance, key=self._rank)
        convener = next(peer for peer in order if peer not in self._passed_over)
        if now >= self._pass_at:
            self._pass_at = now + NEXT_SECONDS
            if convener != self._peer:
                self._passed_over[convener] = None
                convener = next(peer for peer in order if peer not in self._passed_over)
        if convener != self._peer or len(order) < self._size_min:
            return []
        chosen = [self._peer, *(peer for peer in by_distance if peer != self._peer)][: self._size_max]
        members = tuple(self._ready.get(peer, self._me) for peer in sorted(chosen))
        group = self._make(members)
        if fault_of(group):
            return []
        self._form(group, self._peer)
        return [(PeerId(member.peer), Propose(self.key, group)) for member in members if member != self._me]

    def _candidates(self) -> list[PeerId]:
        """Return the ready peers that may be in a group."""
        ready = self._admitted(self._ready)  # tickets may expire while a wish waits
        return [peer for peer in ready if self._leaves_out is None or not self._leaves_out(peer)]

    def _is_whole(self, now: float) -> bool:
        """Return whether all awaited peers are ready. If not, record the deadline of a missing one."""
        self._held_up_until = inf
        for peer in self._expected:
            if peer in self._ready:
                continue
            until = inf if self._waits is None else self._waits.until(peer)
            if now < until:
                self._held_up_until = until
                return False
        for peer, until in self._early.items():
            if now < until:
                self._held_up_until = until
                return False
            self.unanswered.add(peer)
        return True

    def _distance(self, peer: PeerId) -> bytes:
        return _distance(self.key, peer)

    def _form(self, group: Group, convener: PeerId) -> None:
        self.group, self.convener = group, convener
        self.events.append(Formed(self.key, group))

    def _end(self, reason: str) -> None:
        self.is_over = True
        self.events.append(NotFormed(self.key, reason))


@lru_cache(maxsize=DISTANCES_MAX)
def _distance(key: bytes, peer: PeerId) -> bytes:
    return blake3(key + peer).digest()


def _member(sender: PeerId, message: Ready) -> GroupMember:
    return GroupMember(sender, message.nonce, message.rate, message.has_tensors, message.coordinate)


class Matchmaking:
    """All wishes of one node, behind one protocol."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._wishes: dict[bytes, GroupWish] = {}
        # a peer whose wish continues announces it again within this time
        self._early = EarlyWishes(1.5 * READY_SECONDS)
        self.events: list[Event] = []

    @property
    def deadline(self) -> float:
        return min((wish.deadline for wish in self._wishes.values()), default=inf)

    def begin(self, now: float, wish: GroupWish) -> Sends:
        """Begin a wish for a group; an earlier wish under the same key ends. Raises ValueError if there are
        too many."""
        if wish.key not in self._wishes and len(self._wishes) >= WISHES_MAX:
            raise ValueError(f"a node can have at most {WISHES_MAX} simultaneous wishes for a group")
        self._wishes[wish.key] = wish
        for peer in self._early.of(now, wish.key):
            wish.heard_early(now, peer)
        sends = wish.wake(now)
        self._drain(wish)
        return sends

    def end(self, key: bytes) -> Sends:
        """Remove a wish, whether it was fulfilled or not."""
        wish = self._wishes.pop(key, None)
        if wish is not None:
            wish.withdraw()
        return []

    def get(self, key: bytes) -> GroupWish | None:
        """Return the wish under a key."""
        return self._wishes.get(key)

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        """Handle one message. If there is no wish under its key, only record that the sender is ready."""
        wish = self._wishes.get(message.key)
        if wish is None:
            if isinstance(message, Ready):
                self._early.heard(now, sender, message.key)
            if isinstance(message, Propose):
                # All its members would wait for this peer, which has ended the wish.
                group = message.group
                if sender in group.peers and self._me in group.peers:
                    return [
                        (peer, Decline(message.key, group.id)) for peer in group.peers if peer != self._me
                    ]
            return []
        if isinstance(message, Ready):
            self._early.answered(sender)
        sends = wish.receive(now, sender, message)
        self._drain(wish)
        return sends

    def wake(self, now: float) -> Sends:
        """Wake the wishes that are due."""
        sends: Sends = []
        for wish in list(self._wishes.values()):
            if wish.deadline <= now:
                sends += wish.wake(now)
            self._drain(wish)
        return sends

    def expect(self, now: float, key: bytes, peers: Iterable[PeerId]) -> Sends:
        """Expect these peers too."""
        wish = self._wishes.get(key)
        sends = [] if wish is None else wish.expect(now, peers)
        if wish is not None:
            self._drain(wish)
        return sends

    def introduce(self, key: bytes, peers: Iterable[PeerId]) -> Sends:
        """Announce the wish to these peers too, because they may come."""
        wish = self._wishes.get(key)
        return [] if wish is None else wish.introduce(peers)

    def lost(self, now: float, peer: PeerId) -> Sends:
        """Stop expecting a peer that membership or the roster reports as gone."""
        sends: Sends = []
        for wish in self._wishes.values():
            sends += wish.lost(now, peer)
            self._drain(wish)
        return sends

    def _drain(self, wish: GroupWish) -> None:
        self._early.unanswered(wish.unanswered)
        wish.unanswered.clear()
        self.events += wish.events
        wish.events.clear()
