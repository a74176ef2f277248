"""The network of one simulated peer: its addresses, inboxes and streams, on a fabric shared by all peers."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import trio

from crypto.contact import ADDRESSES_MAX, Address
from crypto.errors import LocalProtocolError
from crypto.identity import PeerId, short_peer
from node.errors import Unreachable, WrongPeer
from node.seams import MESSAGE_BYTES_USUAL, USUAL_STREAMS, Handler, StreamLimits
from node.transport.connections import GRACE_SECONDS
from node.transport.handlers import Handlers, serve
from node.transport.handshake import CONNECT_SECONDS
from node.transport.router import ONE_SHOT_BYTES_MAX
from node.transport.settings import TRANSPORT
from sim.executor import sleep_for, stand_still
from sim.inbox import Datagrams, SimInbox
from sim.local import SimLocal
from sim.network.addresses import Home, Homes
from sim.network.instants import after, nearest_instant
from sim.network.links import Sender, SimLinks
from sim.network.pace import PeerPace
from sim.network.queues import Parcel
from sim.streams import Line, SimStream, admit, stream_pair

HANDSHAKE_TRIPS = 4
"""Number of one-way trips before a stream can be used: two for TCP, and two for Noise XX."""


class SingleHomed:
    """The methods of `node.seams.Network` for machines on several networks, with trivial answers: a simulated
    machine is on one network."""

    def admits(self, address: Address) -> bool:  # noqa: ARG002
        """Return True: every simulated address is public."""
        return True

    def paths(self, peer: PeerId) -> tuple[Address, ...]:  # noqa: ARG002
        """Return an empty tuple, as on every machine with a single network."""
        return ()

    def prefer(self, peer: PeerId, address: Address) -> None:
        """Do nothing: there is no second path."""


class Fabric(Protocol):
    """The part of all simulated networks that they share (see `sim.seams`), as one peer's network uses it."""

    links: SimLinks
    homes: Homes
    has_local: bool

    def pace(self, peer: PeerId) -> PeerPace: ...
    def reaches(self, one: PeerId, other: PeerId) -> bool: ...
    def living(self, peer: PeerId) -> "SimNetwork | None": ...
    def near(self, peer: PeerId) -> Iterator[tuple[SimLocal, float]]: ...
    def count(self, what: str, number: int = 1) -> None: ...
    def count_traffic(self, sender: PeerId, protocol: str, sent_bytes: int) -> None: ...
    def post(
        self, sender: Sender, peer: PeerId, protocol: str, data: bytes, *, by_stream: bool = False
    ) -> None: ...
    def carry(self, parcel: Parcel) -> None: ...
    def later(self, at: float, action: Callable[[], None]) -> None: ...


class SimNetwork(SingleHomed):
    """`node.seams.Network` of one simulated peer. `SimNetworkFabric.attach` makes it; streams need `run`."""

    def __init__(self, medium: Fabric, peer: PeerId, home: Home) -> None:
        self.alive = True
        self.pace = medium.pace(peer)
        self._medium = medium
        self._peer = peer
        self._home = home
        self._addresses: tuple[Address, ...] = (home.own,)
        self._counters: Counter[str] = Counter()
        self._inboxes: dict[str, SimInbox] = {}
        self._senders: dict[str, Sender] = {}
        self._held: list[tuple[PeerId, str, bytes, bool]] = []
        self._handlers: Handlers[SimStream] = Handlers()
        self._known: dict[PeerId, None] = {}
        self._impostors: dict[PeerId, PeerId] = {}
        self._streams: dict[SimStream, bool] = {}  # the value: whether the remote side opened it
        self._nursery: trio.Nursery | None = None
        self._local = SimLocal(home.own, partial(medium.near, peer), self._counters)
        self._has_local = medium.has_local
        self._scope = trio.CancelScope()

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self._addresses

    @property
    def outside(self) -> Address:
        """Return the address where other peers see this one: one of `addresses`, or the outer address of its
        NAT."""
        return self._home.outside

    @property
    def reachable(self) -> bool | None:
        """Return True for a peer without a NAT, whose address others can reach, else None."""
        return True if self._medium.links.at(self._peer).nat is None else None

    @property
    def local(self) -> SimLocal | None:
        return self._local if self._has_local and self._nursery is not None else None

    def announce(self, address: Address) -> None:
        own, *others = self._addresses
        self._addresses = tuple(dict.fromkeys((own, address.of(self._peer), *others)))[:ADDRESSES_MAX]

    @property
    def counters(self) -> Mapping[str, int]:
        self.miss()
        return self._counters

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve streams until cancelled. Handlers then get a moment to finish; after it the peer is dead."""
        leaving = trio.Event()
        try:
            async with trio.open_nursery() as outer:
                self._scope = outer.cancel_scope
                self._nursery = await outer.start(self._keep_serving, leaving)
                task_status.started()
                try:
                    await trio.sleep_forever()
                finally:
                    leaving.set()
        finally:
            self._nursery = None
            self.die(is_cut=False)

    async def _keep_serving(
        self, leaving: trio.Event, *, task_status: trio.TaskStatus[trio.Nursery] = trio.TASK_STATUS_IGNORED
    ) -> None:
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.shield = True
            task_status.started(nursery)
            await leaving.wait()
            nursery.cancel_scope.deadline = trio.current_time() + GRACE_SECONDS
            for stream, is_served in self._streams.items():
                if is_served:
                    stream.leave()

    def learn(self, peer: PeerId, addresses: Sequence[Address], *, is_hint: bool = False) -> None:  # noqa: ARG002
        """Learn addresses of a peer. It becomes reachable only if one of them is really its own."""
        there = [self._medium.homes.peer_at(address) for address in addresses]
        if peer != self._peer and peer in there:
            self._known[peer] = None
        elif impostors := [each for each in there if each is not None]:
            self._impostors[peer] = impostors[0]

    def known_addresses(self, peer: PeerId) -> tuple[Address, ...]:
        home = self._medium.homes.outside(peer)
        return () if home is None or peer not in self._known else (home,)

    def is_own(self, address: Address) -> bool:
        return self._medium.homes.peer_at(address) == self._peer

    def host_of(self, peer: PeerId) -> str | None:
        return None if (home := self._medium.homes.outside(peer)) is None else home.host

    def send(
        self, peer: PeerId, protocol: str, message: bytes, *, by_stream: bool = False, is_answer: bool = False
    ) -> None:
        del is_answer  # a reply by stream answers a request that came by stream
        if len(message) > ONE_SHOT_BYTES_MAX:
            raise LocalProtocolError(
                f"{len(message)} bytes of {protocol} are too long for a message. Open a stream."
            )
        if not self.alive:
            return
        if peer not in self._known:
            self._counters["messages_without_address"] += 1
            return
        if self.pace.still_until > now_seconds():
            self._held.append((peer, protocol, bytes(message), by_stream))
            return
        self.send_held()
        self._post(peer, protocol, bytes(message), by_stream)

    def send_held(self) -> None:
        """Send, at the thaw, the messages that were held back while the peer was frozen."""
        if self._held and self.pace.still_until <= now_seconds():
            held, self._held = self._held, []
            for each in held:
                self._post(*each)

    def miss(self) -> None:
        """Drop datagrams that arrived while the peer was not running."""
        for inbox in self._inboxes.values():
            if not (self.alive and inbox.is_open):
                self._refuse(inbox.drop_before(now_seconds()))

    def expect(self, sender: PeerId, protocol: str, due: float, number: int, data: bytes) -> None:
        """Accept a datagram in flight from the network of another peer."""
        inbox = self._inbox(protocol)
        if not (self.alive and inbox.is_open):
            self._refuse(inbox.drop_before(now_seconds()))
        if not inbox.put(due, sender, number, data):
            self._counters["inbox_full"] += 1
            self._medium.count("overflowed")

    def bequeath(self) -> dict[str, Datagrams]:
        """Return the datagrams in flight to this dead network."""
        self.miss()
        return {protocol: inbox.empty() for protocol, inbox in self._inboxes.items()}

    def inherit(self, inboxes: dict[str, Datagrams]) -> None:
        """Take over the datagrams in flight to an earlier network of this peer."""
        for protocol, datagrams in inboxes.items():
            for due, sender, number, data in datagrams:
                self._inbox(protocol).put(due, sender, number, data)

    @property
    def waiting(self) -> int:
        """Return how many datagrams are in all inboxes."""
        return sum(len(inbox) for inbox in self._inboxes.values())

    def inbox(self, protocol: str) -> SimInbox:
        inbox = self._inbox(protocol)
        if not inbox.is_open:
            inbox.is_open = True
            self._refuse(inbox.drop_before(now_seconds()))
        return inbox

    def _inbox(self, protocol: str) -> SimInbox:
        inbox = self._inboxes.get(protocol)
        if inbox is None:
            inbox = self._inboxes[protocol] = SimInbox(self.pace, self._admit)
        return inbox

    def _admit(self, sender: PeerId, due: float) -> bool:
        if not self.alive:
            self._medium.count("missed")
            return False
        links = self._medium.links
        if links.has_translators and not links.lets_in(sender, self._peer, due):
            return False
        self._medium.count("delivered")
        # We can answer any peer that reaches us: the real transport would have a session with it by now.
        self._known[sender] = None
        return True

    def _post(self, peer: PeerId, protocol: str, message: bytes, by_stream: bool) -> None:
        sender = self._senders.get(protocol)
        if sender is None:
            sender = self._senders[protocol] = self._medium.links.sender(self._peer, protocol)
        self._medium.post(sender, peer, protocol, message, by_stream=by_stream)

    def _refuse(self, number: int) -> None:
        """Count `number` datagrams that no code listened for."""
        if number:
            self._counters["messages_refused_protocol"] += number
            self._medium.count("missed", number)

    def handle(self, protocol: str, handler: Handler, limits: StreamLimits = USUAL_STREAMS) -> None:
        self._handlers.add(protocol, handler, limits)

    async def open(
        self,
        peer: PeerId,
        protocol: str,
        *others: str,
        message_bytes_max: int = MESSAGE_BYTES_USUAL,
        at: Address | None = None,
    ) -> SimStream:
        if peer not in self._known:
            await self._meet_impostor(peer)
        target = await self._meet(peer)
        if at is not None and self._medium.homes.peer_at(at) != peer:
            raise Unreachable("refused", f"{short_peer(peer)} is not at {at.short}")
        names = (protocol, *others)
        chosen = target._handlers.first_of(names)
        if not self.alive or target._nursery is None or chosen is None:
            target._counters["streams_refused_protocol"] += 1
            raise Unreachable("refused", f"{short_peer(peer)} does not speak {' or '.join(names)}")
        near, far = self._join(target, chosen)
        admit(target._handlers.register, peer, far, target._counters)
        near.message_bytes_max = message_bytes_max
        far.message_bytes_max = target._handlers.message_bytes_max(chosen)
        self._add(near, is_served=False)
        target._add(far, is_served=True)
        target._nursery.start_soon(target._serve, target._handlers.of(chosen), far)
        return near

    def _add(self, stream: SimStream, *, is_served: bool) -> None:
        self._counters["streams_served" if is_served else "streams_opened"] += 1
        self._streams[stream] = is_served
        stream.offended = self._offended

    def _offended(self) -> None:
        self._counters["streams_broken"] += 1

    async def _meet_impostor(self, peer: PeerId) -> None:
        """Fail to connect to `peer`, which is not at its known address; an impostor may be there."""
        other = self._impostors.get(peer)
        if other is None:
            await trio.lowlevel.checkpoint()
            raise Unreachable("unknown", f"no address of {short_peer(peer)} is known")
        await self._meet(other)
        raise WrongPeer("wrong key", f"wanted {short_peer(peer)}, found {short_peer(other)}")

    async def identify(self, address: Address) -> PeerId:
        peer = self._medium.homes.peer_at(address)
        if peer is None:
            await trio.lowlevel.checkpoint()
            raise Unreachable("refused", f"nobody answers at {address.short}")
        await self._meet(peer)
        if address.peer not in (None, peer):
            wanted = short_peer(address.peer or peer)
            raise WrongPeer("wrong key", f"wanted {wanted}, found {short_peer(peer)}")
        self._known[peer] = None
        return peer

    def look_at_streams(self, stall_seconds: float) -> None:
        """See `SimNetworkFabric.look_at_streams`."""
        for stream in list(self._streams):
            is_cut = not self._meets(stream.peer)
            if is_cut and not stall_seconds:
                self._break(stream)
            elif is_cut and not stream.is_stalled:
                stream.stall()
                give_up = partial(self._give_up, stream, stream.stalls)
                self._medium.later(after(now_seconds(), stall_seconds), give_up)
            elif not is_cut and stream.is_stalled:
                stream.resume()

    def die(self, *, is_cut: bool = True) -> None:
        """See `SimNetworkFabric.kill`. `is_cut`: break the streams without closing them."""
        self.alive = False
        self.pace.still_until = 0.0  # when a process stops, its kernel closes what it had open
        for stream in list(self._streams):
            stream.close(is_cut=is_cut)
        self._streams.clear()
        self._held.clear()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()
            self._scope.cancel()

    def _meets(self, peer: PeerId) -> bool:
        """Return whether packets pass in both directions."""
        reaches = self._medium.reaches
        return reaches(self._peer, peer) and reaches(peer, self._peer)

    def _break(self, stream: SimStream) -> None:
        self._streams.pop(stream, None)
        stream.close(is_cut=True)

    def _give_up(self, stream: SimStream, stalls: int) -> None:
        """Break a stream if it is still in the stall number `stalls`."""
        if stream.is_stalled and stream.stalls == stalls:
            self._break(stream)

    def _join(self, target: "SimNetwork", protocol: str) -> tuple[SimStream, SimStream]:
        """Open a stream to `target`; return the near end and the far end."""
        medium = self._medium
        links = medium.links
        places = links.at(self._peer), links.at(target._peer)
        trips = links.latency_ticks(*places), links.latency_ticks(*reversed(places))
        carry = medium.carry if links.is_limited else None
        paces = self.pace, target.pace
        there = Line(places, paces, trips, protocol, carry, medium.later)
        back = Line(places[::-1], paces[::-1], trips[::-1], protocol, carry, medium.later)

        def counter(peer: PeerId) -> Callable[[int], None]:
            return lambda sent_bytes: medium.count_traffic(peer, protocol, sent_bytes)

        near, far = stream_pair(there, back, (counter(self._peer), counter(target._peer)))
        near.source, far.source = target.outside.of(None), self._home.source()
        return near, far

    async def _meet(self, peer: PeerId) -> "SimNetwork":
        """Wait for the handshake; return the remote peer's network."""
        await stand_still(self.pace)
        links, begun = self._medium.links, now_seconds()
        there, back = links.latency_seconds(self._peer, peer), links.latency_seconds(peer, self._peer)
        await sleep_for(HANDSHAKE_TRIPS / 2 * (there + back))
        if not self._meets(peer) or not links.may_open(peer, begun):
            await trio.sleep_until(max(now_seconds(), begun + CONNECT_SECONDS))
            raise Unreachable("timeout", "nothing comes back from the peer")
        target = self._medium.living(peer)
        if target is None:
            raise Unreachable("refused", "the peer is not running")
        # The kernel of a stopped process accepts connections, but nothing answers the handshake.
        with trio.move_on_after(TRANSPORT.handshake_seconds) as scope:
            await stand_still(target.pace)
        if scope.cancelled_caught:
            raise Unreachable("timeout", ("the peer accepted the connection, but did not shake hands"))
        return target

    async def _serve(self, handler: Handler, stream: SimStream) -> None:
        try:
            if await serve(handler, stream, self._counters):
                self._handlers.register.credit(stream)
            else:
                stream.close(is_cut=True)
        finally:
            self._handlers.register.leave(stream)
            self._streams.pop(stream, None)
            stream.close()


def now_seconds() -> float:
    """Return the virtual time, to the microsecond."""
    return nearest_instant(trio.current_time())
