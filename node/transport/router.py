"""Dispatch of incoming traffic: a handler per protocol for streams, an inbox per protocol for messages.

A conversation's first message names the protocol, or several in order of preference, so that two versions
of a program understand each other in one round trip; the answer is numbers and never a text, so that a
stranger's text does not reach a screen.
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
"""Versions of one protocol that an opener speaks at once."""
HELLO_BYTES_MAX = 512
"""Enough for four of the longest names."""
ONE_SHOT_BYTES_MAX = 2**20
"""The limit of a single message over a connection; a longer one belongs on an opened stream."""
ONE_SHOT_SECONDS = 30.0
"""The time limit from the first dial to the last byte; like a datagram, nobody waits for such a message."""

ACCEPTED, UNKNOWN_PROTOCOL, BUSY, WITHOUT_WORK = 0, 1, 2, 3

WorkBits = Annotated[int, msgspec.Meta(ge=0, le=WORK_BITS_MAX)]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The opener's first message. `kind`: a stream for a handler, one message for the inbox, an identity
    check alone, or a path by which the other side reaches the opener too. `protocols` are names in order of
    preference: versions of one protocol. `work_bits` is the proof of work that the opener requires of ids: if
    the two differ, neither is served."""

    kind: Literal["stream", "message", "identify", "path"]
    protocols: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=PROTOCOL_BYTES_MAX)], ...],
        msgspec.Meta(max_length=PROTOCOLS_MAX),
    ]
    work_bits: WorkBits = 0


class HelloAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`chosen` is the number of the name in the hello. `work_bits` is the proof of work that the answering
    side requires of ids."""

    code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    chosen: Annotated[int, msgspec.Meta(ge=0, lt=PROTOCOLS_MAX)] = 0
    work_bits: WorkBits = 0


async def greet(
    connection: Connection, hello: Hello, me: PeerId, message_bytes_max: int = 0, ahead: bytes = b""
) -> str:
    """State the purpose of `me`'s conversation and return the name that the other side chose. From then on
    messages of at most `message_bytes_max` are accepted. The first message of the conversation may go `ahead`
    of the answer; if the answer is no, the connection ends.

    Raises:
        Unreachable: "refused", with the other side's reason; it may be asked for something else.
            "work": the settings or the ids of the two do not fit one swarm.
        StreamClosed: it hung up, or what it said is no answer.
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
        raise Unreachable("work", wrong or f"{short_peer(connection.peer)} wants more work in this node's id")
    if answer.code != ACCEPTED and ahead:
        connection.end("what went ahead is not wanted")
    if answer.code == UNKNOWN_PROTOCOL:
        wanted = " or ".join(hello.protocols)
        raise Unreachable("refused", f"{short_peer(connection.peer)} does not speak {wanted}")
    if answer.code != ACCEPTED:
        connection.end("the other side is busy")
        raise Unreachable("refused", f"{short_peer(connection.peer)} has too many streams of ours open")
    if not hello.protocols:
        return ""
    if answer.chosen >= len(hello.protocols):
        raise connection.end("the other side chose a protocol that was not named")
    return hello.protocols[answer.chosen]


def _work_fault(me: PeerId, own_bits: int, peer: PeerId, bits: int) -> str:
    """Return the conflict between this node, which requires `own_bits` of work in ids, and one that requires
    `bits`; empty for none."""
    if work_of(me) < bits:
        wanted = f"start with --work-bits {bits} and a new identity"
        return f"this swarm wants ids with {bits} bits of work, this node's has {work_of(me)}: {wanted}"
    if bits > own_bits:
        return f"this swarm has work_bits {bits}, this node {own_bits}: start with --work-bits {bits}"
    if bits < own_bits:
        who = short_peer(peer)
        return (
            f"work_bits is {bits} there and {own_bits} here: {who} has to start with --work-bits {own_bits}"
        )
    if not has_work(peer, own_bits):
        return f"{short_peer(peer)} has an id with {work_of(peer)} bits of work; this swarm wants {own_bits}"
    return ""


class Router:
    """The handlers and inboxes of one node. Its `alarm` is to be run while the node is. Peers whose ids have
    less than `work_bits` of work, or that require another number, are not served."""

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
        """Called with each peer that sent a message by a stream that fits a datagram."""

    def handle(self, protocol: str, handler: Handler, limits: StreamLimits = USUAL_STREAMS) -> None:
        """Serve streams of `protocol`; LocalProtocolError if it has a handler already."""
        self._handlers.add(protocol, handler, limits)

    def inbox(self, protocol: str) -> QueueInbox:
        """Return the inbox of `protocol`; messages of protocols without one are refused."""
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
        """Read and answer a hello; return the purpose and the chosen name, None if it was refused. A promised
        stream is counted until `serve` has ended, or `forget`.

        Raises:
            RemoteProtocolError, StreamClosed: it was not a hello.
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
        """Let the protocol's handler serve a stream. If that fails by a bug of ours, the connection is cut,
        so that the other side does not take the answer for complete."""
        try:
            if not await serve(self._handlers.of(stream.protocol), stream, self._counters):
                stream.connection.end("its handler failed")
        finally:
            self.forget(stream.connection)

    @property
    def register(self) -> Register[Connection]:
        """The accepted connections, and the protocol that each serves now."""
        return self._handlers.register

    def forget(self, connection: Connection) -> None:
        """Serve no stream on a connection, even if one was promised. May be repeated."""
        self.register.step_back(connection)

    def _promise(self, connection: Connection, protocol: str) -> bool:
        """Return whether the peer may have one more stream of this protocol; silent streams make room for
        it."""
        evicted = self.register.enter(trio.current_time(), connection, protocol)
        for each in evicted or ():
            self.evict(each)
        return evicted is not None

    def evict(self, connection: Connection) -> None:
        """End a connection that has lost its place to another."""
        self._counters["connections_displaced"] += 1
        connection.end("others need the room")

    async def take_one_shot(self, connection: Connection, protocol: str) -> bool:
        """Receive the one message that a hello has announced; return False if it did not come."""
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
        """Return the number of the first known name; 0 if no name was requested."""
        if hello.kind in ("identify", "path"):
            return 0
        known: Container[str] = self._inboxes if hello.kind == "message" else self._handlers
        return next((number for number, name in enumerate(hello.protocols) if name in known), None)
