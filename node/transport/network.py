"""The real `node.seams.Network`: datagrams over UDP, streams over TCP, one port number for both.

It only composes: `listen` has the sockets, `udp` the datagrams, `connections` the streams, `router` the
protocols, `book` the addresses. Errors caused by other peers are counted here and never raised; `run` raises
only a bug in one of our own handlers.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from crypto.contact import Address
from crypto.errors import LocalProtocolError
from crypto.identity import Identity, PeerId
from crypto.noise import suites_named
from crypto.sessions.core import Sessions
from crypto.sessions.packets import Datagram, payload_bytes_max
from crypto.swarm import Swarm
from dht.work import has_work
from node.seams import MESSAGE_BYTES_USUAL, USUAL_STREAMS, Clock, Handler, StreamLimits
from node.transport.address_book import AddressBook
from node.transport.address_policy import AddressPolicy, Place, is_global
from node.transport.announced import AnnouncedAddresses
from node.transport.connections import Connections
from node.transport.datagram_paths import DatagramPaths
from node.transport.handshake import Credentials, default_suites
from node.transport.inbox import QueueInbox
from node.transport.interfaces import read_interfaces
from node.transport.listen import BoundSockets, bind_all
from node.transport.multicast import Multicast
from node.transport.one_shots import OneShots
from node.transport.pace import Paces
from node.transport.paths import Paths
from node.transport.router import ONE_SHOT_BYTES_MAX, Router
from node.transport.settings import TRANSPORT, TransportSettings
from node.transport.short_messages import ShortMessages
from node.transport.sockets import UdpSockets
from node.transport.streams import SecureStream
from node.transport.udp import Datagrams

HEARD_SECONDS = 15.0
"""For this long after its latest datagram, a peer behind a relay, or one that has offered a path, is sent
datagrams. Common routers keep a mapping for at least twice this time."""


@dataclass(frozen=True)
class Translation:
    """The address translation of this machine's router, as texts for people; empty texts if unknown."""

    mapping: str = ""
    """The outcome of requesting a port mapping."""
    kind: str = ""
    """The kind of translation that peers observed."""


class RealNetwork:
    """Reaches peers by id over TCP and UDP.

    `run` must be running to listen and to send messages. When it is cancelled, handlers get a moment, then
    all streams end in order.

    `listen` holds (host, port) pairs; port 0 means any free port. A port that is taken is an error, unless
    the places `may_move` to one of the next ten. After the start `ports` has the ports in the same order.
    `announce` replaces the announced addresses. `static` is the X25519 private key (32 bytes). `keys` make
    the swarm private. Every peer id, even one only reported, needs `work_bits` of proof of work. `suites` are
    cipher suite names, best first, instead of all that work here. `beacon_port` is usually
    `multicast.BEACON_PORT`; None turns the local network off. `settings` are for experiments.
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
        may_move: bool = True,
        work_bits: int = 0,
        settings: TransportSettings = TRANSPORT,
    ) -> None:
        self._identity = identity
        chosen = suites_named(suites) if suites else default_suites()
        self._work_bits = work_bits
        which = Swarm(swarm, tuple(keys), work_bits)
        self._credentials = Credentials(identity, static, which, entropy, chosen, settings.handshake_seconds)
        self._clock = clock
        self._listen = tuple(listen)
        self._may_move = may_move
        self._beacon_port = beacon_port
        self._local: Multicast | None = None
        self._counters: Counter[str] = Counter()
        self._router = Router(self._counters, work_bits, settings)
        self._policy = AddressPolicy()
        self._book = AddressBook(self._policy)
        self._announced = AnnouncedAddresses(self.peer, self._policy, announce)
        self.paces = Paces()
        self._connections = Connections(
            self._credentials, self._book, self._router, self._counters, self.paces, settings
        )
        self._bound: tuple[BoundSockets, ...] = ()
        self.translation = Translation()
        """The known address translation of this machine's router."""
        self._datagrams: Datagrams | None = None
        self._one_shots = OneShots(self._connections.send, self._counters)
        self._paths = DatagramPaths()
        self._router.streamed = self._streamed
        self._short = ShortMessages(
            self._connections.send,
            self._counters,
            is_reached=self._is_reached,
            sent=self._paths.streamed,
            failed=lambda peer: self._paths.failed(peer, clock.monotonic()),
        )
        self.closed: Callable[[PeerId], None] | None = None
        """Called with each peer whose host reports that no process listens at the peer's address."""
        self.ports: tuple[int, ...] = ()

    @property
    def peer(self) -> PeerId:
        return self._identity.peer

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self._announced.addresses

    @property
    def port(self) -> int:
        """The first of `ports`; 0 before the start."""
        return self.ports[0] if self.ports else 0

    @property
    def moved(self) -> tuple[tuple[int, int], ...]:
        """The pairs (wanted port, port used instead) for ports that were taken."""
        pairs = ((each.wanted, each.port) for each in self._bound if each.wanted not in (0, each.port))
        return tuple(dict.fromkeys(pairs))

    @property
    def counters(self) -> Mapping[str, int]:
        return self._counters

    @property
    def without_datagrams(self) -> tuple[PeerId, ...]:
        """The peers that streams reach but datagrams do not."""
        return self._paths.blocked

    @property
    def multiplexed(self) -> Paths:
        """The paths to peers that cannot be dialled, or that cannot dial this node."""
        return self._connections.paths

    @property
    def credentials(self) -> Credentials:
        """The credentials of this node in handshakes."""
        return self._credentials

    @property
    def circuits(self) -> tuple[Address, ...]:
        """The relays' circuits by which others reach this node, set by `reach_by`."""
        return self._announced.circuits

    def reach_by(self, circuits: Sequence[Address]) -> None:
        """Announce these circuits, by which relays lead to this node."""
        self._announced.reach_by(circuits)

    @property
    def local(self) -> Multicast | None:
        return self._local

    @property
    def reachable(self) -> bool | None:
        return None

    def look(self) -> bool:
        """Read the interfaces again; return whether addresses changed. If so, forget confirmations."""
        before = self._policy.listening
        self._policy.look(self._places, read_interfaces())
        has_moved = self._policy.listening != before
        self._announced.choose(has_moved=has_moved)
        return has_moved

    def doubt(self) -> None:
        """Start afresh with each peer, because another node has shaken hands with this node's keys."""
        if self._datagrams is not None:
            self._datagrams.doubt()

    def announce(self, address: Address) -> None:
        """Announce an address, but no link-local one (beacons do that), and none if the user set them."""
        if not address.is_link_local and address.of(self.peer) not in self.addresses:
            self._announced.confirm(address)

    @property
    def listening(self) -> tuple[Place, ...]:
        """The IP literals and ports at which this node listens."""
        return self._places

    def knock_at(
        self, peer: PeerId, addresses: Sequence[Address], may_send: Callable[[Sequence[Address], int], bool]
    ) -> None:
        """Test whether datagrams get through to a peer; `may_send` is called as in `Datagrams.knock`."""
        if self._datagrams is not None:
            self._datagrams.knock(self._clock.monotonic(), peer, addresses, anew=True, may_send=may_send)

    def heard_at(self, peer: PeerId) -> float:
        """Return when the latest datagram of this peer came; minus infinity if none has."""
        return self._book.heard_at(peer)

    def seen_at(self, peer: PeerId) -> Address | None:
        """Return the source of this peer's latest datagram."""
        return self._book.observed(peer)

    def answered_at(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the addresses where a peer has answered, and its datagrams' source if the peer claims it."""
        return self._book.answered_at(peer)

    def map_to(self, address: Address | None) -> None:
        """Announce an address that a router forwards to this node; None withdraws it."""
        self._announced.map_to(address)

    @property
    def _places(self) -> tuple[Place, ...]:
        return tuple((each.host, each.port) for each in self._bound)

    @property
    def address_for_others(self) -> Address | None:
        """Return the announced address that works on another machine; None if there is none."""
        return self._policy.for_others(self.addresses)

    def is_own(self, address: Address) -> bool:
        return self._policy.is_own(address)

    def admits(self, address: Address) -> bool:
        return self._policy.admits(address)

    def may_dial(self, peer: PeerId, address: Address) -> bool:
        """Record an attempt to connect to an address of a peer; return whether it is allowed."""
        return self._book.may_dial(peer, address, self._clock.monotonic())

    def known_addresses(self, peer: PeerId) -> tuple[Address, ...]:
        return self._book.known(peer)

    def learn(self, peer: PeerId, addresses: Sequence[Address], *, is_hint: bool = False) -> None:
        if peer != self.peer and has_work(peer, self._work_bits):
            self._book.claim(peer, addresses, is_hint=is_hint)

    def host_of(self, peer: PeerId) -> str | None:
        return self._book.host_of(peer)

    def inbox(self, protocol: str) -> QueueInbox:
        return self._router.inbox(protocol)

    def handle(self, protocol: str, handler: Handler, limits: StreamLimits = USUAL_STREAMS) -> None:
        self._router.handle(protocol, handler, limits)

    def send(
        self, peer: PeerId, protocol: str, message: bytes, *, by_stream: bool = False, is_answer: bool = False
    ) -> None:
        """Send a message as the seam defines. Raises LocalProtocolError for a message of more than
        `router.ONE_SHOT_BYTES_MAX`."""
        if len(message) > ONE_SHOT_BYTES_MAX:
            raise LocalProtocolError(
                f"{len(message)} bytes of {protocol} are too long for a message. Open a stream."
            )
        if self._datagrams is None:
            self._counters["messages_while_not_running"] += 1
            return
        now = self._clock.monotonic()
        # Otherwise a datagram that asks for a stream would cause a dial to any address that its sender
        # claims.
        by_stream = by_stream and not (is_answer and not self._paths.has_just_asked(peer, now))
        if not self._book.knows(peer) and self.multiplexed.best(peer) is None:
            self._counters["messages_without_address"] += 1
        elif len(message) > payload_bytes_max(protocol):
            self._one_shots.put(peer, protocol, message)
        elif by_stream or self._paths.is_by_stream(peer, now) or self._is_behind(peer, now):
            self._short.put(peer, protocol, message)
            if self._paths.knocks(peer, now):
                self._datagrams.knock(now, peer, self._book.for_datagram(peer, now))
        elif not (addresses := self._book.for_datagram(peer, now)):
            self._counters["messages_held_back"] += 1
            self.multiplexed.seek(peer)
        elif not self._datagrams.send(now, peer, protocol, message, addresses):
            # There are only names to look up, or only addresses of the other family. TCP handles both.
            self._one_shots.put(peer, protocol, message)

    def paths(self, peer: PeerId) -> tuple[Address, ...]:
        return self._book.paths(peer)

    def prefer(self, peer: PeerId, address: Address) -> None:
        self._book.prefer(peer, address)

    async def open(
        self,
        peer: PeerId,
        protocol: str,
        *others: str,
        message_bytes_max: int = MESSAGE_BYTES_USUAL,
        at: Address | None = None,
    ) -> SecureStream:
        names = (protocol, *others)
        return await self._connections.open(peer, *names, message_bytes_max=message_bytes_max, at=at)

    async def keep_ready(self, peer: PeerId, at: Address) -> None:
        """Keep an idle connection to a peer `at` an address, because it will be needed soon. Raises
        Unreachable."""
        await self._connections.keep_ready(peer, at)

    async def identify(self, address: Address) -> PeerId:
        return await self._connections.identify(address)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled; `started` once `addresses` are known. Raises UsageError if it cannot
        listen."""
        if self._datagrams is not None:
            raise LocalProtocolError("this network is already running")
        bound = await bind_all(self._listen, may_move=self._may_move)
        self.ports = tuple(each.port for each in bound)
        self._bound = bound
        self.look()
        sockets = UdpSockets([each.udp for each in bound], self._counters, self._found_closed)
        sessions = Sessions(
            self._identity,
            self._credentials.swarm,
            self._credentials.entropy,
            now=self._clock.monotonic(),
            wall_milliseconds=int(self._clock.wall() * 1000),
            counters=self._counters,
            admits=partial(has_work, bits=self._work_bits),
        )
        datagrams = Datagrams(
            sockets,
            sessions,
            self._clock,
            self._counters,
            where=self._book.for_datagram,
            heard=self._heard,
            arrived=self._arrived,
            unanswered=self._no_answer,
        )
        try:
            self._datagrams = datagrams
            async with trio.open_nursery() as outer:
                outer.start_soon(self._router.alarm.run)
                await outer.start(self._connections.run)
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(datagrams.receive_forever)
                        nursery.start_soon(datagrams.wake_forever)
                        await nursery.start(self._connections.arrivals.listen, [each.tcp for each in bound])
                        nursery.start_soon(self._short.run)
                        nursery.start_soon(self._one_shots.run)
                        if self._beacon_port is not None:
                            self._local = Multicast(self._places, self._counters, port=self._beacon_port)
                            await nursery.start(self._local.run)
                        task_status.started()
                finally:
                    self._connections.leave()
        finally:
            self._datagrams = self._local = None
            sockets.close()
            for each in bound:
                each.close()

    # --- datagrams and messages --------------------------------------------------------------------

    def _arrived(self, datagram: Datagram) -> None:
        self._router.deliver(datagram.sender, datagram.protocol, datagram.payload)

    def _heard(self, peer: PeerId, address: Address, now: float) -> None:
        self._book.observe(peer, address, now)
        self._paths.heard(peer)

    def _streamed(self, peer: PeerId) -> None:
        self._paths.asked(peer, self._clock.monotonic(), self._book.heard_at(peer))

    def _no_answer(self, peer: PeerId, now: float) -> None:
        """Handle failed datagram handshakes. Streams are tried only to peers that have answered before."""
        if self._is_reached(peer):
            self._paths.unanswered(peer, now)
            if not any(is_global(each.host) for each in self.addresses if each.relay is None):
                # The peer is behind a router, and it cannot dial this node to answer.
                self.multiplexed.offer_soon(peer)
        else:
            self.multiplexed.seek(peer)

    def _is_reached(self, peer: PeerId) -> bool:
        """Return whether the peer has answered before, or has opened a stream to this node."""
        is_met = self._book.host_of(peer) is not None or self._paths.has_asked(peer)
        return is_met or self.multiplexed.best(peer) is not None

    def _found_closed(self, address: Address) -> None:
        if self.closed is not None:
            for peer in self._book.at(address):
                self.closed(peer)

    def _is_behind(self, peer: PeerId, now: float) -> bool:
        """Return whether a datagram would probably not reach a peer behind its router."""
        if now - self._book.heard_at(peer) <= HEARD_SECONDS:
            return False
        return self.multiplexed.best(peer) is not None or bool(self._book.circuits(peer))
