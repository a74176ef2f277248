"""Dispatches incoming traffic: one handler for each protocol of streams, and one inbox for each protocol of
messages.

A conversation's first message names the protocol, or several in order of preference, so that two versions of
a program understand each other within one round trip. The answer contains only numbers, so that no text from
an unknown peer reaches a screen.
"""

from collections import Counter
from collections.abc import Callable, Container
from typing import Annotated, Literal

import msgspec
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, short_peer
from crypto.protocols import PROTOCOL_BYTES_MAX, protocol_bytes
from crypto.registers import Register
from crypto.sessions.packets import payload_bytes_max
from dht.work import WORK_BITS_MAX, has_work, work_of
from node.errors import StreamClosed, Unreachable
from node.seams import USUAL_STREAMS, Handler, StreamLimits
from node.transport.handlers import Handlers, serve
from node.transport.inbox import Alarm, QueueInbox
from node.transport.settings import TRANSPORT, TransportSettings
from node.transport.streams import SecureStream
from node.transport.tcp import Connection

PROTOCOLS_MAX = 4
"""Maximum number of versions of one protocol that an opener offers."""
HELLO_BYTES_MAX = 512
"""Maximum size of a hello: enough for four of the longest names."""
ONE_SHOT_BYTES_MAX = 2**20
"""Maximum size of a single message over a connection. Anything longer belongs on a stream."""
ONE_SHOT_SECONDS = 30.0
"""Time limit from the first dial to the last byte. As with a datagram, nobody waits for such a message."""

ACCEPTED, UNKNOWN_PROTOCOL, BUSY, WITHOUT_WORK = 0, 1, 2, 3

WorkBits = Annotated[int, msgspec.Meta(ge=0, le=WORK_BITS_MAX)]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The opener's first message. `kind` is a stream for a handler, a single message for the inbox, an
    identity check alone, or a path by which the peer can reach the opener too. `protocols` are names in order
    of preference, such as versions of one protocol. `work_bits` is the proof of work that the opener requires
    of ids. If the two peers require different numbers, neither is served."""

    kind: Literal["stream", "message", "identify", "path"]
    protocols: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=PROTOCOL_BYTES_MAX)], ...],
        msgspec.Meta(max_length=PROTOCOLS_MAX),
    ]
    work_bits: WorkBits = 0


class HelloAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a hello. `chosen` is the index of the accepted name in the hello. `work_bits` is the
    proof of work that the answering peer requires of ids."""

    code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    chosen: Annotated[int, msgspec.Meta(ge=0, lt=PROTOCOLS_MAX)] = 0
    work_bits: WorkBits = 0


async def greet(
    connection: Connection, hello: Hello, me: PeerId, message_bytes_max: int = 0, ahead: bytes = b""
) -> str:
    """State the purpose of `me`'s conversation and return the protocol name that the peer chose. From then on
    messages of at most `message_bytes_max` are accepted. The first message of the conversation may go `ahead`
    of the answer; if the peer then refuses, the connection ends.

    Raises:
        Unreachable: "refused", with the peer's reason; a different request may succeed.
            "work": the settings or ids of the two peers do not fit one swarm.
        StreamClosed: the peer hung up or sent something that is not an answer.
    """
    connection.limit(HELLO_BYTES_MAX)
    await connection.send(encode(hello))
    if ahead:
        await connection.send(ahead)
    received = await connection.receive(0)
    connection.limit(message_bytes_max)
    if not isinstance(received, tuple):
        raise connection.end("a mark instead of an answer")
    try:
        answer: HelloAnswer = decode(received[0], HelloAnswer, bytes_max=HELLO_BYTES_MAX)
    except RemoteProtocolError as error:
        raise connection.offended(error) from None
    wrong = _work_fault(me, hello.work_bits, connection.peer, answer.work_bits)
    if wrong or answer.code == WITHOUT_WORK:
        connection.end("ids without the swarm's proof of work")
        raise Unreachable(
            "work", wrong or (f"{short_peer(connection.peer)} requires more work in this node's id")
        )
    if answer.code != ACCEPTED and ahead:
        connection.end("a message that went ahead was refused")
    if answer.code == UNKNOWN_PROTOCOL:
        wanted = " or ".join(hello.protocols)
        raise Unreachable("refused", f"{short_peer(connection.peer)} does not speak {wanted}")
    if answer.code != ACCEPTED:
        connection.end("the other side is busy")
        raise Unreachable("refused", f"{short_peer(connection.peer)} has too many streams of ours open")
    if not hello.protocols:
        return ""
    if answer.chosen >= len(hello.protocols):
        raise connection.end("the other side chose a protocol that was not offered")
    return hello.protocols[answer.chosen]


def _work_fault(me: PeerId, own_bits: int, peer: PeerId, bits: int) -> str:
    """Return the conflict between this node, which requires `own_bits` of work in ids, and a peer that
    requires `bits`; empty if there is none."""
    if work_of(me) < bits:
        wanted = f"start with --work-bits {bits} and a new identity"
        return (
            f"this swarm requires ids with {bits} bits of work, but this node's id has "
            f"{work_of(me)}: {wanted}"
        )
    if bits > own_bits:
        return f"this swarm has work_bits {bits}, but this node has {own_bits}: start with --work-bits {bits}"
    if bits < own_bits:
        who = short_peer(peer)
        return (
            f"work_bits is {bits} there but {own_bits} here: {who} has to start with --work-bits {own_bits}"
        )
    if not has_work(peer, own_bits):
        return (
            f"{short_peer(peer)} has an id with {work_of(peer)} bits of work, but this "
            f"swarm requires {own_bits}"
        )
    return ""


class Router:
    """The handlers and inboxes of one node. Its `alarm` must run while the node does. A peer is not served if
    its id has less than `work_bits` of work, or if it requires a different number."""

    def __init__(
        self,
        counters: Counter[str],
        work_bits: int = 0,
        settings: TransportSettings = TRANSPORT,
    ) -> None:
        self._counters = counters
        self._work_bits = work_bits
        self._handlers: Handlers[Connection] = Handlers(settings.inbound)
        self._inboxes: dict[str, QueueInbox] = {}
        self.alarm = Alarm()
        self.streamed: Callable[[PeerId], None] | None = None
        """Called with each peer that sent by stream a message that would fit a datagram."""

    def handle(self, protocol: str, handler: Handler, limits: StreamLimits = USUAL_STREAMS) -> None:
        """Serve streams of `protocol`. Raises LocalProtocolError if the protocol has a handler already."""
        self._handlers.add(protocol, handler, limits)

    def inbox(self, protocol: str) -> QueueInbox:
        """Return the inbox of `protocol`, making it if necessary. Messages of a protocol without an inbox are
        refused."""
        if protocol not in self._inboxes:
            protocol_bytes(protocol)
            self._inboxes[protocol] = QueueInbox(self._counters, self.alarm)
        return self._inboxes[protocol]

    def deliver(self, sender: PeerId, protocol: str, message: bytes) -> None:
        """Put a message into its inbox."""
        inbox = self._inboxes.get(protocol)
        if inbox is None:
            self._counters["messages_refused_protocol"] += 1
        else:
            inbox.put(sender, message)

    async def welcome(self, connection: Connection, *, busy: bool) -> tuple[Hello, str] | None:
        """Read and answer a hello. Return the hello and the chosen name, or None if it was refused. A
        promised stream is counted until `serve` has ended, or until `forget`.

        Raises:
            RemoteProtocolError, StreamClosed: the message was not a hello.
        """
        connection.limit(HELLO_BYTES_MAX)
        received = await connection.receive(0)
        if not isinstance(received, tuple):
            raise RemoteProtocolError("a mark instead of a hello")
        hello: Hello = decode(received[0], Hello, bytes_max=HELLO_BYTES_MAX)
        if hello.work_bits != self._work_bits or not has_work(connection.peer, self._work_bits):
            self._counters["streams_refused_work"] += 1
            await connection.send(encode(HelloAnswer(WITHOUT_WORK, 0, self._work_bits)))
            return None
        chosen = self._choose(hello)
        name = hello.protocols[chosen] if chosen is not None and hello.protocols else ""
        if hello.kind == "stream" and chosen is not None and not busy:
            busy = not self._promise(connection, name)
        code = BUSY if busy else UNKNOWN_PROTOCOL if chosen is None else ACCEPTED
        if code == ACCEPTED and hello.kind == "message":
            connection.limit(ONE_SHOT_BYTES_MAX)
        elif code == ACCEPTED and hello.kind == "stream":
            connection.limit(self._handlers.message_bytes_max(name))
        if code != ACCEPTED:
            self._counters["streams_refused_busy" if busy else "streams_refused_protocol"] += 1
        await connection.send(encode(HelloAnswer(code, chosen or 0, self._work_bits)))
        return (hello, name) if code == ACCEPTED else None

    async def serve(self, stream: SecureStream) -> None:
        """Let the protocol's handler serve a stream. If the handler fails because of a bug in this program,
        the connection is cut, so that the peer does not take the answer for complete."""
        try:
            if not await serve(self._handlers.of(stream.protocol), stream, self._counters):
                stream.connection.end("its handler failed")
        finally:
            self.forget(stream.connection)

    @property
    def register(self) -> Register[Connection]:
        """The accepted connections, with the protocol that each currently serves."""
        return self._handlers.register

    def forget(self, connection: Connection) -> None:
        """Serve no stream on a connection, even if one was promised. May be called repeatedly."""
        self.register.step_back(connection)

    def _promise(self, connection: Connection, protocol: str) -> bool:
        """Return whether the peer may have one more stream of this protocol. Silent streams make room for
        it."""
        evicted = self.register.enter(trio.current_time(), connection, protocol)
        for each in evicted or ():
            self.evict(each)
        return evicted is not None

    def evict(self, connection: Connection) -> None:
        """End a connection that has lost its place to another connection."""
        self._counters["connections_displaced"] += 1
        connection.end("others need the room")

    async def take_one_shot(self, connection: Connection, protocol: str) -> bool:
        """Receive the single message that a hello has announced; return False if it did not come."""
        try:
            with trio.fail_after(ONE_SHOT_SECONDS):
                received = await connection.receive(0)
        except (StreamClosed, trio.TooSlowError):
            received = None
        if not isinstance(received, tuple):
            self._counters["messages_cut_short"] += 1
            return False
        if self.streamed is not None and len(received[0]) <= payload_bytes_max(protocol):
            self.streamed(connection.peer)
        self.deliver(connection.peer, protocol, received[0])
        return True

    def _choose(self, hello: Hello) -> int | None:
        """Return the index of the first known name; 0 if no name was requested."""
        if hello.kind in ("identify", "path"):
            return 0
        known: Container[str] = self._inboxes if hello.kind == "message" else self._handlers
        return next((number for number, name in enumerate(hello.protocols) if name in known), None)
