"""Strategies on a quadratic with a different minimum for each peer: every strategy finds the common
minimum."""

import numpy as np
import pytest

from gossip.averaging.codecs import codec_of, roundtrip
from gossip.averaging.grid import Grid
from gossip.averaging.robust.reduction import Vector
from gossip.averaging.strategies import (
    Asynchronous,
    Delayed,
    DiLoCo,
    Mean,
    NoLoCo,
    ParameterMean,
    SparseLoCo,
    Strategy,
)
from tests.gossip.swarm import peer_of

COUNT, ITEMS, LOCAL_STEPS = 16, 512, 10


def train(strategies: list[Strategy], rounds: int, failing: float = 0.0) -> tuple[float, float]:
    """Run local gradient steps and rounds. Return the final distance of the mean from the common minimum, as
    a share of the initial distance, and the spread of the peers.
    """
    draws = np.random.default_rng(3)
    centres = [draws.standard_normal(ITEMS) + 3 for _ in strategies]
    target = np.mean(centres, axis=0)
    thetas: list[Vector] = [np.zeros(ITEMS) for _ in strategies]
    peers = [peer_of(number) for number in range(len(strategies))]
    grouping = strategies[0].grouping
    grid = Grid(b"run", 0, peers, {"all": 64, "moshpit": 4, "pairs": 2}[grouping])
    cells = {peer: grid.start(peer) for peer in peers}
    codec = codec_of(strategies[0].codec, "float64")
    for number in range(rounds):
        for _ in range(LOCAL_STEPS):
            thetas = [theta - 0.05 * (theta - centre) for theta, centre in zip(thetas, centres, strict=True)]
        groups: dict[bytes, list[int]] = {}
        for place, peer in enumerate(peers):
            groups.setdefault(grid.key(number, cells[peer]), []).append(place)
        for group in groups.values():
            held = {peers[place]: cells[peers[place]][grid.axis(number)] for place in group}
            cells.update(grid.moved(number, cells[peers[group[0]]], held))
            offers = {place: roundtrip(codec, strategies[place].offer(thetas[place])) for place in group}
            late = {place for place in group if draws.random() < failing}
            here = [place for place in group if place not in late]
            vector = np.mean([offers[place] for place in here], axis=0) if len(here) > 1 else None
            for place in group:
                mean = None if vector is None or place in late else Mean(vector)
                thetas[place] = strategies[place].take(thetas[place], mean)
            if vector is not None and grouping == "all":
                # A member that missed the round catches up from a member that did not.
                for place in late:
                    strategies[place].load(strategies[here[0]].state())
                    thetas[place] = thetas[here[0]].copy()
    middle = np.mean(thetas, axis=0)
    spread = float(np.std(thetas, axis=0).max())
    return float(np.linalg.norm(middle - target) / np.linalg.norm(target)), spread


def made(name: str) -> list[Strategy]:
    theta = np.zeros(ITEMS)
    kinds: dict[str, Strategy] = {
        "parameters": ParameterMean(LOCAL_STEPS),
        "pairs": ParameterMean(LOCAL_STEPS, grouping="pairs"),
        "asynchronous": Asynchronous(LOCAL_STEPS, 20),
        "diloco": DiLoCo(theta, LOCAL_STEPS),
        "diloco int8": DiLoCo(theta, LOCAL_STEPS, codec="int8"),
        "diloco int4": DiLoCo(theta, LOCAL_STEPS, codec="int4"),
        "noloco": NoLoCo(theta, LOCAL_STEPS),
        "sparseloco": SparseLoCo(theta, LOCAL_STEPS),
    }
    return [kinds[name]]


@pytest.mark.parametrize(
    ("name", "rounds", "distance_max"),
    [
        ("parameters", 60, 0.02),
        ("pairs", 60, 0.02),
        ("asynchronous", 60, 0.02),
        ("diloco", 120, 0.02),
        ("diloco int8", 120, 0.02),
        ("diloco int4", 120, 0.02),
        ("noloco", 120, 0.02),
        ("sparseloco", 150, 0.2),
    ],
)
@pytest.mark.parametrize("failing", [0.0, 0.1])
def test_every_strategy_finds_the_common_minimum(
    name: str, rounds: int, distance_max: float, failing: float
) -> None:
    strategies = [strategy for _ in range(COUNT) for strategy in made(name)]
    distance, spread = train(strategies, rounds, failing)
    # While a peer is missing, its own minimum is missing from the common one too.
    assert distance < distance_max * (2 if failing else 1)
    # If all average in one group, the members that succeed or catch up hold the same values.
    assert spread <= (1e-12 if strategies[0].grouping == "all" else 1.5)


def test_a_failed_round_changes_nothing() -> None:
    theta = np.arange(ITEMS, dtype=np.float64)
    for name in ("parameters", "asynchronous", "diloco", "noloco", "sparseloco"):
        strategy = made(name)[0]
        before = {key: value.copy() for key, value in strategy.state().items()}
        strategy.offer(theta)
        assert (strategy.take(theta, None) == theta).all()
        after = strategy.state()
        assert all((before[key] == after[key]).all() for key in before), name


def test_rounds_without_local_steps_only_reduce_the_spread_of_copies() -> None:
    draws = np.random.default_rng(1)
    peers = [NoLoCo(np.zeros(ITEMS), 1) for _ in range(4)]
    thetas: list[Vector] = [draws.standard_normal(ITEMS) for _ in peers]
    for pair in ((0, 1), (2, 3)):
        mean = Mean(np.mean([peers[place].offer(thetas[place]) for place in pair], axis=0))
        for place in pair:
            thetas[place] = peers[place].take(thetas[place], mean)
    expected = np.mean(thetas, axis=0)
    assert np.std(thetas, axis=0).max() > 0.1, "no copy carries the noise of its own group"
    for pair in ((0, 2), (1, 3)):
        mean = Mean(np.mean([peers[place].offer(thetas[place]) for place in pair], axis=0))
        for place in pair:
            thetas[place] = peers[place].take(thetas[place], mean)
    assert np.allclose(thetas, expected, atol=1e-12)


@pytest.mark.parametrize("name", ["diloco", "sparseloco"])
def test_momentum_leaves_values_that_all_peers_share_unchanged(name: str) -> None:
    (strategy,) = made(name)
    theta = np.ones(ITEMS)
    moved = strategy.take(theta, Mean(strategy.offer(theta)))
    assert not (moved == 0).all()
    assert (strategy.take(moved, Mean(np.zeros(ITEMS))) == moved).all()


def test_a_stale_mean_weighs_less_and_a_very_old_one_is_ignored() -> None:
    strategy = Asynchronous(1, stale_steps_max=8)
    theta, mean = np.zeros(3), np.ones(3)
    assert strategy.take(theta, Mean(mean)).tolist() == [1, 1, 1]
    assert strategy.take(theta, Mean(mean, stale_steps=3)).tolist() == [0.5, 0.5, 0.5]
    assert strategy.take(theta, Mean(mean, stale_steps=9)).tolist() == [0, 0, 0]
    assert strategy.dropped_count == 1


def test_delayed_averaging_keeps_the_steps_made_meanwhile() -> None:
    strategy = Delayed(ParameterMean(1))
    theta = np.zeros(3)
    strategy.offer(theta)
    assert strategy.take(theta + 0.25, Mean(np.ones(3))).tolist() == [1.25, 1.25, 1.25]
    strategy.offer(theta)
    assert strategy.take(theta + 0.25, None).tolist() == [0.25, 0.25, 0.25]


def test_a_peer_that_joins_late_loads_the_shared_state() -> None:
    one = DiLoCo(np.zeros(4), 1)
    one.offer(np.ones(4))
    one.take(np.ones(4), Mean(np.full(4, -1.0)))
    late = DiLoCo(np.full(4, 9.0), 1)
    late.load(one.state())
    assert (late.offer(np.ones(4)) == one.offer(np.ones(4))).all()
