"""The exchange of one data set among the peers that want or have it: a sans-IO core.

Each peer announces its pieces and requests those that it lacks from several peers simultaneously: first the
most urgent pieces, then the rarest (as in BitTorrent; Cohen 2003). The caller verifies a piece, which is then
immediately offered to the others. A peer that sends a wrong piece gets no more requests, and a silent peer is
skipped. An overdue piece is requested from a second peer as well, so that the last pieces do not wait for the
slowest peer.

Not here: uploads (`gossip.pieces.uploads`); hashes, disks and streams. `have` lists the pieces on disk at the
start, so that an exchange can resume.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import ClassVar, assert_never

import numpy as np

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from crypto.registers import Budget, Register
from gossip.pieces.choice import Bits, Choice, Counts
from gossip.pieces.messages import (
    NUMBERS_MAX,
    Cancel,
    Got,
    Message,
    Piece,
    PieceRefused,
    PieceRequest,
    PiecesHeld,
    Unknown,
)
from gossip.pieces.peer import SwarmPeer
from gossip.pieces.uploads import UploadDue, Uploads

PEERS_MAX = 32
"""Maximum number of peers in one exchange. A newcomer replaces a peer that has moved nothing for a while; if
there is none, the newcomer gets the answer Unknown."""
PATIENCE_SECONDS = 60.0
"""How long a peer that has sent or taken a piece may be idle before a newcomer may replace it."""
PLACES = Budget(PEERS_MAX, 1, PEERS_MAX, PATIENCE_SECONDS)
"""The limits on peers. A peer's network is unknown here, so each peer counts as a network of its own."""
TICK_SECONDS = 0.5
RETRY_SECONDS = 2.0
"""How long to wait before requesting a refused piece from the same peer again."""
HEDGE_SECONDS = 3.0
"""Age of a request after which the piece is requested from a second, idle peer as well."""
STALL_SECONDS = 60.0
"""Silence after which a peer is skipped: it is slower than 35 kbit/s for each piece."""
PAUSE_SECONDS = 60.0
MISSES_MAX = 64
"""Number of falsely claimed pieces after which a peer gets no more requests, if it has delivered fewer pieces
than that."""
QUESTION_SECONDS = 5.0
"""How long to wait before asking a peer again that has not announced its pieces."""
URGENCY_USUAL = 1

Sends = list[tuple[PeerId, Message]]


@dataclass(frozen=True)
class PieceArrived:
    """An instruction to verify and store these bytes, and then to call `stored`."""

    UNREAD: ClassVar = ("body",)

    sender: PeerId
    number: int
    body: bytes


@dataclass(frozen=True)
class PeerDropped:
    """The peer broke the protocol or sent wrong bytes, so it gets no more requests."""

    peer: PeerId
    reason: str


Event = PieceArrived | UploadDue | PeerDropped


class PieceSwarm:
    """The exchange of one data set of `count` pieces on one peer, which already has those in `have`."""

    def __init__(self, me: PeerId, data: bytes, count: int, have: Collection[int], rng: Random) -> None:
        self.me = me
        self.data = data
        self.count = count
        self.events: list[Event] = []
        self.have: Bits = np.zeros(count, np.bool_)
        self.have[list(have)] = True
        self.deadline = inf
        self.uploaded_pieces = 0
        self.wasted_pieces = 0
        """Number of pieces that arrived although they were already present."""
        self.peers: dict[PeerId, SwarmPeer] = {}
        self._places: Register[SwarmPeer] = Register(PLACES)
        self._wanted: Bits = np.zeros(count, np.bool_)
        self._urgency: Counts = np.full(count, URGENCY_USUAL, np.int64)
        self._holders: Counts = np.zeros(count, np.int64)
        self._in_flight: Bits = np.zeros(count, np.bool_)
        self._verifying: set[int] = set()
        self._uploads = Uploads(data, self.have, self._holders)
        self._choice = Choice(count, rng)
        self._dropped: set[PeerId] = set()

    # Input

    def meet(self, now: float, peers: Iterable[PeerId]) -> Sends:
        """Ask these peers which pieces they have: they may have the data, or want it."""
        sends: Sends = []
        for peer in peers:
            if peer != self.me and peer not in self.peers and peer not in self._dropped:
                entered = self._enter(now, peer)
                if entered is None:
                    break
                sends += [*entered, (peer, self._have_set(is_question=True))]
        self._schedule(now)
        return sends

    def want(self, now: float, numbers: Sequence[int] | Bits, urgency: int = URGENCY_USUAL) -> Sends:
        """Fetch these pieces too. Pieces with a lower urgency go first."""
        was_complete = self.is_complete
        self._wanted[numbers] = True
        self._urgency[numbers] = np.minimum(self._urgency[numbers], urgency)
        sends: Sends = []
        if was_complete and not self.is_complete:
            sends = [(peer, self._have_set(is_question=False)) for peer in self.peers]
        self._schedule(now)
        return sends + self._fill_all(now)

    def stored(self, now: float, sender: PeerId, number: int, *, is_right: bool) -> Sends:
        """Record the result for an arrived piece: it was verified and stored, or it is wrong."""
        self._verifying.discard(number)
        if not is_right:
            return self._drop(now, sender, f"piece {number} does not match its hash")
        sends: Sends = []
        if sender in self.peers:
            self._places.credit(self.peers[sender])
        if not self.have[number]:
            self.have[number] = True
            is_complete = self.is_complete
            for peer in self.peers.values():
                if number in peer.asked:
                    self._release(peer, number)
                    peer.cancelled.add(number)
                    sends.append((peer.peer, Cancel(self.data, (number,))))
                if not peer.is_complete or is_complete:
                    sends.append((peer.peer, Got(self.data, (number,), is_complete)))
        return sends + self._fill_all(now)

    def not_stored(self, now: float, number: int) -> Sends:
        """Record that an arrived piece could not be stored, so that it may be requested again."""
        self._verifying.discard(number)
        self._schedule(now)
        return []

    def found(self, number: int) -> None:
        """Record that a piece is already stored here."""
        self.have[number] = True

    def forget(self, numbers: Iterable[int]) -> None:
        """Record that these pieces are damaged or were removed."""
        for number in numbers:
            self.have[number] = False

    def uploaded(self, now: float, peer: PeerId, number: int, *, was_sent: bool) -> Sends:
        """Record that an UploadDue was carried out, or that the piece is missing."""
        found = self.peers.get(peer)
        if found is None:
            return []
        if was_sent:
            self.uploaded_pieces += 1
            found.moved_at = now
            self._places.credit(found)
        else:
            self.have[number] = False
        refusals = self._uploads.done(found, number, was_sent=was_sent)
        self._schedule(now)
        return self._uploading(peer, refusals)

    def lost(self, now: float, peer: PeerId) -> Sends:
        """Remove a peer that is dead, left, or unreachable. Its pieces are requested from other peers."""
        self._remove(peer)
        return self._fill_all(now)

    @property
    def is_complete(self) -> bool:
        """Whether all wanted pieces are stored here."""
        return not bool(np.any(self._wanted & ~self.have))

    def lacks(self, numbers: Sequence[int] | Bits) -> bool:
        """Return whether any of these pieces is missing."""
        return not bool(np.all(self.have[numbers]))

    def is_sourceless(self, numbers: Sequence[int] | Bits) -> bool:
        """Return whether any of these pieces is missing and has no known holder."""
        mask = np.zeros(self.count, np.bool_)
        mask[numbers] = True
        return bool(np.any(mask & ~self.have & (self._holders == 0)))

    # Messages of other peers

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        """Handle a message of a peer. Raises RemoteProtocolError."""
        if sender in self._dropped:
            return []
        peer = self.peers.get(sender)
        if isinstance(message, PiecesHeld):
            return self._on_have(now, sender, message)
        if peer is None:
            return []  # the peer was dropped before
        match message:
            case Unknown():
                self._remove(sender)
                return self._fill_all(now)
            case Got():
                return self._on_got(now, peer, message)
            case PieceRequest():
                refusals = self._uploads.ask(now, peer, self._checked(message.numbers))
                return self._uploading(sender, refusals)
            case Cancel():
                self._uploads.cancel(peer, self._checked(message.numbers))
                return []
            case PieceRefused():
                return self._on_refused(now, peer, message)
            case Piece():
                return self._on_piece(now, peer, message)
            case _:
                assert_never(message)

    def wake(self, now: float) -> Sends:
        """Withdraw requests from silent peers, and send new ones."""
        sends: Sends = []
        self.deadline = inf
        for peer in list(self.peers.values()):
            if not peer.answered and now - peer.question_at > QUESTION_SECONDS:
                peer.question_at = now
                sends.append((peer.peer, self._have_set(is_question=True)))
            if peer.is_stuck(now, STALL_SECONDS):
                sends.append((peer.peer, Cancel(self.data, tuple(peer.asked)[:NUMBERS_MAX])))
                peer.paused_until = now + PAUSE_SECONDS
                for number in list(peer.asked):
                    self._release(peer, number)
                    peer.cancelled.add(number)
        sends += self._fill_all(now)
        return sends

    # Internal

    def _on_have(self, now: float, sender: PeerId, message: PiecesHeld) -> Sends:
        has = np.unpackbits(np.frombuffer(message.pieces, np.uint8), bitorder="little")
        if len(message.pieces) != -(-self.count // 8) or has[self.count :].any():
            raise RemoteProtocolError("a have-set whose length differs from the data set's")
        peer = self.peers.get(sender)
        sends: Sends = []
        if peer is None:
            entered = self._enter(now, sender)
            if entered is None:
                return [(sender, Unknown(self.data))]
            sends, peer = entered, self.peers[sender]
        self._holders -= peer.has
        peer.has = has[: self.count].astype(np.bool_)
        self._holders += peer.has
        peer.is_complete = message.is_complete
        peer.answered = True
        if message.is_question:
            sends.append((sender, self._have_set(is_question=False)))
        self._schedule(now)
        return sends + self._fill(now, peer)

    def _on_got(self, now: float, peer: SwarmPeer, message: Got) -> Sends:
        peer.is_complete = message.is_complete
        for number in self._checked(message.numbers):
            if not peer.has[number]:
                peer.has[number] = True
                self._holders[number] += 1
                peer.moved_at = now
            peer.retry_at.pop(number, None)
            self._uploads.arrived(peer.peer, number)
        self._schedule(now)
        return self._fill(now, peer)

    def _on_refused(self, now: float, peer: SwarmPeer, message: PieceRefused) -> Sends:
        number = self._checked((message.number,))[0]
        if number not in peer.asked:
            return []
        self._release(peer, number)
        if message.why == "absent":
            peer.misses += 1
            if peer.has[number]:
                peer.has[number] = False
                self._holders[number] -= 1
            if peer.misses >= MISSES_MAX and peer.misses > peer.delivered:
                return self._drop(now, peer.peer, "it does not have pieces that it announced")
        else:
            if len(peer.retry_at) > 4 * NUMBERS_MAX:
                peer.retry_at = {each: at for each, at in peer.retry_at.items() if at > now}
            peer.retry_at[number] = now + RETRY_SECONDS
        self._schedule(now)
        return self._fill_all(now)

    def _on_piece(self, now: float, peer: SwarmPeer, message: Piece) -> Sends:
        number = self._checked((message.number,))[0]
        if number in peer.cancelled:
            peer.cancelled.discard(number)
            self.wasted_pieces += 1
            if self.have[number] or number in self._verifying:
                return []
            peer.asked.setdefault(number, now)
        if number not in peer.asked:
            raise RemoteProtocolError("a piece that was not requested")
        peer.arrived(now, number, len(message.body))
        peer.moved_at = now
        self._release(peer, number)
        if self.have[number] or number in self._verifying:
            self.wasted_pieces += 1
        else:
            self._verifying.add(number)
            self.events.append(PieceArrived(peer.peer, number, message.body))
        return self._fill(now, peer)

    def _checked(self, numbers: Sequence[int]) -> Sequence[int]:
        if any(number >= self.count for number in numbers):
            raise RemoteProtocolError("a piece number beyond the end of the data set")
        return numbers

    def _have_set(self, *, is_question: bool) -> PiecesHeld:
        bits = np.packbits(self.have, bitorder="little").tobytes()
        return PiecesHeld(self.data, bits, is_question, self.is_complete)

    def _uploading(self, peer: PeerId, refusals: Iterable[PieceRefused]) -> Sends:
        """Queue uploads for the caller, and send the peer its refusals."""
        self.events += self._uploads.due
        self._uploads.due.clear()
        return [(peer, refusal) for refusal in refusals]

    def _release(self, peer: SwarmPeer, number: int) -> None:
        """Record that `peer` no longer owes this piece. If no peer does, it may be requested from any
        peer."""
        peer.asked.pop(number, None)
        if not any(number in other.asked for other in self.peers.values()):
            self._in_flight[number] = False

    def _enter(self, now: float, peer: PeerId) -> Sends | None:
        """Add a peer. Return the messages to the peer that it replaces; None if there is no room."""
        found = SwarmPeer(peer, self.count, now)
        evicted = self._places.admit(now, found, peer, peer)
        if evicted is None:
            return None
        for each in evicted:
            self._remove(each.peer)
        self.peers[peer] = found
        return [(each.peer, Unknown(self.data)) for each in evicted]

    def _remove(self, peer: PeerId) -> None:
        found = self.peers.pop(peer, None)
        if found is None:
            return
        self._places.leave(found)
        for number in list(found.asked):
            self._release(found, number)
        self._holders -= found.has
        self._uploads.forget(peer)

    def _drop(self, now: float, peer: PeerId, reason: str) -> Sends:
        self._remove(peer)
        if len(self._dropped) < 4 * PEERS_MAX:
            self._dropped.add(peer)
        self.events.append(PeerDropped(peer, reason))
        return [(peer, Unknown(self.data)), *self._fill_all(now)]

    def _fill_all(self, now: float) -> Sends:
        sends: Sends = []
        # The peer with the fewest open requests is asked first.
        for peer in sorted(self.peers.values(), key=lambda each: len(each.asked)):
            sends += self._fill(now, peer)
        self._schedule(now)
        return sends

    def _fill(self, now: float, peer: SwarmPeer) -> Sends:
        """Request as many pieces from a peer as its window allows."""
        room = peer.window - len(peer.asked)
        if room <= 0 or peer.paused_until > now:
            return []
        open_ = self._wanted & ~self.have & peer.has
        if self._verifying:
            open_[list(self._verifying)] = False
        possible = open_ & ~self._in_flight
        if refused := [number for number, at in peer.retry_at.items() if at > now]:
            possible[refused] = False
        fetching = sorted([self.me, *(each.peer for each in self.peers.values() if not each.is_complete)])
        numbers = self._choice.pick(
            possible,
            self._urgency,
            self._holders,
            place=fetching.index(self.me),
            shares=len(fetching),
            limit=min(room, NUMBERS_MAX),
        )
        if not numbers and not peer.asked:
            numbers = self._overdue(now, peer, open_ & self._in_flight)
        for number in numbers:
            peer.ask(now, number)
            self._in_flight[number] = True
        return [(peer.peer, PieceRequest(self.data, tuple(numbers)))] if numbers else []

    def _overdue(self, now: float, peer: SwarmPeer, open_: Bits) -> list[int]:
        """Return a piece that another peer has owed for too long, to be requested from this peer as well."""
        for number in map(int, np.flatnonzero(open_)):
            owing = [each.asked[number] for each in self.peers.values() if number in each.asked]
            if len(owing) == 1 and owing[0] + HEDGE_SECONDS < now and peer.retry_at.get(number, 0.0) <= now:
                return [number]
        return []

    def _schedule(self, now: float) -> None:
        is_waiting = any(not peer.answered for peer in self.peers.values())
        if is_waiting or not self.is_complete:
            self.deadline = min(self.deadline, now + TICK_SECONDS)
