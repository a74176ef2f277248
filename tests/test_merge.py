"""A stage that nobody is left for goes to the stages beside it: a run uses the machines that are left.

Whole nodes in virtual time, held against one process that knows of no stages.
"""

import pytest

from node.events import RunPlanned, RunResumed
from tests.partition_world import World
from tests.test_recut import planned
from tests.test_takeover import SAVE_EVERY, holders, newest, other, play, said, small

PAUSE_SECONDS_MAX = 10.0
"""From a death to the next step."""


def pauses(world: World) -> list[float]:
    """How long the run stood still each time, as those say who resumed it."""
    return sorted({event.seconds for event in said(world, RunResumed)})


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stage_beside_takes_the_layers_of_one_that_was_lost(place: int) -> None:
    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        await world.reached(SAVE_EVERY + 2)
        world.crash(holders(world)[place])

    world = play("abc", small(stages=3), scenario)
    assert newest(world).height == 1
    assert len(newest(world).stages) == 2
    assert max(pauses(world)) <= PAUSE_SECONDS_MAX


def test_four_stages_become_three_and_then_two() -> None:
    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        world.crash(other(world, "d"))
        await planned(world, 1)
        await world.reached(SAVE_EVERY + 4)
        world.crash(other(world, "d"))

    world = play("abcd", small(stages=4, steps=14), scenario)
    assert {event.height: len(event.stages) for event in said(world, RunPlanned)} == {0: 4, 1: 3, 2: 2}
