"""The real `node.seams.Network`: datagrams over UDP, streams over TCP, one port number for both.

It composes and decides nothing twice: `listen` has the sockets, `udp` the datagrams, `handshake` who is
there, `tcp` the secure streams, `router` the protocols, `book` the addresses. What strangers do wrong is
counted here and raised nowhere; a bug in one of our own handlers comes out of `run`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import trio

from crypto.contact import Address
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import Identity, PeerId, short_peer
from crypto.noise import Session, suites_named
from crypto.sessions.core import Sessions
from crypto.sessions.packets import Datagram, payload_bytes_max
from crypto.swarm import Swarm
from node.errors import StreamClosed, Unreachable
from node.seams import Clock, Handler
from node.transport.book import AddressBook
from node.transport.handshake import (
    HANDSHAKE_SECONDS,
    Credentials,
    Outsider,
    accept,
    default_suites,
    dial,
)
from node.transport.inbox import QueueInbox
from node.transport.listen import bind, dialable
from node.transport.pool import Pool
from node.transport.router import ONE_SHOT_BYTES_MAX, ONE_SHOT_SECONDS, Hello, Router, greet
from node.transport.tcp import Assembly, SecureStream
from node.transport.udp import Datagrams, address_of

INBOUND_MAX = 512
"""Connections from others at once; each costs a buffer of 128 KiB."""
INBOUND_PER_PEER_MAX = 64
"""So that one peer cannot take them all; a busy neighbour in a run has a dozen open."""
HALF_OPEN_MAX = 64
"""Handshakes at once: each costs us about a millisecond of computing that nobody has paid for yet."""
OPEN_SECONDS = 20.0
"""All addresses of a peer together."""
ONE_SHOT_SENDERS = 8
ONE_SHOT_QUEUE_MAX = 256
ONE_SHOT_QUEUE_BYTES_MAX = 32 * 2**20

_REASONS = ("wrong key", "refused", "timeout", "unknown")
"""Of several failures the one that says most."""


class RealNetwork:
    """Reach peers by id over TCP and UDP. `run` must be running to listen and to send messages; when it
    ends, all streams end.

    `listen` is (host, port), port 0 for any; `announce` replaces the addresses that others are told;
    `static` is the X25519 private key (32 bytes) kept beside the identity; `keys` make the swarm private;
    `suites` by name, best first, are taken in place of all that work here. After the start `port` says
    where it listens and `taken` which ports others held.
    """

    def __init__(
        self,
        identity: Identity,
        static: bytes,
        swarm: str,
        *,
        clock: Clock,
        entropy: Callable[[int], bytes],
        listen: tuple[str, int] = ("0.0.0.0", 0),  # noqa: S104 - a peer is there to be reached
        announce: Sequence[Address] = (),
        keys: Sequence[bytes] = (),
        suites: Sequence[str] = (),
    ) -> None:
        self._identity = identity
        chosen = suites_named(suites) if suites else default_suites()
        self._credentials = Credentials(identity, static, Swarm(swarm, tuple(keys)), entropy, chosen)
        self._clock = clock
        self._listen = listen
        self._announce = tuple(announce)
        self._counters: Counter[str] = Counter()
        self._router = Router(self._counters)
        self._book = AddressBook()
        self._assembly = Assembly()
        self._pool = Pool()
        # All that are open, so that none outlives `run`; a dict for its order.
        self._streams: dict[SecureStream, None] = {}
        self._addresses: tuple[Address, ...] = ()
        self._datagrams: Datagrams | None = None
        self._inbound = self._half_open = 0
        self._inbound_by_peer: Counter[PeerId] = Counter()
        self._one_shots, self._one_shots_out = trio.open_memory_channel[tuple[PeerId, str, bytes]](
            ONE_SHOT_QUEUE_MAX
        )
        self._one_shot_bytes = 0
        self.port = 0
        self.taken: tuple[int, ...] = ()

    @property
    def peer(self) -> PeerId:
        return self._identity.peer

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self._addresses

    @property
    def counters(self) -> Mapping[str, int]:
        return self._counters

    def learn(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        if peer != self.peer:
            self._book.claim(peer, addresses)

    def inbox(self, protocol: str) -> QueueInbox:
        return self._router.inbox(protocol)

    def handle(self, protocol: str, handler: Handler) -> None:
        self._router.handle(protocol, handler)

    def send(self, peer: PeerId, protocol: str, message: bytes) -> None:
        """As the seam says; LocalProtocolError for a message of more than `router.ONE_SHOT_BYTES_MAX`."""
        if len(message) > ONE_SHOT_BYTES_MAX:
            raise LocalProtocolError(f"{len(message)} bytes of {protocol}: open a stream for so much")
        if self._datagrams is None:
            self._counters["messages_while_not_running"] += 1
        elif not (addresses := self._where(peer)):
            self._counters["messages_without_address"] += 1
        elif len(message) > payload_bytes_max(protocol):
            self._queue_one_shot(peer, protocol, message)
        elif not self._datagrams.send(peer, protocol, message, addresses):
            # Only names to look up, or only the other address family: TCP knows both.
            self._queue_one_shot(peer, protocol, message)

    async def open(self, peer: PeerId, protocol: str) -> SecureStream:
        stream = await self._open(peer, Hello("stream", protocol))
        self._counters["streams_opened"] += 1
        return stream

    async def identify(self, address: Address) -> PeerId:
        with trio.move_on_after(OPEN_SECONDS):
            stream = await self._reach(address, Hello("identify", ""))
            await stream.aclose()
            return stream.peer
        raise Unreachable("timeout", f"{address.short} did not answer in {OPEN_SECONDS:g} s")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled; `started` once `addresses` are known. Raises UsageError: cannot listen."""
        if self._datagrams is not None:
            raise LocalProtocolError("this network runs already")
        bound = await bind(*self._listen)
        self.port, self.taken = bound.port, bound.taken
        self._addresses = tuple(
            address.of(self.peer) for address in dialable(bound.host, bound.port, self._announce)
        )
        sessions = Sessions(
            self._identity,
            self._credentials.swarm,
            self._credentials.entropy,
            now=self._clock.monotonic(),
            wall_milliseconds=int(self._clock.wall() * 1000),
            counters=self._counters,
        )
        datagrams = Datagrams(
            bound.udp, sessions, self._clock, self._counters, self._where, self._heard, self._arrived
        )
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound.tcp))
        try:
            self._datagrams = datagrams
            async with trio.open_nursery() as nursery:
                nursery.start_soon(datagrams.receive_forever)
                nursery.start_soon(datagrams.wake_forever)
                nursery.start_soon(partial(trio.serve_listeners, self._serve, [listener]))
                for _ in range(ONE_SHOT_SENDERS):
                    nursery.start_soon(self._send_one_shots)
                task_status.started()
        finally:
            self._datagrams = None
            datagrams.close()
            bound.tcp.close()
            for stream in tuple(self._streams):
                stream.close()

    # --- datagrams and messages --------------------------------------------------------------------

    def _where(self, peer: PeerId) -> tuple[Address, ...]:
        return self._book.for_datagram(peer, self._clock.monotonic())

    def _heard(self, peer: PeerId, source: Address) -> None:
        self._book.observe(peer, source, self._clock.monotonic())

    def _arrived(self, datagram: Datagram) -> None:
        self._router.deliver(datagram.sender, datagram.protocol, datagram.payload)

    def _queue_one_shot(self, peer: PeerId, protocol: str, message: bytes) -> None:
        if self._one_shot_bytes + len(message) > ONE_SHOT_QUEUE_BYTES_MAX:
            self._counters["messages_dropped_queue_full"] += 1
            return
        try:
            self._one_shots.send_nowait((peer, protocol, message))
        except trio.WouldBlock:
            self._counters["messages_dropped_queue_full"] += 1
            return
        self._one_shot_bytes += len(message)

    async def _send_one_shots(self) -> None:
        while True:
            peer, protocol, message = await self._one_shots_out.receive()
            try:
                with trio.fail_after(ONE_SHOT_SECONDS):
                    stream = await self._open(peer, Hello("message", protocol))
                    try:
                        await stream.send(message)
                    finally:
                        await stream.aclose()
                self._counters["messages_by_stream"] += 1
            except (Unreachable, StreamClosed, trio.TooSlowError):
                self._counters["messages_by_stream_failed"] += 1
            finally:
                self._one_shot_bytes -= len(message)

    # --- streams out -------------------------------------------------------------------------------

    async def _open(self, peer: PeerId, hello: Hello) -> SecureStream:
        """Try one address after the other; the failure that says most is the one that is raised."""
        addresses = self._book.for_stream(peer)
        if not addresses:
            raise Unreachable("unknown", f"no address of {short_peer(peer)} is known")
        failures: list[Unreachable] = []
        with trio.move_on_after(OPEN_SECONDS):
            for address in addresses:
                try:
                    return await self._reach(address.of(peer), hello)
                except Unreachable as failure:
                    failures.append(failure)
        if not failures:
            raise Unreachable("timeout", f"{short_peer(peer)} did not answer in {OPEN_SECONDS:g} s")
        raise min(failures, key=lambda failure: _REASONS.index(failure.reason))

    async def _reach(self, address: Address, hello: Hello) -> SecureStream:
        """One address: connect, shake hands, be welcomed."""
        transport, session = await dial(address, self._credentials)
        stream = self._make_stream(transport, session)
        welcomed = False
        try:
            self._book.prove(session.peer, address_of(transport.socket.getpeername()))
            with trio.fail_after(HANDSHAKE_SECONDS):
                await greet(stream, hello)
            welcomed = True
        except trio.TooSlowError:
            raise Unreachable("timeout", f"{address.short} shook hands, then fell silent") from None
        except (StreamClosed, OSError):
            raise Unreachable("refused", f"{address.short} hung up after the handshake") from None
        finally:
            if not welcomed:
                stream.close()
        return stream

    def _make_stream(self, transport: trio.SocketStream, session: Session) -> SecureStream:
        stream = SecureStream(
            transport, session, self._assembly, self._pool, self._counters, self._streams.pop
        )
        self._streams[stream] = None
        return stream

    # --- streams in --------------------------------------------------------------------------------

    async def _serve(self, transport: trio.SocketStream) -> None:
        """One connection that came in, from its first byte to its end."""
        if self._inbound >= INBOUND_MAX or self._half_open >= HALF_OPEN_MAX:
            self._counters["connections_over_limit"] += 1
            transport.socket.close()
            return
        self._inbound += 1
        try:
            stream = await self._shake_hands(transport)
            if stream is not None:
                await self._serve_peer(stream)
        finally:
            self._inbound -= 1
            transport.socket.close()

    async def _shake_hands(self, transport: trio.SocketStream) -> SecureStream | None:
        self._half_open += 1
        try:
            return self._make_stream(transport, await accept(transport, self._credentials))
        except Outsider:
            self._counters["handshakes_by_outsiders"] += 1
        except RemoteProtocolError:
            self._counters["handshakes_refused"] += 1
        except (trio.BrokenResourceError, OSError):
            self._counters["handshakes_broken"] += 1
        except trio.TooSlowError:
            self._counters["handshakes_timed_out"] += 1
        finally:
            self._half_open -= 1
        return None

    async def _serve_peer(self, stream: SecureStream) -> None:
        by_peer, peer = self._inbound_by_peer, stream.peer
        busy = by_peer[peer] >= INBOUND_PER_PEER_MAX
        by_peer[peer] += 1
        try:
            with trio.fail_after(HANDSHAKE_SECONDS):
                hello = await self._router.welcome(stream, busy=busy)
        except (RemoteProtocolError, StreamClosed, trio.TooSlowError):
            self._counters["hellos_refused"] += 1
        else:
            if hello is not None:
                self._counters["streams_served"] += 1
                await self._router.serve(stream, hello)
        finally:
            by_peer[peer] -= 1
            if not by_peer[peer]:
                del by_peer[peer]
            await stream.aclose()
