"""The all-reduce of one group, as a sans-IO machine: every member ends with the same bytes.

Reduce-scatter, then all-gather, directly between all members. Member j owns part j of the vector: the others
send it their slices of that part ("scatter"), and it adds them up and sends the sum to all ("gather"). Each
member sends and receives 2 (m - 1) / m of the vector for m members, which is the bandwidth optimum (Patarasu
and Yuan 2009). It takes two steps instead of a ring's 2 (m - 1), which suits a few replicas of a stage.

An owner adds in the order of `members`, never in the order of arrival. So the result does not depend on the
network, and equals the plain sum in member order, bit for bit.

Only the replicas of a stage use this all-reduce; peers that average parameters use `gossip.averaging`. It
does not survive the loss of a member: in that case, restart with a new key and without the `missing` members.
It does not detect false gradients.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId

CHUNK_BYTES = 1 << 20
"""Maximum size of the data in one message: small enough to interleave, large enough that the frame's overhead
is negligible."""
PART_BYTES_MAX = CHUNK_BYTES + 256
"""Size limit of one encoded Part: the data, a key of at most 64 bytes, and the small fields."""
KEY_BYTES_MAX = 64
GROUP_MAX = 256
"""Maximum number of members of one group. All members exchange data with all others, which is too costly
beyond a few dozen."""
VECTOR_BYTES_MAX = 1 << 40

Vector = NDArray[np.floating[Any]]
Position = Annotated[int, msgspec.Meta(ge=0, lt=VECTOR_BYTES_MAX)]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of one part of the vector.

    `index` identifies the part: it is its owner's position in `members`. `offset` counts bytes from the start
    of the part and is a multiple of `CHUNK_BYTES`; `data` is little-endian. In scatter `data` is the sender's
    summand, in gather the sum.
    """

    key: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES_MAX)]
    phase: Literal["scatter", "gather"]
    index: Position
    offset: Position
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=CHUNK_BYTES)]


Sends = list[tuple[PeerId, Part]]


class AllReduce:
    """One member's side of one all-reduce.

    `members` is the same tuple for all and contains `me`; `key` names this attempt and is the same for all.
    `vector` is one-dimensional, float32 or float64, of the same size for all, and must not change before
    `start` has returned. Raises ValueError for invalid arguments.
    """

    def __init__(self, me: PeerId, members: tuple[PeerId, ...], key: bytes, vector: Vector) -> None:
        if me not in members or len(set(members)) != len(members) or len(members) > GROUP_MAX:
            raise ValueError(f"a group has 1-{GROUP_MAX} different members, this peer among them")
        if vector.ndim != 1 or vector.dtype not in (np.float32, np.float64):
            raise ValueError(f"want a flat float32 or float64 vector, not {vector.dtype} {vector.shape}")
        if len(key) > KEY_BYTES_MAX:
            raise ValueError(f"a key has at most {KEY_BYTES_MAX} bytes")
        self._me = me
        self._members = members
        self._place = members.index(me)
        self._key = key
        self._vector: Vector | None = vector
        self._wire = vector.dtype.newbyteorder("<")
        self._chunk_size = CHUNK_BYTES // vector.dtype.itemsize
        self._bounds = _split(vector.size, len(members))
        self._total = np.empty(vector.size, vector.dtype)
        # Chunks of our part still to be added up, keyed by their start in the vector, then by member.
        self._summands: dict[int, dict[int, Vector]] = {}
        # Chunks of the total still unknown, with the position of their owner. A dict, to keep the order.
        self._awaited: dict[int, int] = {}
        for place in range(len(members)):
            for begin, end in self._chunks(place):
                self._awaited[begin] = place
                if place == self._place:
                    # A copy, because the caller may change its vector after `start`.
                    self._summands[begin] = {place: vector[begin:end].copy()}
        if len(members) == 1:
            self._total[:] = vector
            self._awaited.clear()

    @property
    def done(self) -> bool:
        """Whether `total` is complete. A member that is done may still have to send what `start` returned."""
        return not self._awaited

    @property
    def total(self) -> Vector:
        """The sum of all vectors; available once done."""
        if not self.done:
            raise LocalProtocolError("the all-reduce is not done")
        return self._total

    @property
    def digest(self) -> bytes:
        """BLAKE3 of the total's little-endian bytes, 32 bytes; available once done. It must be equal on all
        members."""
        return blake3(self.total.astype(self._wire, copy=False).tobytes()).digest()

    @property
    def missing(self) -> tuple[PeerId, ...]:
        """The awaited members, in the order of `members`. Either their sum or their summand of our part is
        missing."""
        waits = [place in self._awaited.values() for place in range(len(self._members))]
        waits[self._place] = False
        for summands in self._summands.values():
            for place in range(len(self._members)):
                waits[place] = waits[place] or place not in summands
        return tuple(peer for peer, wait in zip(self._members, waits, strict=True) if wait)

    @property
    def unsummed(self) -> tuple[PeerId, ...]:
        """Return the awaited members whose summands of our part are missing. They delay the other members
        too, who wait for our sum."""
        waits = [
            any(place not in summands for summands in self._summands.values())
            for place in range(len(self._members))
        ]
        return tuple(peer for peer, wait in zip(self._members, waits, strict=True) if wait)

    @property
    def left(self) -> int:
        """The number of chunks still to be received."""
        return len(self._awaited) + sum(len(self._members) - len(row) for row in self._summands.values())

    def start(self) -> Sends:
        """Return our summands of all other members' parts. Call it once, before or after receiving."""
        if self._vector is None:
            raise LocalProtocolError("an all-reduce can start only once")
        vector, self._vector = self._vector, None
        return [
            (self._members[place], self._part("scatter", place, begin, vector[begin:end]))
            for place in range(len(self._members))
            if place != self._place
            for begin, end in self._chunks(place)
        ]

    def receive(self, sender: PeerId, message: Part) -> Sends:
        """Handle one chunk; ignore a repeat. Raises RemoteProtocolError for a chunk that does not belong
        here."""
        place = self._place_of(sender)
        if message.key != self._key:
            raise RemoteProtocolError("a part of another all-reduce")
        owner = self._place if message.phase == "scatter" else place
        if message.index != owner or message.phase not in ("scatter", "gather"):
            raise RemoteProtocolError(f"a {message.phase} part {message.index} from member {place}")
        begin, end = self._locate(message)
        if message.phase == "gather":
            if self._awaited.pop(begin, None) is not None:
                self._total[begin:end] = np.frombuffer(message.data, self._wire)
            return []
        summands = self._summands.get(begin)
        if summands is None or place in summands:
            return []
        summands[place] = np.frombuffer(message.data, self._wire)
        return self._add_up(begin, end) if len(summands) == len(self._members) else []

    def _add_up(self, begin: int, end: int) -> Sends:
        summands = self._summands.pop(begin)
        total = self._total[begin:end]
        total[:] = summands[0]
        # Values of other members may overflow or be NaN. The caller checks for that, so numpy should not warn
        # here.
        with np.errstate(all="ignore"):
            for place in range(1, len(self._members)):
                total += summands[place]
        del self._awaited[begin]
        part = self._part("gather", self._place, begin, total)
        return [(peer, part) for peer in self._members if peer != self._me]

    def _part(self, phase: Literal["scatter", "gather"], place: int, begin: int, values: Vector) -> Part:
        offset = (begin - self._bounds[place]) * values.dtype.itemsize
        return Part(self._key, phase, place, offset, values.astype(self._wire, copy=False).tobytes())

    def _place_of(self, sender: PeerId) -> int:
        if sender == self._me or sender not in self._members:
            raise RemoteProtocolError("a part from a peer outside the group")
        return self._members.index(sender)

    def _locate(self, message: Part) -> tuple[int, int]:
        """Return the start and end in the vector, in elements, of a chunk whose owner has been checked."""
        if message.offset % CHUNK_BYTES:
            raise RemoteProtocolError("a part that does not begin at a chunk's start")
        begin = self._bounds[message.index] + message.offset // CHUNK_BYTES * self._chunk_size
        end = min(begin + self._chunk_size, self._bounds[message.index + 1])
        if len(message.data) != (end - begin) * self._wire.itemsize or begin >= end:
            raise RemoteProtocolError(f"a part of {len(message.data)} bytes at {message.offset}: wrong size")
        return begin, end

    def _chunks(self, place: int) -> Iterator[tuple[int, int]]:
        """Yield the start and end, in elements, of each chunk of a member's part."""
        last = self._bounds[place + 1]
        for begin in range(self._bounds[place], last, self._chunk_size):
            yield begin, min(begin + self._chunk_size, last)


def _split(size: int, count: int) -> list[int]:
    """Return the start of each of `count` almost equal parts, and the end of the last part."""
    return [size * place // count for place in range(count + 1)]
