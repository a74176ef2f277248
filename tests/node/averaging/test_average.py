"""Averaging by whole nodes on real sockets, in one process."""

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio

from crypto.contact import parse_address
from crypto.identity import PeerId, peer_text
from node import config
from node.averaging.once import AveragingResult
from node.averaging.service import PURPOSE, Averaging
from node.averaging_events import AveragingEnded, AveragingJoined
from node.errors import UsageError
from node.runtime import Node
from node.seams import Parts, Seams
from partition.run.receipts import UNPROVEN_WEIGHT_MAX


def settings(folder: Path, name: str) -> config.Config:
    return config.Config(
        name=name,
        data_dir=folder / name,
        swarm=config.SwarmSettings(name="averaging", preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False),
        resources=config.Resources(calibrate=False),
    )


@asynccontextmanager
async def nodes(folder: Path, count: int, parts: Parts | None = None) -> AsyncIterator[list[Node]]:
    """Yield nodes that know each other."""
    async with AsyncExitStack() as stack:
        found: list[Node] = []
        for number in range(count):
            own = settings(folder, f"n{number}")
            if found:
                seeds = (parse_address(found[0].addresses[0]),)
                own = replace(own, join=config.JoinSettings(lan=False, seeds=seeds))
            found.append(await stack.enter_async_context(Node(own, parts=parts)))
        for node in found:
            await node.wait_for_members(count - 1)
        yield found


async def average_all(
    found: list[Node], tensors: list[dict[str, Any]], **options: Any
) -> list[AveragingResult]:
    results: list[AveragingResult | None] = [None] * len(found)

    async def average(number: int) -> None:
        weight = options.get("weights", [1.0] * len(found))[number]
        results[number] = await found[number].average(
            tensors[number], "x", weight, options.get("peers", len(found) - 1), 40.0, aggregate="mean"
        )

    async with trio.open_nursery() as nursery:
        for number in range(len(found)):
            nursery.start_soon(average, number)
    return [result for result in results if result is not None]


async def test_four_nodes_get_one_weighted_mean_and_name_its_members(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    given: list[dict[str, Any]] = [
        {"w": generator.normal(size=(300, 1_000)).astype(np.float32), "b": generator.normal(size=7)}
        for _ in range(4)
    ]
    weights = [1.0, 2.0, 3.0, 4.0]
    async with nodes(tmp_path, 4) as found:
        with found[0].watch() as events:
            results = await average_all(found, given, weights=weights)
            told = [events.receive_nowait() for _ in range(events.statistics().current_buffer_used)]
        assert [result.error for result in results] == [""] * 4
        for name in ("w", "b"):
            mean = sum(w * each[name] for w, each in zip(weights, given, strict=True)) / 10
            np.testing.assert_allclose(results[0].tensors[name], mean, atol=1e-6)
            assert results[0].tensors[name].dtype == given[0][name].dtype
            assert len({result.tensors[name].tobytes() for result in results}) == 1
        shares = {peer_text(node.peer): weight / 10 for node, weight in zip(found, weights, strict=True)}
        assert all(result.shares == pytest.approx(shares) for result in results)
        assert sum(isinstance(event, AveragingJoined) for event in told) == 3
        ended = [event for event in told if isinstance(event, AveragingEnded)]
        assert [(event.outcome, event.members) for event in ended] == [("ok", 4)]
        contribution = found[0].runs.receipts.contribution(found[1].peer)
        assert contribution.averaged > 0
        assert 1.0 < contribution.weight <= UNPROVEN_WEIGHT_MAX
        # A second round under the same name, with different values.
        again = await average_all(
            found, [{name: 2 * array for name, array in each.items()} for each in given]
        )
        assert len({result.tensors["w"].tobytes() for result in again}) == 1
        np.testing.assert_allclose(again[0].tensors["w"], sum(2 * each["w"] for each in given) / 4, atol=1e-6)


async def test_torch_tensors_are_returned_with_their_types(tmp_path: Path) -> None:
    given = [{"w": torch.full((3,), float(n), dtype=torch.bfloat16), "v": torch.ones(2)} for n in range(2)]
    async with nodes(tmp_path, 2) as found:
        first, second = await average_all(found, given)
    assert first.tensors["w"].dtype == torch.bfloat16
    assert first.tensors["w"].tolist() == second.tensors["w"].tolist() == [0.5] * 3
    assert first.tensors["v"].dtype == torch.float32


async def test_different_shapes_are_refused_with_the_reason(tmp_path: Path) -> None:
    async with nodes(tmp_path, 2) as found:
        results: list[AveragingResult] = []

        async def average(number: int) -> None:
            tensors = {"w": np.ones(3 + number, np.float32)}
            results.append(await found[number].average(tensors, "x", 1.0, 1, 3.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(average, 0)
            nursery.start_soon(average, 1)
    for result in results:
        assert not result.is_averaged
        assert result.error == "0 of 1 others took part within 3 s; 1 gave other names or shapes"
        assert result.tensors["w"].tolist() == [1.0] * len(result.tensors["w"])


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({}, "no tensors"),
        ({"w": np.ones(3, np.int64)}, "int64 cannot be averaged"),
        ({"w": np.array([1.0, np.nan])}, "not finite"),
        ({"w": "words"}, "cannot be averaged"),
    ],
)
async def test_unsupported_tensors_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, Any], text: str
) -> None:
    async with nodes(tmp_path, 1) as found:
        with pytest.raises(UsageError, match=text):
            await found[0].average(tensors, "x")


@pytest.mark.slow
async def test_no_success_is_reported_if_a_node_dies_in_a_round(tmp_path: Path) -> None:
    given = [{"w": np.full(2_000_000, n, np.float32)} for n in range(3)]
    numbers: dict[str, int] = {}
    results: list[AveragingResult] = []

    async def average(node: Node, number: int) -> None:
        numbers[node.id] = number
        results.append(await node.average(given[number], "x", 1.0, 2, 30.0))

    async with nodes(tmp_path, 2) as found, trio.open_nursery() as nursery:
        own = settings(tmp_path, "third")
        seeds = (parse_address(found[0].addresses[0]),)
        # Cancel the task without a goodbye, after part of its tensor has been sent.
        async with (
            trio.open_nursery() as dying,
            Node(replace(own, join=config.JoinSettings(lan=False, seeds=seeds))) as third,
        ):
            await third.wait_for_members(2)
            nursery.start_soon(average, found[0], 0)
            nursery.start_soon(average, found[1], 1)
            dying.start_soon(average, third, 2)
            while not any(runner.attempt.sent_bytes for runner in third.averaging.runners):  # noqa: ASYNC110 - a counter wakes nobody
                await trio.sleep(0.001)
            dying.cancel_scope.cancel()
    assert len(results) == 2
    for result in results:
        if result.is_averaged:
            mean = sum(share * numbers[peer] for peer, share in result.shares.items())
            assert np.allclose(result.tensors["w"], mean)
        else:
            assert result.error
    assert len({result.tensors["w"].tobytes() for result in results if result.is_averaged}) <= 1


async def test_participants_missing_from_each_others_view_meet_through_their_records(tmp_path: Path) -> None:
    crowds: dict[PeerId, list[PeerId]] = {}

    def make(
        seams: Seams, *arguments: Any, live: Callable[[], Collection[PeerId]], **named: Any
    ) -> Averaging:
        seen = lambda: crowds.get(seams.network.peer) or live()  # noqa: E731
        return Averaging(seams, *arguments, live=seen, **named)

    async with nodes(tmp_path, 3, {Averaging: make}) as found:
        third = found[2].peer
        for node in found[:2]:
            # As in a large swarm, each node's list holds a peer that does not participate and lacks the other
            # participant.
            crowds[node.peer] = [node.peer, third]
        results = await average_all(found[:2], [{"w": np.ones(4)}, {"w": np.zeros(4)}])
        assert [result.error for result in results] == ["", ""]
        assert results[0].tensors["w"].tolist() == [0.5] * 4
        records = await found[2].discovery.find(PURPOSE, found[0].averaging.runs[0].key)
        assert {record.publisher for record in records} == {found[0].peer, found[1].peer}
