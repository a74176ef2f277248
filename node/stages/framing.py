"""How a request and its answer travel between a node and its stage's process. No torch, and no sockets.

A message is a header, its MessagePack, and what stands behind that: the file of an `Import` or `Exported`,
which may be gigabytes, and decoding copies at one go. The tensors of a micro-batch are in neither. Their
bytes lie in memory that both sides map, requests in its first half and answers in the second: one call is
served at a time, so one place for each is enough. Whoever reads copies them out at once, and trusts nothing
that stands there later.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.noise import Data
from node.errors import PayloadRefused, SessionRefused, StageDiverged, StageFailed
from partition.codecs.codec import Payload
from partition.stage import (
    Backward,
    BackwardDone,
    Exported,
    Forward,
    Forwarded,
    Import,
    PayloadPart,
    Ran,
    Refused,
    Reply,
    Request,
    Run,
    Serve,
    Served,
)

_HEADER = struct.Struct("<QQQQQ")
HEADER_BYTES = _HEADER.size

_PAYLOADS: dict[type, tuple[str, ...]] = {
    Forward: ("input", "labels"),
    Backward: ("gradient",),
    Run: ("input",),
    Serve: ("input",),
    Forwarded: ("output", "gradient"),
    BackwardDone: ("gradient",),
    Ran: ("output",),
    Served: ("output",),
}
"""Where messages have tensors: at most two bundles of them."""

Message = TypeVar("Message", Request, Reply)


class Header(NamedTuple):
    """In front of every message. Bytes of its MessagePack, of what stands behind that, and of its bundles of
    tensors in shared memory; then for how many nanoseconds the stage's process was busy with the answer."""

    message: int
    behind: int = 0
    first: int = 0
    second: int = 0
    busy_nanoseconds: int = 0

    @property
    def payloads(self) -> int:
        """Bytes in shared memory."""
        return self.first + self.second

    def encode(self) -> bytes:
        return _HEADER.pack(*self)


class Parts(NamedTuple):
    """A message as it travels."""

    message: bytes
    behind: bytes = b""
    payloads: tuple[Data, ...] = ()

    def header(self, busy_nanoseconds: int = 0) -> Header:
        first, second = (*map(len, self.payloads), 0, 0)[:2]
        return Header(len(self.message), len(self.behind), first, second, busy_nanoseconds)


def read_header(data: bytes) -> Header:
    """Read a header of HEADER_BYTES; whatever they are, they are numbers, which the caller holds against its
    bounds."""
    return Header(*_HEADER.unpack(data))


def split(message: object) -> Parts:
    """Take a request or reply apart."""
    if isinstance(message, Import | Exported):
        return Parts(encode(msgspec.structs.replace(message, data=b"")), message.data)
    found: dict[str, Payload] = {}
    for name in _PAYLOADS.get(type(message), ()):
        payload = getattr(message, name)
        if payload is not None:
            found[name] = payload
    if not found:
        return Parts(encode(message))
    emptied = {
        name: msgspec.structs.replace(payload, data=memoryview(b"")) for name, payload in found.items()
    }
    bare = msgspec.structs.replace(message, **emptied)  # type: ignore[type-var]  # a struct, by the table
    return Parts(encode(bare), payloads=tuple(payload.data for payload in found.values()))


def largest_payload(request: object) -> PayloadPart | None:
    """Return which of the tensors of a micro-batch is the longest; None where a request has none."""
    if isinstance(request, Backward):
        return "gradient"
    if not isinstance(request, Forward):
        return None
    return "labels" if request.labels and len(request.labels.data) > len(request.input.data) else "input"


def refusal(reply: Refused) -> StageFailed:
    """The error that a refusal comes to for whoever asked."""
    if reply.fault in ("position", "room"):
        return SessionRefused(reply.reason, reply.session, has_no_room=reply.fault == "room")
    if reply.part:
        return PayloadRefused(reply.reason, reply.part, of_values=reply.fault == "values")
    return (StageDiverged if reply.fault == "divergence" else StageFailed)(reply.reason)


def joined(message: Message, behind: bytes, payloads: Sequence[Data]) -> Message:
    """A decoded message with what came beside it: `payloads` are both bundles, b"" where there is none.

    Raises:
        RemoteProtocolError: something came beside a message that has no place for it.
    """
    if isinstance(message, Import | Exported):
        if any(payloads):
            raise RemoteProtocolError("tensors beside a message that has none")
        return msgspec.structs.replace(message, data=behind)
    if behind:
        raise RemoteProtocolError(f"{len(behind)} bytes behind a message that has none")
    left = list(payloads)
    found = {}
    for name in _PAYLOADS.get(type(message), ()):
        payload = getattr(message, name)
        if payload is not None:
            if payload.data:
                raise RemoteProtocolError("a message with tensors in two places")
            found[name] = msgspec.structs.replace(payload, data=memoryview(left.pop(0)).toreadonly())
    if any(left):
        raise RemoteProtocolError("tensors beside a message that has none")
    return msgspec.structs.replace(message, **found)
