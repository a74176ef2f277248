"""Aggregation rules on whole nodes over real sockets: the damage by liars is bounded, and peers with
different rules never mix but name each other.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from crypto.identity import peer_text
from node import config
from node.averaging.once import AveragingResult
from node.errors import UsageError
from node.runtime import Node
from tests.node.averaging.test_average import nodes, settings

LIE = np.full(1_000, 1e6, np.float32)


async def test_nodes_withstand_a_liar_and_name_peers_of_another_rule(tmp_path: Path) -> None:
    """One node of four sends large values with a weight of a trillion."""
    draws = np.random.default_rng(1)
    given = [LIE, *(draws.standard_normal(1_000).astype(np.float32) for _ in range(3))]
    honest = np.stack(given[1:])
    results: dict[tuple[str, int], AveragingResult] = {}
    async with nodes(tmp_path, 4) as found, trio.open_nursery() as nursery:

        async def average(group: str, aggregate: str, number: int, peers: int, seconds: float) -> None:
            weight = 1.0 if number else 1e12
            results[group, number] = await found[number].average(
                {"w": given[number]}, group, weight, peers, seconds, aggregate=aggregate
            )

        for aggregate in ("auto", "median", "mean"):
            for number in range(4):
                nursery.start_soon(average, aggregate, aggregate, number, 3, 60.0)
        for number in range(2):
            nursery.start_soon(average, "apart", ("mean", "median")[number], number, 1, 3.0)
    for aggregate, rule, liars in (
        ("auto", "nnm-trimmed-mean", 1),
        ("median", "median", 1),
        ("mean", "mean", 0),
    ):
        several = [results[aggregate, number] for number in range(4)]
        assert [(each.error, each.aggregate, each.liars_max) for each in several] == [("", rule, liars)] * 4
        assert len({each.tensors["w"].tobytes() for each in several}) == 1
        share = several[0].shares[peer_text(found[0].peer)]
        assert share == pytest.approx(1 / 4 if rule == "median" else 4 / 7), (
            "the first member's weight in the round was not bounded or not reported"
        )
        is_honest = (several[0].tensors["w"] <= honest.max(axis=0)).all()
        assert is_honest == (rule != "mean")
    first, second = results["apart", 0].error, results["apart", 1].error
    assert '1 average these tensors by aggregate = "median", this peer by "mean"' in first
    assert '1 average these tensors by aggregate = "mean", this peer by "median"' in second


async def test_an_impossible_rule_is_a_usage_error(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1) as (me,):
        with pytest.raises(
            UsageError, match="average: unknown aggregate 'best'; use auto or one of mean, median"
        ):
            await me.average({"w": LIE}, "x", aggregate="best")
        with pytest.raises(
            UsageError, match="average: aggregate median: codec topk64 sends only a few values"
        ):
            await me.average({"w": LIE}, "x", codec="topk64", aggregate="median")


async def test_auto_selects_the_mean_in_a_swarm_with_a_key(tmp_path: Path) -> None:
    key_file = tmp_path / "swarm.key"
    key_file.write_text(bytes(range(32)).hex() + "\n")
    key_file.chmod(0o600)
    swarm = config.SwarmSettings(name="averaging", preset="local", key_file=key_file)
    async with Node(replace(settings(tmp_path, "n"), swarm=swarm)) as me:
        alone = await me.average({"w": LIE}, "x", timeout_seconds=0.01, aggregate="auto")
    assert (alone.is_averaged, alone.aggregate) == (False, "mean")
