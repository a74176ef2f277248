"""Reaches peers by hole punching through both routers, by TCP and UDP. It drives `punching`; `observers`
reports how this node's router translates.

Two peers talk over a path that exists, usually through a relay (`punch_messages`), and dial each other at the
same instant from the ports at which they listen. The resulting connection becomes a path like any other. If
one peer's listening socket accepts the other's dial, that ordinary connection is used in the same way.
"""

import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from random import Random

import trio

from crypto.contact import Address
from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.containment import contain
from node.errors import StreamClosed, Unreachable
from node.seams import Clock, Stream
from node.transport.address_policy import Place, ip_of, is_global
from node.transport.introductions import Introductions
from node.transport.network import RealNetwork
from node.transport.observers import ASK_SECONDS, Observers
from node.transport.punch_messages import (
    CANDIDATES_MAX,
    MESSAGE_BYTES_MAX,
    OFFER_BYTES_MIN,
    PROTOCOL,
    Begin,
    Introduce,
    Meet,
    Observe,
    ObservedAddresses,
    PunchOffer,
    RoundTrip,
    read_message,
)
from node.transport.punching import (
    RETRY_SECONDS,
    SYNS_BYTES,
    TRANSPORTS,
    OfferAllowance,
    PunchBudget,
    Transport,
)
from node.transport.simultaneous import PUNCH_RETRIES_SECONDS, connect_from, secure

ANSWER_SECONDS = 8.0
"""Time limit for the peer's offer. The peer first asks others for its public address."""
DIAL_SECONDS = 3.0
"""How long both peers dial. The kernel retransmits after one second."""
FLIGHT_SECONDS = 0.5
"""How long to wait for the peer's first flight, in addition to two round trips. If none has come by then, the
peer's listening socket must have accepted the connection, and waits as well."""
KNOCKS_SECONDS = (0.0, 0.25, 0.75)
"""When datagram handshakes are sent after both peers have begun: at most three packets to each address,
equally many to all, as far as `OfferAllowance` permits."""
OBSERVED_FRESH_SECONDS = 60.0
"""How long a datagram's source is reported to its sender. Routers keep a mapping for about this long."""
INTRODUCERS_MAX = 2
"""Maximum number of peers that are asked, one after the other, to introduce an unreachable peer."""


PunchConnect = Callable[[Sequence[Place], Address, Sequence[float]], Awaitable[trio.SocketStream]]
"""Connects like `connect_from`, from one of this node's listening ports, and tries again after each pause."""


class Puncher:
    """The hole punching of one node. `peers` are possible observers."""

    def __init__(
        self,
        network: RealNetwork,
        clock: Clock,
        rng: Random,
        peers: Callable[[], Collection[PeerId]],
        counters: Counter[str],
        connect: PunchConnect = connect_from,
    ) -> None:
        self._connect = connect
        self._network = network
        self._clock = clock
        self._counters = counters
        self.budget = PunchBudget(network.admits)
        self.observers = Observers(network, clock, rng, peers, counters)
        self.seen = self.observers.seen
        self._introductions = Introductions(network, clock, counters, self._may_come, self._meet)
        network.handle(PROTOCOL, self._serve)
        network.multiplexed.punch = self.punch
        network.multiplexed.introduce = self.introduce
        network.multiplexed.lost_punched = self._lost

    async def run(self) -> None:
        """Ask others at which address they see this node, and accept introductions, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._introductions.run)
            await self.observers.run()

    # --- punching ------------------------------------------------------------------------------------

    async def punch(self, peer: PeerId) -> None:
        """Try to reach directly a peer that has a relayed path."""
        for pause_seconds in (0.0, RETRY_SECONDS):
            await trio.sleep(pause_seconds)
            may_start = self.budget.may_start(peer, self._clock.monotonic())
            if not may_start or await self._attempt(peer):
                return

    async def _attempt(self, peer: PeerId) -> bool:
        """Try once; return whether a path was made."""
        self._counters["punches_begun"] += 1
        worked = False
        with contain("punching"):
            await self.observers.look()
            try:
                worked = await self._lead(peer)
            except (Unreachable, StreamClosed, RemoteProtocolError, trio.TooSlowError):
                self._counters["punches_broken"] += 1
        # The peer may have led an attempt at the same time, and meanwhile refused this one.
        worked = worked or self._is_reached(peer)
        self.budget.ended(peer, worked=worked)
        self._counters["punches_worked" if worked else "punches_failed"] += 1
        return worked

    def _lost(self, peer: PeerId) -> None:
        self.budget.lost(peer, self._clock.monotonic())

    async def introduce(self, peer: PeerId) -> None:
        """Try to reach a peer that has no path, through introductions by peers that know both."""
        if not self.budget.may_start(peer, self._clock.monotonic()):
            return
        worked = False
        await self.observers.look()
        asked = [common for common, _ in self.observers.asked]
        commons = [each for each in dict.fromkeys((*asked, *self.observers.candidates())) if each != peer]
        for common in commons[:INTRODUCERS_MAX]:
            self._counters["introductions_asked"] += 1
            try:
                worked = await self._lead(peer, common)
            except (Unreachable, StreamClosed, RemoteProtocolError, trio.TooSlowError):
                self._counters["introductions_broken"] += 1
            if worked := worked or self._is_reached(peer):
                break
        self.budget.ended(peer, worked=worked)
        self._counters["introductions_worked"] += worked

    async def _meet(self, stream: Stream, offer: PunchOffer, peer: PeerId) -> None:
        """Answer a peer's offer, which came over a path to the peer or through an introducer."""
        await self.observers.look()
        await self._follow(stream, offer, peer)

    def _may_answer(self, peer: PeerId) -> bool:
        may = self.budget.may_answer(peer, self._clock.monotonic())
        self._counters["punches_refused"] += not may
        return may

    def _may_come(self, teller: PeerId) -> bool:
        may = self.budget.may_come(teller, self._clock.monotonic())
        self._counters["punches_refused"] += not may
        return may

    async def _lead(self, peer: PeerId, common: PeerId | None = None) -> bool:
        """Exchange offers with a peer, over a path to it or through an introducer, and dial at the same time.
        Return whether a path was made."""
        stream = await self._network.open(common or peer, PROTOCOL, message_bytes_max=MESSAGE_BYTES_MAX)
        try:
            if common is not None:
                await stream.send(encode(Introduce(peer)))
            with trio.fail_after(ANSWER_SECONDS):
                await stream.send(encode(self._own_offer()))
                offer = read_message(await stream.receive())
                if not isinstance(offer, PunchOffer):
                    raise RemoteProtocolError("no offer")
                began = trio.current_time()
                await stream.send(encode(RoundTrip()))
                if not isinstance(read_message(await stream.receive()), RoundTrip):
                    raise RemoteProtocolError("no probe")
                round_trip_seconds = trio.current_time() - began
                await stream.send(encode(Begin()))
            await trio.sleep(round_trip_seconds / 2)
            return await self._dial(peer, stream.peer, offer, round_trip_seconds, is_first=True)
        finally:
            stream.close()

    async def _serve(self, stream: Stream) -> None:
        first = read_message(await stream.receive())
        if isinstance(first, Observe):
            await self._observe(stream)
        elif isinstance(first, Introduce):
            await self._introductions.introduce(stream, PeerId(first.peer))
        elif isinstance(first, Meet):
            await self._introductions.meet(stream, first.token)
        elif not isinstance(first, PunchOffer):
            raise RemoteProtocolError("neither an offer nor a request")
        elif self._may_answer(stream.peer):
            await self._meet(stream, first, stream.peer)

    async def _observe(self, stream: Stream) -> None:
        """Answer a peer's Observe requests."""
        with suppress(StreamClosed):
            while True:
                await stream.send(encode(self._observed(stream)))
                with trio.move_on_after(3 * ASK_SECONDS) as scope:
                    again = read_message(await stream.receive())
                if scope.cancelled_caught:
                    return
                if not isinstance(again, Observe):
                    raise RemoteProtocolError("an unexpected message")

    async def _follow(self, stream: Stream, offer: PunchOffer, peer: PeerId) -> None:
        round_trip_seconds = None
        with trio.move_on_after(ANSWER_SECONDS):
            await stream.send(encode(self._own_offer()))
            if not isinstance(read_message(await stream.receive()), RoundTrip):
                raise RemoteProtocolError("no probe")
            began = trio.current_time()
            await stream.send(encode(RoundTrip()))
            if not isinstance(read_message(await stream.receive()), Begin):
                raise RemoteProtocolError("no beginning")
            round_trip_seconds = trio.current_time() - began
        if round_trip_seconds is not None:
            await self._dial(peer, stream.peer, offer, round_trip_seconds, is_first=False)

    def _observed(self, stream: Stream) -> ObservedAddresses:
        now, peer, source = self._clock.monotonic(), stream.peer, stream.source
        heard = self._network.seen_at(peer)
        is_fresh = heard is not None and now - self._network.heard_at(peer) <= OBSERVED_FRESH_SECONDS
        return ObservedAddresses(
            "" if source is None else str(source.of(None)), str(heard) if is_fresh else ""
        )

    def _own_offer(self) -> PunchOffer:
        """Return an offer with this node's addresses, from its interfaces and from observers."""
        now = self._clock.monotonic()
        own = [
            each for each in self._network.addresses if each.relay is None and ip_of(each.host) is not None
        ]
        near = [each.of(None) for each in own]
        places: dict[Transport, tuple[str, ...]] = {}
        for transport in TRANSPORTS:
            outside = self.seen.place(transport, now)
            if outside is not None and self.observers.is_own(outside.host):
                outside = (
                    None  # this machine has the address itself, and was seen at a port of another socket
                )
            every = dict.fromkeys(([] if outside is None else [outside]) + near)
            places[transport] = tuple(str(each) for each in every)[:CANDIDATES_MAX]
        return PunchOffer(places["tcp"], places["udp"], bytes(OFFER_BYTES_MIN))

    async def _dial(
        self, peer: PeerId, teller: PeerId, offer: PunchOffer, round_trip_seconds: float, *, is_first: bool
    ) -> bool:
        """Dial at the same time as the peer; return whether there is a path. The offer came from the
        `teller`, which is an introducer if it is not `peer`."""
        via = None if teller == peer else teller
        tcp = self._admitted(peer, offer.tcp, teller=via)
        udp = self._admitted(peer, offer.udp, [each.host for each in tcp], teller=via)
        until = trio.current_time() + DIAL_SECONDS
        allowance = OfferAllowance(len(encode(offer)))
        tcp = [each for each in tcp if allowance.take(each, SYNS_BYTES[each.kind])]
        async with trio.open_nursery() as knocking:
            knocking.start_soon(self._knock, peer, udp, allowance)
            done = trio.Event()
            async with trio.open_nursery() as nursery:
                for address in tcp:
                    dial = partial(self._dial_one, peer, address, round_trip_seconds, is_first, allowance)
                    nursery.start_soon(dial, done)
                with trio.move_on_at(until):
                    await done.wait()
                nursery.cancel_scope.cancel()
        return self._is_reached(peer)

    def _admitted(
        self,
        peer: PeerId,
        offered: Sequence[str],
        paid: Collection[str] = (),
        *,
        teller: PeerId | None = None,
    ) -> list[Address]:
        """Return the addresses of an offer that this node may dial. Local addresses refer to this network
        only if both nodes have the same outer address. This node's is confirmed by several observers; the
        peer's is its own claim."""
        now = self._clock.monotonic()
        found = self.budget.admit(peer, offered, now, paid, teller)
        own, outside = self.seen.agreed_place("tcp", now), [each for each in found if is_global(each.host)]
        if own is not None and own.host in {each.host for each in outside}:
            return found
        return outside

    def _is_reached(self, peer: PeerId) -> bool:
        return any(path.way != "relayed" for path in self._network.multiplexed.of(peer))

    async def _knock(self, peer: PeerId, addresses: Sequence[Address], allowance: OfferAllowance) -> None:
        began, since = trio.current_time(), self._clock.monotonic()
        for seconds in KNOCKS_SECONDS:
            await trio.sleep_until(began + seconds)
            if self._network.heard_at(peer) >= since:
                self._counters["punched_udp"] += 1
                return
            self._network.knock_at(peer, addresses, allowance.take_datagrams)

    async def _dial_one(
        self,
        peer: PeerId,
        address: Address,
        round_trip_seconds: float,
        is_first: bool,
        allowance: OfferAllowance,
        done: trio.Event,
    ) -> None:
        try:
            transport = await self._connect(self._network.listening, address, PUNCH_RETRIES_SECONDS)
            is_first = is_first or not await _speaks(transport, 2 * round_trip_seconds + FLIGHT_SECONDS)
            secured = await secure(transport, self._network.credentials, address.of(peer), is_first=is_first)
        except Unreachable:
            return
        allowance.proved(address)
        if done.is_set():
            secured.transport.socket.close()
            return
        if is_first:
            try:
                await self._network.multiplexed.offer_on(secured)
            except Unreachable:
                return
        else:
            self._network.multiplexed.serve_punched(secured)
        self._counters["punched_tcp"] += 1
        done.set()


async def _speaks(transport: trio.SocketStream, seconds: float) -> bool:
    """Return whether the peer begins to send within `seconds`; nothing is read."""
    with trio.move_on_after(seconds):
        with suppress(OSError):
            return bool(await transport.socket.recv(1, socket.MSG_PEEK))
        return False
    return False
