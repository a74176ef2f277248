"""Members of a run in local mode without a network, for `benchmarks/headline.py`: twenty seeds in minutes.

`Shard` deals the samples; `make_strategy` and `Delayed` average. These are the nodes' own code. The model is
torch's own SimpleCNN. Messages and processes are left out: a round takes as long as some steps, and reaches
all peers that the strategy wants. One vector holds parameters and Adam's moments, all of which the strategies
without outer steps average, as a node does.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from crypto.identity import PeerId
from gossip.averaging.catalogue import OUTER, make_strategy
from gossip.averaging.strategies import Delayed, Mean
from node.local.shard import Shard
from partition.capture.models.simple_cnn import SimpleCNN

Array = NDArray[Any]
BETAS = (0.9, 0.999)
ROUND_STEPS = 3.0
"""The time of a round of averaging, in steps; no member waits during it."""
UNBALANCED = (0.8, 1.25)
"""Range of the relative likelihood with which a class's samples are held out in a new partition; drawn for
each class."""
PACES = (0.8, 1.25)
"""Range of the seconds per step of members that do not wait for others; drawn for each seed."""

torch.set_num_threads(1)


@dataclass(frozen=True)
class Data:
    """Images and labels, for training and held out."""

    name: str
    train: tuple[Array, Array]
    test: tuple[Array, Array]

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.train[0].shape[1:]
        return channels, height, width

    @property
    def classes(self) -> int:
        return int(self.train[1].max()) + 1

    def split(self, share: float, seed: int) -> "Data":
        """Hold out this share of the training samples instead of the test part, to choose settings."""
        order = np.random.default_rng(seed).permutation(len(self.train[0]))
        at = int(share * len(order))
        parts = [(self.train[0][rows], self.train[1][rows]) for rows in (order[at:], order[:at])]
        return Data(self.name, parts[0], parts[1])

    def repartitioned(self, number: int) -> "Data":
        """Deal all samples again into as many training and held-out ones as before. Of some classes more
        samples are held out, and so fewer are trained on."""
        draws = np.random.default_rng((number, 6))
        images, labels = (np.concatenate(pair) for pair in zip(self.train, self.test, strict=True))
        weights = draws.uniform(*UNBALANCED, self.classes)
        keys = draws.random(len(labels)) ** (1 / weights[labels])  # Efraimidis and Spirakis (2006)
        order = np.argsort(-keys, kind="stable")
        held_out, kept = order[: len(self.test[1])], draws.permutation(order[len(self.test[1]) :])
        parts = [(images[rows], labels[rows]) for rows in (kept, held_out)]
        return Data(self.name, parts[0], parts[1])


@dataclass(frozen=True)
class Way:
    """One way to train. `local_steps` 0 means one pass over a member's share. `rate` is the learning rate."""

    providers: int = 1
    local_steps: int = 0
    strategy: str = "average"
    waits: bool = True
    rate: float = 0.001
    batch: int = 16
    same_steps: bool = False
    """Whether each member makes as many steps as one machine, so that all together see `providers` times the
    samples."""
    is_centralised: bool = False
    """Whether this is a federated simulation in one machine: clients train one after another, a server
    averages their models, and each client begins its next turn with new moments."""


@dataclass
class Result:
    """The outcome of one seed: the curve as (epochs, accuracy), and the `confusion` matrix with true classes
    in rows."""

    accuracy: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)
    confusion: Array | None = None


class Member:
    """One model and its shard."""

    def __init__(self, data: Data, way: Way, seed: int, order: int, number: int, peers: list[PeerId]) -> None:
        torch.manual_seed(seed)  # all members begin with the same values
        self.module = SimpleCNN(data.shape, data.classes)
        self.parameters = [*self.module.parameters()]
        self.size = sum(each.numel() for each in self.parameters)
        self.vector = torch.zeros(3 * self.size)  # parameters and the two moments
        self.gradient = torch.zeros(self.size)
        at = 0
        for each in self.parameters:
            end = at + each.numel()
            self.vector[at:end] = each.data.reshape(-1)
            each.data = self.vector[at:end].view(each.shape)
            each.grad = self.gradient[at:end].view(each.shape)
            at = end
        self.data, self.way, self.steps, self.moments_begun = data, way, 0, 0
        self.images = torch.from_numpy(data.train[0])
        self.labels = torch.from_numpy(data.train[1])
        self.shard = Shard(order.to_bytes(32, "big"), order, len(data.train[0]), peers[number])
        self.shard.set_members(peers)
        self.averaged = self.size if way.is_centralised or way.strategy in OUTER else 3 * self.size
        self.pass_steps = max(1, len(self.shard.rows) // way.batch)
        self.local_steps = way.local_steps or self.pass_steps
        strategy = make_strategy(way.strategy, self.copy(), self.local_steps, "float32")
        self.strategy = Delayed(strategy)
        self.random = torch.Generator().manual_seed(1_000 * order + number)

    def copy(self) -> Array:
        return self.vector[: self.averaged].numpy().copy()

    def set(self, found: Array) -> None:
        self.vector[: self.averaged] = torch.from_numpy(found)
        if self.way.is_centralised:
            self.vector[self.size :].zero_()
            self.moments_begun = self.steps
        self.vector[2 * self.size :].clamp_(min=0)

    def step(self) -> None:
        rows = self.shard.take(self.way.batch)
        torch.random.set_rng_state(self.random.get_state())
        self.gradient.zero_()
        loss = functional.cross_entropy(self.module(self.images[rows]), self.labels[rows])
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self.random.set_state(torch.random.get_rng_state())
        self.steps += 1
        theta, first, second = self.vector.view(3, self.size)
        first.lerp_(self.gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(self.gradient, self.gradient, value=1 - BETAS[1])
        made = self.steps - self.moments_begun
        scale = self.way.rate / (1 - BETAS[0] ** made)
        theta.addcdiv_(first, (second / (1 - BETAS[1] ** made)).sqrt_().add_(1e-8), value=-scale)

    def predict(self) -> Array:
        self.module.eval()
        with torch.no_grad():
            parts = torch.split(torch.from_numpy(self.data.test[0]), 256)
            found = torch.cat([self.module(part).argmax(1) for part in parts]).numpy()
        self.module.train()
        return np.asarray(found)


def train(
    data: Data, way: Way, seed: int, epochs: int, *, look: bool = False, shuffle: int | None = None
) -> Result:
    """Train on the samples of this many epochs. `look` also records the curve, once per epoch. With
    `shuffle`, samples are dealt in a different order and to different members; the initial values remain
    those of `seed`."""
    order = seed if shuffle is None else 1_000 + shuffle
    draws = np.random.default_rng((order, 5))
    peers = [PeerId(draws.bytes(34)) for _ in range(way.providers)]
    members = [Member(data, way, seed, order, number, peers) for number in range(way.providers)]
    total = epochs * (len(data.train[0]) // way.batch) * (way.providers if way.same_steps else 1)
    result = Result()
    ahead = total // epochs

    def made(steps: int) -> None:
        nonlocal ahead
        if look and steps >= ahead:
            result.curve.append((epochs * steps / total, _accuracy(members[0])[0]))
            ahead += total // epochs

    if way.providers == 1:
        for number in range(total):
            members[0].step()
            made(number + 1)
    elif way.waits:
        _wait(members, total, made)
    else:
        _wait_for_nobody(members, total, made, draws)
    result.accuracy, result.confusion = _accuracy(members[0])
    return result


def _accuracy(member: Member) -> tuple[float, Array]:
    found, truth = member.predict(), member.data.test[1]
    confusion = np.zeros((member.data.classes, member.data.classes), np.int64)
    np.add.at(confusion, (truth, found), 1)
    return float((found == truth).mean()), confusion


def _wait(members: list[Member], total: int, made: Callable[[int], None]) -> None:
    """Average all members once all have made their local steps."""
    each, length = total // len(members), members[0].local_steps
    at = 0
    while at < each:
        steps = min(length, each - at)
        for member in members:
            for _ in range(steps):
                member.step()
        at += steps
        offers = [member.strategy.offer(member.copy()) for member in members]
        mean = np.stack(offers).mean(axis=0, dtype=np.float32)
        for member in members:
            member.set(member.strategy.take(member.copy(), Mean(mean)))
        made(at * len(members))


def _wait_for_nobody(
    members: list[Member], total: int, made: Callable[[int], None], draws: np.random.Generator
) -> None:
    """Average each member with the next one that offers its copy; the member trains on meanwhile."""
    paces = draws.uniform(*PACES, len(members))
    order: Iterator[int] = count()
    events: list[tuple[float, int, int, Array | None]] = [
        (float(paces[number]), next(order), number, None) for number in range(len(members))
    ]
    offered: dict[int, tuple[int, Array]] = {}
    waiting: list[int] = []
    begun = [0] * len(members)
    steps = 0
    while steps < total:
        now, _, number, mean = heapq.heappop(events)
        member = members[number]
        if mean is not None:  # a round with this member has ended
            at, _ = offered.pop(number)
            stale = member.steps - at
            member.set(member.strategy.take(member.copy(), Mean(mean, stale_steps=stale)))
            continue
        member.step()
        steps += 1
        made(steps)
        heapq.heappush(events, (now + float(paces[number]), next(order), number, None))
        if member.steps - begun[number] >= member.local_steps and number not in offered:
            begun[number] = member.steps
            offered[number] = (member.steps, member.strategy.offer(member.copy()))
            waiting.append(number)
        if len(waiting) == 2:
            vector = np.stack([offered[each][1] for each in waiting]).mean(axis=0, dtype=np.float32)
            for each in waiting:
                heapq.heappush(events, (now + ROUND_STEPS, next(order), each, vector))
            waiting.clear()
