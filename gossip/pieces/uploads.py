"""The sending side of an exchange: the choice and order of uploads.

A source that alone has some pieces sends each of them once before it sends any twice (super-seeding). So one
copy of a data set is in the swarm after little more than one copy was sent. As long as there are unsent
pieces, a request for a piece that another peer has, or is being sent, is referred elsewhere.

Not here: reading the piece, and its stream. The caller carries out an `UploadDue` and calls `done`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crypto.identity import PeerId
from gossip.pieces.choice import Bits, Counts
from gossip.pieces.messages import PieceRefused
from gossip.pieces.peer import UPLOADS_MAX, SwarmPeer

GIVEN_SECONDS = 60.0
"""How long a peer that was sent a piece may take to announce it."""
PUT_OFF_MAX = 4
"""Maximum number of times that a request for a piece is referred elsewhere before the piece is sent after
all."""


@dataclass(frozen=True)
class UploadDue:
    """An instruction to send this piece to the peer, and then to call `uploaded`."""

    peer: PeerId
    number: int


class Uploads:
    """The uploads of the data set `data`. `have` and `holders` belong to the exchange: the pieces stored
    here, and the number of other holders of each. `due` is for the caller."""

    def __init__(self, data: bytes, have: Bits, holders: Counts) -> None:
        self.due: list[UploadDue] = []
        self._data = data
        self._have = have
        self._holders = holders
        # The receiver of each piece in transit, and the start time, until that receiver announces the piece.
        self._given: dict[int, tuple[PeerId, float]] = {}
        self._was_given: Bits = np.zeros(len(have), np.bool_)

    def ask(self, now: float, peer: SwarmPeer, numbers: Sequence[int]) -> list[PieceRefused]:
        """Queue the requested pieces. Return the refusals of those that will not be sent."""
        refusals = []
        for number in numbers:
            if not self._have[number]:
                refusals.append(PieceRefused(self._data, number, "absent"))
            elif number in peer.uploads or peer.sending == number:
                continue
            elif len(peer.uploads) >= UPLOADS_MAX:
                refusals.append(PieceRefused(self._data, number, "busy"))
            elif self._goes_elsewhere(now, peer, number):
                peer.put_off[number] = peer.put_off.get(number, 0) + 1
                refusals.append(PieceRefused(self._data, number, "elsewhere"))
            else:
                peer.put_off.pop(number, None)
                peer.uploads.append(number)
                self._given[number] = (peer.peer, now)
                self._was_given[number] = True
        self._begin(peer)
        return refusals

    def cancel(self, peer: SwarmPeer, numbers: Sequence[int]) -> None:
        """Remove requests that the peer has cancelled."""
        for number in numbers:
            if number in peer.uploads:
                peer.uploads.remove(number)
                if self._is_given(peer.peer, number):
                    self._take_back(number)

    def done(self, peer: SwarmPeer, number: int, *, was_sent: bool) -> list[PieceRefused]:
        """Record that an UploadDue was carried out, or that the piece is missing. Start the peer's next
        upload."""
        peer.sending = None
        refusals = []
        if not was_sent:
            self._take_back(number)
            refusals.append(PieceRefused(self._data, number, "absent"))
        self._begin(peer)
        return refusals

    def arrived(self, peer: PeerId, number: int) -> None:
        """Record that a peer has announced a piece."""
        if self._is_given(peer, number):
            del self._given[number]

    def forget(self, peer: PeerId) -> None:
        """Stop counting pieces as in transit to this peer."""
        for number in [each for each, given in self._given.items() if given[0] == peer]:
            self._take_back(number)

    def _begin(self, peer: SwarmPeer) -> None:
        if peer.sending is None and peer.uploads:
            peer.sending = peer.uploads.popleft()
            self.due.append(UploadDue(peer.peer, peer.sending))

    def _goes_elsewhere(self, now: float, peer: SwarmPeer, number: int) -> bool:
        """Return whether to refer this request elsewhere: another peer has this piece or is being sent it,
        and there are unsent pieces."""
        if peer.put_off.get(number, 0) >= PUT_OFF_MAX:
            return False
        given = self._given.get(number)
        is_given = given is not None and given[0] != peer.peer and given[1] + GIVEN_SECONDS > now
        if not is_given and not self._holders[number]:
            return False
        return bool(np.any(self._have & (self._holders == 0) & ~self._was_given))

    def _is_given(self, peer: PeerId, number: int) -> bool:
        given = self._given.get(number)
        return given is not None and given[0] == peer

    def _take_back(self, number: int) -> None:
        """Stop counting this piece as in transit."""
        self._given.pop(number, None)
        self._was_given[number] = False
