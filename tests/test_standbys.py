"""Idle machines follow a stage: its holder's death costs no return to a checkpoint, and no step is computed
twice.

Whole nodes in virtual time, compared with one process without stages.
"""

from typing import Any

import trio

from node.events import RunCovered, RunPlanned, RunResumed, StepCommitted
from node.protocols.manifest import Manifest
from partition.run.settings import RunSettings
from tests.partition_world import World
from tests.stack import prepare
from tests.test_takeover import newest, play, said, small

LATER_SECONDS = 60.0
"""Longer than it takes until an idle machine follows."""


LOOKS_SOON = RunSettings(refill_seconds=1.0)
"""Ten idle virtual seconds of a swarm would cost as many real ones."""


def followed(**changes: Any) -> Manifest:
    """Return a run of two stages with one replica each, long enough that an idle machine comes to follow
    them."""
    return small(**({"steps": 16, "standbys": 1, "save_every": 12} | changes))


async def following(world: World, count: int = 1) -> str:
    """Wait until this many machines follow; return the name of the first."""
    with trio.fail_after(LATER_SECONDS):
        while not said(world, RunPlanned) or len(newest(world).standbys) != count:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.05)
    return world.group.name_of(newest(world).standbys[0])


def holder_beside(world: World, name: str) -> str:
    """Return the node that computes the stage that this node follows."""
    peer = world.group.nodes[name].peer
    stage = next(stage for stage in newest(world).stages if peer in stage)
    return world.group.name_of(next(each for each in stage if each not in newest(world).standbys))


def committed_once(world: World) -> bool:
    """Return whether no step was committed under two plans."""
    steps = {(event.step, event.height) for event in said(world, StepCommitted)}
    return len({step for step, _ in steps}) == len(steps)


def test_a_standby_takes_over_its_stage_without_a_checkpoint() -> None:
    async def scenario(world: World) -> None:
        follower = await following(world)
        await world.reached(newest_step(world) + 2)
        world.crash(holder_beside(world, follower))
        with trio.fail_after(LATER_SECONDS):
            while newest(world).height < 2:  # noqa: ASYNC110 - virtual time
                await trio.sleep(0.05)

    world = play("abxc", followed(), scenario, settings=LOOKS_SOON)
    assert {event.restored_step for event in said(world, RunPlanned)} == {None}
    assert {event.lost_steps for event in said(world, RunResumed)} == {0}
    assert committed_once(world)
    assert {round(chance, 2) for event in said(world, RunCovered) for chance in event.covers} >= {0.9, 0.99}


def newest_step(world: World) -> int:
    return max((event.step for event in said(world, StepCommitted)), default=0)


def test_a_standby_gives_its_slot_to_another_run() -> None:
    """A requester asks a machine that only follows, and the machine frees its slot at once."""

    async def scenario(world: World) -> None:
        follower = await following(world)
        await world.reached(newest_step(world) + 1)  # the machine has received its plan
        node = world.group.nodes["c"]
        other = prepare(node, small(stages=1, steps=4, test_samples=16))
        with trio.fail_after(LATER_SECONDS):
            await node.runs.submit(other)
        planned = next(event for event in said(world, RunPlanned) if event.run == other.text)
        assert planned.stages == ((world.group.nodes[follower].peer,),)

    play("abc", followed(), scenario, forks=True, settings=LOOKS_SOON)
