"""The services of a world of cores: real doors, providers and upkeep of all peers, and stages that hash.

Peers of a service's pool constantly request answers, each through its own door core (the door is the node
that asks a service). The holders of stages come and go with the scenario's churn
(`sim.worlds.served_stages`). The next token is a hash of all tokens before it. A stage can compute it only if
it has all of them, so each finished answer is compared with the true one (`sim.checkers.answers`).

Not here: the DHT (a door asks the pool's peers that its membership core considers alive), manifests, slots
and tensors. A broken stream is not reported, as in a power cut; only silence reveals it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random
from typing import Any

import numpy as np
from blake3 import blake3

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.member import Status
from partition.serve.door import Door, GenerationOver, GenerationWish, RouteTaken, RouteWanted, Sampled, Shape
from partition.serve.messages import SERVE_PROTOCOL, Alive, Carried, Roll, ServiceRow, UnitWork
from partition.serve.messages import LeaveSession as Leave
from partition.serve.messages import OpenSession as Open
from partition.serve.messages import RestSession as Rest
from partition.serve.provider import SessionProvider
from partition.serve.routes import StageReplica
from partition.serve.sampling import Sampling
from sim.events import AnswerEnded, PeerStarted, PeerStopped
from sim.network.instants import after, instant
from sim.scenario.model import ServedModel
from sim.seeds import draw, seeded_rng
from sim.worlds.life import Life
from sim.worlds.served_stages import PlayedStages
from sim.worlds.streams import Streams
from sim.worlds.training import RunsGround, TrainingRuns

VOCABULARY = 1 << 15
MESSAGE_BYTES = 200
"""The approximate size of a message without its tensors."""
ASK_SECONDS = 1.0
AGAIN_SECONDS = 1.0
KEEP_SECONDS = 5.0
"""Interval between two checks whether the service still has a member, as its publisher makes them."""


def token_after(tokens: Sequence[int]) -> int:
    """Return the true next token."""
    return int.from_bytes(blake3(np.array(tokens, np.uint32).tobytes()).digest(4)) % VOCABULARY


class ServedModels:
    """All services of a scenario in one world."""

    def __init__(self, ground: RunsGround, runs: TrainingRuns) -> None:
        self.counters: Counter[str] = Counter()
        peers = ground.peers
        self._services = [
            _Service(self, ground, runs, service, number, tuple(peers[: service.members]))
            for number, service in enumerate(ground.scenario.services)
        ]
        if self._services:
            ground.on(PeerStarted, self._started)
            ground.on(PeerStopped, self._stopped)

    def network_changed(self) -> None:
        """React to a change in which peers reach each other."""
        for service in self._services:
            service.streams.changed()

    def leave(self, peer: PeerId, then: Callable[[], None]) -> None:
        """Make others take over the stages that a peer holds, service by service."""
        for service in self._services:
            then = partial(service.leave, peer, then)
        then()

    def _started(self, life: Life, _event: PeerStarted) -> None:
        for service in self._services:
            service.started(life.peer)

    def _stopped(self, life: Life, _event: PeerStopped) -> None:
        for service in self._services:
            service.stopped(life.peer)


class StreamLines:
    """The environment for streams of one protocol: that of the runs' streams, with separate counters."""

    def __init__(self, runs: TrainingRuns, ground: RunsGround, counters: Counter[str], protocol: str) -> None:
        self._ground, self._counters, self._protocol = ground, counters, protocol
        self.at, self.connected, self.thaws = runs.at, runs.connected, runs.thaws

    @property
    def now(self) -> float:
        return self._ground.now

    def carry(self, sender: PeerId, receiver: PeerId, size_bytes: int, land: Callable[[float], None]) -> None:
        self._counters[f"messages {self._protocol}"] += 1
        self._counters[f"bytes {self._protocol}"] += size_bytes
        self._ground.carry(sender, receiver, size_bytes, land)


@dataclass(eq=False)
class _Asked:
    """An answer that a peer requests."""

    wish: GenerationWish
    began: float
    tokens: list[int] = field(default_factory=list)
    newest: float = 0.0
    first_seconds: float = 0.0
    pause_seconds: float = 0.0
    moves: int = 0


class _Service:
    """One service."""

    def __init__(
        self,
        models: ServedModels,
        ground: RunsGround,
        runs: TrainingRuns,
        service: ServedModel,
        number: int,
        pool: tuple[PeerId, ...],
    ) -> None:
        self.ground, self.runs, self.service, self.pool = ground, runs, service, pool
        self.id = draw(ground.seed, "service", number)[:32].ljust(32, b"\0")
        self.number = number
        self.nodes: dict[PeerId, _Node] = {}
        self.counters = models.counters
        self.lines = StreamLines(runs, ground, models.counters, SERVE_PROTOCOL)
        self.streams = Streams(self.lines, ground.seed, self._deliver, self._reconnected)
        self._rng = seeded_rng(ground.seed, "answers", number)
        self._heads = seeded_rng(ground.seed, "beginnings", number)
        self._head = tuple(self._heads.randrange(VOCABULARY) for _ in range(2 * service.prompt))
        """The tokens with which half of the prompts begin."""
        ground.at(instant(service.at_seconds), self._begin)

    def _begin(self) -> None:
        """Assign the stages for the first time; retry later if too few peers are up."""
        if self._place():
            self.ground.at(after(self.ground.now, KEEP_SECONDS), self._keep)
            self._plan_answer()
        else:
            self.ground.at(after(self.ground.now, AGAIN_SECONDS), self._begin)

    def _keep(self) -> None:
        """Assign the stages again if no member is left."""
        if not any(node.stages.held for node in self.nodes.values()):
            self._place()
        self.ground.at(after(self.ground.now, KEEP_SECONDS), self._keep)

    def _place(self) -> bool:
        """Make peers hold the stages; return whether enough peers are up."""
        wanted = self.service.stages * self.service.replicas
        up = [peer for peer in self.pool if peer in self.nodes]
        if len(up) < wanted:
            return False
        # From the end of the pool, because the first peers never leave.
        rows = [
            ServiceRow(peer, place % self.service.stages, False) for place, peer in enumerate(up[-wanted:])
        ]
        for row in rows:
            self.nodes[PeerId(row.peer)].stages.take(PeerId(row.peer), row.stage, rows)
        return True

    def _plan_answer(self) -> None:
        wait = self._rng.expovariate(self.service.answers_per_second)
        self.ground.at(after(self.ground.now, wait), self._ask)

    def _ask(self) -> None:
        self._plan_answer()
        up = [peer for peer in self.pool if peer in self.nodes]
        length = self._rng.randint(1, 2 * self.service.prompt)
        prompt = tuple(self._rng.randrange(VOCABULARY) for _ in range(length))
        shared = self._heads.choice((0, 0, length // 2, length - 1))
        prompt = self._head[:shared] + prompt[shared:]
        if up:
            self.nodes[up[self._rng.randrange(len(up))]].ask(prompt)

    def started(self, peer: PeerId) -> None:
        if peer in self.pool:
            self.nodes[peer] = _Node(self, peer, self.ground.lives[peer].serial)
            self.streams.changed()

    def stopped(self, peer: PeerId) -> None:
        self.nodes.pop(peer, None)
        self.streams.stopped(peer)

    def leave(self, peer: PeerId, then: Callable[[], None]) -> None:
        """Make others take over the stages that a peer holds. `then` is called once they have, or once the
        peer is gone."""
        node = self.nodes.get(peer)
        if node is None:
            then()
        else:
            node.stages.leave(then)

    def _deliver(self, sender: PeerId, receiver: PeerId, message: Any) -> None:
        node = self.nodes.get(receiver)
        if node is not None:
            node.receive(sender, message)

    def _reconnected(self, sender: PeerId, receiver: PeerId) -> None:
        node = self.nodes.get(sender)
        if node is not None:
            node.lost(receiver)


class _Node:
    """One life of one peer in a service: its door, its provider, and its stages."""

    def __init__(self, service: _Service, peer: PeerId, serial: int) -> None:
        self.peer = peer
        self._service = service
        self._ground = service.ground
        self._rng: Random = seeded_rng(service.ground.seed, "door", service.number, peer, serial)
        self._door = Door(peer, self._rng.randbytes)
        self.provider = SessionProvider()
        self.stages = PlayedStages(self, service.id, service.service, token_after)
        self._asked: dict[int, _Asked] = {}
        self._looks = False
        self._wake_at = inf

    # Events and messages of its cores

    @property
    def now(self) -> float:
        return self._ground.now

    @property
    def is_over(self) -> bool:
        """Whether this life has ended."""
        return self._service.nodes.get(self.peer) is not self

    @property
    def slowness(self) -> float:
        return self._service.runs.slowness(self.peer)

    def count(self, what: str) -> None:
        """Increment a counter of this service."""
        self._service.counters[what] += 1

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Act at this time, at the thaw if the peer is frozen, or never if it is gone."""
        self._ground.at(when, self._when_awake, action)

    def _when_awake(self, action: Callable[[], None]) -> None:
        if self.is_over:
            return
        thaws = self._service.lines.thaws(self.peer)
        if thaws > self._ground.now:
            self._ground.at(thaws, self._when_awake, action)
        else:
            action()

    def turn(self, sends: Sequence[tuple[PeerId, Any]]) -> None:
        for receiver, message in sends:
            size = MESSAGE_BYTES + (message.size_bytes if isinstance(message, Carried) else 0)
            self._service.streams.send(self.peer, receiver, message, size)
        self._do_what_they_want()
        deadlines = self._door.deadline, self.provider.deadline, self.stages.deadline
        due = max(min(deadlines), self._ground.now)
        if due < self._wake_at and due < inf:
            self._wake_at = instant(due)
            self.at(self._wake_at, partial(self._wake, self._wake_at))

    def _wake(self, planned: float) -> None:
        if planned != self._wake_at:
            return  # an earlier wake has replaced this one
        self._wake_at, now = inf, self._ground.now
        self.turn([*self.provider.wake(now), *self._door.wake(now), *self.stages.wake(now)])

    def _do_what_they_want(self) -> None:
        for event in _taken(self.provider):
            self.stages.do(event)
        self.stages.act()
        for event in _taken(self._door):
            match event:
                case Sampled():
                    self._note(event)
                case RouteTaken():
                    asked = self._asked.get(event.generation)
                    if asked is not None and event.lost:
                        asked.moves += 1
                case RouteWanted():
                    self.look()
                case GenerationOver():
                    self._end(event)

    def receive(self, sender: PeerId, message: Any) -> None:
        """Handle a message. A message that no honest peer sends is a bug."""
        now, provider = self._ground.now, self.provider
        sends: list[tuple[PeerId, Any]] = []
        match message:
            case Carried(message=UnitWork()):
                sends = provider.receive(now, sender, message)
            case Open() | Leave() | Rest():
                try:
                    sends = provider.receive(now, sender, message)
                except RemoteProtocolError:  # a stream that waited has already reopened it
                    return
            case Roll():
                sends = self.stages.receive(now, sender, message)
            case Alive():
                sends = [*provider.receive(now, sender, message), *self._door.receive(now, sender, message)]
            case _:
                sends = self._door.receive(now, sender, message)
        self.turn(sends)

    def lost(self, peer: PeerId) -> None:
        """Handle a stream that broke and was reopened."""
        now = self._ground.now
        self.provider.lost(peer)
        self.turn([*self._door.lost(now, peer), *self.stages.lost(now, peer)])

    # Its stages

    def ask_to_host(
        self, peer: PeerId, stage: int, rows: Sequence[ServiceRow], answer: Callable[[bool], None]
    ) -> None:
        """Ask a peer, possibly this one, to hold a stage."""
        if peer == self.peer:
            answer(self.stages.take(peer, stage, rows))
            return
        put = partial(self._put_host, peer, stage, rows)
        self._service.streams.ask(
            self.peer, peer, MESSAGE_BYTES, ASK_SECONDS, put, lambda reply: answer(bool(reply))
        )

    def _put_host(
        self, peer: PeerId, stage: int, rows: Sequence[ServiceRow], answer: Callable[[Any], None]
    ) -> None:
        node = self._service.nodes.get(peer)
        answer(None if node is None else node.stages.take(self.peer, stage, rows))

    # Its door

    def ask(self, prompt: tuple[int, ...]) -> None:
        """Request an answer, once the answering peers are known."""
        self.look(partial(self._begin, prompt))

    def _begin(self, prompt: tuple[int, ...]) -> None:
        service, now = self._service.service, self._ground.now
        shape = Shape(self._service.id, service.stages, VOCABULARY, 4 * service.prompt + service.tokens)
        wish = GenerationWish(prompt, service.tokens, Sampling())
        number, sends = self._door.begin(now, shape, wish)
        self._asked[number] = _Asked(wish, now, newest=now)
        self.turn(sends)

    def look(self, then: Callable[[], None] | None = None) -> None:
        """Find out which live peers of the pool answer."""
        if self._looks and then is None:
            return
        self._looks = True
        peers = self.alive()
        routes: dict[int, list[StageReplica]] = {}
        left = len(peers)

        def heard(peer: PeerId, reply: Any) -> None:
            nonlocal left
            left -= 1
            seconds = 2 * self._ground.latency_seconds(self.peer, peer) if peer != self.peer else 0.0
            for stage, is_ready, sessions in reply or ():
                if is_ready:
                    routes.setdefault(stage, []).append(StageReplica(peer, sessions, seconds))
            if left or self.is_over:
                return
            self._looks = False
            sends = self._door.learn(self._ground.now, self._service.id, routes)
            self.turn(sends)
            if then is not None:
                then()

        for peer in peers:
            put = partial(self._put_look, peer)
            self._service.streams.ask(self.peer, peer, MESSAGE_BYTES, ASK_SECONDS, put, partial(heard, peer))

    def _put_look(self, peer: PeerId, answer: Callable[[Any], None]) -> None:
        node = self._service.nodes.get(peer)
        answer(None if node is None else node.stages.listing())

    def alive(self) -> list[PeerId]:
        statuses: Mapping[PeerId, Status] = self._ground.lives[self.peer].swim.statuses
        return [
            peer
            for peer in self._service.pool
            if peer == self.peer or statuses.get(peer) in (Status.ALIVE, Status.SUSPECT)
        ]

    def _note(self, event: Sampled) -> None:
        asked, now = self._asked[event.generation], self._ground.now
        if asked.tokens:
            asked.pause_seconds = max(asked.pause_seconds, now - asked.newest)
        else:
            asked.first_seconds = now - asked.began
        asked.newest = now
        asked.tokens.append(event.token)

    def _end(self, event: GenerationOver) -> None:
        asked = self._asked.pop(event.generation)
        tokens = list(asked.wish.prompt)
        for token in asked.tokens:
            is_right = token == token_after(tokens)
            tokens.append(token)
            if not is_right:
                break
        else:
            is_right = True
        self._ground.tell(
            self._ground.lives[self.peer],
            AnswerEnded(
                self._service.id,
                event.reason,
                len(asked.tokens),
                is_right,
                asked.moves,
                asked.first_seconds,
                asked.pause_seconds,
                self._ground.now - asked.began,
            ),
        )


def _taken(core: Any) -> list[Any]:
    events = list(core.events)
    core.events.clear()  # in place, because the core's parts share the list
    return events
