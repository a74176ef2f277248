"""A peer of the swarm that sends every message of every protocol, with hostile values.

It has an identity, is a member like any other, and may have a stage in a run. `Insider` sends datagrams and
opens streams. `LyingNetwork` stands between its node and the network: it learns from received messages, and
answers some requests to this node with any answer of the protocol. Nothing is checked here: the victims' own
counters, steps and events show the effects.
"""

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, cast

import trio

from crypto.encoding import decode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import PeerId
from node.errors import StreamClosed, Unreachable
from node.seams import USUAL_STREAMS, Handler, Inbox, Network, Stream, StreamLimits
from node.transport.router import ONE_SHOT_BYTES_MAX
from tests.hostile.values import Values
from tests.hostile.wire import PROTOCOLS, Protocol, structs

ANSWER_SECONDS = 1.0
"""Seconds that an answer is awaited; after that the conversation is abandoned."""
OPEN_SECONDS = 5.0
HELD_MAX = 6
"""Maximum number of silent streams kept open, over all protocols and victims; the oldest are closed first."""
REPEATS = 40
"""Number of times that a request is repeated on one stream, and number of streams for simultaneous
repeats."""
PARTS_MAX = 20
"""Maximum number of messages read from one answer."""
ANSWER_BYTES_MAX = 4 << 20
PAYLOAD_BYTES = 64 << 10
LIES_PART = 0.2
"""The share of others' requests that this node answers with a lie."""
AT_ONCE = 8
"""Maximum number of concurrent deeds in one round."""
LONG = 1 << 30

Deed = Callable[[], Awaitable[None]]


def read(data: bytes, kind: Any) -> Any:
    """Return a decoded message; None if it is malformed."""
    with suppress(RemoteProtocolError):
        return decode(data, kind, bytes_max=LONG)
    return None


class Insider:
    """Sends hostile messages over `network`. `sent` counts messages by protocol and kind, and other deeds by
    name."""

    def __init__(self, network: Network, values: Values) -> None:
        self.protocols: Sequence[Protocol] = PROTOCOLS
        """The protocols that the insider uses; all by default."""
        self._network = network
        self._values = values
        self._rng: Random = values.rng
        self._held: deque[Stream] = deque()
        self.sent: Counter[str] = Counter()
        self._misdeeds = (
            self._say_nothing,
            self._say_half,
            self._never_read,
            self._close_at_once,
            self._repeat_on_one,
            self._repeat_on_many,
            self._say_garbage,
        )

    async def round(self, victims: Collection[PeerId]) -> None:
        """Send every kind of message of every protocol to each victim once, and do each misdeed in some
        protocol."""
        deeds = deque(self._rng.sample(found := self._deeds(victims), len(found)))

        async def go_through() -> None:
            while deeds:
                await self._do(deeds.popleft())

        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(go_through)

    def _deeds(self, victims: Collection[PeerId]) -> list[Deed]:
        deeds: list[Deed] = []
        with_streams = [protocol for protocol in self.protocols if protocol.said is not None]
        for victim in victims:
            for protocol in self.protocols:
                deeds += [
                    partial(self._datagram, victim, protocol, kind) for kind in structs(protocol.datagrams)
                ]
                kinds = structs(protocol.said)
                if protocol.payloads:
                    deeds.append(
                        partial(self.converse, victim, protocol, self._rng.sample(kinds, len(kinds)))
                    )
                else:
                    deeds += [partial(self.ask, victim, protocol, kind) for kind in kinds]
            for misdeed in self._misdeeds:
                deeds.append(partial(misdeed, victim, self._rng.choice(with_streams)))
        return deeds

    async def close(self) -> None:
        """Close the held streams."""
        while self._held:
            await self._held.popleft().aclose()

    async def _do(self, deed: Deed) -> None:
        """Do a deed. It may fail, because the victim defends itself."""
        try:
            await deed()
        except (StreamClosed, Unreachable):
            self.sent["(refused)"] += 1

    def _made(self, protocol: Protocol, kind: type, **fixed: bytes) -> bytes:
        self.sent[f"{protocol.name} {kind.__name__}"] += 1
        return self._values.message(kind, protocol.name, **fixed)

    async def _datagram(self, victim: PeerId, protocol: Protocol, kind: type) -> None:
        message = self._made(protocol, kind)
        with suppress(LocalProtocolError):  # longer than any timeout of the transport
            self._network.send(victim, protocol.name, message)
        await trio.lowlevel.checkpoint()

    async def _open(self, victim: PeerId, protocol: Protocol) -> Stream:
        with trio.move_on_after(OPEN_SECONDS):
            return await self._network.open(victim, protocol.name, message_bytes_max=ANSWER_BYTES_MAX)
        raise Unreachable("timeout", "nobody opens")

    async def _say(self, stream: Stream, message: bytes, *payload: bytes) -> None:
        with trio.move_on_after(ANSWER_SECONDS) as scope, suppress(LocalProtocolError):
            await stream.send(message, *payload)
        if scope.cancelled_caught:
            raise StreamClosed("it takes nothing")

    async def ask(self, victim: PeerId, protocol: Protocol, kind: type) -> None:
        """Send one request on a stream of its own, and read its answer."""
        await self.put(victim, protocol, self._made(protocol, kind))

    async def put(self, victim: PeerId, protocol: Protocol, message: bytes) -> Any:
        """Send a raw request; return its first answer, None if there is no answer."""
        first = None
        stream = await self._open(victim, protocol)
        try:
            await self._say(stream, message)
            with trio.move_on_after(ANSWER_SECONDS):
                for part in range(PARTS_MAX):
                    answer = await stream.receive()
                    if part == 0:
                        first = read(answer, protocol.answered)
                        self._values.known.learn(first)
        except StreamClosed:
            pass  # after the answer, or instead of it
        finally:
            await _close(stream)
        return first

    async def converse(
        self, victim: PeerId, protocol: Protocol, kinds: Sequence[type], **fixed: bytes
    ) -> None:
        """Send all kinds of messages on one stream, some with a payload; `fixed` is passed to
        `Values.message`."""
        stream = await self._open(victim, protocol)
        try:
            for kind in kinds:
                message = self._made(protocol, kind, **fixed)
                has_payload = kind.__name__ == "Frame" or self._rng.random() < 0.03
                await self._say(stream, message, *([self._payload()] if has_payload else []))
        finally:
            await _close(stream)

    def _payload(self) -> bytes:
        return self._rng.randbytes(self._rng.choice((0, 1, 256, 2_048, PAYLOAD_BYTES)))

    def _any(self, protocol: Protocol) -> bytes:
        return self._made(protocol, self._rng.choice(structs(protocol.said)))

    # Misdeeds

    async def _say_nothing(self, victim: PeerId, protocol: Protocol) -> None:
        self.sent["(nothing said)"] += 1
        await self._hold(await self._open(victim, protocol))

    async def _say_half(self, victim: PeerId, protocol: Protocol) -> None:
        self.sent["(half said)"] += 1
        stream = await self._open(victim, protocol)
        message = self._any(protocol)
        await self._say(stream, message[: len(message) // 2])
        await self._hold(stream)

    async def _never_read(self, victim: PeerId, protocol: Protocol) -> None:
        self.sent["(never read)"] += 1
        stream = await self._open(victim, protocol)
        await self._say(stream, self._any(protocol))
        await self._hold(stream)

    async def _close_at_once(self, victim: PeerId, protocol: Protocol) -> None:
        self.sent["(closed at once)"] += 1
        await _close(await self._open(victim, protocol))
        stream = await self._open(victim, protocol)
        await self._say(stream, self._any(protocol))
        await _close(stream)

    async def _repeat_on_one(self, victim: PeerId, protocol: Protocol) -> None:
        self.sent["(repeated on one stream)"] += 1
        message = self._any(protocol)
        stream = await self._open(victim, protocol)
        try:
            for _ in range(REPEATS):
                await self._say(stream, message)
        finally:
            await _close(stream)

    async def _repeat_on_many(self, victim: PeerId, protocol: Protocol) -> None:
        self.sent["(repeated on many streams)"] += 1
        message = self._any(protocol)

        async def once() -> None:
            with suppress(StreamClosed, Unreachable):
                stream = await self._open(victim, protocol)
                try:
                    await self._say(stream, message)
                    with trio.move_on_after(ANSWER_SECONDS):
                        await stream.receive()
                finally:
                    await _close(stream)

        async with trio.open_nursery() as nursery:
            for _ in range(REPEATS):
                nursery.start_soon(once)

    async def _say_garbage(self, victim: PeerId, protocol: Protocol) -> None:
        self.sent["(garbage)"] += 1
        stream = await self._open(victim, protocol)
        for data in (b"", b"\xc1", self._rng.randbytes(40), b"\x91" * 10_000, self._any(protocol) + b"\0"):
            await self._say(stream, data)
        await _close(stream)

    async def _hold(self, stream: Stream) -> None:
        self._held.append(stream)
        if len(self._held) > HELD_MAX:
            await _close(self._held.popleft())


async def _close(stream: Stream) -> None:
    with trio.move_on_after(ANSWER_SECONDS) as scope:
        scope.shield = True
        await stream.aclose()


class LyingNetwork:
    """A network for a lying node: it answers some requests with lies, and learns from all received datagrams.
    Everything else is passed to `network`."""

    def __init__(self, network: Network, values: Values) -> None:
        self._network = network
        self._values = values
        self.lies = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def handle(self, protocol: str, handler: Handler, limits: StreamLimits = USUAL_STREAMS) -> None:
        """Let the node handle streams, except for some requests that are answered with lies."""
        self._network.handle(protocol, partial(self._serve, handler), limits)

    def inbox(self, protocol: str) -> Inbox:
        """Return the same inbox, with its messages observed."""
        return _Heard(self._network.inbox(protocol), self._values, protocol)

    async def _serve(self, handler: Handler, stream: Stream) -> None:
        answered = next((each.answered for each in PROTOCOLS if each.name == stream.protocol), None)
        if answered is None or self._values.rng.random() >= LIES_PART:
            await handler(stream)
            return
        self.lies += 1
        with trio.move_on_after(OPEN_SECONDS):
            await stream.receive()
            for kind in self._values.rng.sample(structs(answered), min(2, len(structs(answered)))):
                message = self._values.message(kind, stream.protocol)
                if len(message) <= ONE_SHOT_BYTES_MAX:
                    await stream.send(message)
            await stream.send(self._values.rng.randbytes(100))


class _Heard:
    def __init__(self, inbox: Inbox, values: Values, protocol: str) -> None:
        self._inbox = inbox
        self._values = values
        self._kind = next((each.datagrams for each in PROTOCOLS if each.name == protocol), None)

    async def take(self, until: float) -> list[tuple[PeerId, bytes]]:
        """Return the received messages."""
        found = await self._inbox.take(until)
        for _, data in found[:4]:
            self._values.known.learn(read(data, self._kind) if self._kind is not None else None)
        return found

    def notify(self) -> None:
        """See `node.seams.Inbox`."""
        self._inbox.notify()


def lying(network: Network, values: Values) -> Network:
    """Return the network of a lying node."""
    return cast("Network", LyingNetwork(network, values))
