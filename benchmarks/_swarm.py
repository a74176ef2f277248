"""Swarms of bare SWIM cores on the simulator's engine, for `benchmarks/swim.py` and for its small forms in
the tests.

Members know each other from the start. Signatures are keyed hashes (`sim.seeds`), which cost a fiftieth of
Ed25519. Message sizes are those of the real codec plus a real datagram's envelope.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

from crypto.contact import Address
from crypto.encoding import encode
from crypto.facts import Fact
from crypto.identity import PeerId
from dht.keys import KEY_BITS, node_number
from gossip.member import MemberDown, MemberForgotten, MemberLeft, MemberSuspected, MemberUp, Profile, Status
from gossip.messages import read_body
from gossip.settings import SwimSettings
from gossip.swim import PROTOCOL, Swim
from node.services.driver import Sends
from sim.engine import Engine
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seeds import HashSigner, seeded_peer, seeded_rng

LINKS = NetworkModel(nearest_seconds=0.01, farthest_seconds=0.08, jitter_seconds=0.01)
"""One-way latencies; a round trip takes 20 to 180 ms."""
LOSSY = NetworkModel(nearest_seconds=0.01, farthest_seconds=0.08, jitter_seconds=0.01, loss=0.1)
METADATA = bytes(60)
"""Metadata of about the size of a node's capacity."""


class CountingCore:
    """A core whose sent messages and facts are counted by kind; slow, for analysing traffic."""

    def __init__(self, core: Swim, counts: Counter[str]) -> None:
        self.core = core
        self.counts = counts
        self.events = core.events

    @property
    def deadline(self) -> float:
        return self.core.deadline

    def receive(self, now: float, sender: PeerId, message: Any) -> Sends:
        return self._count(self.core.receive(now, sender, message))

    def wake(self, now: float) -> Sends:
        return self._count(self.core.wake(now))

    def _count(self, sends: Sends) -> Sends:
        for _, message in sends:
            kind = type(message).__name__
            self.counts[f"messages {kind}"] += 1
            facts = getattr(message, "facts", ())
            size = len(encode(message))
            self.counts[f"bytes {kind}"] += size
            for fact in facts:
                what = type(read_body(fact)).__name__
                self.counts[f"facts {kind} {what}"] += 1
                self.counts[f"bytes {kind} {what}"] += len(encode(fact))
        return sends


class BlockedCore:
    """A core whose messages wait in both directions while it is blocked, but whose timers run on. This is the
    slow member of Lifeguard's experiments (Dadgar et al. 2018, section V), which accuses others because it
    cannot hear them."""

    def __init__(self, core: Swim) -> None:
        self.core = core
        self.events = core.events
        self._until = -inf
        self._in: list[tuple[PeerId, Any]] = []
        self._out: list[Any] = []

    @property
    def deadline(self) -> float:
        return min(self.core.deadline, self._until) if self._in or self._out else self.core.deadline

    def block(self, until: float) -> None:
        """Hold messages back until the time `until`."""
        self._until = until

    def receive(self, now: float, sender: PeerId, message: Any) -> Sends:
        if now < self._until:
            self._in.append((sender, message))
            return []
        return [*self._release(now), *self.core.receive(now, sender, message)]

    def wake(self, now: float) -> Sends:
        sends = self._release(now) if now >= self._until else []
        if self.core.deadline <= now:
            sends += self.core.wake(now)
        if now < self._until:
            self._out += sends
            return []
        return sends

    def _release(self, now: float) -> Sends:
        sends, self._out = self._out, []
        waiting, self._in = self._in, []
        for sender, message in waiting:
            sends += self.core.receive(now, sender, message)
        return sends


@dataclass
class Swarm:
    """A swarm of `count` members. Their events are appended to `events` as (time, observer, event). `scoped`:
    each member lists only its neighbourhood. `blockable`: `block` can hold a member's messages back."""

    count: int
    settings: SwimSettings
    network: NetworkModel
    seed: int
    counted: bool = False
    scoped: bool = False
    blockable: bool = False
    make: Callable[..., Swim] = Swim
    events: list[tuple[float, PeerId, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.links = SimLinks(self.network, self.seed)
        self.engine = Engine(self.links, publish=self._learnt, count_bytes=True)
        self.peers = [seeded_peer(self.seed, number) for number in range(self.count)]
        self.numbers = {peer: number for number, peer in enumerate(self.peers)}
        self.rng = Random(self.seed)
        self.cores: dict[int, Swim] = {}
        self.lives: Counter[int] = Counter()
        self.blocked: dict[int, BlockedCore] = {}
        for number in range(self.count):
            self.start(number, incarnation=1)
        facts = [core._beliefs.me.said.fact for core in self.cores.values()]
        around = self._neighbourhoods(facts) if self.scoped else None
        for number, core in self.cores.items():
            if around is None:
                core.acquaint(0.0, self.peers[number - 1], facts)
            else:
                core.scope.depth, told = around[number]
                core.acquaint(
                    0.0, next(PeerId(fact.author) for fact in told if fact.author != core.peer), told
                )
            core._beliefs.queue.drop(core.peer)
            core.events.clear()

    def _neighbourhoods(self, facts: list[Fact]) -> dict[int, tuple[int, list[Fact]]]:
        """Return the depth of each member's scope, and the facts of the members in it."""
        sorted_facts = sorted(facts, key=lambda fact: node_number(PeerId(fact.author)))
        keys = [node_number(PeerId(fact.author)) for fact in sorted_facts]
        found = {}
        for key, fact in zip(keys, sorted_facts, strict=True):
            depth, first, end = 0, 0, len(keys)
            while end - first > self.settings.scope_members_max:
                depth += 1
                low = key >> KEY_BITS - depth << KEY_BITS - depth
                first, end = bisect_left(keys, low), bisect_left(keys, low + (1 << KEY_BITS - depth))
            found[self.numbers[PeerId(fact.author)]] = depth, sorted_facts[first:end]
        return found

    @property
    def now(self) -> float:
        return self.engine.now

    def profile(self, number: int) -> Profile:
        host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        return Profile(f"node-{number}", (Address("ip4", host, 9747),), METADATA)

    def start(self, number: int, incarnation: int, join: Iterable[int] = ()) -> Swim:
        """Start a member, which knows the members `join`."""
        peer = self.peers[number]
        self.lives[number] += 1
        rng = seeded_rng(self.seed, "life", peer, self.lives[number])
        signer = HashSigner(peer, "swarm", self.seed)
        place = node_number if self.scoped else None
        core = self.make(signer, self.profile(number), self.settings, rng, incarnation, self.now, place=place)
        self.cores[number] = core
        driven: Any = CountingCore(core, self.counts) if self.counted else core
        if self.blockable:
            driven = self.blocked[number] = BlockedCore(core)
        self.engine.add(peer, driven, protocol=PROTOCOL, at=self.now)
        seeds = [self.peers[other] for other in join]
        if seeds:
            self.engine.call(self.now, peer, lambda _, now: core.join(now, seeds), protocol=PROTOCOL)
        return core

    def crash(self, number: int) -> None:
        """Crash a member without a goodbye."""
        self.engine.kill(self.peers[number], self.now)
        del self.cores[number]

    def block(self, number: int, until: float) -> None:
        """Hold back all messages to and from a member."""

        def block(core: Any, _now: float) -> Sends:
            core.block(until)
            return []

        self.engine.call(self.now, self.peers[number], block, protocol=PROTOCOL)

    def run(self, seconds: float) -> None:
        self.engine.run(self.engine.now + seconds)

    def sent_bytes(self, peers: Iterable[PeerId] | None = None) -> int:
        """Return the bytes sent so far by these members, or by all."""
        if peers is None:
            return sum(sent.sent_bytes for sent in self.engine.traffic().values())
        return sum(self.engine.traffic(peer)[PROTOCOL].sent_bytes for peer in peers)

    def rate(self, before_bytes: int, seconds: float) -> float:
        """Return the bytes per second and member since the total was `before_bytes`."""
        return (self.sent_bytes() - before_bytes) / seconds / self.count

    def holds(self, observer: int, subject: int) -> Status | None:
        return self.cores[observer].status(self.peers[subject])

    def of(self, kind: type, since: float = 0.0) -> list[tuple[float, PeerId, Any]]:
        return [row for row in self.events if type(row[2]) is kind and row[0] >= since]

    def false_deaths(self, since: float = 0.0) -> int:
        """Return the number of verdicts of death on running members by running members."""
        return sum(self.numbers[event.peer] in self.cores for _, _, event in self.of(MemberDown, since))

    def _learnt(self, now: float, peer: PeerId, event: Any) -> None:
        if isinstance(event, MemberDown | MemberSuspected | MemberUp | MemberLeft | MemberForgotten):
            self.events.append((now, peer, event))
