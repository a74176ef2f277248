"""Membership: drives the SWIM core over datagrams and reports its events to the rest of the node."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from random import Random

import trio

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId, short_peer
from dht.keys import node_number
from dht.work import has_work
from gossip import member as core
from gossip.clocks import PeerClocks
from gossip.coordinates import Coordinates
from gossip.messages import INSTANCE_BYTES, MESSAGE_BYTES_MAX, Message, life_of, started_of
from gossip.settings import PRESETS
from gossip.swim import PROTOCOL, Swim
from node import events
from node.seams import Clock, Network
from node.services.broadcasts import BroadcastListeners
from node.services.driver import Driver, Sends
from node.services.metadata import claimed_capacity, claimed_standing

RIVALS_MAX = 16
"""Maximum number of other nodes with this node's identity that are remembered, the latest, so that each is
reported once."""
CLOCK_NEWS_SECONDS = 0.01
"""Least jump of the clock that is followed. The wall clock and the monotonic one never agree to the
microsecond."""
LEAVE_SECONDS = 0.6
"""How long a leaving node still answers and gossips its goodbye."""


class Listed(Collection[PeerId]):
    """Peers with some statuses, as a collection of peer ids. It is queried at every event, so no list is
    built for it."""

    def __init__(self, swim: Swim, statuses: frozenset[core.Status]) -> None:
        self._swim = swim
        self._statuses = statuses

    def __contains__(self, peer: object) -> bool:
        return isinstance(peer, bytes) and self._swim.status(PeerId(peer)) in self._statuses

    def __iter__(self) -> Iterator[PeerId]:
        return iter(sorted(peer for peer, held in self._swim.statuses.items() if held in self._statuses))

    def __len__(self) -> int:
        if self._statuses == _LIVE:
            return self._swim.live
        return sum(1 for _ in self)


_LIVE = frozenset({core.Status.ALIVE, core.Status.SUSPECT})
_GONE = frozenset({core.Status.DEAD, core.Status.LEFT})


class Membership:
    """The membership service of one node. `run` drives it. `gone` is called for every member that died or
    left, and `forgotten` for those that are no longer listed."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        rng: Random,
        signer: Signer,
        profile: core.Profile,
        preset: str,
        *,
        publish: Callable[[events.Event], None],
        refuse: Callable[[PeerId, RemoteProtocolError], None],
        met: Callable[[PeerId, Sequence[Address]], None],
        gone: Callable[[PeerId], None],
        forgotten: Callable[[PeerId], None],
        observe: Callable[[core.Event], None],
        look_up: Callable[[bytes, Callable[[Sequence[PeerId]], None]], None] | None = None,
        make: Callable[..., Swim] = Swim,
        instance: bytes = bytes(INSTANCE_BYTES),
        yields: Callable[[events.IdentityShared], None] = lambda _shared: None,
        look_for_life: Callable[[Sequence[Address]], None] = lambda _addresses: None,
        doubt: Callable[[], None] = lambda: None,
        is_scoped: bool = True,
        work_bits: int = 0,
    ) -> None:
        """`observe` is called with every event of the core; `make` makes the core. `look_up` finds the peers
        nearest to a key and passes them on. With it, if membership `is_scoped`, only this node's
        neighbourhood is listed. `instance` is random. `look_for_life` is called with addresses where another
        node may use this node's key. If the other node began earlier, `yields` is called, and this node must
        end without a goodbye, because all would take the goodbye for the other node's. If this node began
        earlier, `doubt` makes it shake hands again with every peer. Peers whose ids have less than
        `work_bits` of work are not admitted."""
        self._network = network
        self._clock = clock
        self._publish = publish
        self._met = met
        self._gone = gone
        self._forgotten = forgotten
        self._refuse = refuse
        self._observe = observe
        self._has_left = False
        self.listeners = BroadcastListeners()
        self._look_up = look_up if is_scoped else None
        self._rivals: dict[int, None] = {}
        self._yields = yields
        self._doubt = doubt
        self._look_for_life = look_for_life
        self._swim = self._make_core(
            partial(make, signer, profile, PRESETS[preset], rng), instance, work_bits
        )
        self.life = life_of(self.incarnation, instance)
        self.follow_clock()
        self._driver = self._make_driver()
        self.run = self._driver.run

    def _make_core(self, make: Callable[..., Swim], instance: bytes, work_bits: int) -> Swim:
        # The wall clock in milliseconds is above any incarnation that an earlier life used.
        incarnation = int(self._clock.wall() * 1000)
        place = None if self._look_up is None else node_number
        swim = make(incarnation, self._clock.monotonic(), place=place, instance=instance)
        swim.locate(self._network.host_of)
        if work_bits:
            swim.scope.admits = partial(has_work, bits=work_bits)
        return swim

    def _make_driver(self) -> Driver:
        return Driver(
            self._swim,
            PROTOCOL,
            Message,
            message_bytes_max=MESSAGE_BYTES_MAX,
            network=self._network,
            clock=self._clock,
            publish=self._on_event,
            refuse=self._refuse,
        )

    @property
    def live(self) -> "Listed":
        """The peers believed alive, including this node; a live view."""
        return Listed(self._swim, _LIVE)

    @property
    def gone(self) -> "Listed":
        """The peers listed as dead, or as having left."""
        return Listed(self._swim, _GONE)

    @property
    def members(self) -> tuple[core.SwarmMember, ...]:
        """All listed peers, including dead ones."""
        return self._swim.members

    @property
    def coordinates(self) -> Coordinates:
        """This node's network coordinates."""
        return self._swim.coordinates

    def live_addresses(self) -> dict[PeerId, tuple[Address, ...]]:
        """The claimed addresses of each other live member."""
        others = [member for member in self._swim.members if member.live and member.peer != self._swim.peer]
        return {member.peer: member.addresses for member in others}

    def round_trip_seconds(self, peer: PeerId) -> float | None:
        """Return the recent round trip of a datagram to `peer`; None if there was none."""
        return self._swim.coordinates.round_trip_seconds_to(peer)

    @property
    def clocks(self) -> PeerClocks:
        """The peers' clocks, compared with this node's."""
        return self._swim.clocks

    def follow_clock(self) -> None:
        """Use the changed time of this machine's clock in messages to others."""
        offset, told = self._clock.wall() - self._clock.monotonic(), self._swim.wall_offset
        if told is None or abs(offset - told) > CLOCK_NEWS_SECONDS:
            self._swim.wall_offset = offset

    def command(self, order: Callable[[Swim, float], Sends]) -> None:
        """Let local code act on the core. `order(core, now)` returns what to send."""
        self._driver.command(lambda now: order(self._swim, now))

    def update(self, profile: core.Profile) -> None:
        """Announce a new name, address or metadata. Does nothing after this node's goodbye."""
        if not self._has_left:
            self._driver.command(lambda now: self._swim.update(now, profile))

    def join(self, peers: Sequence[PeerId]) -> None:
        """Exchange member lists with these peers."""
        self._driver.command(lambda now: self._swim.join(now, peers))

    def suspect(self, peer: PeerId) -> None:
        """Probe `peer` immediately, because something else hints that it is gone."""
        self._driver.command(lambda now: self._swim.hint_suspect(now, peer))

    def closed(self, peer: PeerId) -> None:
        """Record a host's report that no process listens at the address of `peer`. A suspicion of the peer
        then ends soon."""

        def close(now: float) -> Sends:
            self._swim.hint_closed(now, peer)
            return []

        self._driver.command(close)

    @property
    def incarnation(self) -> int:
        """The present incarnation of this node."""
        me = self._swim.member(self._swim.peer)
        return 0 if me is None else me.incarnation

    def met_life(self, life: bytes, incarnation: int, addresses: Sequence[Address]) -> None:
        """Note another life of this node's identity that answers now, with its claimed addresses."""
        if not self._has_left:
            self._driver.command(lambda now: self._swim.meet_life(now, life, incarnation))
        self._share(core.RivalFound(started_of(life), "", tuple(addresses), life > self.life))

    def _share(self, event: core.RivalFound) -> None:
        """Report another node with this node's identity, once for each. The younger of the two nodes
        stops."""
        if event.started_milliseconds in self._rivals:
            return
        self._rivals[event.started_milliseconds] = None
        if len(self._rivals) > RIVALS_MAX:
            del self._rivals[next(iter(self._rivals))]
        shared = events.IdentityShared(
            at=self._clock.wall(),
            name=event.name,
            addresses=tuple(address.short for address in event.addresses),
            started=event.started_milliseconds / 1000,
            is_younger=event.is_younger,
        )
        self._publish(shared)
        if not event.is_younger:
            self._yields(shared)

    def broadcast(self, topic: bytes, data: bytes) -> None:
        """Broadcast to all members. Raises LocalProtocolError if the data is too long, or too many topics
        wait."""
        self._driver.command(lambda now: self._swim.broadcast(now, topic, data))

    async def leave(self) -> None:
        """Say goodbye, and stay a moment so that it spreads."""
        self._has_left = True
        self.listeners.close()
        self._driver.command(self._swim.leave)
        await trio.sleep(LEAVE_SECONDS)

    def _on_event(self, event: core.Event) -> None:  # noqa: C901 - one branch for each kind of event
        self._observe(event)
        if isinstance(event, core.MemberUp | core.MemberChanged):
            self._network.learn(event.peer, event.addresses)
        told = self._told(event)
        if told is not None:
            self._publish(told)
        match event:
            case core.MemberUp() | core.MemberChanged():
                self._met(event.peer, event.addresses)
            case core.MemberDown() | core.MemberLeft():
                self._gone(event.peer)
            case core.MemberForgotten():
                self._forgotten(event.peer)
            case core.CandidateFound():
                self._network.learn(event.peer, event.addresses)  # the peer will be pinged there
            case core.NeighbourhoodLookupWanted():
                if self._look_up is not None:
                    self._look_up(event.key, self._meet)
            case core.RivalFound():
                self._share(event)
            case core.RivalOutlived():
                self._doubt()
            case core.OtherLifeHeard():
                self._look_elsewhere(event.addresses)
            case core.BroadcastHeard():
                self.listeners.hear(event)
            case core.FactsRefused():
                self._refuse(event.sender, RemoteProtocolError(event.reason))

    def _look_elsewhere(self, addresses: Sequence[Address]) -> None:
        own = {address.of(None) for address in self._network.addresses}
        if elsewhere := [address for address in addresses if address.of(None) not in own]:
            self._look_for_life(elsewhere)

    def _told(self, event: core.Event) -> events.Event | None:
        """Return the node's event for an event of the core; None if people do not need one."""
        at = self._clock.wall()
        match event:
            case core.MemberUp():
                return self._joined(event)
            case core.MemberChanged():
                return self._changed(event)
            case core.MemberDegraded() | core.MemberRecovered():
                return self._degraded(event)
            case core.MemberSuspected():
                return events.MemberSuspected(at=at, peer=event.peer, by=event.accuser, reason=event.reason)
            case core.MemberRefuted():
                reason = f"it answers, in incarnation {event.incarnation}"
                return events.MemberRefuted(at=at, peer=event.peer, reason=reason)
            case core.MemberDown():
                return events.MemberLost(at=at, peer=event.peer, reason=event.reason)
            case core.MemberLeft():
                return events.MemberLeft(at=at, peer=event.peer, reason="left")
        return None

    def _meet(self, peers: Sequence[PeerId]) -> None:
        """Exchange lists with the peers that a lookup has found, unless this node has said goodbye."""
        if peers and not self._has_left:
            self.join(peers)

    def _joined(self, event: core.MemberUp) -> events.MemberJoined:
        known = self._swim.member(event.peer)
        through = known.found_through if known is not None else None
        return events.MemberJoined(
            at=self._clock.wall(),
            peer=event.peer,
            name=event.name,
            addresses=tuple(address.short for address in event.addresses),
            found_through=self._found_through(event.peer, through),
            capacity=claimed_capacity(event.metadata, self._clock.wall()),
            standing=claimed_standing(event.metadata),
        )

    def _changed(self, event: core.MemberChanged) -> events.MemberChanged:
        return events.MemberChanged(
            at=self._clock.wall(),
            peer=event.peer,
            name=event.name,
            addresses=tuple(address.short for address in event.addresses),
            capacity=claimed_capacity(event.metadata, self._clock.wall()),
            standing=claimed_standing(event.metadata),
        )

    def _degraded(self, event: core.MemberDegraded | core.MemberRecovered) -> events.MemberDegraded:
        at = self._clock.wall()
        if isinstance(event, core.MemberRecovered):
            return events.MemberDegraded(at=at, peer=event.peer, condition="")
        return events.MemberDegraded(
            at=at,
            peer=event.peer,
            condition=str(event.condition),
            rate=event.rate,
            seconds=event.seconds,
            reason=event.reason,
        )

    def _found_through(self, peer: PeerId, through: PeerId | None) -> str:
        if through is None:
            return ""
        return "itself" if through == peer else self._name_of(through)

    def _name_of(self, peer: PeerId) -> str:
        known = self._swim.member(peer)
        return short_peer(peer) if known is None else known.name
