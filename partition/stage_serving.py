"""The stage API, as far as it continues served sessions: what a node asks a stage's process, and its answers.

`partition.stage` has the rest, and passes these on.
"""

from typing import Annotated

import msgspec

from partition.codecs.codec import Codec, Payload

UNITS_MAX = 256
"""Sessions that one request of serving continues: more wait for the next."""
BITS_BYTES = 16
"""A bit class: nobody gains by finding two machines of one name that compute differently, but a liar."""
SESSION_BYTES_MAX = 32
NUMBER_MAX = 2**53
Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]


class Unit(msgspec.Struct, frozen=True, array_like=True):
    """Some tokens of one session, in a request for many: they stand at `position` and after it.

    `wanted` is how many of its last rows the last stage answers with logits, from none to all.

    Raises:
        ValueError: more rows are wanted than there are tokens.
    """

    session: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    position: Number
    tokens: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
    wanted: Number = 0

    def __post_init__(self) -> None:
        if self.wanted > self.tokens:
            raise ValueError(f"{self.wanted} rows wanted of {self.tokens} tokens")


class Serve(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Continue sessions by the entry point `serve`: a batch of units of any lengths, each of another session.

    `input` is flat over all units, in their order: token ids, int64 [tokens], at the first stage, elsewhere
    the `Served.output` of the stage before, as it came. Its `sizes` do not count: the units say them.

    A session begins with a unit at position 0. A unit at a lower position than the session has reached takes
    back what stands there and after; one at a higher position is refused, and so is one that there are no
    pages for. `Refused.session` then says which, and no session has changed. With `is_hidden` the last stage
    answers the wanted rows as they go into its head, in the place of logits.
    """

    units: Annotated[tuple[Unit, ...], msgspec.Meta(min_length=1, max_length=UNITS_MAX)]
    input: Payload
    codec: Codec = "raw"
    is_hidden: bool = False


class Served(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer: tensors [tokens, ...] for the next stage, flat as they came.

    Those of the last stage are logits [rows, vocabulary] of the wanted rows, in the order of the units; None
    where no row is wanted.
    """

    output: Payload | None
    busy_nanoseconds: Number = 0


class FindBits(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask to which bit class the stage belongs, once it has its parameters: it serves some made-up tokens."""


class BitsFound(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Two replicas of a stage that answer the same `bits` computed these tokens to the same bits. Empty: this
    machine gives a session other bits when it comes in other parts, so no other equals it, nor it itself.
    The values of the rows `packed` lie in the arena no more: `ReadValues` has them. The stage needs at most
    `needed_bytes` of the memory that it was given."""

    bits: Annotated[bytes, msgspec.Meta(max_length=BITS_BYTES)]
    packed: tuple[int, ...] = ()
    needed_bytes: Number = 0


class ReadValues(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for `length` bytes of a row's values as they are stored, from `begin` on."""

    row: Number
    begin: Number
    length: Number


class ValuesRead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer."""

    data: bytes


class CopySession(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Begin a session with the first `tokens` of `base`, which goes on as it was: what both have they share.

    Refused where `base` has fewer tokens, by the fault "position"."""

    session: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    base: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]


class EndSession(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget a session: its states, its keys and values. An unknown one is none."""

    session: Annotated[bytes, msgspec.Meta(min_length=1, max_length=SESSION_BYTES_MAX)]
