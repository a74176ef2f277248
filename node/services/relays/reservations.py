"""Places at relays for a node that nobody can dial: asked for at several, kept, and told to others.

A place is asked for again every minute, which also says whether the relay is still there: relayed connections
degrade over hours. A relay that fails is left alone for a while, and another one takes its place.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import trio

from crypto.contact import Address
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.containment import contain
from node.errors import StreamClosed, Unreachable
from node.seams import Clock
from node.transport.network import CIRCUITS_TOLD_MAX, RealNetwork
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

WANTED = CIRCUITS_TOLD_MAX
"""Relays at once: one may vanish."""
RENEW_SECONDS = 60.0
"""Between two times that a place is asked for; a place lasts ten times as long."""
ANSWER_SECONDS = 10.0
"""For the answer to that."""
LOOK_SECONDS = 0.5
"""How often it is looked whether there are enough."""
REFUSED_SECONDS = 60.0
"""How long a relay that refused, or failed, is left alone; where it was lost a shorter while."""
LOST_SECONDS = 2.0
TAKING_MAX = 16
"""Circuits that are taken at once of those that one relay announces; it holds that many for one node too."""
TRIED_MAX = 256
"""Relays that are left alone: as many as a swarm has members in view that are worth a try."""


class Reservations:
    """The service of one node. `candidates` are the peers to ask, the best first; `is_wanted` says whether
    others reach this node by relays alone; `changed` is called when the circuits to tell are others."""

    def __init__(
        self,
        network: RealNetwork,
        clock: Clock,
        *,
        candidates: Callable[[], Sequence[PeerId]],
        is_wanted: Callable[[], bool],
        changed: Callable[[], None],
        counters: Counter[str],
    ) -> None:
        self._network = network
        self._clock = clock
        self._candidates = candidates
        self._is_wanted = is_wanted
        self._changed = changed
        self._counters = counters
        self._circuits: dict[PeerId, Address] = {}
        self._asking: dict[PeerId, trio.CancelScope] = {}
        self._left_alone: dict[PeerId, float] = {}
        self._taking: Counter[PeerId] = Counter()

    @property
    def circuits(self) -> tuple[Address, ...]:
        """Those by which this node is reached, the oldest first."""
        return tuple(self._circuits.values())

    async def run(self) -> None:
        """Keep places as long as they are wanted, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                now = self._clock.monotonic()
                self._left_alone = {peer: until for peer, until in self._left_alone.items() if until > now}
                if not self._is_wanted():
                    for scope in self._asking.values():
                        scope.cancel()
                elif len(self._asking) < WANTED:
                    for relay in self._candidates():
                        if relay not in self._asking and relay not in self._left_alone:
                            self._asking[relay] = trio.CancelScope()
                            nursery.start_soon(self._keep, relay)
                            break
                await trio.sleep(LOOK_SECONDS)

    async def _keep(self, relay: PeerId) -> None:
        seconds = REFUSED_SECONDS
        try:
            with self._asking[relay], contain("a place at a relay"):
                try:
                    await self._stay(relay)
                except* (Unreachable, StreamClosed, RemoteProtocolError, trio.TooSlowError):
                    self._counters["relays_failed"] += 1
                    seconds = LOST_SECONDS if relay in self._circuits else REFUSED_SECONDS
        finally:
            del self._asking[relay]
            if len(self._left_alone) >= TRIED_MAX:
                del self._left_alone[next(iter(self._left_alone))]
            self._left_alone[relay] = self._clock.monotonic() + seconds
            if self._circuits.pop(relay, None) is not None:
                self._tell()

    async def _stay(self, relay: PeerId) -> None:
        """Have a place at a relay, until it is lost."""
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
        await stream.send(encode(KeepPlace()))
        due, is_answered = self._clock.monotonic() + ANSWER_SECONDS, False
        while True:
            reply: Reply | None = None
            with trio.move_on_at(due):
                reply = decode(await stream.receive(), Reply, bytes_max=MESSAGE_BYTES_MAX)
            match reply:
                case PlaceKept():
                    is_answered, due = True, self._clock.monotonic() + RENEW_SECONDS
                    if stream.peer not in self._circuits:
                        self._counters["places_at_relays"] += 1
                        self._circuits[stream.peer] = at.through(None)
                        self._tell()
                case CircuitAnnounced(token, peer):
                    if self._taking[stream.peer] < TAKING_MAX:
                        self._taking[stream.peer] += 1
                        nursery.start_soon(self._accept, stream.peer, at, token, PeerId(peer))
                    else:
                        self._counters["circuits_not_taken"] += 1
                case None if is_answered:
                    await stream.send(encode(KeepPlace()))
                    is_answered, due = False, self._clock.monotonic() + ANSWER_SECONDS
                case None:
                    raise trio.TooSlowError
                case RelayRefused():
                    raise Unreachable("refused", "the relay has no place")
                case _:
                    raise RemoteProtocolError("no answer to what was asked")

    async def _accept(self, relay: PeerId, at: Address, token: bytes, peer: PeerId) -> None:
        with contain("a circuit that comes in"):
            try:
                await self._network.multiplexed.accept(relay, at, token, peer)
            except Unreachable:
                self._counters["circuits_not_taken"] += 1
            finally:
                self._taking[relay] -= 1

    def _tell(self) -> None:
        self._network.reach_by(self.circuits)
        self._changed()
