"""Borders between stages move in a live run: layers move with their optimizer moments, and nothing is lost.

Whole nodes in virtual time, compared with one process without stages.
"""

import os
from contextlib import AsyncExitStack
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import trio
from torch import nn

from node import config
from node.checkpoints.weights import weights_name
from node.events import Event, RunEnded, RunPlanned, RunResumed, StepCommitted
from node.protocols.manifest import Manifest, Run
from node.runtime import Node
from partition.capture.models.model_spec import Precision
from partition.capture.task import Task, capture_task, correct, cross_entropy
from partition.plan.change import Change
from partition.stage import OptimizerSettings, StageSpecification
from sim.network.pace import PeerPace
from sim.worlds.stages import NodeExecutor
from tests.exact_models import normalised_cnn
from tests.partition_world import World
from tests.stack import Model, Tensors, known, manifest, prepare, reference, simulate, swarm, train, weights
from tests.test_takeover import newest, other, play, said, small

RATE = 1e6
"""FLOP/s of a simulated peer, with which a step of the model of twelve layers takes seconds."""
SLOW_AT = 8
"""The step after which one peer is slow."""
REAL_STAGES = int(os.environ.get("PEERLOOM_RECUT_STAGES", "0"))
"""In `make test`, whole nodes move layers in virtual time; in `make soak`, real processes do."""
REAL_SECONDS_MAX = 300.0
"""Seconds allowed on a busy machine, on which each stage imports torch twice."""
ADAM = OptimizerSettings(kind="adamw", learning_rate=0.01, weight_decay=0.1)


def committer(world: World) -> Any:
    """Return the membership of the node that commits."""
    name = world.group.name_of(newest(world).trainer)
    return world.group.nodes[name].runs.members[world.run.id]


def recut(world: World, *cuts: int) -> None:
    """Let the committer move the borders, as after a measurement."""
    member = committer(world)
    member.core.between.recut(Change(cuts=cuts))
    member.act()


def elsewhere(world: World, *choices: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first of these cuts that is not in force."""
    now = tuple(last for _, last in newest(world).layers[:-1])
    return next(cuts for cuts in choices if cuts != now)


async def planned(world: World, height: int) -> None:
    """Wait for a plan of this height."""
    with trio.fail_after(60):
        while newest(world).height < height:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.1)


def _ignore(specification: StageSpecification, step: int, microbatches: tuple[int, ...]) -> None:
    del specification, step, microbatches


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    """Assert that a run with moved layers and one without have exactly the same result."""
    assert sorted(found) == sorted(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_moved_layers_continue_with_their_moments_bit_for_bit() -> None:
    async def scenario(world: World) -> None:
        await world.reached(3)
        recut(world, *elsewhere(world, (1, 2), (2, 3)))
        await planned(world, 1)
        await world.reached(6)
        recut(world, 3, 4)
        await planned(world, 2)

    world = play("abc", small(stages=3, optimizer=ADAM), scenario)
    assert newest(world).height == 2
    assert newest(world).layers == ((0, 3), (3, 4), (4, 5))
    assert {event.lost_steps for event in said(world, RunResumed)} == {0}
    assert_same_bits(weights(world.group, "c", world.run), reference(world.run))


def test_every_replica_of_a_stage_takes_the_new_layers() -> None:
    async def scenario(world: World) -> None:
        await world.reached(4)
        recut(world, *elsewhere(world, (3,), (2,)))

    world = play("abcd", small(replicas=2, optimizer=ADAM), scenario)
    assert newest(world).height == 1
    assert newest(world).restored_step is not None


def test_a_member_that_dies_while_layers_move_does_not_stop_the_run() -> None:
    async def scenario(world: World) -> None:
        await world.reached(4)
        recut(world, *elsewhere(world, (3,), (2,)))
        world.crash(other(world, "d"))

    play("abcd", small(replicas=2, optimizer=ADAM), scenario)


def test_a_moved_stage_is_restored_from_an_old_cuts_checkpoint() -> None:
    async def scenario(world: World) -> None:
        await world.reached(4)
        recut(world, *elsewhere(world, (3,), (2,)))
        await planned(world, 1)
        world.crash(other(world, "c"))

    world = play("abc", small(save_every=100, optimizer=ADAM), scenario)
    assert newest(world).height >= 2


def test_cuts_that_leave_a_stage_empty_are_not_proposed() -> None:
    async def scenario(world: World) -> None:
        await world.reached(2)
        recut(world, 5)
        recut(world, 0)
        recut(world, 1, 2)

    assert newest(play("abc", small(), scenario)).height == 0


def test_batch_statistics_and_dropout_move_too() -> None:
    async def scenario(world: World) -> None:
        await world.reached(3)
        recut(world, *elsewhere(world, (2,), (1,)))

    world = play("abc", small(captured=normalised_cnn(), optimizer=ADAM), scenario)
    assert newest(world).height == 1
    assert_same_bits(weights(world.group, "c", world.run), reference(world.run))


@cache
def deep_model(dtype: Precision = "float64", width: int = 64) -> Model:
    """Return a model of twelve equal layers with a width of 64."""
    torch.manual_seed(3)
    sizes = [64, *[width] * 12]
    blocks = [nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairwise(sizes)]
    kind = getattr(torch, dtype)
    module = nn.Sequential(nn.Flatten(), *blocks, nn.Linear(width, 10)).to(kind)
    images, labels = torch.zeros(2, 1, 8, 8, dtype=kind), torch.zeros(2, dtype=torch.int64)
    return known(
        capture_task(Task(module, (images,), (labels,), cross_entropy, {"correct": correct}, name="deep"))
    )


def step_seconds(events: list[Event], height: int) -> float:
    """Return the median time of a plan's steps, without the first ones."""
    steps = [row.seconds for row in events if isinstance(row, StepCommitted) and row.height == height]
    return median(steps[2:])


def test_a_slow_peer_gives_layers_away_and_the_run_speeds_up() -> None:
    """No request causes this: the committer measures, and two checks agree."""
    paces = {name: PeerPace() for name in "abc"}
    executors = {name: NodeExecutor(RATE, 1.0, lambda _: 0.0, pace, _ignore) for name, pace in paces.items()}
    wanted = manifest(
        deep_model(),
        stages=3,
        replicas=1,
        steps=24,
        microbatch=8,
        microbatches=4,
        test_samples=16,
        save_every=50,
        frames="exact",
    )
    found: list[tuple[Run, list[Event], Tensors]] = []

    async def scenario() -> None:
        async with swarm("abc", executors=executors, preset="lan") as group:

            async def on_event(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == SLOW_AT:
                    plans = [row for row in group.events["c"] if isinstance(row, RunPlanned)]
                    slow = group.name_of(plans[-1].stages[1][0])
                    paces[slow].factor = 4.0

            run, events = await train(group, "c", wanted, on_event)
            found.append((run, events, weights(group, "c", run)))

    simulate(scenario)
    ((run, events, result),) = found
    plans = [event for event in events if isinstance(event, RunPlanned)]
    first, second = ([last - begin for begin, last in plan.layers] for plan in plans[:2])
    assert second[1] < first[1]
    assert len({plan.stages for plan in plans}) == 1
    slow = [row.seconds for row in events if isinstance(row, StepCommitted) and row.height == 0][
        SLOW_AT + 4 :
    ]
    assert step_seconds(events, 1) < 0.75 * median(slow)
    assert_same_bits(result, reference(run))


@pytest.mark.skipif(not REAL_STAGES, reason="PEERLOOM_RECUT_STAGES=3")
def test_moved_layers_keep_every_bit_between_real_processes(tmp_path: Path) -> None:
    """Start nodes on loopback; each stage has its own process, which is restarted for its new layers."""
    trio.run(_train_on_real_nodes, tmp_path)


async def _train_on_real_nodes(tmp_path: Path) -> None:
    wanted = manifest(
        stages=REAL_STAGES,
        replicas=1,
        steps=12,
        microbatches=2,
        test_samples=16,
        save_every=100,
        optimizer=ADAM,
    )
    with trio.fail_after(REAL_SECONDS_MAX):
        await _recut_for_real(tmp_path, wanted)


async def _recut_for_real(tmp_path: Path, wanted: Manifest) -> None:
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for name in "abc"[:REAL_STAGES]:
            settings = config.Config(
                name=name,
                data_dir=tmp_path / name,
                swarm=config.SwarmSettings(name="recut", preset="local"),
                listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
                join=config.JoinSettings(lan=False),
                resources=config.Resources(calibrate=False, cores=1),
            )
            join = [nodes[0].network.addresses[0].short] if nodes else []
            nodes.append(await stack.enter_async_context(Node(settings, join=join)))
        while any(len(node.membership.live) < len(nodes) for node in nodes):  # noqa: ASYNC110
            await trio.sleep(0.05)
        requester = nodes[-1]
        run = prepare(requester, wanted)
        plans: list[RunPlanned] = []
        with requester.watch() as events:
            await requester.runs.submit(run)
            async for event in events:
                if isinstance(event, RunPlanned):
                    plans.append(event)
                if isinstance(event, StepCommitted) and event.step == 3:
                    (member,) = requester.runs.members.values()
                    cuts = tuple(range(1, REAL_STAGES))
                    other = cuts if plans[0].layers[0] != (0, 1) else tuple(cut + 1 for cut in cuts)
                    member.core.between.recut(Change(cuts=other))
                    member.act()
                if isinstance(event, RunEnded):
                    assert event.outcome == "done", event
                    break
        assert [plan.height for plan in plans] == [0, 1]
        assert plans[0].layers != plans[1].layers
        data = requester.seams.storage.read(weights_name(run.text))
    assert data is not None
    assert_same_bits(safetensors.numpy.load(data), reference(run))
