"""A stage without a holder is merged into the adjacent stages: a run goes on with the remaining machines.

Whole nodes in virtual time, compared with one process without stages.
"""

from functools import partial

import pytest
import trio

from node.events import Event, RunChanged, RunPlanned, RunResumed, StepCommitted
from node.protocols.manifest import Run
from sim.network.pace import PeerPace
from sim.worlds.stages import NodeExecutor
from tests.partition_world import World
from tests.stack import Tensors, _live, manifest, reference, simulate, swarm, train, weights
from tests.test_recut import RATE, _ignore, assert_same_bits, deep_model, planned, step_seconds
from tests.test_takeover import SAVE_EVERY, holders, newest, other, play, said, small

PAUSE_SECONDS_MAX = 10.0
"""Maximum seconds from a death to the next step."""


def pauses(world: World) -> list[float]:
    """Return each pause of the run, as the members that resumed it report."""
    return sorted({event.seconds for event in said(world, RunResumed)})


@pytest.mark.parametrize("place", [0, 1])
def test_an_adjacent_stage_takes_the_layers_of_a_lost_one(place: int) -> None:
    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        await world.reached(SAVE_EVERY + 2)
        world.crash(holders(world)[place])

    world = play("abc", small(stages=3), scenario)
    assert newest(world).height == 1
    assert len(newest(world).stages) == 2
    assert max(pauses(world)) <= PAUSE_SECONDS_MAX
    reasons = {event.reason for event in said(world, RunChanged) if event.state == "degraded"}
    assert any("2 stages have the layers of 3, each step about " in each for each in reasons)


def test_four_stages_become_three_and_then_two() -> None:
    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        world.crash(other(world, "d"))
        await planned(world, 1)
        await world.reached(SAVE_EVERY + 4)
        world.crash(other(world, "d"))

    world = play("abcd", small(stages=4, steps=14), scenario)
    assert {event.height: len(event.stages) for event in said(world, RunPlanned)} == {0: 4, 1: 3, 2: 2}


@pytest.mark.parametrize("role", ["replica", "committer and replica"])
def test_a_leaving_last_holder_hands_its_stage_to_adjacent_ones(role: str) -> None:
    """The leaving member's state is saved at the current step, and not taken from the last checkpoint."""
    left: list[str] = []

    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        await world.reached(SAVE_EVERY + 2)
        left.append("c" if role.startswith("committer") else other(world, "c"))
        await world.group.nodes[left[0]].leave()
        world.crash(left[0])

    world = play("abc", small(stages=3), scenario)
    assert len(newest(world).stages) == 2
    assert left[0] not in holders(world)
    assert {event.lost_steps for event in said(world, RunResumed)} == {0}
    steps = {(event.step, event.height) for event in said(world, StepCommitted)}
    assert sorted(step for step, _ in steps) == list(range(10)), "each step once"


def test_a_lost_stage_is_merged_only_within_the_owners_limits() -> None:
    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        await world.reached(SAVE_EVERY + 2)
        world.group.nodes[other(world, "c")].set("memory", "1%")

    world = play("abc", small(stages=3), scenario)
    assert len(newest(world).stages) == 2
    assert {event.lost_steps for event in said(world, RunResumed)} == {0}
    steps = {(event.step, event.height) for event in said(world, StepCommitted)}
    assert sorted(step for step, _ in steps) == list(range(10)), "each step once"


def test_a_requester_continues_alone_if_its_run_allows_it() -> None:
    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        await world.reached(SAVE_EVERY + 2)
        world.crash(other(world, "b"))

    world = play("ab", small(stages=2, on_lost_quorum="requester"), scenario)
    assert newest(world).stages == ((world.group.nodes["b"].peer,),)
    assert max(pauses(world)) <= PAUSE_SECONDS_MAX


def test_merged_stages_are_split_again_once_a_machine_joins() -> None:
    """No request causes this: the committer measures, and two checks agree that a third stage pays off."""
    executors = {name: NodeExecutor(RATE, 1.0, lambda _: 0.0, PeerPace(), _ignore) for name in "abcx"}
    wanted = manifest(
        deep_model(),
        stages=3,
        replicas=1,
        steps=36,
        microbatch=8,
        microbatches=4,
        test_samples=16,
        save_every=2,
        frames="exact",
    )
    found: list[tuple[Run, list[Event], Tensors]] = []

    async def scenario() -> None:
        async with swarm("abc", executors=executors, preset="lan") as group, trio.open_nursery() as nursery:

            async def on_event(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 4 and event.height == 0:
                    group.kill("a")
                if isinstance(event, StepCommitted) and event.step == 8:
                    joining = partial(_live, group, "x", "b", 1, 0.0, executor=executors["x"])
                    await nursery.start(joining)

            run, events = await train(group, "c", wanted, on_event)
            found.append((run, events, weights(group, "c", run)))
            nursery.cancel_scope.cancel()

    simulate(scenario)
    ((run, events, result),) = found
    assert_same_bits(result, reference(run))
    plans = [event for event in events if isinstance(event, RunPlanned)]
    assert [len(plan.stages) for plan in plans][-1] == 3
    assert 2 in [len(plan.stages) for plan in plans]
    assert {event.lost_steps for event in events if isinstance(event, RunResumed)} <= {0, 1, 2}
    assert step_seconds(events, plans[-1].height) < 0.85 * step_seconds(events, plans[-2].height)
