"""The framing of requests and answers between a node and its stage's process. No torch, and no sockets.

A message is a header, its MessagePack, and, for an `Import` or `Exported`, a trailing file. The file may have
gigabytes, and decoding it as a part of the MessagePack would copy it in one go. The tensors of a micro-batch
are in neither: their bytes are in memory that both processes map, requests in its first half and answers in
the second. One call is served at a time, so one area for each is enough. The reader immediately copies the
tensors out and does not read that area again.
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
    RunEntryPoint,
    Serve,
    Served,
)

_HEADER = struct.Struct("<QQQQQ")
HEADER_BYTES = _HEADER.size

_PAYLOADS: dict[type, tuple[str, ...]] = {
    Forward: ("input", "labels"),
    Backward: ("gradient",),
    RunEntryPoint: ("input",),
    Serve: ("input",),
    Forwarded: ("output", "gradient"),
    BackwardDone: ("gradient",),
    Ran: ("output",),
    Served: ("output",),
}
"""The fields with tensors in each message; a message has at most two such payloads."""

Message = TypeVar("Message", Request, Reply)


class Header(NamedTuple):
    """The header of every message: the lengths of its MessagePack, of its trailing file, and of its two
    tensor payloads in shared memory. The last field is how many nanoseconds the stage's process was busy with
    the answer."""

    message: int
    behind: int = 0
    first: int = 0
    second: int = 0
    busy_nanoseconds: int = 0

    @property
    def payloads(self) -> int:
        """The number of bytes in shared memory."""
        return self.first + self.second

    def encode(self) -> bytes:
        return _HEADER.pack(*self)


class FramedMessage(NamedTuple):
    """A message split for sending."""

    message: bytes
    behind: bytes = b""
    payloads: tuple[Data, ...] = ()

    def header(self, busy_nanoseconds: int = 0) -> Header:
        first, second = (*map(len, self.payloads), 0, 0)[:2]
        return Header(len(self.message), len(self.behind), first, second, busy_nanoseconds)


def read_header(data: bytes) -> Header:
    """Read a header of HEADER_BYTES. Any bytes are a valid header, so the caller must check the lengths
    against its limits."""
    return Header(*_HEADER.unpack(data))


def split(message: object) -> FramedMessage:
    """Split a request or reply."""
    if isinstance(message, Import | Exported):
        return FramedMessage(encode(msgspec.structs.replace(message, data=b"")), message.data)
    found: dict[str, Payload] = {}
    for name in _PAYLOADS.get(type(message), ()):
        payload = getattr(message, name)
        if payload is not None:
            found[name] = payload
    if not found:
        return FramedMessage(encode(message))
    emptied = {
        name: msgspec.structs.replace(payload, data=memoryview(b"")) for name, payload in found.items()
    }
    bare = msgspec.structs.replace(message, **emptied)  # type: ignore[type-var]  # a struct, by the table
    return FramedMessage(encode(bare), payloads=tuple(payload.data for payload in found.values()))


def largest_payload(request: object) -> PayloadPart | None:
    """Return which field of a pass's request has the longest tensors; None if the request is not a pass of a
    micro-batch."""
    if isinstance(request, Backward):
        return "gradient"
    if not isinstance(request, Forward):
        return None
    return "labels" if request.labels and len(request.labels.data) > len(request.input.data) else "input"


def refusal(reply: Refused) -> StageFailed:
    """Return the error to raise at the caller for a refusal."""
    if reply.fault in ("position", "room"):
        return SessionRefused(reply.reason, reply.session, has_no_room=reply.fault == "room")
    if reply.part:
        return PayloadRefused(reply.reason, reply.part, of_values=reply.fault == "values")
    return (StageDiverged if reply.fault == "divergence" else StageFailed)(reply.reason)


def joined(message: Message, behind: bytes, payloads: Sequence[Data]) -> Message:
    """Return a decoded message with its trailing file and tensors. `payloads` are both tensor payloads, each
    b"" if there is none.

    Raises:
        RemoteProtocolError: a file or tensors came with a message that has no field for them.
    """
    if isinstance(message, Import | Exported):
        if any(payloads):
            raise RemoteProtocolError("tensors with a message that has none")
        return msgspec.structs.replace(message, data=behind)
    if behind:
        raise RemoteProtocolError(f"{len(behind)} bytes after a message that has no trailing file")
    left = list(payloads)
    found = {}
    for name in _PAYLOADS.get(type(message), ()):
        payload = getattr(message, name)
        if payload is not None:
            if payload.data:
                raise RemoteProtocolError("the message has tensors both inside and in shared memory")
            found[name] = msgspec.structs.replace(payload, data=memoryview(left.pop(0)).toreadonly())
    if any(left):
        raise RemoteProtocolError("tensors with a message that has none")
    return msgspec.structs.replace(message, **found)
