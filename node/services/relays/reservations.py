"""Places (reservations) at relays for a node that cannot be dialled. It requests and renews several, and
announces them.

A renewal every 20 s also tests whether the relay is still there, because relayed connections degrade over
hours. A relay that fails is left alone for a while, and a different one is used instead.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import trio

from crypto.contact import Address
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.containment import contain
from node.errors import StreamClosed, Unreachable
from node.seams import Clock
from node.services.relays.places import ANSWER_SECONDS, PlaceLease, PlaceSearch
from node.services.relays.settings import RELAYS, RelaySettings
from node.transport.network import RealNetwork
from node.transport.relay_messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    CircuitAnnounced,
    KeepPlace,
    PlaceKept,
    RelayRefused,
    Reply,
)
from node.transport.streams import SecureStream
from node.waker import Waker

LOOK_SECONDS = 0.5
"""Seconds between checks of the number of places."""
TAKING_MAX = 16
"""Maximum number of one relay's circuits that are accepted simultaneously. A relay announces no more to one
node."""


class Reservations:
    """The reservations of one node. `candidates` are the peers to ask, the best first. `is_wanted` returns
    whether others can reach this node only through relays. `changed` is called when the circuits to announce
    change."""

    def __init__(
        self,
        network: RealNetwork,
        clock: Clock,
        *,
        candidates: Callable[[], Sequence[PeerId]],
        is_wanted: Callable[[], bool],
        changed: Callable[[], None],
        counters: Counter[str],
        settings: RelaySettings = RELAYS,
    ) -> None:
        self._network = network
        self._clock = clock
        self._candidates = candidates
        self._is_wanted = is_wanted
        self._changed = changed
        self._counters = counters
        self._circuits: dict[PeerId, Address] = {}
        self._asking: dict[PeerId, trio.CancelScope] = {}
        self._search = PlaceSearch(settings)
        self._taking: Counter[PeerId] = Counter()
        self._readying: set[PeerId] = set()

    @property
    def circuits(self) -> tuple[Address, ...]:
        """The circuits by which others reach this node, the oldest first."""
        return tuple(self._circuits.values())

    async def run(self) -> None:
        """Keep places as long as they are wanted, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                if not self._is_wanted():
                    for scope in self._asking.values():
                        scope.cancel()
                else:
                    relay = self._search.next(self._clock.monotonic(), self._candidates())
                    if relay is not None:
                        self._asking[relay] = trio.CancelScope()
                        nursery.start_soon(self._keep, relay)
                await trio.sleep(LOOK_SECONDS)

    async def _keep(self, relay: PeerId) -> None:
        try:
            with self._asking[relay], contain("a place at a relay"):
                try:
                    await self._stay(relay)
                except* (Unreachable, StreamClosed, RemoteProtocolError, trio.TooSlowError):
                    self._counters["relays_failed"] += 1
        finally:
            del self._asking[relay]
            was_kept = self._circuits.pop(relay, None) is not None
            self._search.ended(self._clock.monotonic(), relay)
            if was_kept:
                self._tell()

    async def _stay(self, relay: PeerId) -> None:
        """Keep a place at a relay until it is lost."""
        with trio.fail_after(2 * ANSWER_SECONDS):
            path = await self._network.multiplexed.offer(relay)
        path.is_kept = True
        stream = None
        try:
            if path.address is None:
                raise Unreachable("refused", "the relay hung up")
            with trio.fail_after(2 * ANSWER_SECONDS):
                stream = await self._network.open(relay, PROTOCOL, message_bytes_max=MESSAGE_BYTES_MAX)
            async with trio.open_nursery() as nursery:
                await self._converse(stream, path.address.of(relay), nursery)
        finally:
            path.is_kept = False
            if stream is not None:
                stream.close()

    async def _converse(self, stream: SecureStream, at: Address, nursery: trio.Nursery) -> None:
        lease = PlaceLease(self._clock.monotonic())
        waker = Waker(self._clock, lambda: lease.deadline)
        await stream.send(encode(KeepPlace()))
        nursery.start_soon(self._renew, stream, lease, waker)
        while True:
            reply: Reply = decode(await stream.receive(), Reply, bytes_max=MESSAGE_BYTES_MAX)
            match reply:
                case PlaceKept() if lease.awaits_answer:
                    lease.kept(self._clock.monotonic())
                    waker.stir()
                    if stream.peer not in self._circuits:
                        self._counters["places_at_relays"] += 1
                        self._circuits[stream.peer] = at.through(None)
                        self._search.kept(self._clock.monotonic(), stream.peer)
                        self._tell()
                    nursery.start_soon(self._keep_ready, stream.peer, at)
                case CircuitAnnounced():
                    if self._taking[stream.peer] < TAKING_MAX:
                        self._taking[stream.peer] += 1
                        nursery.start_soon(self._accept, stream.peer, at, reply)
                    else:
                        self._counters["circuits_not_taken"] += 1
                case RelayRefused():
                    raise Unreachable("refused", "the relay refused a place")
                case _:
                    raise RemoteProtocolError("the relay's reply does not match the request")

    async def _renew(self, stream: SecureStream, lease: PlaceLease, waker: Waker) -> NoReturn:
        """Renew the place when it is time. Raises TooSlowError if the relay did not answer."""
        while True:
            asks_again = await waker.wake_when_due(lease)
            if asks_again:
                await stream.send(encode(KeepPlace()))
            elif asks_again is not None:
                raise trio.TooSlowError

    async def _accept(self, relay: PeerId, at: Address, announced: CircuitAnnounced) -> None:
        peer = PeerId(announced.peer)
        try:
            with contain("a circuit that comes in"):
                try:
                    await self._network.multiplexed.accept(relay, at, announced.token, peer, announced.flight)
                except Unreachable:
                    self._counters["circuits_not_taken"] += 1
                except RemoteProtocolError:
                    # The peer behind the relay may be at fault, because a relay cannot read the flight. No
                    # connection was used up.
                    self._counters["circuits_not_taken"] += 1
                    return
                await self._keep_ready(relay, at)
        finally:
            self._taking[relay] -= 1

    async def _keep_ready(self, relay: PeerId, at: Address) -> None:
        """Keep an idle connection to the relay for the next circuit, which then needs no handshake with the
        relay first. There is one such task for each relay, so many announcements do not cause more dials."""
        if relay in self._readying:
            return
        self._readying.add(relay)
        try:
            with contain("a connection for the next circuit"), suppress(Unreachable):
                await self._network.keep_ready(relay, at)
        finally:
            self._readying.discard(relay)

    def _tell(self) -> None:
        self._network.reach_by(self.circuits)
        self._changed()
