"""NAT traversal in a world of cores, with a node's cores: peers learn their outside addresses, keep places
(reservations) at relays, send through relays, and punch holes.

A message travels as from a node (`node.transport.network`). It goes as a datagram to a peer that is reachable
or was heard of recently. To any other peer it goes on an open path, by dialling, or through a relay where
that peer has a place. Streams lose nothing as long as their connections exist. Each peer knows the places of
the others, and any peer with a public address is a relay. Bytes on a path do not count against a relay's rate
or budgets.
"""

from collections import Counter

from crypto.contact import make_address
from crypto.crowds import network_of
from crypto.identity import PeerId
from crypto.token_buckets import prefix_of
from node.services.relays.ledger import Limits, NoPlace, RelayLedger
from node.services.relays.places import WANTED, PlaceLease
from node.transport.address_policy import is_global
from node.transport.network import HEARD_SECONDS
from node.transport.observers import ASK_SECONDS, OBSERVERS_WANTED
from node.transport.puncher import OBSERVED_FRESH_SECONDS
from node.transport.punching import PunchBudget
from sim.events import PeerStarted, PeerStopped, PlaceFound, PlaceLost, ReachabilityJudged
from sim.network.instants import TICKS_PER_SECOND, after
from sim.network.links import STREAM_TRIPS
from sim.network.machines import carry, connect
from sim.network.places import Place
from sim.seeds import seeded_entropy, seeded_rng
from sim.worlds.crossing import SimPath, Traveller, dial, latencies
from sim.worlds.joining import DialGround, live_others
from sim.worlds.life import Life
from sim.worlds.open_paths import OpenPaths
from sim.worlds.punching import SimPuncher

LOOK_SECONDS = 5.0
"""Interval at which a peer checks whether it has enough places; a node checks ten times as often."""
CIRCUIT_TRIPS_NEAR, CIRCUIT_TRIPS_FAR, CIRCUIT_TRIPS_THROUGH = 8, 7, 2
"""Number of one-way trips until a circuit is usable. Near: the asking peer's handshakes with the relay, its
request and the answer. Far: the notice to the second peer, its handshakes and its answer. Through: the
handshake of both peers through the relay."""


class RoutedPeers:
    """The NAT traversal of all peers of a world, with `counters` of its outcomes."""

    def __init__(self, ground: DialGround) -> None:
        self._ground = ground
        self._links = ground.links
        self._here: dict[PeerId, Traveller] = {}
        self.counters: Counter[str] = Counter()
        self._paths = OpenPaths(ground, self._here, self.counters, self._lost)
        self._puncher = SimPuncher(ground, self._here, self.counters, self._paths)
        ground.on(PeerStarted, self._started)
        ground.on(PeerStopped, self._stopped)
        ground.on(ReachabilityJudged, self._judged)
        ground.links.ways = self

    # --- lives ---------------------------------------------------------------------------------------

    def _started(self, life: Life, event: PeerStarted) -> None:
        del event
        machine = self._links.at(life.peer).machine
        assert machine is not None
        entropy = seeded_entropy(self._ground.seed, "relay", life.peer, life.serial)
        ledger = RelayLedger(Limits(is_on=machine.site is None), entropy)
        budget = PunchBudget(lambda address: is_global(address.host))
        machine.is_up = True
        self._here[life.peer] = traveller = Traveller(machine, ledger, budget, life.number)
        if machine.site is not None:
            traveller.wants_places = True  # like a node with only local addresses
            rng = seeded_rng(self._ground.seed, "looks", life.peer, life.serial)
            self._ground.at(
                after(self._ground.now, rng.uniform(0, LOOK_SECONDS)), self._look, life, traveller
            )
            self._ground.at(after(self._ground.now, rng.uniform(0, ASK_SECONDS)), self._ask, life, traveller)

    def _stopped(self, life: Life, event: PeerStopped) -> None:
        del event
        traveller = self._here.pop(life.peer, None)
        if traveller is not None:
            traveller.machine.is_up = False

    def _judged(self, life: Life, event: ReachabilityJudged) -> None:
        traveller = self._here.get(life.peer)
        if traveller is not None:
            traveller.wants_places = event.reachable is not True and traveller.machine.site is not None

    def reboot(self, peer: PeerId) -> None:
        """Reboot the router of a peer, which loses its mappings."""
        machine = self._links.at(peer).machine
        for card in () if machine is None else machine.cards.values():
            if card.site is not None:
                card.site.reboot()
                self.counters["routers rebooted"] += 1

    def _relays(self, life: Life, traveller: Traveller) -> list[PeerId]:
        """Return the listed peers that may relay, the nearest first."""
        found = [
            peer
            for peer in live_others(life)
            if (other := self._here.get(peer)) and other.ledger.limits.is_on
        ]
        return sorted(found, key=lambda peer: (self._links.latency_seconds(traveller.peer, peer), peer))

    # --- places at relays ----------------------------------------------------------------------------

    def _look(self, life: Life, traveller: Traveller) -> None:
        if self._here.get(life.peer) is not traveller:
            return
        now = self._ground.now
        self._ground.at(after(now, LOOK_SECONDS), self._look, life, traveller)
        if traveller.wants_places and len(traveller.search.asked) < WANTED:
            relay = traveller.search.next(now, self._relays(life, traveller))
            if relay is not None:
                self._reserve(life, traveller, relay)

    def _reserve(self, life: Life, traveller: Traveller, peer: PeerId) -> None:
        now, relay = self._ground.now, self._here.get(peer)
        made = None if relay is None else dial(traveller, relay, now)
        if relay is None or made is None:
            traveller.search.ended(now, peer)
            return
        path = self._paths.open(traveller, relay, "direct", (made,), now)
        lease = path.lease = PlaceLease(now)
        if self._request(life, path):
            self._ground.at(lease.deadline, self._renew, life, path)
        else:
            self._paths.close(path)

    def _request(self, life: Life, path: SimPath) -> bool:
        """Request or renew the place; return False if it is refused. A received answer is handled
        immediately."""
        now, lease, relay = self._ground.now, path.lease, path.other
        assert lease is not None
        there = path.arrives(path.first, now, self._links.latency_seconds)
        back = path.arrives(relay, now, self._links.latency_seconds)
        if there is None or back is None or self._here.get(relay.peer) is not relay:
            return True  # no answer will come, and the lease expires
        try:
            relay.ledger.reserve(now, path.first.peer, prefix_of(path.connections[0].source[0]))
        except NoPlace:
            return False
        lease.kept(now)
        self.counters["places renewed"] += relay.peer in path.first.circuits
        if relay.peer not in path.first.circuits:
            path.first.circuits[relay.peer] = path
            path.first.search.kept(now, relay.peer)
            self.counters["places kept"] += 1
            self._ground.tell(life, PlaceFound(relay.peer))
        return True

    def _renew(self, life: Life, path: SimPath) -> None:
        now, lease = self._ground.now, path.lease
        if lease is None or path.is_over or self._here.get(life.peer) is not path.first:
            return
        if lease.deadline > now:
            self._ground.at(lease.deadline, self._renew, life, path)
        elif lease.wake(now):
            if self._request(life, path):
                self._ground.at(lease.deadline, self._renew, life, path)
            else:
                self._paths.close(path)
        else:
            self._paths.close(path)

    def _lost(self, path: SimPath) -> None:
        """Handle the end of a path on which a place was kept."""
        first, relay = path.first, path.other
        was_kept = first.circuits.pop(relay.peer, None) is not None
        first.search.ended(self._ground.now, relay.peer)
        relay.ledger.release(first.peer)
        if was_kept:
            self.counters["places lost"] += 1
            life = self._ground.lives.get(first.peer)
            if life is not None and self._here.get(first.peer) is first:
                self._ground.tell(life, PlaceLost(relay.peer))

    # --- where others see a peer ---------------------------------------------------------------------

    def _ask(self, life: Life, traveller: Traveller) -> None:
        if self._here.get(life.peer) is not traveller:
            return
        now = self._ground.now
        self._ground.at(after(now, ASK_SECONDS), self._ask, life, traveller)
        self._look_outside(life, traveller)

    def _look_outside(self, life: Life, traveller: Traveller) -> None:
        """Ask two peers for this peer's outside address, on connections that stay open and keep the mapping
        alive."""
        now = self._ground.now
        is_short = len(traveller.observers) < OBSERVERS_WANTED
        for peer in [*traveller.observers, *(self._relays(life, traveller) if is_short else ())]:
            other, made = self._here.get(peer), traveller.observers.get(peer)
            if made is not None and not (
                other is not None and made.passes(traveller.machine, now) and made.passes(other.machine, now)
            ):
                del traveller.observers[peer]
                made = None
            if made is None and other is not None and len(traveller.observers) < OBSERVERS_WANTED:
                place = other.machine.place_for(traveller.machine, "tcp", now)
                made = connect(traveller.machine, other.machine, place, now)
                if made is not None:
                    traveller.observers[peer] = made
            if made is not None and other is not None:
                network = network_of(prefix_of(made.to[0]))
                traveller.seen.note(now, peer, "tcp", make_address(*made.source), network)
                heard, at = other.heard.get(traveller.peer, (None, 0.0))
                if heard is not None and now - at <= OBSERVED_FRESH_SECONDS:
                    traveller.seen.note(now, peer, "udp", make_address(*heard), network)

    # --- messages ------------------------------------------------------------------------------------

    def trips(self, own: Place, receiver: Place, tick: int, *, by_stream: bool) -> tuple[int, ...] | None:
        """Return the travel times of a message in ticks, an empty tuple if it is lost, or None if no router
        affects it."""
        one, other = self._here.get(own.peer), self._here.get(receiver.peer)
        if one is None or other is None or not self._links.connects(own, receiver):
            return None
        now = tick / TICKS_PER_SECOND
        if one.machine.site is None and other.machine.site is None:
            return None
        if not by_stream and not self._goes_by_stream(one, other, now):
            return self._datagram(one, other, now)
        arrives = self._stream(one, other, now)
        if arrives is None:
            one.datagrams.failed(other.peer, now)
            self.counters["lost at routers"] += 1
            return ()
        one.datagrams.streamed(other.peer)
        other.datagrams.asked(one.peer, now, other.heard.get(one.peer, (None, -1e9))[1])
        return (max(1, round((arrives - now) * TICKS_PER_SECOND)),)

    def _goes_by_stream(self, one: Traveller, other: Traveller, now: float) -> bool:
        if one.datagrams.is_by_stream(other.peer, now):
            if one.datagrams.knocks(other.peer, now):
                self._datagram(one, other, now)
            return True
        if now - one.heard.get(other.peer, (None, -1e9))[1] <= HEARD_SECONDS:
            return False
        return self._paths.best(one, other) is not None or bool(other.circuits)

    def _datagram(self, one: Traveller, other: Traveller, now: float) -> tuple[int, ...] | None:
        heard = one.heard.get(other.peer)
        to = other.machine.place_for(one.machine, "udp", now) if heard is None else heard[0]
        source = None if to is None else carry("udp", one.machine, other.machine, to, now)
        if source is None:
            # A datagram's handshake fails here; on a public network a node would reach the peer by stream.
            self.counters["dropped at routers"] += 1
            if heard is not None and now - heard[1] > HEARD_SECONDS:
                del one.heard[other.peer]
            one.datagrams.unanswered(other.peer, now)
            self._puncher.offer(one, other, now)
            return ()
        other.heard[one.peer] = source, now
        other.datagrams.heard(one.peer)
        return None

    def _stream(self, one: Traveller, other: Traveller, now: float) -> float | None:
        """Return the arrival time of a message sent by stream; None if no stream can be opened."""
        path = self._paths.best(one, other)
        if path is None:
            made = dial(one, other, now)
            if made is not None:
                there, back = latencies(self._links, one, other)
                return after(now, (STREAM_TRIPS + 1) // 2 * there + STREAM_TRIPS // 2 * back)
            path = self._ask_circuit(one, other, now)
        if path is None:
            return None
        path.used_at = max(now, path.ready_at)
        arrives = path.arrives(one, now, self._links.latency_seconds)
        return None if arrives is None else max(0.0, path.ready_at - now) + arrives

    # --- paths ---------------------------------------------------------------------------------------

    def _ask_circuit(self, one: Traveller, other: Traveller, now: float) -> SimPath | None:
        """Ask a relay to connect a peer with a second peer that has a place there."""
        for relay in [path.other for path in other.circuits.values()]:
            if self._here.get(relay.peer) is not relay:
                continue
            near = dial(one, relay, now)
            place = other.circuits[relay.peer]
            if near is None or place.arrives(relay, now, self._links.latency_seconds) is None:
                continue
            far = dial(other, relay, now)
            try:
                announced = relay.ledger.announce(now, one.peer, other.peer, prefix_of(near.source[0]))
                if far is None:
                    relay.ledger.withdraw(announced.token)
                    continue
                circuit = relay.ledger.accept(now, other.peer, announced.token)
            except NoPlace:
                self.counters["circuits refused"] += 1
                continue
            seconds = self._circuit_seconds(one, relay, other)
            return self._paths.open(one, other, "relayed", (near, far), after(now, seconds), relay, circuit)
        return None

    def _circuit_seconds(self, one: Traveller, relay: Traveller, other: Traveller) -> float:
        near, far = (sum(latencies(self._links, end, relay)) / 2 for end in (one, other))
        own = CIRCUIT_TRIPS_NEAR * near + CIRCUIT_TRIPS_FAR * far
        return own + CIRCUIT_TRIPS_THROUGH * (near + far)
