"""The composition root: one node, from its six seams to its services, and the process around it.

    async with Node(Config(...)) as me: ...        embedded, under trio
    main(config, ...)                              the daemon, `peerloom`

A node given no seams takes the real ones. Everything that happens becomes an event, which folds into `state`.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from random import Random
from types import TracebackType
from typing import Any

import trio

from crypto.contact import Address
from crypto.facts import IdentitySigner
from crypto.identity import PeerId, peer_text
from crypto.swarm import Swarm
from dht.kademlia import Kademlia
from gossip.member import Profile
from gossip.messages import INSTANCE_BYTES
from gossip.swim import Swim
from node.api.run_models import run_files
from node.api.surface import Surface
from node.averaging.service import Averaging
from node.changing import ChangeableParts, change, keep_limits
from node.checkpoint_commands import CheckpointCommands
from node.checkpoints.replication import CheckpointReplicator
from node.checkpoints.service import Checkpoints
from node.checkpoints.weights import WEIGHTS_PURPOSE
from node.commands import Commands
from node.config import AcceptRuns, Config, read_join
from node.containment import cancelled_at_exit, contain, failures, is_alone, keep_running
from node.content.blobs import BlobServer
from node.content.directory import Directory
from node.control import CommandHandler, ControlServer
from node.events import Event, IdentityShared, NodeStopped
from node.executor import RealExecutor
from node.following import start_following
from node.forks import keep_loop_from_children
from node.journal import Journal
from node.local.service import LocalRuns
from node.paths import cache_folder, usable
from node.placement.inbound import Inbound
from node.placement.leases import Offer
from node.placement.machine_state import MachineState
from node.placement.offers import offers_of, own_offer
from node.placement.permission import Permission
from node.placement.places import Places
from node.placement.provider import Provider
from node.placement.searching import search_providers
from node.recording.recorder import Recorder
from node.runs.held import standing_of
from node.runs.needs import Beside, RunHost, SwarmView
from node.runs.runs import Runs
from node.runs.vacating import of_others, vacate
from node.seams import Clock, Executor, LocalNetwork, Network, RealClock, Seams, Storage, make_core, own_rng
from node.service_settings import ServiceSettings
from node.services.adverts import keep_advertised
from node.services.autonat import ReachService
from node.services.bootstrap import Bootstrap
from node.services.calibration import CalibrationWish, corrected
from node.services.capacity import Capacity, measure
from node.services.discovery import Discovery
from node.services.energy import EnergyLog, keep_log
from node.services.lan_discovery import Neighbours
from node.services.links import LinkMeasuring
from node.services.lives import Lives, shared_error
from node.services.measurements import CALIBRATED, Measurements
from node.services.membership import LEAVE_SECONDS, Membership
from node.services.metadata import AdvertisedStanding, encode_metadata
from node.services.paths import PathComparison
from node.services.remembering import RememberedPeers
from node.services.standing import StandingKeeper
from node.services.started import node_started
from node.services.swarm_clock import SwarmClock
from node.services.torch_extra import cannot_compute
from node.serving.joined import make_serving
from node.serving_commands import ServingCommands
from node.stages.fences import try_here
from node.storage.blobs import Blobs
from node.storage.budget import ScratchBudget
from node.storage.folder import FolderStorage, locked_folder
from node.storage.guests import Guests
from node.storage.keys import NodeKeys, keys_of
from node.storage.swarm_keys import load_swarm_keys
from node.transport.multicast import BEACON_PORT
from node.transport.network import RealNetwork
from partition.plan.rates import Calibration


class Node(Surface):
    """A node of a swarm: joins, keeps its place, and takes part in runs.

    `config` or `join` (addresses as a person types them) say where to begin; the keyword arguments
    are the six seams, the simulator's way in; `observe` is told of every event of membership and records, and
    of every message of a run that is sent; `parts` make some of its parts in the place of our classes, to try
    out others; `recorder` writes down what comes in. Use it as an async context manager under trio.

    Long because it is the composition root: it makes each service once, joins them, and holds no rule of any.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        join: Sequence[str] | str = (),
        network: Network | None = None,
        clock: Clock | None = None,
        rng: Random | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        executor: Executor | None = None,
        storage: Storage | None = None,
        capacity: Capacity | None = None,
        report: Callable[[Event], None] | None = None,
        observe: Callable[[object], None] | None = None,
        parts: Mapping[type[Any], Callable[..., Any]] | None = None,
        recorder: Recorder | None = None,
        settings: ServiceSettings | None = None,
    ) -> None:
        config, self._settings = config or Config(), settings or ServiceSettings()
        seeds = (*config.join.seeds, *read_join(join))
        self.config = config
        self.handlers: dict[str, CommandHandler] = {}
        self.stopping, self.handed_over = trio.Event(), trio.Event()
        self._is_met = trio.Event()
        self._seeds = replace(config.join, seeds=seeds)
        self._network, self._entropy = network, entropy
        self._clock = clock or RealClock()
        live_others = lambda: len(self.membership.live) - 1  # noqa: E731
        self._swarm_clock = SwarmClock(self._clock, lambda: self.membership.clocks, live_others)
        self._rng = rng or Random(int.from_bytes(entropy(16), "big"))  # noqa: S311 - choices, not keys
        self._scratch = ScratchBudget(config.resources.scratch, config.data_dir)
        self._executor = executor or RealExecutor(scratch=self._scratch)
        self.provider = Provider(config, self._clock)
        self.energy = EnergyLog()
        self._storage, self._capacity = storage, capacity
        self._observe = observe or (lambda _event: None)
        self._recorder, self._classes = recorder, parts or {}
        self.journal = Journal(self._clock, report, recorder)
        self._publish, self._refuse = self.journal.publish, self.journal.refuse
        self.watch, self._refused = self.journal.watch, self.journal.counts
        self._stack = AsyncExitStack()

    # Life

    async def __aenter__(self) -> "Node":
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if error is None:
            await self.leave()
        try:
            return await self._stack.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if error is None or not is_alone(error, group):
                raise
            return None  # the body's own error, without the nursery that it need not know of

    async def _start(self, stack: AsyncExitStack) -> None:
        storage = self._storage
        if storage is None:
            storage = stack.enter_context(locked_folder(self.config.data_dir, self._scratch))
        with usable(self.config.data_dir):
            keys = keys_of(storage, self._entropy, self.config.swarm.work_bits)
        self.network = self._network or self._real_network(keys)
        self._nursery = nursery = await stack.enter_async_context(cancelled_at_exit())
        if self._network is None:
            keep_loop_from_children()
        self.peer = keys.identity.peer
        core = make_core if (recorder := self._recorder) is None else recorder.core
        clock, corrected, parts = self._clock, self._swarm_clock, self._classes
        self.seams = Seams(
            self.network, clock, self._rng, self._entropy, self._executor, storage, core, corrected, parts
        )
        self.signer = IdentitySigner(keys.identity, self.config.swarm.name)
        await nursery.start(self.network.run)
        async with trio.open_nursery() as measuring:
            if isinstance(self._executor, RealExecutor):
                measuring.start_soon(self._try_fences)
            await self._measure()
        if recorder is not None:
            recorder.begin(peer_text(self.peer), self.config, self._clock)
            nursery.start_soon(keep_running, "recording", recorder.run, self._executor)
        at, is_new = self._clock.wall(), keys.is_new
        self._publish(node_started(at, self.config, self.peer, self.network, is_new=is_new))
        with usable(self.config.data_dir):
            self._blobs = await self._executor.run(lambda: Blobs(storage))
            self._guests = await self._executor.run(lambda: Guests(storage, self._blobs))
        self._standing = self._make_standing()
        self._make_services()
        self.serving = make_serving(self)
        self.serving.run_files = partial(run_files, self)
        kept, own = self._blobs, self.measurements
        self._parts = ChangeableParts(
            self.network, self._scratch, kept, self.runs, own, self._offered, self._calibrate
        )
        keep_limits(self._parts, self.config)
        if isinstance(self.network, RealNetwork):
            self.network.closed = self._closed
        await nursery.start(self.membership.run)
        await nursery.start(self.discovery.run)
        await nursery.start(self.runs.run)
        await nursery.start(self.averaging.run)
        await nursery.start(self.serving.run)
        if self._network is None and isinstance(storage, FolderStorage):
            # The control channel is for people at this machine; a simulated node is on none.
            checkpoints = CheckpointCommands(self, self.checkpoints, self.copies, self.runs.save)
            served = ServingCommands(self.serving)
            self.handlers = {**Commands(self).handlers, **checkpoints.handlers, **served.handlers}
            control = ControlServer(self.handlers, storage.path)
            await nursery.start(control.run)
        nursery.start_soon(keep_running, "joining", self.joining.run)
        if self.config.join.lan and self.network.local is not None:
            nursery.start_soon(keep_running, "neighbours", self._neighbours(self.network.local).run)
            nursery.start_soon(keep_running, "joining of neighbours", self.joining.try_heard)
        if self.network.reachable is None:
            nursery.start_soon(keep_running, "echo", self.reach.echo)
            if isinstance(self.network, RealNetwork):
                paths = PathComparison(self.network, self._clock, refuse=self._refuse, counters=self._refused)
                nursery.start_soon(keep_running, "paths", paths.run, lambda: self.membership.live)
            nursery.start_soon(self.inbound.run, own_rng(self._rng))
        nursery.start_soon(keep_running, "telling of checkpoints", self._tell_of_checkpoints)
        if self._capacity is None and isinstance(self._executor, RealExecutor):
            nursery.start_soon(keep_running, "calibration", self._calibrate)
            self.provider.read = MachineState().read
            may, real, known = self.provider.keeps_spare, self._executor, self.runs.known
            nursery.start_soon(keep_running, "spare process", self.runs.readiness.run, may, real.spare_bytes)
            nursery.start_soon(keep_running, "energy", keep_log, self.energy, self._clock, real, known)
        self.provider.changed = self._permitted
        self.runs.sends_less = lambda: bool(self.provider.permission.sends_less)
        nursery.start_soon(keep_running, "permission", self.provider.watch, self._executor)
        nursery.start_soon(keep_running, "remembering", self._remembered.run)
        nursery.start_soon(keep_running, "standing", self._standing.run)
        nursery.start_soon(keep_running, "advertising", self._advertise)
        nursery.start_soon(keep_running, "clocks", self._swarm_clock.watch, self._follow_clock, self._publish)
        self.handlers |= start_following(self, nursery)

    def _swarm_keys(self) -> tuple[bytes, ...]:
        return load_swarm_keys(file) if (file := self.config.swarm.key_file) is not None else ()

    def _real_network(self, keys: NodeKeys) -> RealNetwork:
        listen = self.config.listen
        return RealNetwork(
            keys.identity,
            keys.static,
            self.config.swarm.name,
            clock=self._clock,
            entropy=self._entropy,
            listen=[(address.host, address.port) for address in listen.addresses],
            announce=listen.announce,
            may_move=listen.may_move,
            beacon_port=BEACON_PORT if self.config.join.lan else None,
            keys=self._swarm_keys(),
            work_bits=self.config.swarm.work_bits,
            settings=self._settings.transport,
        )

    def _neighbours(self, local: LocalNetwork) -> Neighbours:
        return Neighbours(
            local,
            self.peer,
            Swarm(self.config.swarm.name, self._swarm_keys()),
            self._clock,
            own_rng(self._rng),
            self._entropy,
            counters=self._refused,
            heard=self._hear_near,
        )

    async def _measure(self) -> None:
        if (capacity := self._capacity) is None:
            capacity = await self._executor.run(lambda: measure(self.config.resources))
        self.capacity = capacity
        self._publish(capacity.measured(self._clock.wall(), self.config.offer.slots))

    def _offered(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._publish(capacity.measured(self._clock.wall(), self.config.offer.slots))
        self._standing.tell_now()

    async def _calibrate(self) -> None:
        """Find out in the background what a stage's process does here, and tell it instead of the guess."""
        if not (self.config.resources.calibrate and self.provider.takes_stages):
            return
        slots = self.provider.rules.slots
        wanted = CalibrationWish(self.capacity.device, "float32", max(1, self.capacity.cores // slots), slots)
        await self.measurements.measure(
            wanted, cache_folder(os.environ, self.config.data_dir), self._calibrated, self._is_met
        )

    def _calibrated(self, found: Calibration) -> None:
        self._offered(corrected(self.capacity, found, self.provider.rules.slots))

    async def _try_fences(self) -> None:
        """Find out what a stage's process can be held to, before any is offered a place here."""
        tried = await self._executor.run(partial(try_here, self.config.resources, self._clock.wall()))
        self.provider.unfenced, self.provider.cannot_compute = tried.unfenced, cannot_compute()
        self._publish(tried)
        if not self.provider.offered.may_serve:
            self._publish(self.provider.offer(self._clock.wall()))

    def _profile(self) -> Profile:
        accepts, standing = self.provider.takes_stages_of_others, self._standing.told
        offered = self.provider.of_a_slot(self.capacity)
        metadata = encode_metadata(offered, accepts_runs=accepts, standing=standing)
        return Profile(self.config.name, self.network.addresses, metadata)

    def _make_standing(self) -> StandingKeeper:
        return StandingKeeper(
            self._clock,
            self.config.swarm.preset,
            first=self._standing_now(None, None),
            look=lambda told: self._standing_now(told, self.runs),
            tell=lambda: self.membership.update(self._profile()),
            live=lambda: len(self.membership.live),
        )

    def _make_services(self) -> None:
        self.membership = Membership(
            self.network,
            self._clock,
            own_rng(self._rng),
            self.signer,
            self._profile(),
            self.config.swarm.preset,
            publish=self._publish_membership,
            refuse=self._refuse,
            met=self._met,
            gone=self._gone,
            forgotten=lambda peer: self.discovery.forgotten(peer),
            observe=self._observe,
            look_up=lambda key, found: self.discovery.locate(key, found),
            is_scoped=self.config.swarm.scope == "neighbourhood",
            work_bits=self.config.swarm.work_bits,
            make=partial(self.seams.core, self.seams.part(Swim)),
            instance=self._entropy(INSTANCE_BYTES),
            yields=self._stop_as_younger,
            doubt=self._doubt_sessions,
            look_for_life=lambda addresses: self._nursery.start_soon(self._lives.look, addresses),
        )
        self.discovery = Discovery(
            self.network,
            self._swarm_clock,
            own_rng(self._rng),
            self.signer,
            refuse=self._refuse,
            observe=self._observe,
            make=partial(self.seams.core, self.seams.part(Kademlia)),
            seams=self.seams,
            work_bits=self.config.swarm.work_bits,
            publish=self._publish,
        )
        self._directory = Directory(self.discovery, self.seams, self._blobs, self.peer)
        self._lives = Lives(self.network, (m := self.membership).life, lambda: m.incarnation, m.met_life)
        self.reach = ReachService(self.network, self._clock, self._settings.reach, counters=self._refused)
        self.inbound = self._make_inbound()
        self._remembered = RememberedPeers(
            self.seams, self._seeds, self.membership.live_addresses, self._is_met
        )
        self.joining = self._make_joining()
        self.checkpoints = Checkpoints(self.seams, self.signer, self._blobs, refuse=self._refuse)
        self.copies = CheckpointReplicator(
            self.seams,
            self.checkpoints,
            self.discovery,
            admits=self._admits_copies,
            ours=lambda run: self.runs.is_ours(run),
            learn_graph=lambda name, holders: self.runs.models.get(name, holders),
            refuse=self._refuse,
        )
        self.averaging = Averaging(
            self.seams,
            self.signer,
            self.discovery,
            own_rng(self._rng),
            live=lambda: self.membership.live,
            publish=self._publish,
            refuse=self._refuse,
            is_private=self.config.swarm.key_file is not None,
        )
        served = lambda peer, size: self.runs.receipts.served(peer, size)  # noqa: E731
        BlobServer(self.seams, self._blobs, refuse=self._refuse, served=served)
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
            accepts=lambda run: self.provider.refusal(run, self.peer),
            machine=lambda: self.provider.machine(self.capacity),
            rate=lambda: self.provider.of_a_slot(self.capacity).flops_per_second,
            own_data=lambda: self.provider.rules.own_data,
            publish=self._publish,
            observe=self._observe,
            settings=self._settings.runs,
            limits=self._settings.run_service,
            slots=self.provider.rules.slots,
        )
        places = Places(self.peer, self.membership, lambda: self.capacity.location)
        measurements = self._make_measurements()
        beside = Beside(measurements, self.checkpoints, self.copies, self._guests, self.averaging, places)
        self.runs = self.seams.part(Runs)(self.seams, self.signer, swarm, host, beside, LocalRuns)

    def _make_inbound(self) -> Inbound:
        return Inbound(
            self,
            self._clock,
            self._entropy,
            profile=self._profile,
            tell=self._standing.tell_now,
            is_known=self._has_given,
            counters=self._refused,
            settings=self._settings.relays,
        )

    def _make_joining(self) -> Bootstrap:
        return Bootstrap(
            self.network,
            self._clock,
            self._remembered.addresses_to_try(),
            publish=self._publish,
            found=self._found,
            is_alone=lambda: len(self.membership.live) < 2,
            is_member=lambda peer: peer in self.membership.live,
            counters=self._refused,
            is_other=self._lives.is_other,
            is_remembered=self._remembered.is_remembered,
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
        self.measurements = Measurements(
            self.peer,
            self._clock,
            self.discovery,
            links,
            members=lambda: self.membership.members,
            frames=lambda: self.runs.links.rates(),
            refuse=self._refuse,
        )
        return self.measurements

    def _hear_near(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        if peer == self.peer:
            self._nursery.start_soon(self._lives.look_near, addresses)
        else:
            self.joining.hear(peer, addresses)

    def _doubt_sessions(self) -> None:
        """Others may take another node's sessions for this one's."""
        if isinstance(self.network, RealNetwork):
            self.network.doubt()

    def _stop_as_younger(self, shared: IdentityShared) -> None:
        """End, since another node with this one's identity began earlier. Say no goodbye: all would take it
        for that node's."""

        async def end() -> None:
            await trio.sleep(LEAVE_SECONDS)  # what this one has said of the other goes round
            raise shared_error(shared, self.config.data_dir, self.addresses)

        if not self.stopping.is_set():
            self._nursery.start_soon(end)

    async def leave(self) -> None:
        """Say goodbye to the swarm; the node ends when its context does."""
        if not self.stopping.is_set():
            self.stopping.set()
        with trio.CancelScope(shield=True):
            saves = self._remembered.save, self.discovery.save
            for part in (self.serving.leave, self.runs.leave, *saves, self.membership.leave):
                with contain("leaving"):  # a full disk is no reason to go without a goodbye
                    await part()
                self.handed_over.set()
        self._publish(NodeStopped(at=self._clock.wall()))

    # Events

    def limit(self, *, accept_runs: AcceptRuns) -> None:
        """Take stages of these others, or of nobody (`never`), until this node ends."""
        self.set("accept_runs", accept_runs)

    def set(self, name: str, text: str | None) -> None:
        """Change a rule by which this node serves others, until it ends; None: as configured. UsageError."""
        self.provider.set(name, text)
        self.config = self.provider.config
        change(self._parts, name, self.config, self.capacity, is_real=self._capacity is None)
        self._permitted(self.provider.permission)

    def _permitted(self, permission: Permission) -> None:
        """Others may be served from now on, or may not: then what they have here is handed over."""
        self._publish(self.provider.offer(self._clock.wall()))
        self._standing.tell_now()
        if not permission.may_serve:
            self.runs.start_task(vacate, self.runs, permission.reason, of_others(self.peer), of=None)

    @property
    def counters(self) -> dict[str, int]:
        """The numbers of refusals and drops at every layer, by reason."""
        own = Counter(internal_errors=failures.total())
        return dict(Counter(self.network.counters) + self._refused + own)

    def publish(self, event: Event) -> None:
        """Tell of what a part beside the node has done, such as its page."""
        self._publish(event)

    # Between the services

    def _met(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        self._is_met.set()
        self.discovery.met(peer, addresses)

    def _publish_membership(self, event: Event) -> None:
        self._publish(event)
        self.runs.news.heard(event)

    def _closed(self, peer: PeerId) -> None:
        self.membership.closed(peer)
        self.runs.news.closed(peer)

    def _gone(self, peer: PeerId) -> None:
        self.discovery.gone(peer)
        self.averaging.member_lost(peer)
        self.runs.news.lost(peer)

    def _found(self, peers: Sequence[PeerId]) -> None:
        if self.stopping.is_set():
            return  # who has said goodbye joins nobody
        self.membership.join(peers)
        self.discovery.join(peers)

    def _admits_copies(self, peer: PeerId, run: bytes) -> str | None:
        return None if self.runs.is_member(run, peer) else "only for members of a run that this node is in"

    def _offers(self) -> list[Offer]:
        """Return what every live member says it offers, this node included."""
        has_slot = self.provider.takes_stages and self.runs.has_slot
        slot, is_sparing = self.provider.of_a_slot(self.capacity), bool(self.provider.permission.sends_less)
        own = own_offer(self.peer, slot, has_slot=has_slot, sends_less=is_sparing)
        if self.provider.is_unreachable:
            return [own]  # members of a run dial each other, and this one too
        return offers_of(own, self.membership.members, self.measurements.knowledge)

    async def _search_providers(self) -> list[Offer]:
        """Return providers beyond those that membership lists."""
        if self.provider.is_unreachable:
            await trio.lowlevel.checkpoint()
            return []
        return await search_providers(self.discovery, self.membership)

    def _standing_now(self, told: AdvertisedStanding | None, runs: Runs | None) -> AdvertisedStanding:
        """How this node is; a simulated one is as if idle. Before there are `runs` it holds nothing."""
        provider, calibrated = self.provider, runs is not None and self.measurements.calibration is not None
        words = {**provider.words, CALIBRATED: calibrated}
        is_measured = self._capacity is None and isinstance(self._executor, RealExecutor)
        return standing_of(
            told, self.capacity, words, runs, self.peer, slots=provider.rules.slots, is_measured=is_measured
        )

    async def _provide(self, run: str, digest: str) -> None:
        """Say in the DHT that this node keeps a run's weights."""
        await self.discovery.publish(WEIGHTS_PURPOSE, bytes.fromhex(run), bytes.fromhex(digest))

    def _follow_clock(self) -> None:
        self.membership.follow_clock()
        self.discovery.follow_clock()

    def _has_given(self, peer: PeerId) -> bool:
        """Whether a peer has worked for this node, or is in a run with it."""
        runs = self.runs
        return runs.receipts.contribution(peer).weight > 1 or any(
            runs.is_member(run, peer) for run in runs.members
        )

    # Announcements to others

    async def _tell_of_checkpoints(self) -> None:
        await self._is_met.wait()  # alone, there is nobody to tell
        await self.copies.start()

    async def _advertise(self) -> None:
        """Advertise this node's offer to peers outside its membership view."""
        await self._is_met.wait()  # alone, there is nobody to tell
        await keep_advertised(
            self.discovery,
            lambda: self.provider.of_a_slot(self.capacity),
            self.network,
            lambda: self.provider.takes_stages_of_others and self.runs.has_slot,
            self.membership.coordinates,
        )
