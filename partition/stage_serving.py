"""The part of the stage API that continues served sessions: a node's requests to a stage's process, and its
answers.

`partition.stage` has the rest, and exports these too.
"""

from typing import Annotated

import msgspec

from partition.codecs.codec import Codec, Payload

UNITS_MAX = 256
"""Maximum number of sessions that one serving request continues; more have to wait for the next request."""
BITS_BYTES = 16
"""Length of a bit class. It can be short: finding two machines that compute differently but have the same
class benefits only a liar."""
SESSION_BYTES_MAX = 32
NUMBER_MAX = 2**53
Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]


class Unit(msgspec.Struct, frozen=True, array_like=True):
    """Some tokens of one session, in a request for many sessions. They begin at `position`.

    `wanted` is the number of its last rows that the last stage answers with logits, from none to all.

    Raises:
        ValueError: more rows are wanted than there are tokens.
    """

    session: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    position: Number
    tokens: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
    wanted: Number = 0

    def __post_init__(self) -> None:
        if self.wanted > self.tokens:
            raise ValueError(f"{self.wanted} rows wanted, but the unit has {self.tokens} tokens")


class Serve(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Continue sessions with the entry point `serve`: a batch of units of any lengths, each of a different
    session.

    `input` is flat over all units, in order. At the first stage it is token ids, int64 [tokens]; at later
    stages it is the previous stage's `Served.output`, unchanged. Its `sizes` are ignored, because the units
    determine them.

    A session begins with a unit at position 0. A unit at a lower position than the session has reached takes
    back the tokens from that position on. A unit at a higher position is refused, and so is one for which
    there are no pages. In that case `Refused.session` names the session, and no session has changed. With
    `is_hidden` the last stage answers the wanted rows as they enter its head, instead of logits.
    """

    units: Annotated[tuple[Unit, ...], msgspec.Meta(min_length=1, max_length=UNITS_MAX)]
    input: Payload
    codec: Codec = "raw"
    is_hidden: bool = False


class Served(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer: tensors [tokens, ...] for the next stage, flat as they came.

    From the last stage they are logits [rows, vocabulary] of the wanted rows, in the order of the units; None
    if no row is wanted.
    """

    output: Payload | None
    busy_nanoseconds: Number = 0


class FindBits(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for the bit class of the stage, once it has its parameters: it serves some made-up tokens to find
    it."""


class BitsFound(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `FindBits`. Two replicas of a stage with the same `bits` have computed these tokens to
    the same bits. `bits` is empty if this machine gives a session different bits when it is divided
    differently, so that no replica can match it, not even itself. The values of the rows `packed` are no
    longer in the arena: read them with `ReadValues`. The stage needs at most `needed_bytes` of the memory
    that it was given."""

    bits: Annotated[bytes, msgspec.Meta(max_length=BITS_BYTES)]
    packed: tuple[int, ...] = ()
    needed_bytes: Number = 0


class ReadValues(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for `length` bytes of a row's values as they are stored, from `begin` on."""

    row: Number
    begin: Number
    length: Number


class ValuesRead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `ReadValues`."""

    data: bytes


class CopySession(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Begin a session with the first `tokens` of `base`, which continues unchanged. The two sessions share
    their common tokens.

    Refused with the fault "position" if `base` has fewer tokens."""

    session: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    base: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]


class EndSession(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget a session: its states, its keys and values. An unknown session is ignored."""

    session: Annotated[bytes, msgspec.Meta(min_length=1, max_length=SESSION_BYTES_MAX)]
