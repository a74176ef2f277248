"""Members that join a run in local mode late start from the state of the other members."""

import pytest
import trio

from node.averaging.participation import Participation
from node.averaging_events import StateFetched
from node.events import StepCommitted
from node.local.saved import forget, state_name
from node.seams import Parts
from partition.run.local_settings import LocalSettings
from sim.storage import MemoryStorage
from sim.worlds.scheduling import run_virtually
from tests import stack
from tests.local_runs import local_runs
from tests.node.local.test_columns import LOCAL, columns, reached, steps_of
from tests.node.local.test_columns import begin as begin_columns
from tests.node.local.test_runs import QUICK, SLOW, submit
from tests.stack import Swarm, swarm

SAVE_EVERY = 4


async def begin(group: Swarm, *, stages: int, local: LocalSettings) -> None:
    """Submit a run from the first node, which only follows it."""
    group.nodes["a"].limit(accept_runs="never")
    await submit(group, stages=stages, replicas=1, local=local, steps=1_000, save_every=SAVE_EVERY)


def step_of(group: Swarm, name: str) -> int:
    found = [each.step for each in local_runs(group.nodes[name]).members.values() if each.has_state]
    return found[0] if found else 0


async def begun(group: Swarm, name: str, step: int = 1) -> list[int]:
    """Return the steps that this member reports, once it has made `count` steps."""
    with trio.fail_after(120):
        while step_of(group, name) < step or not steps_of(group.events[name]):  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.2)
    return steps_of(group.events[name])


def losses_of(group: Swarm, name: str) -> list[float]:
    return [event.loss for event in group.events[name] if isinstance(event, StepCommitted)]


def test_a_requester_has_a_copy_long_before_the_first_checkpoint() -> None:
    async def play() -> None:
        async with swarm("ab", stage_seconds=SLOW) as group:
            group.nodes["a"].limit(accept_runs="never")
            run = await submit(group, stages=1, replicas=1, local=QUICK, steps=1_000, save_every=500)
            with trio.fail_after(60):
                while group.storages["a"].read(state_name(run.text)) is None:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.2)
            assert 1 <= step_of(group, "b") < 100

    run_virtually(play)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_new_head_starts_from_the_state_of_the_last_head(stages: int) -> None:
    """The requester does not train, but it has a copy of the state."""

    async def play() -> None:
        names = "abc"[: 1 + stages]
        async with swarm(names, stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            await begin(group, stages=stages, local=LOCAL if stages > 1 else QUICK)
            head = "b" if stages == 1 else next(iter(await columns(group, 1, names)))
            await begun(group, head, 70)  # by now a trained state has been copied
            first = losses_of(group, head)[0]
            group.kill(head)
            await nursery.start(stack._live, group, "d", "a", 1, SLOW)
            steps = await begun(group, "d", 40)
            assert min(steps) >= 40 - 4 * SAVE_EVERY, "the new head started from the initial values"
            assert [event.step for event in group.events["d"] if isinstance(event, StateFetched)]
            assert losses_of(group, "d")[0] < 0.75 * first
            nursery.cancel_scope.cancel()

    run_virtually(play)


def test_no_free_node_is_asked_without_a_copy_of_the_state() -> None:
    """The head may come back with its disk. To wait for it is better than to train an untrained first
    stage."""

    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            group.nodes["a"].limit(accept_runs="never")
            await begin_columns(group, replicas=1, steps=1_000)  # the requester keeps no states
            (head,) = await columns(group, 1, "bc")
            await begun(group, head, 20)
            group.kill(head)
            await nursery.start(stack._live, group, "d", "a", 1, SLOW)
            await trio.sleep(60.0)
            assert not local_runs(group.nodes["d"]).members
            nursery.cancel_scope.cancel()

    run_virtually(play)


def test_a_head_that_returns_within_minutes_resumes_from_its_disk() -> None:
    """By then the holder of the other stage has replaced the head, so each of the two holds all stages."""

    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            await begin(group, stages=2, local=LOCAL)
            ((head, holder),) = (await columns(group, 1, "bc")).items()
            await begun(group, head, 40)
            first = losses_of(group, head)[0]
            disk = group.storages[head]
            group.kill(head)
            group.events[head] = []
            await trio.sleep(60.0)
            await nursery.start(stack._live, group, head, "a", 1, SLOW, disk)
            steps = await begun(group, head, 40)
            assert min(steps) >= 40 - 2 * SAVE_EVERY
            assert losses_of(group, head)[0] < 0.75 * first
            assert (await columns(group, 2, "bc")).keys() == {head, holder}
            nursery.cancel_scope.cancel()

    run_virtually(play)


def test_a_head_that_joins_other_heads_starts_from_their_state() -> None:
    async def play() -> None:
        async with swarm("abcd", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            await begin_columns(group, steps=400)
            other = next(name for name in await columns(group, 2, "abcd") if name != "a")
            await reached(group, 15)
            group.kill(other)
            await trio.sleep(5.0)
            await nursery.start(stack._live, group, "e", "a", 1, SLOW)
            assert min(await begun(group, "e", 15)) >= 15
            nursery.cancel_scope.cancel()

    run_virtually(play)


@pytest.mark.slow
def test_a_newcomer_waits_for_its_inviters_answer() -> None:
    """The newcomer waits even if at first it hears of no other member."""

    class HastyParticipation(Participation):
        async def settle(self, seconds: float) -> None:
            del seconds
            await super().settle(0.0)

    async def play() -> None:
        parts: Parts = {Participation: HastyParticipation}
        async with swarm("ab", stage_seconds=SLOW, parts=parts) as group, trio.open_nursery() as nursery:
            await submit(group, wait_seconds=0.0, steps=400, save_every=0)
            await reached(group, 20)
            await nursery.start(stack._live, group, "c", "a", 1, SLOW)
            assert min(await begun(group, "c", 20)) >= 20
            nursery.cancel_scope.cancel()

    run_virtually(play)


@pytest.mark.slow
def test_a_holder_that_replaces_the_only_one_starts_from_its_state() -> None:
    """The head of the column keeps a copy of every stage that has a single holder."""

    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            await begin(group, stages=2, local=LOCAL)
            ((head, holder),) = (await columns(group, 1, "bc")).items()
            await begun(group, head, 40)
            group.kill(holder)
            made, told = step_of(group, head), losses_of(group, head)
            await nursery.start(stack._live, group, "d", "a", 1, SLOW)
            await begun(group, head, made + 5)
            assert losses_of(group, head)[len(told)] < 0.9 * told[0]
            fetched = [event.step for event in group.events["d"] if isinstance(event, StateFetched)]
            assert min(fetched) >= made - 4 * SAVE_EVERY
            nursery.cancel_scope.cancel()

    run_virtually(play)


def test_copies_of_other_stages_are_deleted_with_their_run() -> None:
    storage, run = MemoryStorage(), "0123456789abcdef"
    for stage in (0, 1, 2):
        storage.write(state_name(run, stage), b"a state")
    storage.write(state_name("fedcba9876543210"), b"of another run")
    forget(storage, run)
    assert list(storage.sizes("runs")) == [state_name("fedcba9876543210")]
