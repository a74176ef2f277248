"""A world of bare cores: up to 10,000 peers, each with its SWIM and Kademlia core, on the heap engine.

The two cores of a peer are wired to each other as `node.services` and `node.runtime` wire them: whom SWIM
finds Kademlia may meet, whom it loses Kademlia drops; a peer joins both through whoever answered it, tries
again while it is alone, and says goodbye when it leaves. Every event is published once, through `sim.watch`.

Not here: addresses that must be learnt before a message can be sent (a peer is reached by its id), streams,
torch, disks. Those are in `sim.worlds.stack`.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import dht.messages
import dht.settings
import gossip.messages
from crypto.contact import Address
from crypto.identity import PeerId
from dht.messages import PROTOCOL as KADEMLIA
from gossip.member import MemberChanged, MemberDown, MemberLeft, MemberUp, Status
from gossip.settings import PRESETS
from gossip.swim import PROTOCOL as SWIM
from node.services.driver import Sends
from node.services.joining import RETRY_SECONDS_MAX, RETRY_SECONDS_MIN
from node.services.membership import LEAVE_SECONDS
from sim.engine import Engine, Order, Wire
from sim.happenings import PeerStarted, PeerStopped
from sim.network.instants import after, ticks
from sim.network.links import LinkModel, Links
from sim.scenario import Scenario
from sim.seams import EPOCH_SECONDS, HANDSHAKE_TRIPS
from sim.seeds import seeded_rng
from sim.watch import Observed
from sim.worlds.agenda import Agenda
from sim.worlds.life import Life
from sim.worlds.records import RecordsWork
from sim.worlds.replaceable import Cores
from sim.worlds.roster import Roster

OURS = Cores()
WIRES = {
    SWIM: Wire(gossip.messages.Message, gossip.messages.MESSAGE_BYTES_MAX),
    KADEMLIA: Wire(dht.messages.Message, dht.messages.MESSAGE_BYTES_MAX),
}


class CoresWorld:
    """Plays `scenario` from `seed`; everything that happens goes to `publish`. A `sim.watch.World`."""

    def __init__(
        self, scenario: Scenario, seed: int, publish: Callable[[Observed], None], *, cores: Cores = OURS
    ) -> None:
        self.scenario = scenario
        self.seed = seed
        self.cores = cores
        self.links = _links(scenario, seed)
        self.roster = Roster(scenario, seed, lambda _: "")
        wires = WIRES if scenario.encoded else None
        self.engine = Engine(self.links, wires=wires, publish=self._learnt)
        self.lives: dict[PeerId, Life] = {}
        self._publish = publish
        self._agenda = Agenda()
        self._handlers: dict[type, list[Callable[[Life, Any], None]]] = {}
        self._running: list[Life] = []
        self._serials = array("L", bytes(array("L").itemsize * scenario.nodes))
        self._membership = PRESETS[scenario.membership.preset]
        self._discovery = dht.settings.Settings(republish_seconds=scenario.records.republish_seconds)
        for found in (MemberUp, MemberChanged):
            self.on(found, self._met)
        for lost in (MemberDown, MemberLeft):
            self.on(lost, self._lost)
        if scenario.records.enabled:
            RecordsWork(self)

    def play(self, on_sample: Callable[[], None]) -> None:
        """The whole scenario; `on_sample` is called every `sample_seconds`."""
        for number in range(self.scenario.nodes):
            share = seeded_rng(self.seed, "start", number).random() if number else 0.0
            self.at(self.scenario.start.spread_seconds * share, self._start, number, False)
        self.at(self.scenario.sample_seconds, self._sample, on_sample, 1)
        while (due := self._agenda.due) <= self.scenario.seconds:
            self.engine.run(due)
            self._agenda.do_first()
        self.engine.run(self.scenario.seconds)

    def _sample(self, on_sample: Callable[[], None], count: int) -> None:
        self.at((count + 1) * self.scenario.sample_seconds, self._sample, on_sample, count + 1)
        on_sample()

    # What watchers may look at.

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

    def region(self, peer: PeerId) -> str:  # noqa: ARG002
        return ""

    def reaches(self, one: PeerId, other: PeerId) -> bool:  # noqa: ARG002
        return True

    def in_scope(self, one: PeerId, other: PeerId) -> bool:  # noqa: ARG002
        return True

    def believes(self, peer: PeerId) -> Mapping[PeerId, Status]:
        return self.lives[peer].swim.statuses

    def sizes(self, peer: PeerId) -> Mapping[str, tuple[int, int]]:
        return {"members": (len(self.lives[peer].swim.statuses), self._membership.members_max)}

    def counters(self) -> Mapping[str, int]:
        return self.engine.counters

    # What its parts may do.

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self._agenda.at(time, action, *arguments)

    def on(self, kind: type, handler: Callable[[Life, Any], None]) -> None:
        self._handlers.setdefault(kind, []).append(handler)

    def tell(self, life: Life | None, event: Any) -> None:
        self._publish(Observed(self.engine.now, None if life is None else life.peer, event))
        if life is not None:
            for handler in self._handlers.get(type(event), ()):
                handler(life, event)

    def command(self, life: Life, protocol: str, order: Order) -> None:
        if self.lives.get(life.peer) is life:
            self.engine.command(life.peer, order, protocol=protocol)

    def pick(self, rng: Random) -> Life | None:
        return self._running[rng.randrange(len(self._running))] if self._running else None

    # Lives.

    def _start(self, number: int, remembers: bool) -> None:
        now = self.engine.now
        serial = self._serials[number]
        self._serials[number] += 1
        signer = self.roster.signer(number)
        life = Life(number, serial, now, signer)
        # As a node does: one generator for the peer, from which each service has its own.
        rng = seeded_rng(self.seed, "life", life.peer, serial)
        choices = [own_rng(rng) for _ in range(2)]
        incarnation = int((EPOCH_SECONDS + now) * 1000)
        profile = self.roster.profile(number)
        life.swim = self.cores.swim(signer, profile, self._membership, choices[0], incarnation, now)
        addresses: tuple[Address, ...] = profile.addresses
        life.kademlia = self.cores.kademlia(signer, self._discovery, choices[1], addresses)
        life.kademlia.wall_offset = EPOCH_SECONDS
        self.engine.add(life.peer, life.swim, protocol=SWIM, at=now)
        self.engine.add(life.peer, life.kademlia, protocol=KADEMLIA, at=now)
        self.lives[life.peer] = life
        self.tell(life, PeerStarted(self.region(life.peer), remembers))
        self._try_to_join(life, RETRY_SECONDS_MIN)
        life.place = len(self._running)
        self._running.append(life)

    def _stop(self, life: Life, why: str) -> None:
        """A crash, or the beginning of a leave."""
        self._run_no_more(life)
        if why == "leave":
            self.command(life, SWIM, lambda core, now: core.leave(now))
            life.leaving = True
            self.at(after(self.now, LEAVE_SECONDS), self._end, life, why)
        else:
            self._end(life, why)

    def _end(self, life: Life, why: str) -> None:
        self.engine.kill(life.peer, self.now)
        del self.lives[life.peer]
        self.tell(life, PeerStopped(why))

    def _run_no_more(self, life: Life) -> None:
        last = self._running.pop()
        if last is not life:
            self._running[life.place] = last
            last.place = life.place

    # Joining, as node.services.joining does it.

    def _try_to_join(self, life: Life, pause_seconds: float) -> None:
        through = self.pick(seeded_rng(self.seed, "through", life.peer, ticks(self.now)))
        seeds = () if through is None else (through.peer,)
        handshake = HANDSHAKE_TRIPS * max(
            (self.links.latency_seconds(life.peer, seed) for seed in seeds), default=0.0
        )
        self.at(after(self.now, handshake), self._tried_to_join, life, seeds, pause_seconds)

    def _tried_to_join(self, life: Life, seeds: tuple[PeerId, ...], pause_seconds: float) -> None:
        answered = [seed for seed in seeds if self.is_up(seed) and self.reaches(life.peer, seed)]
        if answered:
            self.command(life, SWIM, lambda core, now: core.join(now, answered))
            self.command(life, KADEMLIA, lambda core, now: core.join(now, answered))
        pause_after = min(RETRY_SECONDS_MAX, 2 * pause_seconds)
        self.at(self.now + pause_seconds, self._look_whether_alone, life, pause_after)

    def _look_whether_alone(self, life: Life, pause_seconds: float) -> None:
        if self.lives.get(life.peer) is not life or life.leaving:
            return
        if _is_alone(life):
            self._try_to_join(life, pause_seconds)
        else:
            self.at(self.now + RETRY_SECONDS_MAX, self._look_whether_alone, life, RETRY_SECONDS_MIN)

    # What cores learn.

    def _learnt(self, now: float, peer: PeerId, event: Any) -> None:
        self._publish(Observed(now, peer, event))
        handlers = self._handlers.get(type(event))
        if handlers is not None:
            life = self.lives[peer]
            for handler in handlers:
                handler(life, event)

    def _met(self, life: Life, event: MemberUp | MemberChanged) -> None:
        self.engine.command(life.peer, partial(_add, event), protocol=KADEMLIA)

    def _lost(self, life: Life, event: MemberDown | MemberLeft) -> None:
        self.engine.command(life.peer, partial(_remove, event), protocol=KADEMLIA)


def own_rng(rng: Random) -> Random:
    """The next generator of one part of a peer that has `rng`."""
    return Random(rng.getrandbits(64))  # noqa: S311 - choices, not keys


def _add(event: MemberUp | MemberChanged, core: Any, now: float) -> Sends:
    sends: Sends = core.add(now, event.peer, event.addresses)
    return sends


def _remove(event: MemberDown | MemberLeft, core: Any, now: float) -> Sends:
    sends: Sends = core.remove(now, event.peer)
    return sends


def _is_alone(life: Life) -> bool:
    live = 0
    for status in life.swim.statuses.values():
        live += status in (Status.ALIVE, Status.SUSPECT)
        if live > 1:
            return False
    return True


def _links(scenario: Scenario, seed: int) -> Links:
    model = scenario.network
    return Links(
        LinkModel(model.nearest_seconds, model.farthest_seconds, model.jitter_seconds, model.loss), seed
    )
