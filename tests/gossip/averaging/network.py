"""Averaging attempts over a small simulated network, in virtual time.

A message between two peers takes a latency plus its bytes divided by the sender's rate. Messages of one pair
stay in order, as on a stream. Every message is encoded and decoded on its way.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.averaging.attempt import Attempt
from gossip.averaging.group import Group, GroupMember, Terms
from gossip.averaging.messages import MESSAGE_BYTES_MAX, Message
from gossip.averaging.outcome import Averaged, NotAveraged, Patience, Reason
from gossip.averaging.pace import AttemptPace
from gossip.averaging.robust.reduction import Vector
from gossip.matchmaking import GroupDeclined, GroupWish
from gossip.matchmaking_messages import Message as MatchMessage
from tests.gossip.swarm import HashSigner, peer_of

PATIENCE = Patience(3.0, 1.0, 3.0, 1.0, 0.1, 4.0, 0.2)
SIGNATURE = b"s" * 32


def members_of(
    full: int, send_only: int = 0, without_tensors: int = 0, nonce: int = 0, rates: Sequence[int] = ()
) -> tuple[GroupMember, ...]:
    """Return members by number: first the full members, then those that only send, then those that only
    reduce."""
    count = full + send_only + without_tensors
    return tuple(
        GroupMember(
            peer_of(number),
            nonce.to_bytes(8, "big") + number.to_bytes(8, "big"),
            0 if full <= number < full + send_only else (rates[number] if rates else 1_000_000),
            number < full + send_only,
        )
        for number in range(count)
    )


def group_of(
    members: tuple[GroupMember, ...],
    items: int,
    *,
    codec: str = "float32",
    mode: str = "butterfly",
    dtype: str = "float32",
    number: int = 0,
) -> Group:
    terms = Terms(mode, codec, SIGNATURE, items, dtype)  # type: ignore[arg-type]  # as on the wire
    return Group(b"test", 0, number, terms, members)


class Core(Protocol):
    """A core of an attempt, or of a whole round."""

    result: Averaged | NotAveraged | None

    @property
    def deadline(self) -> float: ...
    @property
    def ready(self) -> tuple[PeerId, ...]: ...
    def start(self, now: float) -> Any: ...
    def wake(self, now: float) -> Any: ...
    def lost(self, now: float, peer: PeerId) -> Any: ...
    def pull(self, now: float, peer: PeerId) -> Any: ...
    def receive(self, now: float, sender: PeerId, message: Any) -> Any: ...


C = TypeVar("C", bound=Core)


class Network(Generic[C]):
    """Cores by number, connected by one network."""

    def __init__(
        self,
        cores: dict[int, C],
        *,
        seed: int = 1,
        loss: float = 0.0,
        latency_seconds: float = 0.01,
        rate: float = 1e9,
    ) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.loss = loss
        self.latency_seconds = latency_seconds
        self.attempts = cores
        self.rates = dict.fromkeys(cores, rate)
        self.numbers = {peer_of(number): number for number in cores}
        self.gone: dict[int, float] = {}
        self.refusals: list[tuple[int, str]] = []
        self.tamper: Callable[[int, int, Message], Message] = lambda _from, _to, message: message
        self.hooks: list[Callable[[], None]] = []
        self._heap: list[tuple[float, int, int, int, bytes]] = []
        self._order = itertools.count()
        self._free_at: dict[int, float] = dict.fromkeys(cores, 0.0)
        self._arrives: dict[tuple[int, int], float] = {}

    @property
    def results(self) -> dict[int, Averaged | NotAveraged | None]:
        return {number: attempt.result for number, attempt in self.attempts.items()}

    @property
    def successes(self) -> dict[int, Averaged]:
        return {n: r for n, r in self.results.items() if isinstance(r, Averaged) and n not in self.gone}

    def start(self, numbers: Sequence[int] | None = None) -> None:
        for number in self.attempts if numbers is None else numbers:
            self.send(number, self.attempts[number].start(self.now))

    def kill(self, number: int, *, noticed_after: float | None = None) -> None:
        """End the process: it sends nothing more, and the others notice only after a while."""
        self.gone[number] = inf if noticed_after is None else self.now + noticed_after

    def restart(self, number: int, core: C) -> None:
        """Restart a process with empty memory."""
        self.gone.pop(number, None)
        self.attempts[number] = core
        self.send(number, core.start(self.now))

    def send(self, sender: int, sends: Any) -> None:
        for peer, message in sends:
            receiver = self.numbers.get(peer)
            if receiver is None:
                # No peer has this id, so it cannot be dialled.
                self.send(sender, self.attempts[sender].lost(self.now, peer))
                continue
            changed = self.tamper(sender, receiver, message)
            data = encode(changed)
            if self.rng.random() < self.loss:
                continue
            begin = max(self.now, self._free_at[sender])
            self._free_at[sender] = begin + len(data) / self.rates[sender]
            at = self._free_at[sender] + self.latency_seconds * self.rng.uniform(0.5, 1.5)
            at = max(at, self._arrives.get((sender, receiver), 0.0))
            self._arrives[sender, receiver] = at
            heapq.heappush(self._heap, (at, next(self._order), sender, receiver, data))

    def run(self, until: float = 60.0) -> None:
        """Run until all live cores are closed, or the time is up."""
        while self.now < until:
            self._pull()
            for hook in self.hooks:
                hook()
            alive = [n for n in self.attempts if n not in self.gone]
            wakes = [(self.attempts[n].deadline, n) for n in alive]
            pulls = [
                self._free_at[n] for n in alive if self.attempts[n].ready and self._free_at[n] > self.now
            ]
            notices = [at for at in self.gone.values() if at > self.now]
            times = [wake for wake, _ in wakes] + pulls + notices
            times += [self._heap[0][0]] if self._heap else []
            at = min(times, default=inf)
            if at == inf:
                return
            self.now = max(self.now, at)
            self._notice()
            if self._heap and self._heap[0][0] <= self.now:
                _, _, sender, receiver, data = heapq.heappop(self._heap)
                self._deliver(sender, receiver, data)
                continue
            for wake, number in wakes:
                if wake <= self.now and number not in self.gone:
                    self.send(number, self.attempts[number].wake(self.now))

    def _pull(self) -> None:
        for number, attempt in self.attempts.items():
            # As on a stream, the next chunk is pulled once the previous one has been sent.
            for peer in attempt.ready:
                if number not in self.gone and self._free_at[number] <= self.now:
                    self.send(number, attempt.pull(self.now, peer))

    def _notice(self) -> None:
        for dead, at in self.gone.items():
            if at <= self.now:
                self.gone[dead] = -inf
                for number, attempt in self.attempts.items():
                    if number not in self.gone:
                        self.send(number, attempt.lost(self.now, peer_of(dead)))

    def _deliver(self, sender: int, receiver: int, data: bytes) -> None:
        if receiver in self.gone:
            return
        try:
            message: Any = decode(data, Message | MatchMessage, bytes_max=MESSAGE_BYTES_MAX)
            sends = self.attempts[receiver].receive(self.now, peer_of(sender), message)
        except RemoteProtocolError as error:
            self.refusals.append((receiver, str(error)))
            return
        self.send(receiver, sends)


class Averaging(Network[Attempt]):
    """One attempt of a group. `vectors` and `weights` are by member number."""

    def __init__(
        self,
        group: Group,
        vectors: dict[int, Vector],
        weights: dict[int, float] | None = None,
        patience: Patience = PATIENCE,
        **network: Any,
    ) -> None:
        self.group = group
        attempts = {}
        for number, member in enumerate(group.members):
            weight = (weights or {}).get(number, 1.0)
            signer = HashSigner(PeerId(member.peer))
            attempts[number] = Attempt(signer, group, vectors.get(number), weight, 0.0, patience)
        super().__init__(attempts, **network)


@dataclass(frozen=True)
class PlaySettings:
    """`window_seconds` is how long a group waits for expected members, `form_seconds` how long a peer waits
    for a group.
    """

    window_seconds: float = 0.2
    form_seconds: float = 10.0
    attempts_max: int = 5


class Play:
    """One peer's part in one round, driven as a node does it (`node.averaging.participation`): a wish for a
    group, then an attempt, and both again if the attempt fails.
    """

    def __init__(
        self,
        peer: PeerId,
        name: bytes,
        terms: Terms,
        vector: Vector | None,
        rate: int,
        expected: Sequence[PeerId],
        nonce: Callable[[int], bytes],
        settings: PlaySettings,
    ) -> None:
        self.result: Averaged | NotAveraged | None = None
        self.attempt: Attempt | None = None
        self.attempt_count = 0
        self._old: list[Attempt] = []
        self._signer = HashSigner(peer)
        self._peer = peer
        self._name = name
        self._terms = terms
        self._vector = vector
        self._rate = rate
        self._expected = [each for each in expected if each != peer]
        self._nonce = nonce
        self._settings = settings
        self._pace = AttemptPace(1e7, 0.5)
        self._wish: GroupWish | None = None
        self._lost: set[PeerId] = set()
        self._met: dict[bytes, GroupWish] = {}
        self._early: dict[bytes, list[tuple[PeerId, Any]]] = {}

    @property
    def awaited(self) -> tuple[PeerId, ...]:
        return () if self._wish is None else self._wish.awaited

    @property
    def deadline(self) -> float:
        wish = inf if self._wish is None or self.attempt is not None else self._wish.deadline
        return min([wish, *(each.deadline for each in self._attempts)])

    @property
    def ready(self) -> tuple[PeerId, ...]:
        return tuple(dict.fromkeys(peer for each in self._attempts for peer in each.ready))

    @property
    def is_closed(self) -> bool:
        return self.result is not None and not self._attempts

    @property
    def _attempts(self) -> list[Attempt]:
        found = self._old if self.attempt is None else [self.attempt, *self._old]
        return [each for each in found if not each.is_closed]

    def start(self, now: float) -> Any:
        return self._begin(now, self._expected)

    def _begin(self, now: float, expected: Sequence[PeerId]) -> Any:
        if not [peer for peer in expected if peer not in self._lost]:
            self.result = NotAveraged(Reason.ALONE)
            return []
        key = blake3(self._name + self._terms.signature + bytes([self.attempt_count])).digest()
        me = GroupMember(self._peer, self._nonce(16), self._rate, self._vector is not None)
        number = self.attempt_count
        self._wish = GroupWish(
            me,
            key,
            [peer for peer in expected if peer not in self._lost],
            lambda members: Group(b"test", 0, number, self._terms, members),
            now,
            window_seconds=self._settings.window_seconds,
            patience_seconds=self._settings.form_seconds,
        )
        self._met[key] = self._wish
        sends = self._wish.wake(now)
        for sender, message in self._early.pop(key, []):
            sends += self._wish.receive(now, sender, message)
        return sends + self._advance(now)

    def receive(self, now: float, sender: PeerId, message: Any) -> Any:
        if isinstance(message, MatchMessage):
            self._lost.discard(sender)
            wish = self._met.get(message.key)
            if wish is None:
                # This has the same effect as if the peer repeated its wish: the convener of a later group
                # waits for the peer.
                self._early.setdefault(message.key, []).append((sender, message))
                return []
            return [*wish.receive(now, sender, message), *self._advance(now)]
        for each in self._attempts:
            if each.id == message.attempt:
                return [*each.receive(now, sender, message), *self._advance(now)]
        if self.result is None:  # like a node's stream, it waits until its group is known here
            self._early.setdefault(message.attempt, []).append((sender, message))
        return []

    def pull(self, now: float, peer: PeerId) -> Any:
        for each in self._attempts:
            if peer in each.ready:
                return [*each.pull(now, peer), *self._advance(now)]
        return []

    def lost(self, now: float, peer: PeerId) -> Any:
        self._lost.add(peer)
        sends: list[Any] = []
        for each in self._attempts:
            if peer in each.group.peers:
                sends += each.lost(now, peer)
        if self._wish is not None and self.attempt is None:
            sends += self._wish.lost(now, peer)
        return sends + self._advance(now)

    def wake(self, now: float) -> Any:
        sends: list[Any] = []
        for each in self._attempts:
            sends += each.wake(now)
        if self._wish is not None and self.attempt is None:
            sends += self._wish.wake(now)
        return sends + self._advance(now)

    def _advance(self, now: float) -> Any:
        sends: list[Any] = []
        wish = self._wish
        if self.result is not None or wish is None:
            return sends
        for event in [event for each in self._met.values() for event in each.events]:
            if isinstance(event, GroupDeclined):
                for each in self._attempts:
                    if each.id == event.attempt:
                        sends += each.lost(now, event.peer)
        for met in self._met.values():
            met.events.clear()
        if self.attempt is None and wish.group is not None:
            patience = self._pace.patience(4 * wish.group.terms.items)
            self.attempt_count += 1
            self.attempt = Attempt(self._signer, wish.group, self._vector, 1.0, now, patience)
            sends += self.attempt.start(now)
            for sender, message in self._early.pop(self.attempt.id, []):
                sends += self.attempt.receive(now, sender, message)
        elif self.attempt is None and wish.is_over:
            self.result = NotAveraged(Reason.ALONE)
        if self.attempt is None or self.attempt.result is None:
            return sends
        result = self.attempt.result
        if isinstance(result, Averaged) or self.attempt_count >= self._settings.attempts_max:
            self.result = result
            return sends
        failed, self.attempt = self.attempt, None
        self._old = [failed, *self._old[:1]]
        others = [peer for peer in failed.group.peers if peer != self._peer]
        return sends + self._begin(now, others)


class Rounds(Network[Play]):
    """One round of peers that know each other."""

    def __init__(
        self,
        vectors: dict[int, Vector],
        count: int,
        *,
        numbers: Sequence[int] | None = None,
        dtype: str = "float32",
        settings: PlaySettings | None = None,
        terms: Terms | None = None,
        **network: Any,
    ) -> None:
        self.vectors = vectors
        self.present = range(count) if numbers is None else numbers
        items = len(next(iter(vectors.values())))
        self.terms = terms or Terms("butterfly", dtype, SIGNATURE, items, dtype)  # type: ignore[arg-type]  # as on the wire
        self.settings = settings or PlaySettings()
        self.rounds = dict.fromkeys(self.present, 7)
        self.drawn = Random(network.get("seed", 1))
        super().__init__({number: self.core(number) for number in self.present}, **network)

    def core(self, number: int) -> Play:
        return Play(
            peer_of(number),
            b"test" + self.rounds[number].to_bytes(4, "big"),
            self.terms,
            self.vectors.get(number),
            1_000_000,
            [peer_of(other) for other in self.present],
            self.drawn.randbytes,
            self.settings,
        )


def vectors_of(
    numbers: Sequence[int], items: int, seed: int = 1, dtype: str = "float32"
) -> dict[int, Vector]:
    generator = np.random.default_rng(seed)
    return {number: generator.standard_normal(items).astype(dtype) for number in numbers}


def mean_of(vectors: dict[int, Vector], shares: dict[int, float]) -> Vector:
    """Return the weighted mean, computed in float64."""
    total: Vector = sum(
        (vectors[number].astype(np.float64) * share for number, share in shares.items()),
        start=np.zeros(len(next(iter(vectors.values()))), np.float64),
    )
    return total
