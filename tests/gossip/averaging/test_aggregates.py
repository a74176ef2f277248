"""Aggregation rules of a group, tested end to end in one attempt with members that send false vectors."""

from typing import get_args

import numpy as np
import pytest

from gossip.averaging.aggregates import RULES, chosen, liars_max, obstacle_of
from gossip.averaging.attempt import Attempt
from gossip.averaging.codecs import CHUNK_ITEMS
from gossip.averaging.group import Aggregate, Group
from gossip.averaging.robust.reduction import Vector
from partition.run.local_settings import AggregateName
from tests.gossip.averaging.network import Averaging, group_of, mean_of, members_of, vectors_of
from tests.gossip.swarm import HashSigner, peer_of

ITEMS = 2 * CHUNK_ITEMS + 12_345


def group_by(aggregate: Aggregate, count: int, items: int, codec: str = "float32") -> Group:
    group = group_of(members_of(count), items, codec=codec)
    terms = type(group.terms)("butterfly", codec, group.terms.signature, items, "float32", aggregate)
    return Group(group.name, group.round, group.number, terms, group.members)


def averaged(
    aggregate: Aggregate, vectors: dict[int, Vector], codec: str = "float32", **options: object
) -> tuple[Averaging, Vector]:
    """Run one attempt, in which all members must succeed. Return its world, and the vector that all members
    hold."""
    items = len(vectors[0])
    world = Averaging(group_by(aggregate, len(vectors), items, codec), vectors, **options)  # type: ignore[arg-type]  # weights
    world.start()
    world.run()
    results = list(world.successes.values())
    assert len(results) == len(vectors)
    assert len({(each.vector.tobytes(), each.digest) for each in results}) == 1
    assert len({tuple(each.shares.items()) for each in results}) == 1
    return world, results[0].vector


@pytest.mark.parametrize("aggregate", ["median", "trimmed-mean"])
@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_one_liar_in_five_moves_no_value_out_of_the_honest_range(aggregate: Aggregate, codec: str) -> None:
    vectors = vectors_of(range(5), ITEMS)
    honest = np.stack([vectors[number] for number in range(1, 5)])
    vectors[0] = -1_000 * honest.mean(axis=0)
    _, found = averaged(aggregate, vectors, codec, weights={0: 1e12})
    slack = 0.0 if codec == "float32" else 0.02
    assert (found >= honest.min(axis=0) - slack).all()
    assert (found <= honest.max(axis=0) + slack).all()
    centre = honest.mean(axis=0)
    assert np.dot(found, centre) / np.linalg.norm(found) / np.linalg.norm(centre) > 0.5


@pytest.mark.parametrize("aggregate", [rule for rule in RULES if rule != "mean"])
@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_no_lie_moves_the_result_far_from_the_honest_vectors(aggregate: Aggregate, count: int) -> None:
    """The lies differ by chunk: either all liars lie in the same chunk, or each in a different one."""
    vectors = vectors_of(range(count), CHUNK_ITEMS + 12_345)
    liars = liars_max(aggregate, count)
    assert liars
    honest = np.stack([vectors[number] for number in range(liars, count)])
    for number in range(liars):
        vectors[number] = vectors[number].copy()
        vectors[number][number % 2 * CHUNK_ITEMS :] = 1e4 * (number + 1)
    _, found = averaged(aggregate, vectors)
    centre = honest.mean(axis=0)
    farthest = np.linalg.norm(honest - centre, axis=1).max()
    assert np.linalg.norm(found - centre) < 3 * farthest


def test_the_plain_mean_of_five_is_moved_by_one_liar() -> None:
    vectors = vectors_of(range(5), 5_000)
    centre = np.stack([vectors[number] for number in range(1, 5)]).mean(axis=0)
    vectors[0] = -1_000 * centre
    _, found = averaged("mean", vectors)
    assert np.dot(found, centre) / np.linalg.norm(found) / np.linalg.norm(centre) < -0.99


@pytest.mark.parametrize("count", [3, 5, 9, 13])
def test_the_trimmed_mean_survives_the_stated_number_of_liars(count: int) -> None:
    vectors = vectors_of(range(count), 10_000)
    liars = liars_max("trimmed-mean", count)
    for number in range(liars):
        vectors[number] = np.full(10_000, 1e30, np.float32)
    honest = np.stack([vectors[number] for number in range(liars, count)])
    _, found = averaged("trimmed-mean", vectors)
    assert (found <= honest.max(axis=0)).all()


def test_every_rule_gives_two_members_their_mean() -> None:
    vectors = vectors_of(range(2), 5_000)
    expected = mean_of(vectors, {0: 0.5, 1: 0.5})
    for aggregate in ("mean", "median", "trimmed-mean"):
        np.testing.assert_allclose(averaged(aggregate, vectors)[1], expected, atol=1e-6)


def test_the_median_counts_every_member_once() -> None:
    vectors = vectors_of(range(3), 5_000)
    world, found = averaged("median", vectors, weights={0: 3.0, 1: 1.0, 2: 1.0})
    assert set(world.successes[0].shares.values()) == {1 / 3}
    np.testing.assert_array_equal(found, np.median(np.stack(list(vectors.values())), axis=0))


def test_a_run_may_use_every_rule_that_a_group_knows() -> None:
    assert get_args(AggregateName) == ("auto", *RULES)


def test_members_with_different_rules_never_form_a_group() -> None:
    first, second = group_by("mean", 3, 100), group_by("median", 3, 100)
    assert first.id != second.id


def test_sparse_payloads_are_refused_by_robust_rules() -> None:
    group = group_of(members_of(3), 100, codec="topk64", mode="exchange")
    group = Group(
        group.name,
        0,
        0,
        type(group.terms)("exchange", "topk64", bytes(32), 100, "float32", "median"),
        group.members,
    )
    with pytest.raises(ValueError, match="median compares whole vectors"):
        Attempt(HashSigner(peer_of(0)), group, np.zeros(100, np.float32), 1.0, 0.0)


@pytest.mark.parametrize(
    ("choice", "is_private", "obstacle", "rule"),
    [
        ("auto", False, "", "nnm-trimmed-mean"),
        ("auto", True, "", "mean"),
        ("auto", False, "pairs", "mean"),
        ("mean", False, "pairs", "mean"),
        ("median", True, "", "median"),
        ("trimmed-mean", True, "", "trimmed-mean"),
    ],
)
def test_auto_chooses_a_robust_rule_if_anybody_may_join(
    choice: str, is_private: bool, obstacle: str, rule: str
) -> None:
    assert chosen(choice, is_private=is_private, obstacle=obstacle) == rule


@pytest.mark.parametrize(
    ("strategy", "codec", "named"),
    [
        ("sparseloco", "float32", "strategy sparseloco"),
        ("diloco", "topk64", "codec topk64"),
        ("gossip", "float32", "strategy gossip averages in pairs"),
    ],
)
def test_an_unknown_or_unusable_rule_is_refused_by_name(strategy: str, codec: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"aggregate median: {named}"):
        chosen("median", is_private=False, obstacle=obstacle_of(strategy, codec))
    with pytest.raises(
        ValueError, match="unknown aggregate 'mode'; use auto or one of mean, median, trimmed-mean, "
    ):
        chosen("mode", is_private=False)
