"""NAT traversal in a world of cores, with a node's cores: peers learn their outside addresses, keep places at
relays, send through relays, and punch.

A message goes as a node sends it (`node.transport.network`): as a datagram to a peer that is reachable or was
heard of lately; otherwise on an open path, by dialling, or through a relay where the peer has a place.
Streams lose nothing while their connections stand. Each peer knows the places of the others; any peer with a
public address is a relay. Bytes on a path do not count against a relay's rate or budgets.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from crypto.contact import make_address
from crypto.crowds import network_of
from crypto.identity import PeerId
from crypto.token_buckets import prefix_of
from node.services.relays.ledger import Limits, NoPlace, RelayLedger
from node.services.relays.places import WANTED, PlaceLease
from node.transport.address_policy import is_global
from node.transport.multiplexed import Way
from node.transport.network import HEARD_SECONDS
from node.transport.observers import ASK_SECONDS, OBSERVERS_WANTED
from node.transport.paths import IMPROVE_SECONDS, idle_seconds
from node.transport.puncher import OBSERVED_FRESH_SECONDS
from node.transport.punching import RETRY_SECONDS, TRANSPORTS, PunchBudget, Transport
from sim.events import PathOpened, PeerStarted, PeerStopped, PlaceFound, PlaceLost, ReachabilityJudged
from sim.network.instants import TICKS_PER_SECOND, after
from sim.network.links import STREAM_TRIPS
from sim.network.machines import TcpLink, carry, connect
from sim.network.places import Place
from sim.network.routers import Endpoint
from sim.seeds import seeded_entropy, seeded_rng
from sim.worlds.crossing import SimPath, Traveller
from sim.worlds.joining import DialGround, live_others
from sim.worlds.life import Life

LOOK_SECONDS = 5.0
"""Interval at which a peer checks whether it has enough places; a node checks ten times as often."""
CIRCUIT_TRIPS_NEAR, CIRCUIT_TRIPS_FAR, CIRCUIT_TRIPS_THROUGH = 8, 7, 2
"""One-way trips until a circuit is usable: the asker's handshakes, its question and the answer; the notice to
the other side, its handshakes and its answer; and the handshake of both through the relay."""
_PATHS_PER_PAIR_MAX = 4


class RoutedPeers:
    """The NAT traversal of all peers of a world, with `counters` of its outcomes.

    Long because places, circuits and punching act on the same paths: apart, each would need the others.
    """

    def __init__(self, ground: DialGround) -> None:
        self._ground = ground
        self._links = ground.links
        self._here: dict[PeerId, Traveller] = {}
        self._paths: dict[tuple[PeerId, PeerId], list[SimPath]] = {}
        self._improved: dict[tuple[PeerId, PeerId], float] = {}
        self.counters: Counter[str] = Counter()
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
            traveller.wants_places = True  # like a node that has only local addresses
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
        """Reboot the router of a peer: it forgets everything."""
        machine = self._links.at(peer).machine
        for card in () if machine is None else machine.cards.values():
            if card.site is not None:
                card.site.reboot()
                self.counters["routers rebooted"] += 1

    def _relays(self, life: Life, traveller: Traveller) -> list[PeerId]:
        """Return the peers in view that may relay, the nearest first."""
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
        made = None if relay is None else self._dial(traveller, relay, now)
        if relay is None or made is None:
            traveller.search.ended(now, peer)
            return
        path = self._open(traveller, relay, "direct", (made,), now)
        lease = path.lease = PlaceLease(now)
        if self._request(life, path):
            self._ground.at(lease.deadline, self._renew, life, path)
        else:
            self._close(path)

    def _dial(self, one: Traveller, other: Traveller, now: float) -> TcpLink | None:
        return connect(one.machine, other.machine, other.machine.place_for(one.machine, "tcp", now), now)

    def _request(self, life: Life, path: SimPath) -> bool:
        """Request or renew the place; return False if it is refused. An answer that gets through is handled
        at once."""
        now, lease, relay = self._ground.now, path.lease, path.other
        assert lease is not None
        there = path.arrives(path.first, now, self._links.latency_seconds)
        back = path.arrives(relay, now, self._links.latency_seconds)
        if there is None or back is None or self._here.get(relay.peer) is not relay:
            return True  # no answer comes, which the lease will notice
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
                self._close(path)
        else:
            self._close(path)

    def _lost(self, path: SimPath) -> None:
        """Handle the end of a path that carried a place."""
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
        """Ask two peers where they see this one, on connections that stay open and keep the mapping."""
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
        """Return the travel times of a message in ticks, empty where it is lost; None where it travels as
        between two public addresses."""
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
        return self._best(one, other) is not None or bool(other.circuits)

    def _datagram(self, one: Traveller, other: Traveller, now: float) -> tuple[int, ...] | None:
        heard = one.heard.get(other.peer)
        to = other.machine.place_for(one.machine, "udp", now) if heard is None else heard[0]
        source = None if to is None else carry("udp", one.machine, other.machine, to, now)
        if source is None:
            # A datagram's handshake gets nowhere; on a public network a node reaches the peer by a stream.
            self.counters["dropped at routers"] += 1
            if heard is not None and now - heard[1] > HEARD_SECONDS:
                del one.heard[other.peer]
            one.datagrams.unanswered(other.peer, now)
            self._offer(one, other, now)
            return ()
        other.heard[one.peer] = source, now
        other.datagrams.heard(one.peer)
        return None

    def _stream(self, one: Traveller, other: Traveller, now: float) -> float | None:
        """Return when a message by a stream arrives; None where no stream can be opened."""
        path = self._best(one, other)
        if path is None:
            made = self._dial(one, other, now)
            if made is not None:
                there, back = self._latencies(one, other)
                return after(now, (STREAM_TRIPS + 1) // 2 * there + STREAM_TRIPS // 2 * back)
            path = self._ask_circuit(one, other, now)
        if path is None:
            return None
        path.used_at = max(now, path.ready_at)
        arrives = path.arrives(one, now, self._links.latency_seconds)
        return None if arrives is None else max(0.0, path.ready_at - now) + arrives

    def _latencies(self, one: Traveller, other: Traveller) -> tuple[float, float]:
        latency = self._links.latency_seconds
        return latency(one.peer, other.peer), latency(other.peer, one.peer)

    # --- paths ---------------------------------------------------------------------------------------

    def _best(self, one: Traveller, other: Traveller) -> SimPath | None:
        paths = self._paths.get(_pair(one.peer, other.peer), ())
        ways: tuple[Way, ...] = ("direct", "punched", "relayed")
        return min(paths, key=lambda path: (ways.index(path.way), -path.ready_at), default=None)

    def _ask_circuit(self, one: Traveller, other: Traveller, now: float) -> SimPath | None:
        """Have a relay connect one peer with another that has a place there."""
        for relay in [path.other for path in other.circuits.values()]:
            if self._here.get(relay.peer) is not relay:
                continue
            near = self._dial(one, relay, now)
            place = other.circuits[relay.peer]
            if near is None or place.arrives(relay, now, self._links.latency_seconds) is None:
                continue
            far = self._dial(other, relay, now)
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
            return self._open(one, other, "relayed", (near, far), after(now, seconds), relay, circuit)
        return None

    def _circuit_seconds(self, one: Traveller, relay: Traveller, other: Traveller) -> float:
        near, far = (sum(self._latencies(end, relay)) / 2 for end in (one, other))
        own = CIRCUIT_TRIPS_NEAR * near + CIRCUIT_TRIPS_FAR * far
        return own + CIRCUIT_TRIPS_THROUGH * (near + far)

    def _open(
        self,
        one: Traveller,
        other: Traveller,
        way: Way,
        connections: tuple[TcpLink, ...],
        ready_at: float,
        relay: Traveller | None = None,
        circuit: Any = None,
    ) -> SimPath:
        path = SimPath(one, other, way, connections, ready_at, relay, circuit)
        paths = self._paths.setdefault(_pair(one.peer, other.peer), [])
        spare = [each for each in paths if each.lease is None]
        if len(paths) >= _PATHS_PER_PAIR_MAX and spare:
            self._close(min(spare, key=lambda each: each.used_at))
        self._paths.setdefault(_pair(one.peer, other.peer), []).append(path)
        self.counters[f"paths {way}"] += 1
        self._ground.tell(self._ground.lives.get(one.peer), PathOpened(other.peer, way))
        self._ground.at(max(ready_at, path.deadline), self._watch, path)
        if way == "relayed":
            self._ground.at(ready_at, self._improve, path)
        return path

    def _close(self, path: SimPath) -> None:
        if path.is_over:
            return
        path.is_over = True
        pair = _pair(path.first.peer, path.other.peer)
        self._paths[pair].remove(path)
        if not self._paths[pair]:
            del self._paths[pair]
        if path.relay is not None and path.circuit is not None:
            path.relay.ledger.closed(path.circuit)
        if path.lease is not None:
            path.lease = None
            self._lost(path)

    def _watch(self, path: SimPath) -> None:
        """Have both ends of a path ping when due, or give it up."""
        now = self._ground.now
        if path.is_over:
            return
        idle_at = path.used_at + self._idle_seconds(path)
        if path.lease is None and idle_at <= now:
            self._close(path)
            return
        for end in (path.first, path.other):
            if self._here.get(end.peer) is not end:
                continue
            if not path.cores[end.peer].tick(now):
                self.counters["paths silent"] += 1
                self._close(path)
                return
            self._send_frames(path, end, now)
        if not any(self._here.get(end.peer) is end for end in (path.first, path.other)):
            self._close(path)
            return
        due = path.deadline if path.lease is not None else min(path.deadline, max(idle_at, now + 1.0))
        self._ground.at(max(after(now, 0.001), due), self._watch, path)
        if path.way == "relayed":
            self._improve(path)

    def _idle_seconds(self, path: SimPath) -> float:
        others = self._paths.get(_pair(path.first.peer, path.other.peer), ())
        return idle_seconds(path.way, has_better=any(each.way != "relayed" for each in others))

    def _send_frames(self, path: SimPath, end: Traveller, now: float) -> None:
        """Exchange the due frames of a path's end, and the answers, each after its trip. Both happen at once
        here, because nothing else looks at a path's cores meanwhile."""
        core, other = path.cores[end.peer], path.end_opposite(end)
        while (frame := core.next_frame(now)) is not None:
            arrives = path.arrives(end, now, self._links.latency_seconds)
            if arrives is not None and self._here.get(other.peer) is other:
                path.cores[other.peer].receive(arrives, frame)
                self._send_frames(path, other, arrives)

    # --- better ways ---------------------------------------------------------------------------------

    def _improve(self, path: SimPath) -> None:
        """Have the side that was reached through a relay dial the other, and punch."""
        now, pair = self._ground.now, _pair(path.first.peer, path.other.peer)
        if path.is_over or self._improved.get(pair, -IMPROVE_SECONDS) + IMPROVE_SECONDS > now:
            return
        if any(each.way != "relayed" for each in self._paths[pair]):
            return
        self._improved[pair] = now
        if not self._offer(path.other, path.first, now):
            self._punch(path.other, path.first, now)

    def _offer(self, one: Traveller, other: Traveller, now: float) -> bool:
        """Have a peer that cannot be dialled, or not by datagram, open a path to the other."""
        best = self._best(one, other)
        if one.machine.site is None or (best is not None and best.way != "relayed"):
            return False
        made = self._dial(one, other, now)
        if made is None:
            return False
        self._open(one, other, "direct", (made,), after(now, 2 * sum(self._latencies(one, other))))
        return True

    def _punch(self, one: Traveller, other: Traveller, now: float, *, is_second: bool = False) -> None:
        """Have both peers dial each other at once at their outside addresses; soon after the first time once
        more."""
        if not one.budget.may_start(other.peer, now) or not other.budget.may_answer(one.peer, now):
            return
        self.counters["punches begun"] += 1
        worked = False
        paid: set[str] = set()
        for transport in TRANSPORTS:
            places = tuple(
                self._offered(*ends, transport, now, paid) for ends in ((one, other), (other, one))
            )
            paid = {place[0] for place in places if place is not None}
            if all(places):
                worked |= self._dial_both(one, other, places, transport, now)
        one.budget.ended(other.peer, worked=worked)
        self.counters["punches worked"] += worked
        if not worked and not is_second:
            self._ground.at(after(now, RETRY_SECONDS), self._punch_again, one, other)

    def _punch_again(self, one: Traveller, other: Traveller) -> None:
        if all(self._here.get(end.peer) is end for end in (one, other)):
            self._punch(one, other, self._ground.now, is_second=True)

    def _offered(
        self, one: Traveller, other: Traveller, transport: Transport, now: float, paid: Collection[str]
    ) -> Endpoint | None:
        """Return where `one` dials `other`: the address that the other offers, if the budget admits it."""
        family = one.machine.family(other.machine)
        own = other.machine.cards[family]
        place = own.inner if family == 6 or own.site is None else None
        if place is None:
            seen = other.seen.place(transport, now)
            place = None if seen is None else (seen.host, seen.port)
        if place is None:
            return None
        admitted = one.budget.admit(other.peer, [str(make_address(*place))], now, paid)
        return (admitted[0].host, admitted[0].port) if admitted else None

    def _dial_both(
        self,
        one: Traveller,
        other: Traveller,
        places: "tuple[Endpoint | None, ...]",
        transport: Transport,
        now: float,
    ) -> bool:
        """Exchange crossing packets: the first open the way out, later ones find the way in."""
        ends = ((one, other, places[0]), (other, one, places[1]))
        sources: list[Endpoint | None] = []
        for _ in range(2):
            sources = [
                None if to is None else carry(transport, near.machine, far.machine, to, now)
                for near, far, to in ends
            ]
        for (near, far, to), source in zip(ends, sources, strict=True):
            if source is None or to is None:
                continue
            back = carry(transport, far.machine, near.machine, source, now)
            if back != to:
                continue
            if transport == "udp":
                far.heard[near.peer], near.heard[far.peer] = (source, now), (back, now)
                self.counters["punched by udp"] += 1
                return False  # messages go by datagram then, and a path is still wanted
            made = TcpLink(near.machine, far.machine, to, source)
            self._open(one, other, "punched", (made,), after(now, sum(self._latencies(one, other))))
            return True
        return False

    def ways(self) -> Mapping[str, int]:
        """Return how many paths are open, by kind."""
        return Counter(path.way for path in self._all())

    def _all(self) -> Iterator[SimPath]:
        return (path for paths in self._paths.values() for path in paths)


def _pair(one: PeerId, other: PeerId) -> tuple[PeerId, PeerId]:
    return (one, other) if one < other else (other, one)
