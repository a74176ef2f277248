"""The first half of an attempt: the parts that this member sends, and those that it has received."""

from collections.abc import Mapping

import numpy as np
from blake3 import blake3

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.averaging.codecs import Codec
from gossip.averaging.group import Group, Owner, is_weight
from gossip.averaging.messages import Chunk, CommitmentBody, HaveBody, HeldPart, checked_chunk
from gossip.averaging.parts import Contributed, Incoming, OutgoingParts, chunk_count
from gossip.averaging.robust.reduction import Vector

LARGEST = 1e38
"""Beyond this magnitude, rounding in a lossy float32 codec could overflow."""


def check_vector(group: Group, place: int, codec: Codec, vector: Vector | None, weight: float) -> None:
    """Check the contribution of the member at `place`. Raises ValueError if it is invalid."""
    if (vector is not None) != group.members[place].has_tensors:
        raise ValueError("a member needs a vector if and only if it has tensors")
    if vector is None:
        return
    if vector.shape != (group.terms.items,) or vector.dtype != group.terms.dtype:
        raise ValueError(
            f"want {group.terms.items} values of {group.terms.dtype}, not {vector.shape} of {vector.dtype}"
        )
    if not is_weight(weight):
        raise ValueError(f"not a weight: {weight}")
    if not np.isfinite(vector).all():
        raise ValueError("the vector has values that are not finite")
    if not codec.is_exact and max(vector.max(), -vector.min()) > LARGEST:
        raise ValueError(f"the vector has values beyond {LARGEST}, the limit of a float32 codec")


class Scatter:
    """Commitments, and the parts of the senders. `place` is this member's position; `vector` is None for a
    member without tensors."""

    def __init__(
        self,
        group: Group,
        owners: dict[int, Owner],
        place: int,
        codec: Codec,
        vector: Vector | None,
        weight: float,
    ) -> None:
        self._group = group
        self._attempt = group.id
        self._owners = owners
        self._place = place
        self._mine = owners.get(place)
        self._codec = codec
        self._weight = weight
        self._is_exchange = group.terms.mode == "exchange"
        self._outgoing = (
            None
            if vector is None
            else OutgoingParts(vector, codec, tuple(owners.values()), self._is_exchange)
        )
        self._incoming: dict[int, Incoming] = {}
        self._commitments: dict[int, tuple[CommitmentBody, bytes]] = {}
        self._refused: dict[int, None] = {}
        self.senders = tuple(p for p, member in enumerate(group.members) if member.has_tensors)

    @property
    def has_tensors(self) -> bool:
        return self._outgoing is not None

    @property
    def is_committed(self) -> bool:
        """Whether this member has sent its commitment, or has no vector to commit."""
        return self._outgoing is None or self._place in self._commitments

    def chunk(self, place: int, number: int) -> Chunk:
        """Return the chunk of this member's vector for the owner at `place`."""
        assert self._outgoing is not None
        data, checksum = self._outgoing.chunk(self._owners[place], number)
        return Chunk(self._attempt, "scatter", place, number, b"", checksum, data)

    def commit(self) -> bytes:
        """Return the body of this member's commitment, which is binding from now on."""
        assert self._outgoing is not None
        body = CommitmentBody(self._attempt, self._weight, self._outgoing.roots())
        data = encode(body)
        self._commitments[self._place] = (body, blake3(data).digest())
        return data

    def check(self, place: int, body: CommitmentBody) -> None:
        """Check a commitment of the member at `place`. Raises RemoteProtocolError if no correct member makes
        it."""
        roots = 1 if self._is_exchange else len(self._owners)
        if place not in self.senders or body.attempt != self._attempt:
            raise RemoteProtocolError("a commitment of a member without tensors, or to another attempt")
        if len(body.roots) != roots or not is_weight(body.weight):
            raise RemoteProtocolError("a commitment with a wrong weight or number of roots")

    def take_commitment(self, place: int, body: CommitmentBody, data: bytes) -> None:
        """Keep a checked commitment; `data` is its body as signed."""
        self._commitments[place] = (body, blake3(data).digest())

    def take_chunk(self, place: int, message: Chunk) -> int:
        """Keep a chunk from the member at `place`. Return its size in bytes, or 0 for a repeat. Raises
        RemoteProtocolError."""
        if self._mine is None or message.place != self._place or place not in self.senders:
            raise RemoteProtocolError("a chunk for another owner, or from a member without tensors")
        if place in self._refused:
            return 0
        data = checked_chunk(message)
        incoming = self._incoming.setdefault(place, Incoming(self._mine))
        return data.nbytes if incoming.put(message.number, data, message.checksum, self._codec) else 0

    def holds(self, place: int) -> bool:
        """Return whether this owner holds, and has checked, its part of this sender's vector."""
        if self._mine is None or place not in self._commitments:
            return False
        if place == self._place:
            return True
        root = self._incoming[place].root if place in self._incoming else None
        roots = self._commitments[place][0].roots
        committed = roots[0] if self._is_exchange else roots[list(self._owners).index(self._place)]
        if root is not None and root != committed:
            self._refused[place] = None
        return root == committed

    def has_begun(self, place: int) -> bool:
        """Return whether any tensor data of this sender has arrived."""
        return place in self._incoming or place in self._commitments

    def unsettled(self) -> list[int]:
        """Return the senders whose part this owner may still receive."""
        return [p for p in self.senders if not self.holds(p) and p not in self._refused]

    def have(self) -> HaveBody:
        """Return the have-set of this owner at this moment."""
        held = (
            HeldPart(place, self._commitments[place][0].weight, self._commitments[place][1])
            for place in self.senders
            if self.holds(place)
        )
        return HaveBody(self._attempt, tuple(held))

    def spoilers(self, haves: Mapping[int, HaveBody]) -> list[int]:
        """Return the owners that prevent a common set. Their have-sets name almost no members, or name a
        commitment of this member that differs from the one it made."""
        own = self._commitments.get(self._place)
        mine = None if own is None else HeldPart(self._place, own[0].weight, own[1])
        return [
            place
            for place, body in haves.items()
            if len(body.held) < 2 or any(each.place == self._place and each != mine for each in body.held)
        ]

    def sources(self, held: tuple[HeldPart, ...]) -> list[Contributed]:
        """Return the parts that this owner reduces, in the order of members; the other parts are released."""
        assert self._mine is not None
        incoming, self._incoming = self._incoming, {}
        sources = []
        for entry in held:
            source = self._outgoing if entry.place == self._place else incoming[entry.place]
            assert source is not None
            peer = PeerId(self._group.members[entry.place].peer)
            count = chunk_count(self._mine)
            sources.append(Contributed(peer, entry.weight, count, source, self._mine, self._codec))
        return sources

    def close(self) -> None:
        """Release all memory."""
        self._incoming.clear()
        self._outgoing = None
