"""Exactness: a model trained in stages over many peers equals one process, also with a death in a step.

ARCHITECTURE, a step. Whole nodes, simulated network and time, real arithmetic.
"""

import pytest
import trio

from node.events import Event, ReplicaDropped, RunEnded, StepCommitted
from tests.stack import Swarm, assert_equal, manifest, reference, simulate, swarm, train, weights


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_two_stages_of_two_replicas_equal_one_process(dtype: str) -> None:
    async def scenario() -> None:
        async with swarm("abcde") as group:
            run, events = await train(group, "e", manifest(dtype=dtype))
            assert [e.step for e in events if isinstance(e, StepCommitted)] == [0, 1, 2, 3, 4]
            expected = reference(run)
            for name in "abcde":
                assert_equal(weights(group, name, run), expected, dtype)

    simulate(scenario)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("moment", [0.02, 0.4, 0.75, 0.97])
def test_a_step_with_a_death_in_it_equals_the_undisturbed_step(stage: int, moment: float) -> None:
    """`moment` is the share of a step that has passed when the replica is killed."""
    replayed: list[int] = []

    async def scenario() -> None:
        async with swarm("abcde") as group:

            async def disturb(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 1:
                    await trio.sleep(moment * event.seconds)
                    group.kill(victim_of(group, stage))
                if isinstance(event, ReplicaDropped):
                    replayed.append(event.microbatches_replayed)

            run, events = await train(group, "e", manifest(), disturb)
            assert [e.step for e in events if isinstance(e, StepCommitted)] == [0, 1, 2, 3, 4]
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done"
            assert_equal(weights(group, "e", run), reference(run), "float64")

    simulate(scenario)
    assert replayed == [4], "one replica held half of the step's eight micro-batches"


def test_a_dead_trainer_is_replaced_and_the_result_is_the_same() -> None:
    async def scenario() -> None:
        async with swarm("abcdef") as group:

            async def disturb(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 1:
                    group.kill("f")

            run, events = await train(group, "f", manifest(), disturb, watcher="a")
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done", events[-1].detail
            assert_equal(weights(group, "a", run), reference(run), "float64")

    simulate(scenario)


def test_a_stage_without_replicas_ends_the_run_and_says_what_was_lost() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:

            async def disturb(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 1:
                    group.kill(victim_of(group, 1))

            _, events = await train(group, "c", manifest(replicas=1), disturb)
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "failed"
            assert "stage 2 of 2 lost its last replica" in events[-1].detail
            assert "its parameters are gone" in events[-1].detail

    simulate(scenario)


def victim_of(group: Swarm, stage: int) -> str:
    """A replica of this stage in the only run there is."""
    plan = next(iter(group.nodes.values())).state.runs
    view = next(iter(plan.values())).plan
    assert view is not None
    return group.name_of(view.stages[stage][0])
