"""A world of bare cores: up to 10,000 peers on the engine, each with its SWIM and Kademlia core.

A peer's two cores are connected as in `node.services` and `node.runtime`: Kademlia adds the peers that SWIM
finds and drops those that it loses. A peer joins both networks through the first peer that answers, retries
while it is alone, and says goodbye when it leaves. A peer behind a NAT asks others to dial it back, and
becomes a DHT client if none of them could. Every event is published once, through `sim.observers`.

Not here: streams, torch, disks, and addresses that a sender must learn first, since here a peer is reached by
its id. So two peers behind restricted NATs connect once both have sent, while nodes need a third peer to
learn each other's outside address. `sim.worlds.stack` has all of that.
"""

import gc
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import dht.messages
import dht.settings
import gossip.messages
from crypto.identity import PeerId
from dht.events import Joined
from dht.keys import node_number
from dht.messages import PROTOCOL as KADEMLIA
from gossip.member import MemberChanged, MemberDown, MemberForgotten, MemberLeft, MemberUp, Status
from gossip.settings import PRESETS
from gossip.swim import PROTOCOL as SWIM
from node.seams import own_rng
from node.services.driver import Core, Sends
from node.services.membership import LEAVE_SECONDS
from sim.engine import Engine
from sim.events import (
    NetworkHealed,
    NetworkSplit,
    PeerFrozen,
    PeerSlowed,
    PeerStarted,
    PeerStopped,
    RouterRebooted,
)
from sim.network.instants import after
from sim.network.links import SimLinks
from sim.observers import Observation
from sim.ports import Order, Wire
from sim.scenario import Scenario
from sim.seams import EPOCH_SECONDS
from sim.seeds import seeded_rng
from sim.worlds.autonat import Reaching
from sim.worlds.factories import Cores
from sim.worlds.joining import WorldBootstrap, remembered
from sim.worlds.life import Life, RunningLives
from sim.worlds.local_runs import LocalModeRuns
from sim.worlds.neighbours import WorldNeighbours
from sim.worlds.records import RecordsWork
from sim.worlds.roster import WorldRoster
from sim.worlds.routed import RoutedPeers
from sim.worlds.script import Direction
from sim.worlds.served import ServedModels
from sim.worlds.timers import Agenda
from sim.worlds.training import TrainingRuns
from sim.worlds.warm_start import Acquaintance

OURS = Cores()
WIRES = {
    SWIM: Wire(gossip.messages.Message, gossip.messages.MESSAGE_BYTES_MAX),
    KADEMLIA: Wire(dht.messages.Message, dht.messages.MESSAGE_BYTES_MAX),
}


COLLECTIONS_MIN = 100
"""Number of garbage collections of the middle generation between two full ones."""


class CoresWorld:
    """Plays `scenario` from `seed`; publishes every event with `publish`. A `sim.observers.World`."""

    def __init__(
        self, scenario: Scenario, seed: int, publish: Callable[[Observation], None], *, cores: Cores = OURS
    ) -> None:
        self.scenario = scenario
        self.seed = seed
        self.cores = cores
        self.links = SimLinks(scenario.network, seed)
        self.roster = WorldRoster(scenario, seed, self._region_of)
        for number, peer in enumerate(self.peers):
            self.links.place(peer, number)
        wires = WIRES if scenario.encoded else None
        self.engine = Engine(self.links, wires=wires, publish=self._learnt, count_bytes=True)
        self.lives: dict[PeerId, Life] = {}
        self._publish = publish
        self._agenda = Agenda()
        self._handlers: dict[type, list[Callable[[Life, Any], None]]] = {}
        self._running = RunningLives()
        self._met_before: dict[int, tuple[PeerId, ...]] = {}
        self._joining = WorldBootstrap(self)
        self._direction = Direction(self, scenario, seed, self._region_of)
        self._slowness: dict[int, float] = {}
        self._serials = array("L", bytes(array("L").itemsize * scenario.nodes))
        self._membership = PRESETS[scenario.membership.preset]
        republish_seconds = scenario.records.republish_seconds or math.inf
        self._discovery = dht.settings.KademliaSettings(republish_seconds=republish_seconds)
        for found in (MemberUp, MemberChanged):
            self.on(found, self._met)
        for lost in (MemberDown, MemberLeft):
            self.on(lost, self._lost)
        self.on(MemberForgotten, self._forgotten)
        self.on(Joined, self._joined)
        self._place = node_number if scenario.membership.scope == "neighbourhood" else None
        if self._place is not None:
            WorldNeighbours(self)
        self._routed = RoutedPeers(self) if scenario.network.has_routers else None
        if self._routed is not None or self.links.has_translators:
            Reaching(self)
        if scenario.records.enabled:
            RecordsWork(self)
        self.training = TrainingRuns(self)
        self.served = ServedModels(self, self.training)
        self.local_runs = LocalModeRuns(self, self.training)

    def play(self, on_sample: Callable[[], None]) -> None:
        """Play the whole scenario; `on_sample` is called every `sample_seconds`."""
        with _few_collections():
            self._play(on_sample)

    def _play(self, on_sample: Callable[[], None]) -> None:
        self._direction.begin()
        if self.scenario.start.acquainted:
            self.at(0.0, self._acquaint)
        self.at(self.scenario.sample_seconds, self._sample, on_sample, 1)
        while (due := self._agenda.due) <= self.scenario.seconds:
            self.engine.run(due)
            self._agenda.do_first()
        self.engine.run(self.scenario.seconds)

    def _acquaint(self) -> None:
        is_scoped = self._place is not None
        known = Acquaintance(
            self, self.links, self.roster, self._membership, self._discovery, scoped=is_scoped
        )
        known.make()

    def _sample(self, on_sample: Callable[[], None], count: int) -> None:
        self.at((count + 1) * self.scenario.sample_seconds, self._sample, on_sample, count + 1)
        on_sample()

    # For watchers

    @property
    def now(self) -> float:
        return self.engine.now

    @property
    def peers(self) -> Sequence[PeerId]:
        return self.roster.peers

    def name(self, peer: PeerId) -> str:
        return self.roster.name(peer)

    def is_up(self, peer: PeerId) -> bool:
        return peer in self.lives

    def up_since(self, peer: PeerId) -> float:
        return self.lives[peer].since

    def region(self, peer: PeerId) -> str:
        return self.links.region(peer)

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        return self.links.reaches(one, other)

    def in_scope(self, one: PeerId, other: PeerId) -> bool:
        return self._place is None or self.lives[one].swim.scope.holds(other)

    def believes(self, peer: PeerId) -> Mapping[PeerId, Status]:
        return self.lives[peer].swim.statuses

    def sizes(self, peer: PeerId) -> Mapping[str, tuple[int, int]]:
        life = self.lives[peer]
        return {**life.swim.sizes, **life.kademlia.sizes}

    def counters(self) -> Mapping[str, int]:
        counters: dict[str, int] = {
            **self.engine.counters,
            **self.training.counters,
            **self.served.counters,
            **self.local_runs.counters,
            **({} if self._routed is None else self._routed.counters),
        }
        for protocol, sent in self.engine.traffic().items():
            counters[f"messages {protocol}"] = sent.messages
            counters[f"bytes {protocol}"] = sent.sent_bytes
        return counters

    # For the parts of the world

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self._agenda.at(time, action, *arguments)
        self.engine.halt(self._agenda.due)

    def carry(self, sender: PeerId, receiver: PeerId, size_bytes: int, land: Callable[[float], None]) -> None:
        self.engine.carry(sender, receiver, size_bytes, land)

    def on(self, kind: type, handler: Callable[[Life, Any], None]) -> None:
        self._handlers.setdefault(kind, []).append(handler)

    def tell(self, life: Life | None, event: Any) -> None:
        self._publish(Observation(self.engine.now, None if life is None else life.peer, event))
        if life is not None:
            for handler in self._handlers.get(type(event), ()):
                handler(life, event)

    def host(self, life: Life, core: Core, protocol: str) -> None:
        self.engine.add(life.peer, core, protocol=protocol, at=self.now, clock=self.links.clock(life.peer))

    def local_now(self, peer: PeerId) -> float:
        return self.links.clock(peer).local(self.now)

    def command(self, life: Life, protocol: str, order: Order) -> None:
        if self.lives.get(life.peer) is life:
            self.engine.command(life.peer, order, protocol=protocol)

    def pick(self, rng: Random) -> Life | None:
        return self._running.pick(rng)

    def latency_seconds(self, one: PeerId, other: PeerId) -> float:
        return self.links.latency_seconds(one, other)

    # Orders of the script (`sim.worlds.script`)

    def runs(self, number: int) -> bool:
        life = self.lives.get(self.roster.peers[number])
        return life is not None and not life.leaving

    def start(self, number: int) -> None:
        if self.roster.peers[number] in self.lives:
            return
        life = self._begin(number)
        self.lives[life.peer] = life
        clock = self.links.clock(life.peer)
        self.engine.add(life.peer, life.swim, protocol=SWIM, at=self.now, clock=clock)
        self.engine.add(life.peer, life.kademlia, protocol=KADEMLIA, at=self.now, clock=clock)
        self.engine.slow(life.peer, self._slowness.get(number, 1.0))
        remembers = life.serial > 0 and self.scenario.churn.remembers
        self.tell(life, PeerStarted(self.region(life.peer), remembers))
        if self.scenario.start.acquainted and self.now == 0:
            self._joining.watch(life)  # acquainted peers learn of each other once all of them have started
        else:
            self._joining.begin(life, self._met_before.pop(number, ()))
        self._running.add(life)

    def split(self, side_of: Mapping[int, int]) -> None:
        sides: dict[int, list[PeerId]] = {}
        for number, peer in enumerate(self.peers):
            sides.setdefault(side_of.get(number, 0), []).append(peer)
        self.links.heal()
        if len(sides) > 1:
            self.links.split(*sides.values())
            self.tell(None, NetworkSplit(tuple(map(tuple, sides.values()))))
        else:
            self.tell(None, NetworkHealed())
        self._network_changed()

    def _network_changed(self) -> None:
        for part in (self.training, self.served, self.local_runs):
            part.network_changed()

    def deafen(self, number: int, deaf: bool) -> None:
        self.links.deafen(self.peers[number], deaf=deaf)
        self._network_changed()

    def block_datagrams(self, number: int, blocked: bool) -> None:
        self.links.block_datagrams(self.peers[number], blocked=blocked)

    def lose(self, number: int, loss: float) -> None:
        self.links.disturb(self.peers[number], loss)

    def reboot(self, number: int) -> None:
        life = self.lives.get(self.peers[number])
        if self._routed is not None and life is not None:
            self._routed.reboot(life.peer)
            self.tell(life, RouterRebooted())

    def freeze(self, number: int, seconds: float) -> None:
        self.engine.freeze(self.peers[number], self.now, seconds)
        self.tell(self.lives[self.peers[number]], PeerFrozen(seconds))

    def slow(self, number: int, factor: float) -> None:
        self._slowness[number] = factor
        self.engine.slow(self.peers[number], factor)
        life = self.lives.get(self.peers[number])
        if life is not None:
            self.tell(life, PeerSlowed(factor))

    def _begin(self, number: int) -> Life:
        """Start a peer's cores, as `node.services` makes them, and return its new life."""
        life = Life(number, self._serials[number], self.now, self.roster.signer(number))
        now = self.links.clock(life.peer).local(self.now)
        self._serials[number] += 1
        rng = seeded_rng(self.seed, "life", life.peer, life.serial)
        incarnation = int((EPOCH_SECONDS + now) * 1000)
        profile = self.roster.profile(number)
        signer = life.signer
        life.swim = self.cores.swim(
            signer, profile, self._membership, own_rng(rng), incarnation, now, place=self._place
        )
        life.swim.wall_offset = EPOCH_SECONDS
        life.kademlia = self.cores.kademlia(signer, self._discovery, own_rng(rng), profile.addresses)
        life.kademlia.wall_offset = EPOCH_SECONDS
        return life

    def stop(self, number: int, why: str) -> None:
        life = self.lives[self.roster.peers[number]]
        self._running.remove(life)
        if self.scenario.churn.remembers:
            self._met_before[number] = remembered(life)
        if why == "leave":
            life.leaving = True
            goodbye = partial(self._say_goodbye, life, why)
            self.served.leave(life.peer, partial(self.training.leave, life.peer, goodbye))
        else:
            self._end(life, why)

    def _say_goodbye(self, life: Life, why: str) -> None:
        if self.lives.get(life.peer) is life:
            self.command(life, SWIM, _leave)
            self.at(after(self.now, LEAVE_SECONDS), self._end, life, why)

    def _end(self, life: Life, why: str) -> None:
        self.engine.kill(life.peer, self.now)
        del self.lives[life.peer]
        self.tell(life, PeerStopped(why))
        del life.swim, life.kademlia  # a reference to this life must not keep its cores alive
        if life.leaving:
            self._direction.ended(life.number)

    # Events of cores

    def _learnt(self, now: float, peer: PeerId, event: Any) -> None:
        self._publish(Observation(now, peer, event))
        handlers = self._handlers.get(type(event))
        if handlers is not None:
            life = self.lives[peer]
            for handler in handlers:
                handler(life, event)

    def _region_of(self, number: int) -> str:
        return self.region(self.peers[number])

    def _met(self, life: Life, event: MemberUp | MemberChanged) -> None:
        self.engine.command(life.peer, partial(_add, event), protocol=KADEMLIA)

    def _joined(self, life: Life, event: Joined) -> None:
        life.entered = life.entered or event.contacts > 0

    def _lost(self, life: Life, event: MemberDown | MemberLeft) -> None:
        self.engine.command(life.peer, partial(_remove, event), protocol=KADEMLIA)

    def _forgotten(self, life: Life, event: MemberForgotten) -> None:
        self.engine.command(life.peer, partial(_unwatch, event), protocol=KADEMLIA)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect the oldest generation less often. It has millions of objects, of which only those of stopped
    peers become garbage."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], max(thresholds[2], COLLECTIONS_MIN))
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _add(event: MemberUp | MemberChanged, core: Any, now: float) -> Sends:
    sends: Sends = core.add(now, event.peer, event.addresses)
    return sends


def _remove(event: MemberDown | MemberLeft, core: Any, now: float) -> Sends:
    sends: Sends = core.remove(now, event.peer)
    return sends


def _unwatch(event: MemberForgotten, core: Any, now: float) -> Sends:
    del now
    core.unwatch(event.peer)
    return []


def _leave(core: Any, now: float) -> Sends:
    sends: Sends = core.leave(now)
    return sends
