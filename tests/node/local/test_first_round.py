"""The start of a run in local mode, by whole nodes in virtual time: no member trains alone while others are
still loading.
"""

import pytest
import trio

from node.averaging_events import AveragingEnded
from node.events import Event, RunChanged, RunEnded, StepCommitted
from node.seams import Stage
from partition.run.local.start_barrier import START_SECONDS_MAX
from sim.executor import SimExecutor
from sim.worlds.scheduling import run_virtually
from tests.node.local.test_runs import QUICK, SLOW, ends, train
from tests.stack import Swarm, _computes, swarm

STEPS = 12


class SlowStart(SimExecutor):
    """An executor that opens a stage as slowly as a real machine, on which a process first loads torch."""

    def __init__(self, seconds: float) -> None:
        super().__init__(lambda request: SLOW if _computes(request) else 0.0)
        self._seconds = seconds

    async def open_stage(self, specification: bytes) -> Stage:
        await trio.sleep(self._seconds)
        return await super().open_stage(specification)


def rounds_of(group: Swarm, name: str) -> list[AveragingEnded]:
    return [e for e in group.events[name] if isinstance(e, AveragingEnded) and e.outcome == "ok"]


def first_step_at(events: list[Event]) -> float:
    return next(event.at for event in events if isinstance(event, StepCommitted) and event.step == 0)


def test_members_that_agreed_to_train_are_in_the_first_round() -> None:
    async def play() -> None:
        executors = {name: SlowStart(seconds) for name, seconds in zip("abc", (1, 4, 9), strict=True)}
        async with swarm("abc", executors=executors, preset="lan") as group:
            await train(group, QUICK, steps=STEPS)
            found = await ends(group, "abc", 200)
            assert [event.outcome for event in found] == ["done"] * 3
            for name in "abc":
                made = rounds_of(group, name)
                assert len(made[0].averaged) == 3, name
                assert len(made) >= 0.8 * STEPS / QUICK.local_steps, name
            begun = [first_step_at(group.events[name]) for name in "abc"]
            assert max(begun) - min(begun) < 2.0, "the members did not start together"
            said = [e.reason for e in group.events["a"] if isinstance(e, RunChanged)]
            assert "waiting for 2 members that agreed to begin" in said

    run_virtually(play)


@pytest.mark.parametrize("fate", ["dies", "opens too late"])
def test_a_missing_member_delays_the_start_for_a_bounded_time(fate: str) -> None:
    async def play() -> None:
        executors = {"a": SlowStart(1), "b": SlowStart(2), "c": SlowStart(3 * START_SECONDS_MAX)}
        async with swarm("abc", executors=executors, preset="lan") as group:
            asked: list[float] = []

            async def disturb(event: Event) -> None:
                is_waiting = isinstance(event, RunChanged) and event.reason.startswith("waiting for")
                if is_waiting and not asked:
                    asked.append(event.at)
                    await trio.sleep(3)
                    if fate == "dies":
                        group.kill("c")

            _, events = await train(group, QUICK, disturb, steps=4)
            waited = first_step_at(events) - asked[0]
            assert waited < (25 if fate == "dies" else START_SECONDS_MAX + 2)
            assert max(len(made.averaged) for made in rounds_of(group, "a")) == 2

    run_virtually(play)


def test_a_slow_held_out_set_does_not_fail_the_placement() -> None:
    async def play() -> None:
        async with swarm("a", stage_seconds=3.0, preset="lan") as group:
            _, events = await train(group, QUICK, steps=1, test_samples=360)
            assert [event.outcome for event in events if isinstance(event, RunEnded)] == ["done"]

    run_virtually(play)
