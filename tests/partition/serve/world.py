"""Doors and providers that exchange messages through queues, and stages that compute a function of the
tokens."""

from collections import deque
from random import Random

import numpy as np
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.identity import Identity, PeerId
from partition.codecs.base import Array
from partition.codecs.codec import Typed, typed
from partition.serve.door import (
    Door,
    GenerationOver,
    GenerationWish,
    HiddenRead,
    Misbehaved,
    RouteTaken,
    RouteWanted,
    Sampled,
    Shape,
    StageReplica,
)
from partition.serve.messages import MESSAGE_BYTES_MAX, Answer, Carried, Message, Sends
from partition.serve.provider import (
    ComputeBatch,
    ForgetSession,
    ForkSession,
    SessionProvider,
)
from partition.serve.sampling import LogitRow, Sampling, choose, log_sum
from partition.serve.selection import best_logits

VOCABULARY = 50
CONTEXT = 600
STAGES = 2
SERVICE = bytes(32)
SHAPE = Shape(SERVICE, STAGES, VOCABULARY, CONTEXT)
DOORS = tuple(Identity(bytes([100 + number]) * 32).peer for number in range(2))
PROVIDERS = {
    stage: tuple(Identity(bytes([1 + 10 * stage + number]) * 32).peer for number in range(2))
    for stage in range(STAGES)
}


def logits_after(tokens: tuple[int, ...]) -> Array:
    """Return the model's output after these tokens."""
    seed = int.from_bytes(blake3(bytes(tokens)).digest(4))
    return np.random.default_rng(seed).normal(size=VOCABULARY).astype(np.float32)


def reference(wish: GenerationWish) -> list[int]:
    """Return the tokens of an undisturbed generation."""
    tokens = list(wish.prompt)
    while len(tokens) < min(len(wish.prompt) + wish.tokens_max, CONTEXT):
        token = choose(LogitRow(logits_after(tuple(tokens))), wish.sampling, len(tokens))
        if token in wish.stops:
            break
        tokens.append(token)
    return tokens[len(wish.prompt) :]


class StageOfTokens:
    """A stage that keeps the tokens of each session, like keys and values. It refuses units that need missing
    tokens.
    """

    def __init__(self, is_last: bool) -> None:
        self.kept: dict[bytes, list[int]] = {}
        self.computed = 0
        self.is_last = is_last

    def obey(self, event: ForkSession | ForgetSession) -> None:
        if isinstance(event, ForgetSession):
            self.kept.pop(event.session, None)
        elif event.tokens <= len(self.kept.get(event.base, ())):
            self.kept[event.session] = self.kept[event.base][: event.tokens]

    def compute(self, asked: ComputeBatch) -> list[tuple[Answer | None, tuple[Typed, ...]]]:
        answers: list[tuple[Answer | None, tuple[Typed, ...]]] = []
        assert len({unit.session for unit in asked.units}) == len(asked.units)
        for unit in asked.units:
            work, (_, ids) = unit.work, unit.arrays[0]
            self.computed += work.tokens
            kept = self.kept.setdefault(unit.session, [])
            assert work.position <= len(kept), "the stage lacks earlier tokens of this unit"
            assert len(ids) == work.tokens
            del kept[work.position :]
            kept += ids.tolist()
            if not self.is_last:
                answers.append((None, (("int64", ids),)))
            elif work.is_hidden:
                rows = [logits_after(tuple(kept[: work.position + n + 1])) for n in range(work.tokens)]
                answers.append((Answer(work.session, work.number), (typed(np.stack(rows)),)))
            elif not work.wanted:
                answers.append((Answer(work.session, work.number), ()))
            else:
                row = logits_after(tuple(kept))
                found = best_logits(row, work.best) if work.best else (row,)
                arrays = tuple(typed(array) for array in found)
                answers.append((Answer(work.session, work.number, work.best, (log_sum(row),)), arrays))
        return answers


class World:
    """All doors and providers. Only calls advance the world; each stream keeps the order of its messages."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 100.0
        self.routes: list[RouteTaken] = []
        self.bits: dict[PeerId, bytes] = {}
        """Bit classes of providers that differ from the rest."""
        self.rng = Random(seed)
        self.doors = {peer: Door(peer, self.rng.randbytes) for peer in DOORS}
        self.providers: dict[PeerId, SessionProvider] = {}
        self.stages: dict[PeerId, StageOfTokens] = {}
        self.stopgaps: dict[tuple[PeerId, int], StageOfTokens] = {}
        """Stages that a provider holds in addition to its own."""
        self.computing: deque[tuple[PeerId, ComputeBatch]] = deque()
        self.later: dict[tuple[PeerId, int], list[ForkSession | ForgetSession]] = {}
        """The actions of a stage that follow once it has computed."""
        self.queues: dict[tuple[PeerId, PeerId], deque[Message | Carried]] = {}
        self.tokens: dict[tuple[PeerId, int], list[int]] = {}
        self.finished: dict[tuple[PeerId, int], GenerationOver] = {}
        self.misbehaved: list[Misbehaved] = []
        self.hidden: dict[tuple[PeerId, int], Array] = {}
        for stage, peers in PROVIDERS.items():
            for peer in peers:
                self.start(stage, peer)

    # Nodes

    def start(self, stage: int, peer: PeerId) -> None:
        """Restart a provider."""
        self.providers[peer] = provider = SessionProvider()
        self.stages[peer] = StageOfTokens(stage == STAGES - 1)
        provider.hold(SERVICE, stage, STAGES, CONTEXT)

    def double_up(self, peer: PeerId, stage: int) -> None:
        """Have a provider hold an additional stage."""
        self.stopgaps[peer, stage] = StageOfTokens(stage == STAGES - 1)
        self.providers[peer].hold(SERVICE, stage, STAGES, CONTEXT)

    def relieve(self, peer: PeerId, stage: int) -> None:
        """Have a provider release an additional stage."""
        del self.stopgaps[peer, stage]
        self.forget_work(peer, stage)
        self.put(peer, self.providers[peer].release(SERVICE, stage, "leaving", "another holds it again"))
        self.drain()

    def forget_work(self, peer: PeerId, stage: int) -> None:
        self.computing = deque(row for row in self.computing if (row[0], row[1].stage) != (peer, stage))
        self.later.pop((peer, stage), None)

    def held(self, peer: PeerId, stage: int) -> StageOfTokens:
        return self.stopgaps.get((peer, stage)) or self.stages[peer]

    def kill(self, peer: PeerId, *, breaks: bool = True) -> None:
        """Kill a provider and its messages in transit. Either all its streams break, or it is just silent."""
        self.providers.pop(peer, None)
        self.stages.pop(peer, None)
        for stage in range(STAGES):
            self.forget_work(peer, stage)
            self.stopgaps.pop((peer, stage), None)
        for pair in [pair for pair in self.queues if peer in pair]:
            del self.queues[pair]
        if breaks:
            for name, door in self.doors.items():
                self.put(name, door.lost(self.now, peer))
            for other in self.providers.values():
                other.lost(peer)
            self.drain()

    def live(self) -> dict[int, list[StageReplica]]:
        return {
            stage: [
                StageReplica(peer, self.providers[peer].sessions, bits=self.bits.get(peer, b"x"))
                for peer in (*peers, *(who for who, number in self.stopgaps if number == stage))
                if peer in self.providers
            ]
            for stage, peers in PROVIDERS.items()
        }

    def begin(self, door: PeerId, wish: GenerationWish) -> tuple[PeerId, int]:
        number, sends = self.doors[door].begin(self.now, SHAPE, wish)
        self.tokens[door, number] = []
        self.put(door, sends)
        self.drain()
        return door, number

    # Events

    def put(self, sender: PeerId, sends: Sends) -> None:
        for receiver, message in sends:
            if isinstance(message, Carried):
                assert len(encode(message.message)) <= MESSAGE_BYTES_MAX
            else:
                message = decode(encode(message), Message, bytes_max=MESSAGE_BYTES_MAX)
            self.queues.setdefault((sender, receiver), deque()).append(message)

    def deliver(self, pair: tuple[PeerId, PeerId]) -> None:
        message = self.queues[pair].popleft()
        if not self.queues[pair]:
            del self.queues[pair]
        sender, receiver = pair
        core = self.doors.get(receiver) or self.providers.get(receiver)
        if core is not None:
            self.put(receiver, core.receive(self.now, sender, message))
        elif sender in self.doors:  # messages to the dead break the stream
            self.put(sender, self.doors[sender].lost(self.now, receiver))
        self.drain()

    def drain(self) -> None:
        for peer, provider in self.providers.items():
            for event in provider.events:
                if isinstance(event, ComputeBatch):
                    self.computing.append((peer, event))
                elif any((busy, asked.stage) == (peer, event.stage) for busy, asked in self.computing):
                    self.later.setdefault((peer, event.stage), []).append(event)
                else:
                    self.held(peer, event.stage).obey(event)
            provider.events.clear()
        for peer, door in self.doors.items():
            said, door.events = door.events, []
            self.routes += [event for event in said if isinstance(event, RouteTaken)]
            for each in said:
                self.note(peer, door, each)

    def note(self, peer: PeerId, door: Door, event: object) -> None:
        match event:
            case Sampled():
                key = peer, event.generation
                assert key not in self.finished
                self.tokens[key].append(event.token)
            case HiddenRead():
                self.hidden[peer, event.generation] = event.rows
            case GenerationOver():
                self.finished[peer, event.generation] = event
            case RouteWanted():
                self.put(peer, door.learn(self.now, SERVICE, self.live()))
                self.drain()
            case Misbehaved():
                self.misbehaved.append(event)

    def compute(self) -> None:
        """Complete the oldest computation."""
        peer, asked = self.computing.popleft()
        stage = self.held(peer, asked.stage)
        answers = stage.compute(asked)
        for event in self.later.pop((peer, asked.stage), ()):
            stage.obey(event)
        self.put(peer, self.providers[peer].computed(self.now, SERVICE, asked.batch, answers))
        self.drain()

    def step(self) -> bool:
        """Run one random event; return whether any was left."""
        choices: list[tuple[PeerId, PeerId] | None] = [*self.queues, *([None] if self.computing else [])]
        if not choices:
            return False
        chosen = self.rng.choice(choices)
        if chosen is None:
            self.compute()
        else:
            self.deliver(chosen)
        return True

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        cores: list[tuple[PeerId, Door | SessionProvider]] = [*self.doors.items(), *self.providers.items()]
        for peer, core in cores:
            if core.deadline <= self.now:
                self.put(peer, core.wake(self.now))
        self.drain()

    def settle(self, *, steps: int = 20_000) -> None:
        """Run until every generation is over."""
        for _ in range(steps):
            if not self.step():
                if len(self.finished) == len(self.tokens):
                    return
                self.pass_time(0.1)
        raise AssertionError("generations that do not end")


def wish(
    prompt: int = 5, tokens: int = 12, *, seed: int = 1, temperature: float = 0.0, **more: float
) -> GenerationWish:
    rng = Random(seed)
    sampling = Sampling(temperature, seed=seed, **more)  # type: ignore[arg-type]  # top_k, top_p, min_p
    return GenerationWish(tuple(rng.randrange(VOCABULARY) for _ in range(prompt)), tokens, sampling)
