"""Who gets what came: a handler per protocol for streams, an inbox per protocol for messages.

A stream's first message names the protocol, the answer is one number. Never a text: what a
stranger writes does not reach a screen.
"""

from collections import Counter
from typing import Annotated, Literal

import msgspec
import trio

from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId, short_peer
from crypto.protocols import PROTOCOL_BYTES_MAX, protocol_bytes
from node.errors import StreamClosed, Unreachable
from node.seams import Handler
from node.transport.inbox import QueueInbox
from node.transport.records import MESSAGE_BYTES_MAX
from node.transport.tcp import SecureStream

HELLO_BYTES_MAX = 256
ONE_SHOT_BYTES_MAX = 2**20
"""A message too long for a datagram that goes by a stream of its own; more belongs on an opened stream."""
ONE_SHOT_SECONDS = 30.0
"""From the first address tried to the last byte; such a message is as little awaited as a datagram."""

ACCEPTED, UNKNOWN_PROTOCOL, BUSY = 0, 1, 2


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The opener's first message. `kind`: a stream for a handler, one message for the inbox, or only
    the question who is there."""

    kind: Literal["stream", "message", "identify"]
    protocol: Annotated[str, msgspec.Meta(max_length=PROTOCOL_BYTES_MAX)]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    code: Annotated[int, msgspec.Meta(ge=0, le=255)]


async def greet(stream: SecureStream, hello: Hello) -> None:
    """Say what the stream is for and wait for the answer.

    Raises:
        Unreachable: "refused", with what the other side has against it. StreamClosed: it hung up.
    """
    stream.limit(HELLO_BYTES_MAX)
    await stream.send(encode(hello))
    try:
        answer: Answer = decode(await stream.receive(), Answer, bytes_max=HELLO_BYTES_MAX)
    except RemoteProtocolError as error:
        raise StreamClosed(f"not an answer: {error}") from None
    stream.limit(MESSAGE_BYTES_MAX)
    if answer.code == UNKNOWN_PROTOCOL:
        raise Unreachable("refused", f"{short_peer(stream.peer)} does not speak {hello.protocol}")
    if answer.code != ACCEPTED:
        raise Unreachable("refused", f"{short_peer(stream.peer)} has too many streams of ours open")


class Router:
    """The handlers and inboxes of one node."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._handlers: dict[str, Handler] = {}
        self._inboxes: dict[str, QueueInbox] = {}

    def handle(self, protocol: str, handler: Handler) -> None:
        """Serve streams of `protocol`; LocalProtocolError if somebody does already."""
        protocol_bytes(protocol)
        if protocol in self._handlers:
            raise LocalProtocolError(f"{protocol} has a handler already")
        self._handlers[protocol] = handler

    def inbox(self, protocol: str) -> QueueInbox:
        """The inbox of `protocol`; messages of protocols without one are refused."""
        protocol_bytes(protocol)
        return self._inboxes.setdefault(protocol, QueueInbox(self._counters))

    def deliver(self, sender: PeerId, protocol: str, message: bytes) -> None:
        """Put a message into its inbox."""
        inbox = self._inboxes.get(protocol)
        if inbox is None:
            self._counters["messages_refused_protocol"] += 1
        else:
            inbox.put(sender, message)

    async def welcome(self, stream: SecureStream, *, busy: bool) -> Hello | None:
        """Read and answer the hello of a new stream; None where it was refused.

        Raises:
            RemoteProtocolError, StreamClosed: what came was no hello.
        """
        stream.limit(HELLO_BYTES_MAX)
        hello: Hello = decode(await stream.receive(), Hello, bytes_max=HELLO_BYTES_MAX)
        code = BUSY if busy else ACCEPTED if self._knows(hello) else UNKNOWN_PROTOCOL
        stream.limit(ONE_SHOT_BYTES_MAX if hello.kind == "message" else MESSAGE_BYTES_MAX)
        if code != ACCEPTED:
            self._counters["streams_refused_busy" if busy else "streams_refused_protocol"] += 1
        await stream.send(encode(Answer(code)))
        return hello if code == ACCEPTED else None

    async def serve(self, stream: SecureStream, hello: Hello) -> None:
        """Do what the hello asked for. What a stranger can cause is counted; our own bugs come out."""
        if hello.kind == "message":
            await self._take_one_shot(stream, hello.protocol)
        elif hello.kind == "stream":
            try:
                await self._handlers[hello.protocol](stream)
            except* RemoteProtocolError:
                self._counters["streams_broken"] += 1
            except* Unreachable:
                self._counters["streams_ended_early"] += 1
            except* StreamClosed:
                pass  # how a conversation ends; what broke one was counted where it broke

    async def _take_one_shot(self, stream: SecureStream, protocol: str) -> None:
        try:
            with trio.fail_after(ONE_SHOT_SECONDS):
                self.deliver(stream.peer, protocol, await stream.receive())
        except (StreamClosed, trio.TooSlowError):
            self._counters["messages_cut_short"] += 1

    def _knows(self, hello: Hello) -> bool:
        if hello.kind == "message":
            return hello.protocol in self._inboxes
        return hello.kind == "identify" or hello.protocol in self._handlers
