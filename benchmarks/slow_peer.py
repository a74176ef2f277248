"""Asynchronous compared with synchronous averaging if one peer of four is four times slower, on digits.

Time is virtual: a local step takes one unit, or four on the slow peer; a round takes as long as ten fast
steps. The real strategies train a real model (one hidden layer, Adam), and each peer has a quarter of the
data. Synchronous: all average once all have made their local steps, and wait for the round. Asynchronous: a
peer offers a copy when it has made its steps, averages with the next peer that does, and trains on meanwhile
(`Asynchronous` in `Delayed`). Both stop after the same number of samples, so accuracy is compared at equal
work.
"""

import heapq
from itertools import count
from typing import Any

import numpy as np
from _figures import Goal, arguments, leave, report
from numpy.typing import NDArray

from gossip.averaging.strategies import Asynchronous, Delayed, Mean, ParameterMean
from node.content.datasets import load_digits

PEERS, SLOW, SLOWNESS = 4, 3, 4.0
LOCAL_STEPS, ROUND_UNITS, BATCH = 20, 10.0, 16
SAMPLES, SEEDS, SEEDS_QUICK = 160_000, 10, 3
SHAPES = ((64, 48), (1, 48), (48, 10), (1, 10))
ITEMS = sum(rows * columns for rows, columns in SHAPES)
RATE, BETAS = 2e-3, (0.9, 0.999)
SAMPLES_GOAL, ACCURACY_GOAL = 2.0, 0.01
Array = NDArray[Any]


def parts(theta: Array) -> list[Array]:
    found, at = [], 0
    for rows, columns in SHAPES:
        found.append(theta[at : at + rows * columns].reshape(rows, columns))
        at += rows * columns
    return found


def logits(theta: Array, images: Array) -> tuple[Array, Array]:
    first, bias, second, last = parts(theta)
    hidden = np.maximum(images @ first + bias, 0)
    return hidden, hidden @ second + last


class Peer:
    """One model and its shard."""

    def __init__(self, theta: Array, images: Array, labels: Array, seed: int) -> None:
        self.theta = theta.copy()
        self.images, self.labels = images, labels
        self.draws = np.random.default_rng(seed)
        self.moments = np.zeros((2, ITEMS), np.float32)
        self.steps = 0

    def step(self) -> None:
        rows = self.draws.integers(0, len(self.images), BATCH)
        images, labels = self.images[rows], self.labels[rows]
        hidden, scores = logits(self.theta, images)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        error = scores / scores.sum(axis=1, keepdims=True)
        error[np.arange(BATCH), labels] -= 1
        error /= BATCH
        back = (error @ parts(self.theta)[2].T) * (hidden > 0)
        found = [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
        gradient = np.concatenate([each.ravel() for each in found])
        self.steps += 1
        first, second = self.moments
        first += (1 - BETAS[0]) * (gradient - first)
        second += (1 - BETAS[1]) * (gradient**2 - second)
        scale = RATE * (1 - BETAS[1] ** self.steps) ** 0.5 / (1 - BETAS[0] ** self.steps)
        self.theta -= (scale * first / (np.sqrt(second) + 1e-8)).astype(np.float32)


def pace(number: int) -> float:
    return SLOWNESS if number == SLOW else 1.0


def synchronous(peers: list[Peer]) -> float:
    """Train until the samples are used up; return the virtual time."""
    strategies = [ParameterMean(LOCAL_STEPS, "all") for _ in peers]
    rounds = SAMPLES // (PEERS * LOCAL_STEPS * BATCH)
    for _ in range(rounds):
        for peer in peers:
            for _ in range(LOCAL_STEPS):
                peer.step()
        offers = [strategy.offer(peer.theta) for strategy, peer in zip(strategies, peers, strict=True)]
        mean = np.stack(offers).mean(axis=0).astype(np.float32)
        for strategy, peer in zip(strategies, peers, strict=True):
            peer.theta = strategy.take(peer.theta, Mean(mean))
    return rounds * (LOCAL_STEPS * SLOWNESS + ROUND_UNITS)


def asynchronous(peers: list[Peer]) -> float:
    """Train in the same way, but without waiting."""
    strategies = [Delayed(Asynchronous(LOCAL_STEPS, 4 * LOCAL_STEPS)) for _ in peers]
    order = count()
    events: list[tuple[float, int, int, Array | None]] = [
        (pace(number), next(order), number, None) for number in range(PEERS)
    ]
    offered: dict[int, tuple[int, Array]] = {}
    waiting: list[int] = []
    taken, now = 0, 0.0
    while taken < SAMPLES:
        now, _, number, mean = heapq.heappop(events)
        peer = peers[number]
        if mean is not None:  # a round with this peer has ended
            steps, _ = offered.pop(number)
            peer.theta = strategies[number].take(peer.theta, Mean(mean, stale_steps=peer.steps - steps))
            continue
        peer.step()
        taken += BATCH
        heapq.heappush(events, (now + pace(number), next(order), number, None))
        if peer.steps % LOCAL_STEPS == 0 and number not in offered:
            offered[number] = (peer.steps, strategies[number].offer(peer.theta))
            waiting.append(number)
        if len(waiting) == 2:
            vector = np.stack([offered[each][1] for each in waiting]).mean(axis=0).astype(np.float32)
            for each in waiting:
                heapq.heappush(events, (now + ROUND_UNITS, next(order), each, vector))
            waiting.clear()
    return now


def play(seed: int, train: Any) -> tuple[float, float]:
    """Return the samples per unit of time, and the mean accuracy of the peers' models on held-out digits."""
    data = load_digits()
    images = np.asarray(data.train["x"], np.float32).reshape(-1, 64)
    labels = np.asarray(data.train["y"])
    order = np.random.default_rng(seed).permutation(len(images))
    draws = np.random.default_rng([seed, 1])
    scaled = [draws.standard_normal(shape) * (2 / shape[0]) ** 0.5 * (shape[0] > 1) for shape in SHAPES]
    theta = np.concatenate([each.ravel() for each in scaled]).astype(np.float32)
    shards = np.array_split(order, PEERS)
    peers = [Peer(theta, images[own], labels[own], 100 * seed + n) for n, own in enumerate(shards)]
    units = train(peers)
    test = np.asarray(data.test["x"], np.float32).reshape(-1, 64)
    right = [(logits(peer.theta, test)[1].argmax(axis=1) == data.test["y"]).mean() for peer in peers]
    return SAMPLES / units, float(np.mean(right))


def main() -> int:
    options = arguments(__doc__ or "")
    seeds = range(SEEDS_QUICK if options.quick else SEEDS)
    sync = [play(seed, synchronous) for seed in seeds]
    free = [play(seed, asynchronous) for seed in seeds]
    rows = [
        {
            "how": name,
            "samples a unit": round(float(np.mean([each[0] for each in found])), 2),
            "accuracy": round(float(np.mean([each[1] for each in found])), 4),
        }
        for name, found in (("synchronous", sync), ("asynchronous", free))
    ]
    ratio = float(np.mean([each[0] / other[0] for each, other in zip(free, sync, strict=True)]))
    below = float(np.mean([other[1] - each[1] for each, other in zip(free, sync, strict=True)]))
    goals = [
        Goal("asynchronous: times the samples per second", ratio, ">=", SAMPLES_GOAL),
        Goal(f"asynchronous: accuracy below synchronous, {len(seeds)} seeds", below, "<=", ACCURACY_GOAL),
    ]
    return report("slow_peer", rows, goals, as_json=options.json)


if __name__ == "__main__":
    leave(main())
