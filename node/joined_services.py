"""Creates each service of a node once, and connects the services: which one reports to which, and which one
asks which.

Not here: the services' own rules, and starting and stopping the node (`node.runtime`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import trio

from crypto.contact import Address
from crypto.identity import PeerId
from crypto.swarm import Swarm
from dht.kademlia import Kademlia
from gossip.messages import INSTANCE_BYTES
from gossip.swim import Swim
from node.averaging.service import Averaging
from node.checkpoints.replication import CheckpointReplicator
from node.checkpoints.service import Checkpoints
from node.checkpoints.weights import WEIGHTS_PURPOSE
from node.config import Config, JoinSettings
from node.content.blobs import BlobServer
from node.content.directory import Directory
from node.events import Event, IdentityShared
from node.journal import Journal
from node.local.service import LocalRuns
from node.own_machine import OwnMachine
from node.placement.inbound import Inbound
from node.placement.leases import Offer
from node.placement.offers import offers_of, own_offer
from node.placement.places import Places
from node.placement.provider import Provider
from node.placement.searching import search_providers
from node.runs.needs import Beside, RunHost, SwarmView
from node.runs.runs import Runs
from node.seams import LocalNetwork, Seams, own_rng
from node.service_settings import ServiceSettings
from node.services.adverts import keep_advertised
from node.services.autonat import ReachService
from node.services.bootstrap import Bootstrap
from node.services.discovery import Discovery
from node.services.lan_discovery import Neighbours
from node.services.links import LinkMeasuring
from node.services.lives import Lives, shared_error
from node.services.measurements import Measurements
from node.services.membership import LEAVE_SECONDS, Membership
from node.services.remembering import RememberedPeers
from node.services.swarm_clock import SwarmClock
from node.storage.blobs import Blobs
from node.storage.guests import Guests
from node.transport.network import RealNetwork


@dataclass(frozen=True)
class Foundation:
    """The parts of a node that its services build on. `observe` receives the events of cores and the messages
    of runs; tasks run in `nursery`. `is_met` is set once another node is known, `stopping` once this node
    leaves."""

    seams: Seams
    signer: Any
    peer: PeerId
    journal: Journal
    provider: Provider
    machine: OwnMachine
    blobs: Blobs
    guests: Guests
    swarm_clock: SwarmClock
    seeds: JoinSettings
    settings: ServiceSettings
    observe: Callable[[object], None]
    nursery: trio.Nursery
    is_met: trio.Event
    stopping: trio.Event


class JoinedServices:
    """The services of one node."""

    runs: Runs

    def __init__(self, base: Foundation) -> None:
        self._base = base
        self.peer, self.provider, self.stopping = base.peer, base.provider, base.stopping
        self.publish = base.journal.publish
        self.network = base.seams.network
        self._clock, self._rng = base.seams.clock, base.seams.rng
        self._refuse, self._refused = base.journal.refuse, base.journal.counts
        self.membership = self._make_membership()
        self.discovery = self._make_discovery()
        self.directory = Directory(self.discovery, base.seams, base.blobs, self.peer)
        self._lives = Lives(self.network, (m := self.membership).life, lambda: m.incarnation, m.met_life)
        self.reach = ReachService(self.network, self._clock, base.settings.reach, counters=self._refused)
        self.inbound = self._make_inbound()
        self.remembered = RememberedPeers(base.seams, base.seeds, self.membership.live_addresses, base.is_met)
        self.joining = self._make_joining()
        self.checkpoints = Checkpoints(base.seams, base.signer, base.blobs, refuse=self._refuse)
        self.copies = self._make_copies()
        self.averaging = self._make_averaging()
        served = lambda peer, size: self.runs.receipts.served(peer, size)  # noqa: E731
        BlobServer(base.seams, base.blobs, refuse=self._refuse, served=served)
        self.measurements = self._make_measurements()
        self.runs = self._make_runs()
        base.machine.join(self.membership, self.measurements, self.runs)
        if isinstance(self.network, RealNetwork):
            self.network.closed = self._closed

    @property
    def config(self) -> Config:
        """The current configuration."""
        return self.provider.config

    # Creation of the services

    def _make_membership(self) -> Membership:
        base = self._base
        return Membership(
            self.network,
            self._clock,
            own_rng(self._rng),
            base.signer,
            base.machine.profile(),
            self.config.swarm.preset,
            publish=self._publish_membership,
            refuse=self._refuse,
            met=self._met,
            gone=self._gone,
            forgotten=lambda peer: self.discovery.forgotten(peer),
            observe=base.observe,
            look_up=lambda key, found: self.discovery.locate(key, found),
            is_scoped=self.config.swarm.scope == "neighbourhood",
            work_bits=self.config.swarm.work_bits,
            make=partial(base.seams.core, base.seams.part(Swim)),
            instance=base.seams.entropy(INSTANCE_BYTES),
            yields=self._stop_as_younger,
            doubt=self._doubt_sessions,
            look_for_life=lambda addresses: base.nursery.start_soon(self._lives.look, addresses),
        )

    def _make_discovery(self) -> Discovery:
        base = self._base
        return base.seams.part(Discovery)(
            self.network,
            base.swarm_clock,
            own_rng(self._rng),
            base.signer,
            refuse=self._refuse,
            observe=base.observe,
            make=partial(base.seams.core, base.seams.part(Kademlia)),
            seams=base.seams,
            work_bits=self.config.swarm.work_bits,
            publish=self.publish,
        )

    def _make_inbound(self) -> Inbound:
        return Inbound(
            self,
            self._clock,
            self._base.seams.entropy,
            profile=self._base.machine.profile,
            tell=self._base.machine.standing.tell_now,
            is_known=self._has_given,
            counters=self._refused,
            settings=self._base.settings.relays,
        )

    def _make_joining(self) -> Bootstrap:
        return Bootstrap(
            self.network,
            self._clock,
            self.remembered.addresses_to_try(),
            publish=self.publish,
            found=self.found,
            is_alone=lambda: len(self.membership.live) < 2,
            is_member=lambda peer: peer in self.membership.live,
            counters=self._refused,
            is_other=self._lives.is_other,
            is_remembered=self.remembered.is_remembered,
        )

    def _make_copies(self) -> CheckpointReplicator:
        return CheckpointReplicator(
            self._base.seams,
            self.checkpoints,
            self.discovery,
            admits=self._admits_copies,
            ours=lambda run: self.runs.is_ours(run),
            learn_graph=lambda name, holders: self.runs.models.get(name, holders),
            refuse=self._refuse,
        )

    def _make_averaging(self) -> Averaging:
        return self._base.seams.part(Averaging)(
            self._base.seams,
            self._base.signer,
            self.discovery,
            own_rng(self._rng),
            live=lambda: self.membership.live,
            publish=self.publish,
            refuse=self._refuse,
            is_private=self.config.swarm.key_file is not None,
        )

    def _make_measurements(self) -> Measurements:
        links = LinkMeasuring(
            self.network,
            self._clock,
            Random(self.peer),  # noqa: S311 - moments and partners, not keys
            is_busy=lambda: not self.runs.has_slot,
            round_trip_seconds=self.membership.round_trip_seconds,
            refuse=self._refuse,
            counters=self._refused,
        )
        return Measurements(
            self.peer,
            self._clock,
            self.discovery,
            links,
            members=lambda: self.membership.members,
            frames=lambda: self.runs.links.rates(),
            refuse=self._refuse,
        )

    def _make_runs(self) -> Runs:
        base, provider = self._base, self.provider
        swarm = SwarmView(
            live=lambda: self.membership.live,
            gone=lambda: self.membership.gone,
            offers=self._offers,
            search=self._search_providers,
            suspect=self.membership.suspect,
            refuse=self._refuse,
            provide=self._provide,
        )
        host = RunHost(
            accepts=lambda run: provider.refusal(run, self.peer),
            machine=lambda: provider.machine(base.machine.capacity),
            rate=lambda: base.machine.offered.flops_per_second,
            own_data=lambda: provider.rules.own_data,
            publish=self.publish,
            observe=base.observe,
            settings=base.settings.runs,
            limits=base.settings.run_service,
            slots=provider.rules.slots,
        )
        places = Places(self.peer, self.membership, lambda: base.machine.capacity.location)
        beside = Beside(self.measurements, self.checkpoints, self.copies, base.guests, self.averaging, places)
        local = base.seams.part(LocalRuns)
        return base.seams.part(Runs)(base.seams, base.signer, swarm, host, beside, local)

    def neighbours(self, local: LocalNetwork, swarm: Swarm) -> Neighbours:
        """Return the discovery of nodes on the local network."""
        return Neighbours(
            local,
            self.peer,
            swarm,
            self._clock,
            own_rng(self._rng),
            self._base.seams.entropy,
            counters=self._refused,
            heard=self._hear_near,
        )

    # News of peers

    def _met(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        self._base.is_met.set()
        self.discovery.met(peer, addresses)

    def _publish_membership(self, event: Event) -> None:
        self.publish(event)
        self.runs.news.heard(event)

    def _closed(self, peer: PeerId) -> None:
        self.membership.closed(peer)
        self.runs.news.closed(peer)

    def _gone(self, peer: PeerId) -> None:
        self.discovery.gone(peer)
        self.averaging.member_lost(peer)
        self.runs.news.lost(peer)

    def found(self, peers: Sequence[PeerId]) -> None:
        """Join these peers."""
        if self.stopping.is_set():
            return  # this node has announced that it leaves, so it must not join anybody
        self.membership.join(peers)
        self.discovery.join(peers)

    def _hear_near(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        if peer == self.peer:
            self._base.nursery.start_soon(self._lives.look_near, addresses)
        else:
            self.joining.hear(peer, addresses)

    # Another node with this one's identity

    def _doubt_sessions(self) -> None:
        """Check the sessions, because others may mistake another node's sessions for this node's."""
        if isinstance(self.network, RealNetwork):
            self.network.doubt()

    def _stop_as_younger(self, shared: IdentityShared) -> None:
        """Stop, because another node with this one's identity started earlier. Do not announce it, since all
        members would think that the other node leaves."""

        async def end() -> None:
            # gives this node's statements about the other node time to spread
            await trio.sleep(LEAVE_SECONDS)
            own = [address.short for address in self.network.addresses]
            raise shared_error(shared, self.config.data_dir, own)

        if not self.stopping.is_set():
            self._base.nursery.start_soon(end)

    # Requests between services

    def _admits_copies(self, peer: PeerId, run: bytes) -> str | None:
        return None if self.runs.is_member(run, peer) else "only for members of a run that this node is in"

    def _offers(self) -> list[Offer]:
        """Return the offers of all live members, including this node."""
        provider = self.provider
        has_slot = provider.takes_stages and self.runs.has_slot
        is_sparing = bool(provider.permission.sends_less)
        own = own_offer(self.peer, self._base.machine.offered, has_slot=has_slot, sends_less=is_sparing)
        if provider.is_unreachable:
            return [own]  # members of a run must be able to dial each other, so this node can only use itself
        return offers_of(own, self.membership.members, self.measurements.knowledge)

    async def _search_providers(self) -> list[Offer]:
        """Return providers that are not in the membership list."""
        if self.provider.is_unreachable:
            await trio.lowlevel.checkpoint()
            return []
        return await search_providers(self.discovery, self.membership)

    async def _provide(self, run: str, digest: str) -> None:
        """Announce in the DHT that this node keeps a run's weights."""
        await self.discovery.publish(WEIGHTS_PURPOSE, bytes.fromhex(run), bytes.fromhex(digest))

    def _has_given(self, peer: PeerId) -> bool:
        """Return whether a peer has worked for this node, or is in a run with it."""
        runs = self.runs
        return runs.receipts.contribution(peer).weight > 1 or any(
            runs.is_member(run, peer) for run in runs.members
        )

    def follow_clock(self) -> None:
        """Make membership and discovery use this machine's current clock."""
        self.membership.follow_clock()
        self.discovery.follow_clock()

    # Announcements to others

    async def tell_of_checkpoints(self) -> None:
        """Clean up this node's checkpoints and announce them in the DHT, once another node is known."""
        await self._base.is_met.wait()
        await self.copies.start()

    async def advertise(self) -> None:
        """Advertise this node's offer to peers outside its membership view, once another node is known."""
        await self._base.is_met.wait()
        await keep_advertised(
            self.discovery,
            lambda: self._base.machine.offered,
            self.network,
            lambda: self.provider.takes_stages_of_others and self.runs.has_slot,
            self.membership.coordinates,
        )
