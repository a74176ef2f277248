"""Reaches peers through both routers, by TCP and UDP: drives `punching`; `observers` reports how this node's
router maps.

Two peers talk over a path that exists, usually a relay's (`punch_messages`), and dial each other at the same
instant from the ports at which they listen. The resulting connection becomes a path like any other; if the
other's listening socket accepts one side's dial, that ordinary connection does as well.
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
"""The time limit for the other side's offer: it first asks others where it is seen."""
DIAL_SECONDS = 3.0
"""How long both dial: the kernel retransmits after one second."""
FLIGHT_SECONDS = 0.5
"""How long one side waits for the other's first flight, beyond two round trips. After that, the other's
listening socket must have accepted the connection, and waits as well."""
KNOCKS_SECONDS = (0.0, 0.25, 0.75)
"""The times of datagram handshakes after both have begun: at most three packets to each address, and equally
many to all, as far as `OfferAllowance` goes."""
OBSERVED_FRESH_SECONDS = 60.0
"""How long a datagram's source is reported to its sender: routers keep a mapping about as long."""
INTRODUCERS_MAX = 2
"""Peers that are asked, one after the other, to introduce an unreachable peer."""


PunchConnect = Callable[[Sequence[Place], Address, Sequence[float]], Awaitable[trio.SocketStream]]
"""Connects like `connect_from`: from one of this node's listening places, again after each pause."""


class Puncher:
    """The service of one node. `peers` are possible observers."""

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
        """Ask others where they see this node, and accept introductions, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._introductions.run)
            await self.observers.run()

    # --- punching ------------------------------------------------------------------------------------

    async def punch(self, peer: PeerId) -> None:
        """Try to reach a peer directly that has a relayed path."""
        for pause_seconds in (0.0, RETRY_SECONDS):
            await trio.sleep(pause_seconds)
            may_start = self.budget.may_start(peer, self._clock.monotonic())
            if not may_start or await self._attempt(peer):
                return

    async def _attempt(self, peer: PeerId) -> bool:
        """Return whether a path came about."""
        self._counters["punches_begun"] += 1
        worked = False
        with contain("punching"):
            await self.observers.look()
            try:
                worked = await self._lead(peer)
            except (Unreachable, StreamClosed, RemoteProtocolError, trio.TooSlowError):
                self._counters["punches_broken"] += 1
        # The other side may have led an attempt at the same time, and refused this one meanwhile.
        worked = worked or self._is_reached(peer)
        self.budget.ended(peer, worked=worked)
        self._counters["punches_worked" if worked else "punches_failed"] += 1
        return worked

    def _lost(self, peer: PeerId) -> None:
        self.budget.lost(peer, self._clock.monotonic())

    async def introduce(self, peer: PeerId) -> None:
        """Try to reach a peer without a path, by introductions of peers that know both."""
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
        """Answer an offer of a peer, which came by a path to it or through an introducer."""
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
        """Exchange offers with a peer, by a path to it or through an introducer, and dial at the same time;
        return whether a path came about."""
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
            raise RemoteProtocolError("neither an offer nor a question")
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
                    raise RemoteProtocolError("a message out of turn")

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
        """Return this node's addresses, by its interfaces and by observers."""
        now = self._clock.monotonic()
        own = [
            each for each in self._network.addresses if each.relay is None and ip_of(each.host) is not None
        ]
        near = [each.of(None) for each in own]
        places: dict[Transport, tuple[str, ...]] = {}
        for transport in TRANSPORTS:
            outside = self.seen.place(transport, now)
            if outside is not None and self.observers.is_own(outside.host):
                outside = None  # this node listens there, and was seen at another port
            every = dict.fromkeys(([] if outside is None else [outside]) + near)
            places[transport] = tuple(str(each) for each in every)[:CANDIDATES_MAX]
        return PunchOffer(places["tcp"], places["udp"], bytes(OFFER_BYTES_MIN))

    async def _dial(
        self, peer: PeerId, teller: PeerId, offer: PunchOffer, round_trip_seconds: float, *, is_first: bool
    ) -> bool:
        """Dial at the same time as the other side; return whether there is a path. The offer came from the
        `teller`, an introducer if it is another peer."""
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
        """Return the addresses of an offer to dial. Local addresses refer to this network only if both nodes
        have the same outer address: this node's by several observers, the peer's by its own statement."""
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
    """Return whether the other side begins to send; nothing is read."""
    with trio.move_on_after(seconds):
        with suppress(OSError):
            return bool(await transport.socket.recv(1, socket.MSG_PEEK))
        return False
    return False
