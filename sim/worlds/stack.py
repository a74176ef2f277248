"""A world of whole nodes: up to about a hundred `node.Node`s in one process, on simulated seams under trio.

The protocols, their framing and signatures, the plans, the checkpoints and the arithmetic of stages are real.
Time, the network, the disks and the duration of computing are virtual. The same seed gives the same world to
the bit on every machine (`sim.worlds.scheduling`).

`sim.worlds.script` and the scenario's runs direct it, as in a world of cores. Each order is carried out after
everything that nodes do at the same instant.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec
import trio
import trio.testing

from crypto.contact import Address
from crypto.identity import PeerId
from dht.events import Joined
from dht.messages import PROTOCOL as KADEMLIA
from gossip.member import Status
from gossip.swim import PROTOCOL as SWIM
from node import config
from node.containment import strictness
from node.errors import UsageError
from node.events import Event, JoinTried, ReachabilityFound
from node.runtime import Node
from sim.events import (
    NetworkHealed,
    NetworkSplit,
    PeerFrozen,
    PeerSlowed,
    PeerStarted,
    PeerStopped,
    ReachabilityJudged,
)
from sim.network.instants import nearest_instant
from sim.network.links import SimLinks
from sim.observers import Observation
from sim.ports import Order
from sim.scenario import Scenario
from sim.seams import SimClock, SimNetworkFabric
from sim.seeds import seeded_entropy, seeded_rng
from sim.storage import MemoryStorage
from sim.wakeup import SimAlarm
from sim.worlds.factories import Cores
from sim.worlds.joining import first_to_dial
from sim.worlds.life import Life, RunningLives
from sim.worlds.machines import machine, new_disk, takes_stages
from sim.worlds.node_life import NodeLife
from sim.worlds.records import RecordsWork
from sim.worlds.roster import SWARM, WorldRoster, capacity
from sim.worlds.run_events import Trained
from sim.worlds.scheduling import run_repeatably
from sim.worlds.script import Direction
from sim.worlds.stack_runs import StackRuns
from sim.worlds.stages import NodeExecutor, settled
from sim.worlds.timers import Agenda

OURS = Cores()
STALL_SECONDS = 20.0
"""How long a stream over a split stalls before both kernels drop it; a node may drop it earlier."""
FOLDER = Path("/simulated")


class StackWorld:
    """Plays `scenario` from `seed`; publishes every event with `publish`. A `sim.observers.World`.

    Only the membership and record cores of `cores` may be replaced. Raises UsageError for others.
    """

    def __init__(
        self, scenario: Scenario, seed: int, publish: Callable[[Observation], None], *, cores: Cores = OURS
    ) -> None:
        if dataclasses.replace(cores, swim=OURS.swim, kademlia=OURS.kademlia) != OURS:
            raise UsageError(
                "whole nodes accept replaced cores only for membership (swim) and records (kademlia)"
            )
        self.scenario = scenario
        self.seed = seed
        self.cores = cores
        self.links = SimLinks(scenario.network, seed)
        # Whole nodes create their own signatures, so they need real keys.
        signed = msgspec.structs.replace(scenario, signatures="ed25519")
        self.roster = WorldRoster(signed, seed, self._region)
        self.lives: dict[PeerId, NodeLife] = {}
        self.medium = SimNetworkFabric(self.links, stall_seconds=STALL_SECONDS)
        for number, peer in enumerate(self.peers):
            self.links.place(peer, number)
            self.medium.attach(peer).die()  # so that each peer gets the address of its number
        self._publish = publish
        self._runs = StackRuns(self)
        self._agenda = Agenda()
        self._alarm = SimAlarm()
        self._handlers: dict[type, list[Callable[[Life, Any], None]]] = {}
        self._running = RunningLives()
        self._serials = [0] * scenario.nodes
        self._storages = [MemoryStorage() for _ in range(scenario.nodes)]
        self._counters: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._failure: Exception | None = None
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._is_playing = False
        self._stands_at = 0.0
        self._direction = Direction(self, scenario, seed, self._region)
        self.on(Joined, self._joined)
        if scenario.records.enabled:
            RecordsWork(self)

    # Playing

    def play(self, on_sample: Callable[[], None]) -> None:
        """Play the whole scenario; `on_sample` is called every `sample_seconds`.

        Raises:
            UsageError: a run's model or data does not exist.
            Broken: a watcher failed, or a run missed its required accuracy.
        """
        self._runs.plan()
        try:
            # A simulation exists to find our bugs, so no exception is contained, unlike in a node.
            with settled() if self.scenario.runs else nullcontext(), strictness(is_strict=True):
                run_repeatably(partial(self._whole, on_sample), seeded_rng(self.seed, "scheduling"))
        except BaseExceptionGroup as group:
            raise self._failure or _alone(group) from None
        if self._failure is not None:
            raise self._failure
        self._runs.check()

    async def _whole(self, on_sample: Callable[[], None]) -> None:
        with self._scope:
            async with trio.open_nursery() as self._nursery:
                self._is_playing = True
                self._direction.begin()
                self.at(self.scenario.sample_seconds, self._sample, on_sample, 1)
                try:
                    await self._direct()
                finally:
                    self._end_all()
                self._nursery.cancel_scope.cancel()

    async def _direct(self) -> None:
        """Carry out due orders, each after everything that nodes do at that instant."""
        end = self.scenario.seconds
        while self._failure is None and (self._agenda.due <= end or self.now < end):
            await self._alarm.sleep_until(min(self._agenda.due, end))
            while self._agenda.due <= min(self.now, end):
                await trio.testing.wait_all_tasks_blocked()
                self._guarded(self._agenda.do_first)
        await trio.testing.wait_all_tasks_blocked()

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call a watcher's function. An exception ends the world, bypassing the nodes' exception handling."""
        if self._failure is None:
            try:
                act()
            except Exception as error:
                self._failure = error
                self._scope.cancel()

    def _sample(self, on_sample: Callable[[], None], count: int) -> None:
        self.at((count + 1) * self.scenario.sample_seconds, self._sample, on_sample, count + 1)
        on_sample()

    def _end_all(self) -> None:
        """End all lives without a goodbye at the end of the experiment. Watchers may read the end state."""
        self._counted = self._count()
        self._stands_at, self._is_playing = self.now, False
        self._publish = _ignore
        for life in self.lives.values():
            life.crash()

    # For watchers

    @property
    def now(self) -> float:
        return nearest_instant(trio.current_time()) if self._is_playing else self._stands_at

    @property
    def peers(self) -> Sequence[PeerId]:
        return self.roster.peers

    @property
    def trained(self) -> tuple[Trained, ...]:
        """Return the requested runs and their outcomes."""
        return tuple(self._runs.words.runs.values())

    def name(self, peer: PeerId) -> str:
        return self.roster.name(peer)

    def is_up(self, peer: PeerId) -> bool:
        return peer in self.lives

    def up_since(self, peer: PeerId) -> float:
        return self.lives[peer].since

    def region(self, peer: PeerId) -> str:
        return self.links.region(peer)

    def _region(self, number: int) -> str:
        return self.region(self.peers[number])

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        return self.links.reaches(one, other)

    def in_scope(self, one: PeerId, other: PeerId) -> bool:  # noqa: ARG002 - a node lists everybody
        return True

    def believes(self, peer: PeerId) -> Mapping[PeerId, Status]:
        return self.lives[peer].swim.statuses

    def sizes(self, peer: PeerId) -> Mapping[str, tuple[int, int]]:
        life = self.lives[peer]
        return {**life.swim.sizes, **life.kademlia.sizes}

    def counters(self) -> Mapping[str, int]:
        return self._count() if self._is_playing else self._counted

    def _count(self) -> Counter[str]:
        total = self._counters + self.medium.counters
        for protocol, traffic in sorted(self.medium.traffic().items()):
            total.update({f"messages {protocol}": traffic.messages, f"bytes {protocol}": traffic.sent_bytes})
        for life in self.lives.values():
            total.update(life.node.counters)
        return total

    # For the world's parts (`sim.worlds.life.WorldEnvironment`)

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self._agenda.at(time, action, *arguments)
        self._alarm.no_later_than(self._agenda.due)

    def on(self, kind: type, handler: Callable[[Life, Any], None]) -> None:
        self._handlers.setdefault(kind, []).append(handler)

    def tell(self, life: Life | None, event: Any) -> None:
        self._guarded(partial(self._tell, life, event))

    def _tell(self, life: Life | None, event: Any) -> None:
        self._publish(Observation(self.now, None if life is None else life.peer, event))
        if life is not None:
            for handler in self._handlers.get(type(event), ()):
                handler(life, event)

    def command(self, life: Life, protocol: str, order: Order) -> None:
        mine = self.lives.get(life.peer)
        if mine is life:
            command = {SWIM: mine.node.membership.command, KADEMLIA: mine.node.discovery.command}[protocol]
            command(order)

    def pick(self, rng: Random) -> Life | None:
        return self._running.pick(rng)

    def latency_seconds(self, one: PeerId, other: PeerId) -> float:
        return self.links.latency_seconds(one, other)

    # Orders of the script (`sim.worlds.script.Directed`)

    def runs(self, number: int) -> bool:
        life = self.lives.get(self.peers[number])
        return life is not None and not life.leaving

    def start(self, number: int) -> None:
        if self.peers[number] in self.lives:
            return
        serial = self._serials[number]
        self._serials[number] += 1
        remembers = serial > 0 and self.scenario.churn.remembers
        if not remembers:
            self._storages[number] = new_disk(self.seed, number)
        life = NodeLife(number, serial, self.now, self.roster.signer(number))
        life.node = self._node(life)
        self.lives[life.peer] = life
        assert self._nursery is not None, "the world is not playing"
        self._nursery.start_soon(self._live, life)
        self.tell(life, PeerStarted(self.region(life.peer), remembers))
        self._running.add(life)

    def stop(self, number: int, why: str) -> None:
        life = self.lives[self.peers[number]]
        self._running.remove(life)
        if why == "leave":
            life.leave()
        else:
            self._end(life, why)

    async def _live(self, life: NodeLife) -> None:
        await life.run()
        if self.lives.get(life.peer) is life:
            self._end(life, "leave")

    def _end(self, life: NodeLife, why: str) -> None:
        self._counters.update(life.node.counters)
        self.medium.kill(life.peer)
        life.crash()
        del self.lives[life.peer]
        self.tell(life, PeerStopped(why))
        if life.leaving:
            self._direction.ended(life.number)

    def split(self, side_of: Mapping[int, int]) -> None:
        sides: dict[int, list[PeerId]] = {}
        for number, peer in enumerate(self.peers):
            sides.setdefault(side_of.get(number, 0), []).append(peer)
        parted = tuple(tuple(side) for _, side in sorted(sides.items()))
        self.medium.heal()
        if side_of:
            self.medium.split(*parted)
        self.tell(None, NetworkSplit(parted) if side_of else NetworkHealed())

    def deafen(self, number: int, deaf: bool) -> None:
        self.links.deafen(self.peers[number], deaf=deaf)
        self.medium.look_at_streams()

    def block_datagrams(self, number: int, blocked: bool) -> None:
        self.links.block_datagrams(self.peers[number], blocked=blocked)

    def lose(self, number: int, loss: float) -> None:
        self.links.disturb(self.peers[number], loss)

    def reboot(self, number: int) -> None:
        """Do nothing: whole nodes have no such routers (`sim.scenario.rules`)."""

    def freeze(self, number: int, seconds: float) -> None:
        self.medium.freeze(self.peers[number], seconds)
        self.tell(self.lives[self.peers[number]], PeerFrozen(seconds))

    def slow(self, number: int, factor: float) -> None:
        self.medium.slow(self.peers[number], factor)
        life = self.lives.get(self.peers[number])
        if life is not None:
            self.tell(life, PeerSlowed(factor))

    # A node

    def _node(self, life: NodeLife) -> Node:
        number, rng_labels = life.number, ("life", life.peer, life.serial)
        offered = machine(self.scenario, self.seed, number, self.region(life.peer))
        through = self._through(life)
        accepts: Literal["swarm", "never"] = "swarm" if takes_stages(self.scenario, number) else "never"
        speed = offered.flops_per_second / capacity("").flops_per_second
        return Node(
            config.Config(
                name=self.name(life.peer),
                swarm=config.SwarmSettings(
                    name=SWARM,
                    preset=self.scenario.membership.preset,
                    scope=self.scenario.membership.scope,
                ),
                resources=config.Resources(accept_runs=accepts),
                data_dir=FOLDER,
            ),
            join=() if through is None else (through.short,),
            network=self.medium.attach(life.peer),
            clock=SimClock(self.links.clock(life.peer)),
            rng=seeded_rng(self.seed, *rng_labels),
            entropy=seeded_entropy(self.seed, *rng_labels),
            executor=NodeExecutor(
                offered.flops_per_second,
                speed,
                self._runs.pass_seconds,
                self.medium.pace(life.peer),
                partial(self._runs.applied, life),
            ),
            storage=self._storages[number],
            capacity=offered,
            report=partial(self._said, life),
            observe=partial(self._learnt, life),
            parts=life.parts(self.cores),
        )

    def _through(self, life: NodeLife) -> Address | None:
        """Return the address of a running peer, chosen by the seed."""
        other = first_to_dial(self, life)
        # If there is no other peer, this one is itself the network.
        life.entered = life.entered or other is None
        if other is not None:
            return self.roster.address(other.number)
        # A peer that cannot be dialled must dial. Even the first one dials a peer that may come later.
        is_behind = self.links.at(life.peer).nat is not None
        return self.roster.address((life.number + 1) % len(self.peers)) if is_behind else None

    # Events of nodes

    def _learnt(self, life: NodeLife, event: Any) -> None:
        if self.lives.get(life.peer) is not life:
            return
        if isinstance(event, msgspec.Struct):
            self._runs.words.sent(life, event)
        else:
            self.tell(life, event)

    def _said(self, life: NodeLife, event: Event) -> None:
        if self.lives.get(life.peer) is not life:
            return
        if isinstance(event, JoinTried) and event.outcome not in ("ok", "self"):
            # A user would ask others for a different address.
            through = self._through(life)
            if through is not None:
                life.node.joining.add(through)
        if isinstance(event, ReachabilityFound):
            self.tell(life, ReachabilityJudged(event.reachable, event.asked))
        said = self._runs.words.of_node(life, event)
        if said is not None:
            self.tell(life, said)

    def _joined(self, life: Life, event: Joined) -> None:
        life.entered = life.entered or event.contacts > 0


def _alone(group: BaseExceptionGroup[Any]) -> BaseException:
    """Return the only exception of a group, or the group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _ignore(observed: Observation) -> None:
    del observed
