"""This node's reachability and its consequences: announcements, and relays, which the node uses or serves
as."""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

import trio

from crypto.identity import PeerId, parse_peer, peer_text
from gossip.member import Profile, SwarmMember
from node.config import Config
from node.containment import keep_running
from node.events import Event
from node.placement.provider import Provider
from node.seams import Clock, Network, own_rng
from node.services.autonat import ReachService
from node.services.discovery import Discovery
from node.services.measurements import Measurements
from node.services.membership import Membership
from node.services.metadata import RELAY_WORD, read_metadata
from node.services.relays.finding import RelayFinder
from node.services.relays.ledger import Limits, RelayLedger
from node.services.relays.places import WANTED
from node.services.relays.reservations import Reservations
from node.services.relays.server import RelayServer
from node.services.relays.settings import RELAYS, RelaySettings
from node.services.traversal import Traversal
from node.services.whereabouts import Whereabouts
from node.transport.address_policy import is_global
from node.transport.multiplexed import Way
from node.transport.network import RealNetwork

HEARD_SECONDS = 60.0
"""A live peer that is directly reachable sends something within this time, even in a large swarm."""
FAR_SECONDS = 10.0
"""Round trip that is assumed for a relay without a known round trip, when relays are sorted."""
KNOWN_MAX = 2 * WANTED
"""If a node knows this many relays among the members, it does not search the DHT for others."""


class InboundNode(Protocol):
    """The part of `node.runtime.Node` that this file uses."""

    peer: PeerId
    network: Network
    discovery: Discovery
    measurements: Measurements
    membership: Membership
    provider: Provider
    reach: ReachService
    stopping: trio.Event

    @property
    def config(self) -> Config: ...
    def publish(self, event: Event) -> None: ...


class Inbound:
    """The reachability service of one node. `profile` returns the node's announcement; `tell` sends it
    immediately."""

    def __init__(
        self,
        node: InboundNode,
        clock: Clock,
        entropy: Callable[[int], bytes],
        *,
        profile: Callable[[], Profile],
        tell: Callable[[], None],
        is_known: Callable[[PeerId], bool],
        counters: Counter[str],
        settings: RelaySettings = RELAYS,
    ) -> None:
        self._settings = settings
        self._node = node
        self._clock = clock
        self._profile = profile
        self._tell = tell
        self._verdict: bool | None = None
        self._asked = 0
        self.ledger = RelayLedger(self._limits, entropy, is_known=is_known)
        self.relay = RelayServer(node.network, clock, self.ledger, counters)
        self._counters = counters
        self._entropy = entropy
        self._finder: RelayFinder | None = None
        self.whereabouts = Whereabouts(
            node.network,
            clock,
            node.reach,
            node.discovery,
            publish=node.publish,
            live=lambda: node.membership.live,
            moved=self._moved,
            heard=self._heard,
            judged=self._judged,
            is_leaving=node.stopping.is_set,
        )

    async def run(self, rng: Random) -> None:
        """Run until cancelled; `rng` chooses the peers to ask."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.whereabouts.run, rng)
            if isinstance(self._node.network, RealNetwork):
                places = Reservations(
                    self._node.network,
                    self._clock,
                    candidates=self._candidates,
                    is_wanted=self._needs_relays,
                    changed=self.whereabouts.circuits_changed,
                    counters=self._counters,
                    settings=self._settings,
                )
                nursery.start_soon(keep_running, "places at relays", places.run)
                self._finder = RelayFinder(
                    self._node.network,
                    self._clock,
                    self._node.discovery,
                    own_rng(rng),
                    is_relay=lambda: self._node.provider.is_relay,
                    is_wanted=self._looks_for_relays,
                    counters=self._counters,
                    settings=self._settings,
                )
                nursery.start_soon(keep_running, "relays of the DHT", self._finder.run)
                traversal = Traversal(
                    self._node.network,
                    self._clock,
                    self._entropy,
                    own_rng(rng),
                    lambda: self._node.membership.live,
                    maps=self._node.config.listen.map,
                    counters=self._counters,
                )
                nursery.start_soon(traversal.run)

    def told_of(self, document: dict[str, Any]) -> dict[str, Any]:
        """Add the `path` to each peer to a document about peers: its kind, its relay, its round trip if pings
        have measured it, and its bytes per second if bursts have; None if there is no path."""
        for row in document["peers"]:
            peer = parse_peer(row["peer"])
            row["path"] = path = self.path_to(peer)
            if path is not None:
                path["datagrams"] = self._hears_datagrams(peer)
        return document

    def path_to(self, peer: PeerId) -> dict[str, Any] | None:
        """Return the path to a peer, as in `told_of`."""
        network = self._node.network
        rate = self._node.measurements.links.core.sent_rate(peer) or None
        path = network.multiplexed.best(peer) if isinstance(network, RealNetwork) else None
        if path is not None:
            relay = None if path.relay is None else peer_text(path.relay)
            seconds = path.round_trip_seconds
            return _path_row(path.way, relay, seconds, rate)
        if network.host_of(peer) is None:
            return None
        seconds = self._node.membership.round_trip_seconds(peer)
        return _path_row("direct", None, seconds, rate)

    def _hears_datagrams(self, peer: PeerId) -> bool:
        """Return whether datagrams arrive from a peer directly; relays carry none."""
        network = self._node.network
        if not isinstance(network, RealNetwork):
            return True
        return self._clock.monotonic() - network.heard_at(peer) <= HEARD_SECONDS

    @property
    def _limits(self) -> Limits:
        """This node's limits as a relay. Only real connections can be relayed."""
        rules = self._node.config.relay
        is_on = rules.enabled and isinstance(self._node.network, RealNetwork)
        return Limits(is_on, rules.circuits, rules.upload_bytes_per_second)

    def _moved(self) -> None:
        self._node.membership.update(self._profile())

    def _heard(self, verdict: bool | None, asked: int) -> None:
        """Handle the report of a peer that dialled this node."""
        self._verdict, self._asked = verdict, asked
        is_relay = verdict is True and self.ledger.limits.is_on and self.ledger.limits.circuits_max > 0
        if is_relay != self._node.provider.is_relay:
            self._node.provider.is_relay = is_relay
            self._tell()

    def _judged(self, is_unreachable: bool) -> None:
        provider = self._node.provider
        provider.is_unreachable = is_unreachable
        self._node.publish(provider.offer(self._clock.wall()))
        self._tell()

    def _needs_relays(self) -> bool:
        """Return whether this node wants a reservation at a relay. It costs little, so one failed dial-back
        without a success is enough. So is a machine with only local addresses while members have others,
        because a router must be between them."""
        # Peers that only have IPv4 can only reach this node by IPv4.
        now = self._clock.monotonic()
        is_reached = self._verdict is True and self._node.reach.families.verdict(4, now) is not False
        if is_reached or self._node.stopping.is_set():
            return False
        own = [each for each in self._node.network.addresses if each.relay is None]
        return self._asked > 0 or (bool(own) and not any(is_global(each.host) for each in own))

    def _looks_for_relays(self) -> bool:
        """Return whether to search the DHT for relays in addition to those that membership knows."""
        known = sum(_is_relay(member) for member in self._node.membership.members if member.live)
        return self._needs_relays() and known < KNOWN_MAX

    def _candidates(self) -> Sequence[PeerId]:
        """Return members that announce that they are relays, and relays found in the DHT, the nearest first.
        After them come members that were reached at a global address: they may be able to relay, but may not
        have learnt it yet."""
        found = {} if self._finder is None else self._finder.seconds
        ranked = [(False, seconds, relay) for relay, seconds in found.items()]
        for member in self._node.membership.members:
            if member.peer == self._node.peer or not member.live or member.peer in found:
                continue
            host = self._node.network.host_of(member.peer)
            is_relay = _is_relay(member)
            if is_relay or (host is not None and is_global(host) and not _has_circuits(member)):
                seconds = self._node.membership.round_trip_seconds(member.peer)
                ranked.append((not is_relay, FAR_SECONDS if seconds is None else seconds, member.peer))
        return [peer for _, _, peer in sorted(ranked)]


def _path_row(way: Way, relay: str | None, seconds: float | None, rate: int | None) -> dict[str, Any]:
    return {"way": way, "relay": relay, "round_trip_seconds": seconds, "bytes_per_second": rate}


def _is_relay(member: SwarmMember) -> bool:
    claim = read_metadata(member.metadata)
    return claim is not None and claim.standing is not None and RELAY_WORD in claim.standing.capabilities


def _has_circuits(member: SwarmMember) -> bool:
    return any(each.relay is not None for each in member.addresses)
