"""Observers, which report the address at which they see this node. This module finds them, asks them
regularly, and drops them.

Their answers show how this node's router translates addresses (`punching.SeenPlaces`), and are part of every
offer to punch. The requests keep the router's mapping open. Not here: dialling peers (`puncher`), and this
node's answers to others.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from math import inf
from random import Random

import trio

from crypto.contact import Address, make_address, parse_address
from crypto.crowds import network_of
from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from crypto.token_buckets import prefix_of
from node.errors import StreamClosed, Unreachable
from node.seams import Clock
from node.transport.address_policy import Place, is_global
from node.transport.network import RealNetwork
from node.transport.punch_messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    Observe,
    ObservedAddresses,
    read_message,
)
from node.transport.punching import OBSERVERS_MAX, ObserverRests, SeenPlaces, Transport
from node.transport.simultaneous import connect_from, leave_nothing, secure
from node.transport.streams import SecureStream

OBSERVE_SECONDS = 3.0
"""Time limit for asking one peer at which address it sees this node."""
RECONNECT_SECONDS = 0.5
"""How long to wait after losing the connection to an observer before connecting again from the same port."""
OBSERVERS_WANTED = 2
"""Number of observers wanted: enough to show whether all see the same address."""
FRESH_SECONDS = 2.0
"""A caller that waits for a round of questions accepts one that began within this time."""
LOOK_SECONDS = 2.0
ASK_SECONDS = 20.0
"""Seconds between rounds of questions while there are too few observers, and once there are enough. Routers
keep a mapping without traffic for 50 s or more."""

Observer = tuple[PeerId, int]
"""A peer that is asked at which address it sees this node, and the IP version to use: 4 or 6."""


Connect = Callable[[Sequence[Place], Address], Awaitable[trio.SocketStream]]
"""Connects to an address from one of the hosts and ports where this node listens."""


class Observers:
    """The observers of one node. `peers` are the peers that may be asked. `asked` has those that are being
    asked, each with its stream. `seen` has their answers."""

    def __init__(
        self,
        network: RealNetwork,
        clock: Clock,
        rng: Random,
        peers: Callable[[], Collection[PeerId]],
        counters: Counter[str],
        connect: Connect = connect_from,
    ) -> None:
        self._connect = connect
        self._network = network
        self._clock = clock
        self._rng = rng
        self._peers = peers
        self._counters = counters
        self.seen = SeenPlaces()
        self.asked: dict[Observer, SecureStream] = {}
        self._rests = ObserverRests()
        self._told = self._own_hosts()
        self._looking = trio.Lock()
        self._looked_at = -inf
        """When the latest completed round of questions began."""

    async def run(self) -> None:
        """Ask others at which address they see this node, until cancelled. The answers go with every offer,
        and the connections keep the router's mapping open."""
        pause_seconds = LOOK_SECONDS
        try:
            while True:
                # Randomize, because two nodes that dial each other at the same instant, both to ask, would
                # otherwise repeat that forever.
                await trio.sleep(pause_seconds * self._rng.uniform(0.75, 1.25))
                own = self._own_hosts()
                is_moved = own != self._told
                if is_moved:
                    self._told = own
                    self._drop(*self.asked)
                    self.seen.forget()
                await self.look(anew=is_moved)
                self._tell()
                seen = [sum(each == family for _, each in self.asked) for family in self._families()]
                pause_seconds = LOOK_SECONDS if not seen or max(seen) < OBSERVERS_WANTED else ASK_SECONDS
        finally:
            self._drop(*self.asked)

    def _tell(self) -> None:
        text = self.seen.text(self._clock.monotonic(), self.is_own)
        self._network.translation = replace(self._network.translation, kind=text)

    def _own_hosts(self) -> tuple[Address, ...]:
        return tuple(
            each for each in self._network.addresses if each.relay is None and not is_global(each.host)
        )

    def is_own(self, host: str) -> bool:
        """Return whether this machine itself has that address."""
        return self._network.is_own(make_address(host, self._network.port))

    def _families(self) -> tuple[int, ...]:
        """Return the IP versions with which this node may be seen from outside."""
        own = [each for each in self._network.addresses if each.relay is None]
        has_ipv6 = any(each.kind == "ip6" and is_global(each.host) for each in own)
        return (4, 6) if has_ipv6 else (4,)

    def _is_on_internet(self, kind: str) -> bool:
        """Return whether this machine itself has a public internet address of this kind."""
        own = [each for each in self._network.addresses if each.relay is None and each.kind == kind]
        return any(is_global(each.host) and self.is_own(each.host) for each in own)

    def candidates(self, family: int = 4) -> list[PeerId]:
        """Return peers that were reached at public addresses, one for each host, in any order. A mere claim
        must not cause a dial, so claims do not count. Peers behind a router are left out, because a punched
        path has the same ports."""
        now = self._clock.monotonic()
        by_host: dict[str, PeerId] = {}
        for peer in self._peers():
            place = self._place_of(peer, family)
            is_hidden = any(path.way == "punched" for path in self._network.multiplexed.of(peer)) or any(
                each.relay is not None for each in self._network.known_addresses(peer)
            )
            if peer == self._network.peer or place is None or is_hidden:
                continue
            if self._rests.may_ask(place.host, now):
                by_host.setdefault(place.host, peer)
        found = list(by_host.values())
        return self._rng.sample(found, len(found))

    def _place_of(self, peer: PeerId, family: int) -> Address | None:
        """Return a public address of this IP version at which a peer was met. An IPv6 address may be a mere
        claim if the peer was met anywhere, so that a peer with both versions is asked over both."""
        met = self._network.answered_at(peer)
        places = (*met, *self._network.known_addresses(peer)) if family == 6 and met else met
        usual = [each for each in places if each.kind == f"ip{family}" and each.relay is None]
        return next((each for each in usual if is_global(each.host)), None)

    async def look(self, *, anew: bool = False) -> None:
        """Ask the present observers again, and replace those that are gone. Concurrent calls share one round,
        so peers that cause many rounds keep nobody waiting. With `anew`, earlier answers no longer count."""
        asked_at, has_waited = self._clock.monotonic(), self._looking.locked()
        async with self._looking:
            began = self._clock.monotonic()
            if has_waited and not anew and self._looked_at >= min(asked_at, began - FRESH_SECONDS):
                return
            before = len(self.asked)
            async with trio.open_nursery() as nursery:
                for observer in self.asked:
                    nursery.start_soon(self.ask, observer)
            if len(self.asked) < before:
                # Connect afresh: a rebooted router may still pass answers on connections that it no longer
                # knows.
                await trio.sleep(RECONNECT_SECONDS)
            async with trio.open_nursery() as nursery:
                for family in self._families():
                    asked = [peer for peer, each in self.asked if each == family]
                    others = [peer for peer in self.candidates(family) if peer not in asked]
                    is_settled = self.seen.is_settled(self._clock.monotonic(), family)
                    wanted = OBSERVERS_WANTED if is_settled else OBSERVERS_MAX
                    for peer in others[: max(0, wanted - len(asked))]:
                        nursery.start_soon(self.ask, (peer, family))
            self._looked_at = began

    async def ask(self, observer: Observer) -> None:
        """Ask one peer at which address it sees this node."""
        peer, family = observer
        place, is_reached = self._place_of(peer, family), observer in self.asked
        try:
            with trio.fail_after(OBSERVE_SECONDS):
                if observer not in self.asked:
                    self.asked[observer] = await self._reach_observer(peer, place)
                    is_reached = True
                stream = self.asked[observer]
                await stream.send(encode(Observe()))
                observed = read_message(await stream.receive())
            if not isinstance(observed, ObservedAddresses):
                raise RemoteProtocolError("the observer's reply does not match the request")
            self._note(peer, observed, b"" if place is None else network_of(prefix_of(place.host)))
            if place is not None:
                self._rests.answered(place.host)
        except (Unreachable, StreamClosed, RemoteProtocolError, trio.TooSlowError):
            self._counters["observers_failed"] += 1
            self._drop(observer)
            if place is not None and not is_reached:
                self._rests.failed(place.host, self._clock.monotonic())

    async def _reach_observer(self, peer: PeerId, place: Address | None) -> SecureStream:
        if place is None:
            raise Unreachable("unknown", "none of its addresses is known")
        if not self._network.may_dial(peer, place):
            raise Unreachable("timeout", "it was dialled too often without an answer")
        if self._is_on_internet(place.kind):
            # Use no fixed local port: if both used their listening ports, only one of two such nodes could
            # ask the other.
            return await self._network.open(peer, PROTOCOL, message_bytes_max=MESSAGE_BYTES_MAX, at=place)
        transport = await self._connect(self._network.listening, place)
        leave_nothing(transport)
        secured = await secure(transport, self._network.credentials, place.of(peer), is_first=True)
        return await self._network.multiplexed.open_on(secured, PROTOCOL)

    def _drop(self, *observers: Observer) -> None:
        for observer in observers:
            stream = self.asked.pop(observer, None)
            if stream is not None:
                stream.connection.end("it is no longer asked for this node's address")

    def _note(self, peer: PeerId, observed: ObservedAddresses, network: bytes) -> None:
        """Record an answer. Raises RemoteProtocolError if it is not an address."""
        transports: tuple[tuple[Transport, str], ...] = (("tcp", observed.tcp), ("udp", observed.udp))
        for transport, text in transports:
            if text:
                address = _address(text)
                self.seen.note(self._clock.monotonic(), peer, transport, address, network)


def _address(text: str) -> Address:
    """Return an address. Raises RemoteProtocolError if it is not an IP address."""
    try:
        address = parse_address(text)
    except ValueError:
        raise RemoteProtocolError("a malformed place") from None
    if address.kind not in ("ip4", "ip6") or address.relay is not None:
        raise RemoteProtocolError("a malformed place")
    return address
