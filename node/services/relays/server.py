"""A relay. It keeps places (reservations) for nodes that cannot be dialled, and carries bytes between two
connections.

`ledger` decides which peers it serves, and how much. The carried bytes are encrypted by the two ends.
"""

import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import assert_never

import trio

from crypto.encoding import decode, encode
from crypto.identity import PeerId
from crypto.token_buckets import prefix_of
from node.errors import StreamClosed
from node.seams import Clock, Network, Stream, StreamLimits
from node.services.relays.ledger import (
    PIECE_BYTES_MAX,
    PLACE_SECONDS,
    PLACES_MAX,
    WAIT_SECONDS,
    Announced,
    NoPlace,
    RelayLedger,
    SharedPace,
)
from node.transport.relay_messages import (
    BUSY,
    MESSAGE_BYTES_MAX,
    OFF,
    PROTOCOL,
    UNKNOWN,
    AskCircuit,
    CircuitAnnounced,
    CircuitReady,
    KeepPlace,
    PlaceKept,
    RelayRefused,
    Request,
    TakeCircuit,
)
from node.transport.streams import SecureStream

STREAMS = StreamLimits(
    message_bytes_max=MESSAGE_BYTES_MAX,
    streams_per_peer_max=16,
    streams_max=2 * PLACES_MAX,
    patience_seconds=PLACE_SECONDS,
)
"""A long silence is allowed, because nothing is sent on the stream of a place until a peer wants to reach its
node."""
SILENT_SECONDS = 60.0
"""How long a circuit may carry no byte before it ends. Its ends ping each other four times as often."""

Socket = trio.socket.SocketType


@dataclass(eq=False)
class _Waiting:
    """A peer that asked for a circuit, until the target has accepted it."""

    taken: trio.Event = field(default_factory=trio.Event)
    circuit: Announced | None = None
    far: socket.socket | None = None
    flight: bytes = b""
    """The target's answer to the asker's flight."""


class RelayServer:
    """The relay of one node. It refuses all requests while its ledger's limits turn it off."""

    def __init__(self, network: Network, clock: Clock, ledger: RelayLedger, counters: Counter[str]) -> None:
        self.ledger = ledger
        self._clock = clock
        self._counters = counters
        self._kept: dict[PeerId, Stream] = {}
        self._waiting: dict[bytes, _Waiting] = {}
        self.pace = SharedPace(ledger.limits.bytes_per_second)
        network.handle(PROTOCOL, self._serve, STREAMS)

    async def _serve(self, stream: Stream) -> None:
        try:
            request: Request = decode(await stream.receive(), Request, bytes_max=MESSAGE_BYTES_MAX)
            match request:
                case KeepPlace():
                    await self._keep(stream)
                case AskCircuit(peer, flight):
                    await self._connect(stream, PeerId(peer), flight)
                case TakeCircuit(token, flight):
                    await self._accept(stream, token, flight)
                case _:
                    assert_never(request)
        except NoPlace as refusal:
            self._counters["relay_refused"] += 1
            await stream.send(encode(RelayRefused(refusal.code)))

    async def _keep(self, stream: Stream) -> None:
        """Keep a place for the peer as long as the peer renews it."""
        peer = stream.peer
        if stream.source is None:
            raise NoPlace(OFF)  # the peer itself is behind a relay
        source = prefix_of(stream.source.host)
        try:
            while True:
                seconds = self.ledger.reserve(self._clock.monotonic(), peer, source)
                self._kept[peer] = stream
                await stream.send(encode(PlaceKept(seconds, self.ledger.limits.bytes_per_second)))
                with trio.move_on_after(seconds) as scope:
                    decode(await stream.receive(), KeepPlace, bytes_max=MESSAGE_BYTES_MAX)
                if scope.cancelled_caught:
                    return
        finally:
            if self._kept.get(peer) is stream:
                del self._kept[peer]
                self.ledger.release(peer)

    async def _connect(self, stream: Stream, target: PeerId, flight: bytes) -> None:
        """Announce the circuit to the target, wait until it accepts, and carry bytes until either end is
        done."""
        near = _bare(stream)
        if stream.source is None:
            raise NoPlace(OFF)
        source = prefix_of(stream.source.host)
        announced = self.ledger.announce(self._clock.monotonic(), stream.peer, target, source)
        waiting = self._waiting[announced.token] = _Waiting()
        try:
            kept = self._kept.get(target)
            if kept is None:
                raise NoPlace(UNKNOWN)
            with trio.move_on_after(WAIT_SECONDS):
                await kept.send(encode(CircuitAnnounced(announced.token, stream.peer, flight)))
                await waiting.taken.wait()
            if waiting.circuit is None or waiting.far is None:
                raise NoPlace(BUSY)
            await near.send(encode(CircuitReady(waiting.flight)))
            opened, rest = near.connection.detach()
            with opened:
                if not rest:
                    await self._carry(waiting.circuit, opened, waiting.far)
        except StreamClosed:
            raise NoPlace(BUSY) from None
        finally:
            self.ledger.withdraw(announced.token)
            self._waiting.pop(announced.token, None)
            if waiting.circuit is not None:
                self.ledger.closed(waiting.circuit)
            if waiting.far is not None:
                waiting.far.close()

    async def _accept(self, stream: Stream, token: bytes, flight: bytes) -> None:
        """Hand this connection over to the waiting peer."""
        far = _bare(stream)
        waiting = self._waiting.get(token)
        if waiting is None:
            raise NoPlace(UNKNOWN)
        circuit = self.ledger.accept(self._clock.monotonic(), stream.peer, token)
        waiting.circuit, waiting.flight = circuit, flight
        try:
            await far.send(encode(CircuitReady()))
            opened, rest = far.connection.detach()
            if rest or token not in self._waiting:
                opened.close()
            else:
                waiting.far = opened
        finally:
            if token not in self._waiting:
                waiting.circuit = None  # the waiting task has given up and closed its own connection
            waiting.taken.set()

    async def _carry(self, circuit: Announced, near: socket.socket, far: socket.socket) -> None:
        self._counters["circuits_carried"] += 1
        ends = trio.socket.from_stdlib_socket(near), trio.socket.from_stdlib_socket(far)
        async with trio.open_nursery() as nursery:
            for source, target in (ends, ends[::-1]):
                nursery.start_soon(self._pump, circuit, source, target, nursery.cancel_scope)

    async def _pump(
        self, circuit: Announced, source: Socket, target: Socket, scope: trio.CancelScope
    ) -> None:
        """Copy one direction, with its own share of the rate. When one direction ends, the other one ends
        too."""
        buffer, who = bytearray(PIECE_BYTES_MAX), object()
        view = memoryview(buffer)
        try:
            while True:
                with trio.fail_after(SILENT_SECONDS):
                    count = await source.recv_into(buffer, self.pace.piece(self._clock.monotonic(), who))
                now = self._clock.monotonic()
                self._counters["relayed_bytes"] += count
                if not count or not self.ledger.carried(now, circuit, count):
                    return
                if seconds := self.pace.take(now, who, count):
                    await trio.sleep(seconds)
                sent = 0
                while sent < count:
                    sent += await target.send(view[sent:count])
        except (OSError, trio.TooSlowError):
            pass  # either end has gone
        finally:
            self.pace.forget(who)
            scope.cancel()


def _bare(stream: Stream) -> SecureStream:
    """Return the stream if it has a connection of its own. Raises NoPlace."""
    if not isinstance(stream, SecureStream) or stream.connection.path is not None:
        raise NoPlace(OFF)
    return stream
