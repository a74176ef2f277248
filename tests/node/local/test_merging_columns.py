"""Columns whose machines die while no other is free. The remaining nodes take over the stages, and hand them
to a machine that joins later. Whole nodes in virtual time.
"""

import pytest
import trio

from node.events import RunChanged
from sim.worlds.scheduling import run_virtually
from tests import stack
from tests.local_runs import local_runs
from tests.node.local.test_columns import LOCAL, columns, reached
from tests.node.local.test_runs import SLOW, ends, submit
from tests.stack import Swarm, swarm

GOES_ON_SECONDS = 10.0
"""Most seconds from a death until the next step."""


async def begin(group: Swarm, *, stages: int, steps: int = 50, requester: str = "a") -> None:
    """Request a run in one column."""
    await submit(group, requester, stages=stages, replicas=1, local=LOCAL, steps=steps, save_every=3)


def held(group: Swarm, name: str) -> set[int]:
    """Return the stages that a node holds."""
    found: set[int] = set()
    for member in local_runs(group.nodes[name]).members.values():
        found |= {member._stage, *member.crew.further}
    return found


def steps_made(group: Swarm, name: str) -> int:
    return max((member.step for member in local_runs(group.nodes[name]).members.values()), default=0)


async def stepping(group: Swarm, name: str) -> float:
    """Return the seconds until the head `name` has made another step."""
    begun, before = trio.current_time(), steps_made(group, name)
    with trio.fail_after(60):
        while steps_made(group, name) <= before:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.1)
    return trio.current_time() - begun


@pytest.mark.parametrize("dies", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_column_continues_without_one_of_its_holders(dies: int) -> None:
    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW, preset="lan") as group:
            await begin(group, stages=3)
            await columns(group, 1, "a")
            await reached(group, 10)
            victim = next(name for name in "bc" if held(group, name) == {dies})
            group.kill(victim)
            took = await stepping(group, "a")
            left = next(name for name in "bc" if name != victim)
            assert sorted([*held(group, "a"), *held(group, left)]) == [0, 1, 2]
            assert took <= GOES_ON_SECONDS
            said = [each.reason for each in group.events["a"] if isinstance(each, RunChanged)]
            assert any("have the layers of 3" in reason for reason in said), said
            found = await ends(group, "a" + left, 400.0)
            assert {event.outcome for event in found} == {"done"}
            assert len({event.weights for event in found}) == 1

    run_virtually(play)


@pytest.mark.slow
def test_a_head_left_alone_holds_all_stages_until_a_node_joins() -> None:
    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW, preset="lan") as group, trio.open_nursery() as nursery:
            await begin(group, stages=3, steps=2_000)
            await columns(group, 1, "a")
            await reached(group, 10)
            for name in "bc":
                group.kill(name)
                assert await stepping(group, "a") <= GOES_ON_SECONDS
            assert held(group, "a") == {0, 1, 2}
            await nursery.start(stack._live, group, "d", "a", 1, SLOW)
            with trio.fail_after(120):
                while held(group, "a") == {0, 1, 2}:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            with trio.fail_after(60):
                while sorted([*held(group, "a"), *held(group, "d")]) != [0, 1, 2]:  # noqa: ASYNC110
                    await trio.sleep(0.1)
            assert await stepping(group, "a") <= GOES_ON_SECONDS
            nursery.cancel_scope.cancel()

    run_virtually(play)


def test_a_holder_replaces_a_requesting_head_that_dies() -> None:
    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW, preset="lan") as group:
            await begin(group, stages=3)
            await columns(group, 1, "a")
            await reached(group, 20)
            made = steps_made(group, "a")
            group.kill("a")
            with trio.fail_after(60):
                while not any(0 in held(group, name) for name in "bc"):  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            head = next(name for name in "bc" if 0 in held(group, name))
            with trio.fail_after(60):
                while steps_made(group, head) <= made:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            assert sorted(stage for name in "bc" for stage in held(group, name)) == [0, 1, 2]
            found = await ends(group, "bc", 400.0)
            assert {event.outcome for event in found} == {"done"}
            assert len({event.weights for event in found}) == 1

    run_virtually(play)
