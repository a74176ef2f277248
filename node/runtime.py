"""The composition root: one node, from its six seams to its services.

    async with Node(Config(...)) as me: ...        embedded, under trio
    main(config, ...)                              the daemon, `peerloom`

A node without given seams uses the real ones. Everything that happens becomes an event, which is folded into
`state`.
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

from crypto.facts import IdentitySigner
from crypto.identity import peer_text
from crypto.swarm import Swarm
from node.api.run_models import run_files
from node.api.surface import Surface
from node.changing import ChangeableParts, change, keep_limits
from node.checkpoint_commands import CheckpointCommands
from node.commands import Commands
from node.config import AcceptRuns, Config, read_join
from node.containment import cancelled_at_exit, contain, failures, is_alone, keep_running
from node.control import CommandHandler, ControlServer
from node.events import Event, NodeStopped
from node.executor import RealExecutor
from node.following import start_following
from node.forks import keep_loop_from_children
from node.joined_services import Foundation, JoinedServices
from node.journal import Journal
from node.own_machine import OwnMachine
from node.parts import checked_parts
from node.paths import usable
from node.placement.machine_state import MachineState
from node.placement.provider import Provider
from node.recording.recorder import Recorder
from node.seams import Clock, Executor, Network, RealClock, Seams, Storage, make_core, own_rng
from node.service_settings import ServiceSettings
from node.services.capacity import Capacity
from node.services.energy import EnergyLog, keep_log
from node.services.paths import PathComparison
from node.services.started import node_started
from node.services.swarm_clock import SwarmClock
from node.serving.joined import make_serving
from node.serving_commands import ServingCommands
from node.storage.blobs import Blobs
from node.storage.budget import ScratchBudget
from node.storage.folder import FolderStorage, locked_folder
from node.storage.guests import Guests
from node.storage.keys import NodeKeys, keys_of
from node.storage.swarm_keys import load_swarm_keys
from node.transport.multicast import BEACON_PORT
from node.transport.network import RealNetwork


class Node(Surface):
    """A node of a swarm: it joins, stays a member, and takes part in runs.

    `config` or `join` (addresses as typed) name the first peers. The other keyword arguments include the six
    seams, which the simulator replaces. `observe` is called with every event of membership and records, and
    with every message that a run sends. `parts` replace some of `node.parts.PARTS`, for experiments;
    `recorder` records the node's inputs. Use it as an async context manager under trio.
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
        self._recorder, self._classes = recorder, checked_parts(parts or {})
        self.journal = Journal(self._clock, report, recorder)
        self._publish, self._refuse = self.journal.publish, self.journal.refuse
        self.watch, self._refused = self.journal.watch, self.journal.counts
        self._stack = AsyncExitStack()

    # Starting and leaving

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
            return None  # raise the body's own error, without the wrapping by our nursery

    async def _start(self, stack: AsyncExitStack) -> None:
        storage = self._storage
        if storage is None:
            storage = stack.enter_context(locked_folder(self.config.data_dir, self._scratch))
        with usable(self.config.data_dir):
            keys = keys_of(storage, self._entropy, self.config.swarm.work_bits)
        self.network = self._network or self._real_network(keys)
        nursery = await stack.enter_async_context(cancelled_at_exit())
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
        self.machine = OwnMachine(
            self.provider, self.seams, self.peer, self._publish, given=self._capacity, is_met=self._is_met
        )
        await self.machine.measure()
        if recorder is not None:
            recorder.begin(peer_text(self.peer), self.config, self._clock)
            nursery.start_soon(keep_running, "recording", recorder.run, self._executor)
        at, is_new = self._clock.wall(), keys.is_new
        self._publish(node_started(at, self.config, self.peer, self.network, is_new=is_new))
        with usable(self.config.data_dir):
            self._blobs = await self._executor.run(lambda: Blobs(storage))
            self._guests = await self._executor.run(lambda: Guests(storage, self._blobs))
        self.machine.keep_standing()
        self._take_services(JoinedServices(self._foundation(nursery)))
        await nursery.start(self.membership.run)
        await nursery.start(self.discovery.run)
        await nursery.start(self.runs.run)
        await nursery.start(self.averaging.run)
        await nursery.start(self.serving.run)
        if self._network is None and isinstance(storage, FolderStorage):
            # The control channel is for people at this machine, so a simulated node has none.
            checkpoints = CheckpointCommands(self, self.checkpoints, self.copies, self.runs.save)
            served = ServingCommands(self.serving)
            self.handlers = {**Commands(self).handlers, **checkpoints.handlers, **served.handlers}
            control = ControlServer(self.handlers, storage.path)
            await nursery.start(control.run)
        self._start_tasks(nursery)
        self.handlers |= start_following(self, nursery)

    def _start_tasks(self, nursery: trio.Nursery) -> None:
        """Start the node's periodic and background tasks, in addition to its services."""
        services, machine = self._services, self.machine
        nursery.start_soon(keep_running, "joining", self.joining.run)
        if self.config.join.lan and self.network.local is not None:
            swarm = Swarm(self.config.swarm.name, self._swarm_keys())
            nursery.start_soon(keep_running, "neighbours", services.neighbours(self.network.local, swarm).run)
            nursery.start_soon(keep_running, "joining of neighbours", self.joining.try_heard)
        if self.network.reachable is None:
            nursery.start_soon(keep_running, "echo", self.reach.echo)
            if isinstance(self.network, RealNetwork):
                paths = PathComparison(self.network, self._clock, refuse=self._refuse, counters=self._refused)
                nursery.start_soon(keep_running, "paths", paths.run, lambda: self.membership.live)
            nursery.start_soon(self.inbound.run, own_rng(self._rng))
        nursery.start_soon(keep_running, "telling of checkpoints", services.tell_of_checkpoints)
        if self._capacity is None and isinstance(self._executor, RealExecutor):
            nursery.start_soon(keep_running, "calibration", machine.calibrate)
            self.provider.read = MachineState().read
            may, real, known = self.provider.keeps_spare, self._executor, self.runs.known
            nursery.start_soon(keep_running, "spare process", self.runs.readiness.run, may, real.spare_bytes)
            nursery.start_soon(keep_running, "energy", keep_log, self.energy, self._clock, real, known)
        self.provider.changed = machine.permitted
        self.runs.sends_less = lambda: bool(self.provider.permission.sends_less)
        nursery.start_soon(keep_running, "permission", self.provider.watch, self._executor)
        nursery.start_soon(keep_running, "remembering", services.remembered.run)
        nursery.start_soon(keep_running, "standing", machine.standing.run)
        nursery.start_soon(keep_running, "advertising", services.advertise)
        follow = services.follow_clock
        nursery.start_soon(keep_running, "clocks", self._swarm_clock.watch, follow, self._publish)

    def _foundation(self, nursery: trio.Nursery) -> Foundation:
        return Foundation(
            self.seams,
            self.signer,
            self.peer,
            self.journal,
            self.provider,
            self.machine,
            self._blobs,
            self._guests,
            self._swarm_clock,
            self._seeds,
            self._settings,
            self._observe,
            nursery,
            self._is_met,
            self.stopping,
        )

    def _take_services(self, services: JoinedServices) -> None:
        self._services = services
        self.membership, self.discovery = services.membership, services.discovery
        self._directory, self._found = services.directory, services.found
        self.reach, self.inbound, self.joining = services.reach, services.inbound, services.joining
        self.checkpoints, self.copies = services.checkpoints, services.copies
        self.averaging, self.measurements = services.averaging, services.measurements
        self.runs = services.runs
        self.serving = make_serving(self)
        self.serving.run_files = partial(run_files, self)
        own, machine = self.measurements, self.machine
        self._parts = ChangeableParts(
            self.network, self._scratch, self._blobs, self.runs, own, machine.offer, machine.calibrate
        )
        keep_limits(self._parts, self.config)

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

    async def leave(self) -> None:
        """Leave the swarm; the node ends when its context does."""
        if not self.stopping.is_set():
            self.stopping.set()
        with trio.CancelScope(shield=True):
            saves = self._services.remembered.save, self.discovery.save
            for part in (self.serving.leave, self.runs.leave, *saves, self.membership.leave):
                with contain("leaving"):  # even with a full disk the node should announce that it leaves
                    await part()
                self.handed_over.set()
        self._publish(NodeStopped(at=self._clock.wall()))

    # Events

    def limit(self, *, accept_runs: AcceptRuns) -> None:
        """Set whose stages this node accepts (`never`: nobody's), until the node ends."""
        self.set("accept_runs", accept_runs)

    def set(self, name: str, text: str | None) -> None:
        """Change a rule by which this node serves others, until the node ends; None restores the configured
        value. Raises UsageError."""
        self.provider.set(name, text)
        self.config = self.provider.config
        change(self._parts, name, self.config, self.capacity, is_real=self._capacity is None)
        self.machine.permitted(self.provider.permission)

    @property
    def capacity(self) -> Capacity:
        """The capacity of this machine."""
        return self.machine.capacity

    @property
    def counters(self) -> dict[str, int]:
        """The numbers of refusals and drops at every layer, by reason."""
        own = Counter(internal_errors=failures.total())
        return dict(Counter(self.network.counters) + self._refused + own)

    def publish(self, event: Event) -> None:
        """Publish an event of a component outside the node, such as its page."""
        self._publish(event)
