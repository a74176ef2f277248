"""Training with liars, by the rule of a swarm without a key: 16 peers, in virtual time.

Each peer trains on its own part of the data. After some local steps all average their parameters in one
group, and every peer continues from the result, as in a run in local mode; each peer keeps its own moments.
The rules are those of `gossip.averaging.aggregates`, with the bounds on weights that an attempt sets. The
tasks are digits (accuracy on held-out ones) and the next character of Python's own text (loss).

Liars know everything that others send, except those that only train on wrong labels. Values that are not
finite are refused while a chunk is decoded, so a peer that sends them counts as silent. The full form plays
every rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from _figures import Goal, arguments, leave, report
from numpy.typing import NDArray

from crypto.identity import PeerId
from gossip.averaging.aggregates import DEFAULT, RULES, counted_weights, reduction_of
from gossip.averaging.codecs import codec_of, roundtrip
from gossip.averaging.group import WEIGHT_MAX, Aggregate
from node.content.datasets import load_digits

PEERS, LIARS, STEPS = 16, 5, 600
SEEDS, SEEDS_QUICK, SEEDS_RULES = 10, 2, 3
BETAS = (0.9, 0.999)
CONTEXT, SYMBOLS = 6, 48
"""Context length and number of symbols. With 32 hidden units and 16 samples, a product is small enough for
BLAS to compute it in one thread. That is ten times faster if other programs use the cores."""
MEAN_MIN, WORST_MIN, COST_MAX, LOSS_MAX = 0.94, 0.92, 0.005, 1.02
# "labels": trained on wrong labels; "weight": the same, at the largest accepted weight.
COMMON = (
    "sign flip",
    "scaled",
    "inner product",
    "labels",
    "weight",
    "one number",
    "noise",
    "not finite",
    "silence",
)
SUBTLE = ("little", "mimic", "min-max", "stand still")
"""Lies that look honest, told by liars that know everything that others send."""
KINDS = ("none", *COMMON, *SUBTLE)
QUICK_KINDS = ("none", "sign flip", "scaled", "inner product", "labels", "weight", "silence", "little")
QUICK_CODED_KINDS = ("none", "inner product", "little")
Array = NDArray[Any]


@dataclass(frozen=True)
class Task:
    """Data, and one hidden layer that learns it: `inputs` [samples, inputs], labels, held-out samples, and
    sizes."""

    inputs: Array
    labels: Array
    test_inputs: Array
    test_labels: Array
    hidden: int
    outputs: int
    rate: float
    batch: int

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        inputs = self.inputs.shape[1]
        return (inputs, self.hidden), (1, self.hidden), (self.hidden, self.outputs), (1, self.outputs)


@dataclass(frozen=True)
class Game:
    """One run: `liars` of the peers lie in the way `kind`, and all peers average by `rule` every
    `local_steps` steps."""

    rule: Aggregate
    kind: str
    liars: int = LIARS
    local_steps: int = 10
    codec: str = "float32"


@lru_cache
def digits() -> Task:
    data = load_digits()
    train, test = (np.asarray(part["x"], np.float32).reshape(-1, 64) for part in (data.train, data.test))
    return Task(train, np.asarray(data.train["y"]), test, np.asarray(data.test["y"]), 48, 10, 5e-3, 32)


@lru_cache
def characters() -> Task:
    """Return Python's own sources and their comments as a task: to predict each character from the six before
    it."""
    text = b"".join(Path(np.__file__).with_name(name).read_bytes() for name in ("__init__.py", "matlib.py"))
    codes = np.clip(np.frombuffer(text, np.uint8).astype(np.int64) - 32, 0, 95)
    common = np.argsort(-np.bincount(codes, minlength=96), kind="stable")[: SYMBOLS - 1]
    place = np.full(96, SYMBOLS - 1)
    place[common] = np.arange(SYMBOLS - 1)
    symbols = place[codes]
    windows = np.lib.stride_tricks.sliding_window_view(symbols, CONTEXT + 1)
    inputs = np.eye(SYMBOLS, dtype=np.float32)[windows[:, :-1]].reshape(len(windows), -1)
    is_test = np.arange(len(windows)) // 200 % 10 == 0
    labels = windows[:, -1]
    return Task(inputs[~is_test], labels[~is_test], inputs[is_test], labels[is_test], 32, SYMBOLS, 5e-3, 16)


class Peers:
    """All peers' models, optimizers and parts of the data, stacked: [peers, values]."""

    def __init__(self, task: Task, seed: int, *, wrong: int) -> None:
        self.task = task
        self.draws = np.random.default_rng([seed, 1])
        theta = [
            self.draws.standard_normal(shape) * (2 / shape[0]) ** 0.5 * (shape[0] > 1)
            for shape in task.shapes
        ]
        self.theta = np.tile(np.concatenate([each.ravel() for each in theta]).astype(np.float32), (PEERS, 1))
        self.moments = np.zeros((2, *self.theta.shape), np.float32)
        self.steps = 0
        order = np.random.default_rng(seed).permutation(len(task.inputs))
        each = len(order) // PEERS
        self.own = order[: each * PEERS].reshape(PEERS, each)
        self.wrong = wrong

    def step(self) -> None:
        task = self.task
        chosen = self.draws.integers(0, self.own.shape[1], (PEERS, task.batch))
        rows = np.take_along_axis(self.own, chosen, axis=1)
        inputs, labels = task.inputs[rows], task.labels[rows].copy()
        labels[: self.wrong] = task.outputs - 1 - labels[: self.wrong]
        _, bias, second, last = layers = self.layers()
        hidden = np.maximum(inputs @ layers[0] + bias, 0)
        error = softmax(hidden @ second + last)
        places = labels[..., None]
        np.put_along_axis(error, places, np.take_along_axis(error, places, 2) - 1, 2)
        error /= task.batch
        back = (error @ second.transpose(0, 2, 1)) * (hidden > 0)
        found = [
            inputs.transpose(0, 2, 1) @ back,
            back.sum(axis=1),
            hidden.transpose(0, 2, 1) @ error,
            error.sum(axis=1),
        ]
        gradient = np.concatenate([each.reshape(PEERS, -1) for each in found], axis=1)
        self.steps += 1
        first, squares = self.moments
        first += (1 - BETAS[0]) * (gradient - first)
        squares += (1 - BETAS[1]) * (gradient**2 - squares)
        scale = task.rate * (1 - BETAS[1] ** self.steps) ** 0.5 / (1 - BETAS[0] ** self.steps)
        self.theta -= np.float32(scale) * first / (np.sqrt(squares) + np.float32(1e-8))

    def layers(self) -> list[Array]:
        found, at = [], 0
        for rows, columns in self.task.shapes:
            found.append(self.theta[:, at : at + rows * columns].reshape(PEERS, rows, columns))
            at += rows * columns
        return found

    def tested(self, first: int) -> tuple[Array, Array]:
        """Return the accuracy and the loss on held-out data of each peer from number `first` on."""
        accuracy, losses = [], []
        layers = self.layers()
        for number in range(first, PEERS):
            one, bias, second, last = (layer[number] for layer in layers)
            found = softmax(np.maximum(self.task.test_inputs @ one + bias, 0) @ second + last)
            labels = self.task.test_labels
            accuracy.append((found.argmax(axis=1) == labels).mean())
            losses.append(-np.log(np.maximum(found[np.arange(len(labels)), labels], 1e-30)).mean())
        return np.array(accuracy), np.array(losses)


def softmax(scores: Array) -> Array:
    found: Array = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found /= found.sum(axis=-1, keepdims=True)
    return found


@dataclass(frozen=True)
class Whole:
    """A vector as the only chunk of its only part."""

    peer: PeerId
    weight: float
    vector: Array
    chunk_count: int = 1

    def chunk(self, number: int) -> Array:
        del number
        return self.vector


def reduced(rule: Aggregate, vectors: Array, weights: Sequence[float]) -> Array:
    """Return an attempt's average of these vectors."""
    bounded = counted_weights(rule, weights)
    parts = [Whole(PeerId(bytes(32)), w, v) for w, v in zip(bounded, vectors, strict=True)]
    return next(reduction_of(rule)(parts))


def lies(kind: str, offers: Array, last: Array, count: int, draws: np.random.Generator) -> Array | None:
    """Return the vectors that liars send instead of their own; None if they are refused."""
    steps: Array = offers - last
    honest = steps[count:]
    mean, spread = honest.mean(axis=0), honest.std(axis=0)
    opposite: Array = -steps[:count]
    moved: Array
    match kind:
        case "sign flip":
            moved = last + opposite
        case "scaled":
            moved = last + 100 * opposite
        case "inner product":  # Xie, Koyejo and Gupta 2019
            moved = last - 3 * mean
        case "little":  # small deviations suffice: Baruch, Baruch and Goldberg 2019
            moved = last + mean - 1.5 * spread
        case "mimic":  # all liars repeat one honest peer: Karimireddy, He and Jaggi 2022
            moved = offers[count]
        case (
            "min-max"
        ):  # as far from the mean as honest peers are from one another: Shejwalkar and Houmansadr 2021
            farthest = max(np.linalg.norm(honest - each, axis=1).max() for each in honest)
            away = -mean / np.linalg.norm(mean)
            low, high = 0.0, 4 * float(farthest)
            for _ in range(20):
                middle = (low + high) / 2
                fits = np.linalg.norm(honest - (mean + middle * away), axis=1).max() <= farthest
                low, high = (middle, high) if fits else (low, middle)
            moved = last + mean + low * away
        case "one number":
            moved = offers[:count].copy()
            moved[:, 7] = 1e6
        case "noise":
            moved = last + draws.standard_normal((count, offers.shape[1])) * np.abs(steps).max()
        case "stand still":
            moved = last
        case "not finite" | "silence":
            return None
        case _:
            return offers[:count]
    return moved if moved.ndim == 2 else np.tile(moved, (count, 1))


def play(task: Task, seed: int, game: Game) -> tuple[Array, Array]:
    """Return each honest peer's final accuracy and loss, a few steps after the last round."""
    is_wrong = game.kind in ("labels", "weight")
    peers = Peers(task, seed, wrong=game.liars if is_wrong else 0)
    draws = np.random.default_rng([seed, 2])
    codec = codec_of(game.codec, "float32")
    weights = [WEIGHT_MAX if game.kind == "weight" and n < game.liars else 1.0 for n in range(PEERS)]
    last = peers.theta[0].copy()
    for _ in range(STEPS // game.local_steps):
        for _ in range(game.local_steps):
            peers.step()
        said = None if game.kind == "none" else lies(game.kind, peers.theta, last, game.liars, draws)
        offers = peers.theta.copy()
        is_heard = said is not None or game.kind == "none"
        if said is not None:
            offers[: game.liars] = said
        first = 0 if is_heard else game.liars
        # Differences are sent, as strategies with an outer step do; otherwise int8 would make no difference.
        sent = np.stack([roundtrip(codec, (each - last).astype(np.float32)) for each in offers[first:]])
        moved = roundtrip(codec, reduced(game.rule, sent, weights[first:]).astype(np.float32))
        last = last + moved
        peers.theta[:] = last
    for _ in range(3):  # separate steps, so that peers differ
        peers.step()
    return peers.tested(game.liars)


def row_of(task: str, game: Game, found: list[tuple[Array, Array]]) -> dict[str, Any]:
    accuracy = np.concatenate([each[0] for each in found])
    losses = np.concatenate([each[1] for each in found])
    return {
        "task": task,
        "rule": game.rule,
        "lies": game.kind,
        "liars": 0 if game.kind == "none" else game.liars,
        "codec": game.codec,
        "local_steps": game.local_steps,
        "accuracy": round(float(accuracy.mean()), 4),
        "worst": round(float(accuracy.min()), 4),
        "loss": round(float(losses.mean()), 4),
    }


def main() -> int:
    options = arguments(__doc__ or "")
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []

    def measure(task: str, game: Game, seeds: int) -> dict[str, Any]:
        of = digits() if task == "digits" else characters()
        rows.append(row_of(task, game, [play(of, seed, game) for seed in range(seeds)]))
        return rows[-1]

    kinds = QUICK_KINDS if options.quick else KINDS
    seeds = SEEDS_QUICK if options.quick else SEEDS
    with np.errstate(over="ignore", invalid="ignore"):  # with the mean, a model may exceed float32
        for name, usual in (
            (f"{LIARS} of {PEERS} lie", Game(DEFAULT, "none")),
            ("3 of 16 lie, int8, H = 20", Game(DEFAULT, "none", 3, 20, "int8")),
        ):
            undisturbed = measure("digits", replace(usual, rule="mean"), seeds)
            played = QUICK_CODED_KINDS if options.quick and usual.codec == "int8" else kinds
            found = [measure("digits", replace(usual, kind=kind), seeds) for kind in played]
            cost = undisturbed["accuracy"] - found[0]["accuracy"]
            goals.append(Goal(f"{name}: accuracy that the rule costs without liars", cost, "<=", COST_MAX))
            for group, members in (("common", COMMON), ("subtle", SUBTLE)):
                some = [row for row in found if row["lies"] in members]
                least = min(some, key=lambda row: row["accuracy"])
                goals += [
                    Goal(
                        f"{name}, {group}: mean accuracy under {least['lies']}",
                        least["accuracy"],
                        ">=",
                        MEAN_MIN,
                    ),
                    Goal(
                        f"{name}, {group}: accuracy of the worst peer",
                        min(row["worst"] for row in some),
                        ">=",
                        WORST_MIN,
                    ),
                ]
        usual = Game(DEFAULT, "none")
        loss = measure("characters", replace(usual, rule="mean"), 1)["loss"]
        for kind in ("none", "scaled") if options.quick else kinds:
            found_loss = measure("characters", replace(usual, kind=kind), 1)["loss"]
            goals.append(
                Goal(f"characters, {kind}: loss relative to the mean", found_loss / loss, "<=", LOSS_MAX)
            )
        for rule in ("mean",) if options.quick else RULES:
            for kind in ("sign flip", "scaled") if options.quick else kinds:
                if rule != DEFAULT:
                    measure("digits", Game(rule, kind), 1 if options.quick else SEEDS_RULES)
    return report("liars", rows, goals, as_json=options.json)


if __name__ == "__main__":
    leave(main())
