"""The real `node.seams.Network`: datagrams over UDP, streams over TCP, one port number for both.

It composes and decides nothing twice: `listen` has the sockets, `udp` the datagrams, `handshake` who is
there, `tcp` the secure streams, `router` the protocols, `book` the addresses. What strangers do wrong is
counted here and raised nowhere; a bug in one of our own handlers comes out of `run`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import trio

from crypto.contact import ADDRESSES_MAX, Address
from crypto.datagrams import Datagram, Opener, Seal, payload_bytes_max
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import Identity, PeerId, short_peer
from crypto.noise import Session, suites_named
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
from node.transport.listen import Place, bind_all, dialable
from node.transport.multicast import Multicast
from node.transport.pool import Pool
from node.transport.router import ONE_SHOT_BYTES_MAX, ONE_SHOT_SECONDS, Hello, Router, greet
from node.transport.sockets import UdpSockets, address_of
from node.transport.tcp import Assembly, SecureStream
from node.transport.udp import Datagrams

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

    `listen` holds (host, port) pairs, port 0 for any; `announce` replaces the addresses that others are told;
    `static` is the X25519 private key (32 bytes) kept beside the identity; `keys` make the swarm private;
    `suites` by name, best first, are taken in place of all that work here; `beacon_port` is that of the local
    network's beacons, usually `multicast.BEACON_PORT`, None for no local network. After the start `ports`
    says where it listens, in the order of `listen`.
    """

    def __init__(
        self,
        identity: Identity,
        static: bytes,
        swarm: str,
        *,
        clock: Clock,
        entropy: Callable[[int], bytes],
        listen: Sequence[Place] = (("0.0.0.0", 0),),  # noqa: S104 - a peer is there to be reached
        announce: Sequence[Address] = (),
        keys: Sequence[bytes] = (),
        suites: Sequence[str] = (),
        beacon_port: int | None = None,
    ) -> None:
        self._identity = identity
        chosen = suites_named(suites) if suites else default_suites()
        self._credentials = Credentials(identity, static, Swarm(swarm, tuple(keys)), entropy, chosen)
        self._clock = clock
        self._listen = tuple(listen)
        self._announce = tuple(announce)
        self._beacon_port = beacon_port
        self._local: Multicast | None = None
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
        self.ports: tuple[int, ...] = ()

    @property
    def peer(self) -> PeerId:
        return self._identity.peer

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self._addresses

    @property
    def port(self) -> int:
        """The first of `ports`; 0 before the start."""
        return self.ports[0] if self.ports else 0

    @property
    def moved(self) -> tuple[tuple[int, int], ...]:
        """(port wanted, port taken instead) of each that others held."""
        pairs = zip((port for _, port in self._listen), self.ports, strict=False)
        return tuple((wanted, port) for wanted, port in pairs if wanted not in (0, port))

    @property
    def counters(self) -> Mapping[str, int]:
        return self._counters

    @property
    def local(self) -> Multicast | None:
        return self._local

    @property
    def reachable(self) -> bool | None:
        return None

    def announce(self, address: Address) -> None:
        """As the seam says, unless a person has said what to tell, or there are too many."""
        address = address.of(self.peer)
        if not self._announce and address not in self._addresses and len(self._addresses) < ADDRESSES_MAX:
            self._addresses = (*self._addresses, address)

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
        elif not self._book.for_stream(peer):
            self._counters["messages_without_address"] += 1
        elif len(message) > payload_bytes_max(protocol):
            self._queue_one_shot(peer, protocol, message)
        else:
            addresses = self._book.for_datagram(peer, self._clock.monotonic())
            if not self._datagrams.send(peer, protocol, message, addresses):
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
        bound = await bind_all(self._listen)
        self.ports = tuple(each.port for each in bound)
        places = [(each.host, each.port) for each in bound]
        self._addresses = tuple(address.of(self.peer) for address in dialable(places, self._announce))
        swarm, boot = self._credentials.swarm.name, int(self._clock.wall() * 1000)
        sockets = UdpSockets([each.udp for each in bound], self._counters)
        datagrams = Datagrams(
            sockets,
            Seal(self._identity, swarm, boot),
            Opener(self.peer, swarm),
            self._counters,
            self._arrived,
        )
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(each.tcp)) for each in bound]
        try:
            self._datagrams = datagrams
            async with trio.open_nursery() as nursery:
                nursery.start_soon(datagrams.receive_forever)
                nursery.start_soon(partial(trio.serve_listeners, self._serve, listeners))
                for _ in range(ONE_SHOT_SENDERS):
                    nursery.start_soon(self._send_one_shots)
                if self._beacon_port is not None:
                    self._local = Multicast(places, self._counters, port=self._beacon_port)
                    await nursery.start(self._local.run)
                task_status.started()
        finally:
            self._datagrams = self._local = None
            sockets.close()
            for each in bound:
                each.close()
            for stream in tuple(self._streams):
                stream.close()

    # --- datagrams and messages --------------------------------------------------------------------

    def _arrived(self, datagram: Datagram, source: Address) -> None:
        if datagram.newest:
            # A copy that came late from an old address must not move the peer back there.
            self._book.observe(datagram.sender, source, self._clock.monotonic())
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
