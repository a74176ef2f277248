"""A node whose stage died and whose run continues without the node learns how the run ends, whoever requested
it.

Whole nodes in virtual time.
"""

from collections.abc import Awaitable, Callable

import pytest
import trio

from node.events import RunEnded, RunPlanned, StepCommitted
from node.protocols.manifest import Run
from node.runs.outside import CROWDED_OUT, NOBODY_LEFT
from node.runs.settings import RunServiceSettings
from node.runs.stopping import DROPPED, STOPPED
from node.service_settings import ServiceSettings
from partition.run.settings import RunSettings
from tests.stack import Swarm, manifest, prepare, simulate, swarm

STEPS = 6
ENDLESS = 100_000
LOOKS_ON = "this node only looks on"
GOES_ON = ("paused", "the run goes on without this node")


async def left_out(group: Swarm, steps: int, *, asked_again: bool = False) -> tuple[Run, str]:
    """Start a run of `a`; a stage of another node dies. Return the run and that node's name."""
    run = prepare(group.nodes["a"], manifest(steps=steps, stages=1, replicas=2, trainers=2, test_samples=16))
    with group.nodes["a"].watch() as events:
        await group.nodes["a"].runs.submit(run)
        with trio.fail_after(120):
            async for event in events:
                if isinstance(event, StepCommitted) and event.step >= 1:
                    break
    plan = group.nodes["a"].runs.members[run.id].plan
    assert plan is not None
    victim = next(
        name
        for name, node in group.nodes.items()
        if name != "a" and node.peer != plan.committer and plan.stage_of(node.peer) is not None
    )
    if not asked_again:
        group.nodes[victim].runs.accepts = lambda run: LOOKS_ON
    group.nodes[victim].runs.members[run.id].fail_stage("its process was ended by SIGKILL")
    await until(lambda: not group.nodes[victim].runs.members)
    assert view(group, victim, run) == GOES_ON
    return run, victim


async def until(ready: Callable[[], object], seconds: float = 60) -> None:
    with trio.fail_after(seconds):
        while not ready():  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.1)


def view(group: Swarm, name: str, run: Run) -> tuple[str, str]:
    """Return this node's status of the run, and the reason it gives."""
    found = group.nodes[name].state.runs[run.text]
    return found.status, found.detail or found.reason


def has_ended(group: Swarm, name: str) -> Callable[[], bool]:
    return lambda: any(isinstance(event, RunEnded) for event in group.events[name])


def play(scenario: Callable[[Swarm], Awaitable[None]], names: str = "abc", **limits: int) -> None:
    async def whole() -> None:
        settings = ServiceSettings(run_service=RunServiceSettings(**limits))  # type: ignore[arg-type]  # by name
        async with swarm(names, settings=settings) as group:
            await scenario(group)

    simulate(whole)


@pytest.mark.parametrize("serves", [True, False])
def test_a_provider_whose_stage_died_learns_the_runs_end_and_result(serves: bool) -> None:
    """If its owner does not let it serve others, it fetches no result for them."""

    async def scenario(group: Swarm) -> None:
        run, victim = await left_out(group, STEPS, asked_again=serves)
        await until(has_ended(group, "a"), 300)
        await until(has_ended(group, victim))
        first, own = group.nodes["a"].state.runs[run.text], group.nodes[victim].state.runs[run.text]
        assert (own.status, own.weights) == ("done", first.weights)
        told = ("", "here") if serves else (f"the weights are not here: {LOOKS_ON}", "elsewhere")
        assert (own.detail, own.result) == told

    play(scenario)


def test_a_provider_whose_stage_died_learns_that_the_run_was_stopped() -> None:
    async def scenario(group: Swarm) -> None:
        run, victim = await left_out(group, ENDLESS)
        await group.nodes["a"].runs.stopping.stop(run.text)
        await until(has_ended(group, victim))
        assert view(group, victim, run) == ("stopped", STOPPED)

    play(scenario)


def test_a_provider_outside_of_a_run_may_still_drop_it_permanently() -> None:
    async def scenario(group: Swarm) -> None:
        run, victim = await left_out(group, ENDLESS)
        stopping = group.nodes[victim].runs.stopping
        assert stopping.known() == [run.text]
        await stopping.drop(run.text)
        assert view(group, victim, run) == ("stopped", DROPPED)
        assert stopping.known() == []
        assert group.nodes[victim].runs.is_over(run.id)

    play(scenario)


@pytest.mark.slow
def test_a_readmitted_provider_is_informed_of_the_end_only_once() -> None:
    async def scenario(group: Swarm) -> None:
        run, victim = await left_out(group, 150, asked_again=True)
        await until(lambda: group.nodes[victim].runs.members)
        await until(has_ended(group, victim), 600)
        assert group.nodes[victim].state.runs[run.text].status == "done"
        ends = [event for event in group.events[victim] if isinstance(event, RunEnded)]
        assert len(ends) == 1
        plans = [event.height for event in group.events[victim] if isinstance(event, RunPlanned)]
        assert plans == sorted(set(plans))
        assert len(plans) > 2

    play(scenario)


def test_a_provider_gives_up_a_run_that_no_member_can_end() -> None:
    async def scenario(group: Swarm) -> None:
        run, victim = await left_out(group, ENDLESS)
        for name in set(group.nodes) - {victim}:
            group.kill(name)
        await until(has_ended(group, victim), 2 * RunSettings().silence_seconds_max)
        assert view(group, victim, run) == ("stopped", NOBODY_LEFT)
        assert not group.nodes[victim].runs.is_over(run.id)
        assert not [name for name in group.storages[victim].sizes("runs") if run.text in name]

    play(scenario)


def test_a_provider_follows_a_limited_number_of_runs_without_it() -> None:
    async def scenario(group: Swarm) -> None:
        run = prepare(group.nodes["a"], manifest(steps=ENDLESS, stages=1, replicas=2, test_samples=16))
        await group.nodes["a"].runs.submit(run)
        plan = group.nodes["a"].runs.members[run.id].plan
        assert plan is not None
        victim = next(name for name, node in group.nodes.items() if node.peer not in (plan.committer,))
        group.nodes[victim].runs.accepts = lambda run: LOOKS_ON
        await until(lambda: run.id in group.nodes[victim].runs.members)
        group.nodes[victim].runs.members[run.id].fail_stage("its process was ended by SIGKILL")
        await until(has_ended(group, victim))
        assert view(group, victim, run) == ("stopped", CROWDED_OUT)

    play(scenario, outside_max=0)
