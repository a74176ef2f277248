"""A requester's revisions of its run: pauses, learning rate and end apply to all replicas alike."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio

from crypto.identity import PeerId
from node.errors import UsageError
from node.events import RunEnded, RunRevised, StepCommitted
from node.protocols import runs as wire
from node.protocols.manifest import Run
from node.protocols.revision import RevisionBody, make_revision
from partition.run.asks import Done
from partition.run.settings import RunSettings
from tests.stack import (
    STAGE_SECONDS,
    Swarm,
    Tensors,
    _live,
    assert_equal,
    is_equal,
    manifest,
    prepare,
    reference,
    simulate,
    swarm,
    weights,
)


async def begun(group: Swarm, requester: str, steps_done: int = 1, **changes: Any) -> Run:
    """Return a run that has committed this many steps."""
    run = prepare(group.nodes[requester], manifest(**({"microbatches": 2} | changes)))
    with group.nodes[requester].watch() as events, trio.fail_after(120):
        await group.nodes[requester].runs.submit(run)
        async for event in events:
            if isinstance(event, StepCommitted) and event.step + 1 >= steps_done:
                return run
    raise AssertionError("the run did not begin")


async def revise(group: Swarm, name: str, run: Run, **changes: Any) -> dict[str, object]:
    return await group.nodes[name].runs.revising.revise(run.text, changes)


async def until(condition: Callable[[], bool], seconds: float = 300) -> None:
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.1)


def ended(group: Swarm, name: str) -> bool:
    return any(isinstance(event, RunEnded) for event in group.events[name])


def is_done(group: Swarm, run: Run) -> bool:
    return group.nodes["a"].state.runs[run.text].status == "done"


def steps(group: Swarm, name: str) -> int:
    return sum(isinstance(event, StepCommitted) for event in group.events[name])


def faster_from(run: Run, first: int) -> Tensors:
    """Return the run's result with the learning rate multiplied by four from this step on."""
    return reference(run, rate=lambda step: 4.0 if step >= first else 1.0)


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    simulate(scenario)


def test_a_paused_run_commits_nothing_and_resumes_without_loss() -> None:
    async def scenario() -> None:
        async with swarm("abcde", preset="lan") as group:
            run = await begun(group, "a", steps=6)
            said = await revise(group, "a", run, is_paused=True)
            assert (said["told"], said["left"]) == (4, 0)
            await trio.sleep(5)
            before = steps(group, "a")
            assert before < 6
            await trio.sleep(
                RunSettings().lost_seconds_max + 5
            )  # longer than a member waits for a missing committer
            assert steps(group, "a") == before
            views = [node.state.runs[run.text] for node in group.nodes.values()]
            assert {(view.status, view.reason) for view in views} == {("paused", "its requester paused it")}
            await revise(group, "a", run, is_paused=False)
            await until(lambda: ended(group, "a"))
            assert_equal(weights(group, "a", run), reference(run), "float64")

    play(scenario)


def test_a_pause_survives_the_committers_death() -> None:
    async def scenario() -> None:
        async with swarm("abcdef", preset="lan") as group:
            run = await begun(group, "a", steps=6, trainers=2)
            await revise(group, "a", run, is_paused=True)
            await trio.sleep(5)
            before = steps(group, "b")
            group.kill("a")
            await trio.sleep(30)
            others = [name for name in "bcdef" if group.nodes[name].runs.members]
            plan = group.nodes[others[0]].state.runs[run.text].plan
            assert plan is not None
            assert plan.height, "another member commits"
            assert {steps(group, name) for name in others} == {before}
            assert {group.nodes[name].state.runs[run.text].status for name in others} == {"paused"}

    play(scenario)


def test_a_revised_learning_rate_survives_the_committers_death() -> None:
    async def scenario() -> None:
        async with swarm("abcdef", preset="lan") as group:
            run = await begun(group, "a", steps=8, trainers=2)
            await revise(group, "a", run, learning_rate=0.2)
            group.kill("a")
            name = next(name for name in "bcdef" if group.nodes[name].runs.members)
            await until(lambda: ended(group, name))
            result = weights(group, name, run)
            found = [first for first in range(9) if is_equal(result, faster_from(run, first), "float64")]
            assert len(found) == 1, "the replicas did not all change at the same step"
            assert 1 <= found[0] < 8
            assert any(isinstance(event, RunRevised) for event in group.events[name])

    play(scenario)


def test_a_requester_may_change_the_last_step_during_a_run() -> None:
    async def scenario() -> None:
        async with swarm("abcde", preset="lan") as group:
            for end in (9, 3):  # later than the first request, and sooner than the last step
                run = await begun(group, "a", steps=6, created_milliseconds=end)
                await revise(group, "a", run, steps=end)
                await until(partial(is_done, group, run))
                view = group.nodes["a"].state.runs[run.text]
                assert (view.step, view.steps) == (end, end)
                assert_equal(weights(group, "a", run), reference(run, steps=end), "float64")

    play(scenario)


def test_a_restarted_requester_may_still_change_its_run() -> None:
    async def scenario() -> None:
        async with swarm("abcdef") as group, trio.open_nursery() as nursery:
            run = await begun(group, "a", steps=100_000, trainers=2)
            await revise(group, "a", run, priority=7)
            storage = group.storages["a"]
            group.kill("a")
            await trio.sleep(20)
            await nursery.start(_live, group, "a", "b", 1, STAGE_SECONDS, storage)
            await trio.sleep(20)
            said = await revise(group, "a", run, is_paused=True)
            assert said["priority"] == 7, "an earlier revision no longer holds"
            others = [name for name in "bcdef" if group.nodes[name].runs.members]
            await until(
                lambda: {group.nodes[name].state.runs[run.text].status for name in others} == {"paused"}, 30
            )
            nursery.cancel_scope.cancel()

    play(scenario)


def test_only_the_requesters_newest_revision_changes_a_run() -> None:
    async def scenario() -> None:
        async with swarm("abcde", preset="lan") as group:
            run = await begun(group, "a", steps=100_000)
            a, b, c = (group.nodes[name] for name in "abc")
            with pytest.raises(UsageError, match="only its requester may change it"):
                await revise(group, "b", run, is_paused=True)
            forged = make_revision(b.signer, RevisionBody(run.id, 2**52, is_paused=True))
            before = b.counters.get("protocol_errors", 0)
            with pytest.raises(Exception, match="no answer"):
                await c.runs.ask(b.peer, wire.Revise(forged), 5)
            assert b.counters["protocol_errors"] == before + 1
            await revise(group, "a", run, priority=3)
            old = make_revision(a.signer, RevisionBody(run.id, 1, is_paused=True))
            assert isinstance(await c.runs.ask(b.peer, wire.Revise(old), 5), Done)
            assert b.state.runs[run.text].status != "paused"
            for node in group.nodes.values():
                body = node.runs.members[run.id].steering.body
                assert body is not None
                assert body.priority == 3

    play(scenario)


def test_any_node_learns_a_runs_state_from_its_members() -> None:
    async def scenario() -> None:
        async with swarm("abcdefg", preset="lan") as group:
            run = await begun(group, "a", steps=4, stages=1, replicas=2)
            outside = next(node for node in group.nodes.values() if run.id not in node.runs.members)
            told = await outside.runs.revising.ask(run.text)
            assert (told.model, told.steps, PeerId(told.requester)) == ("simple-cnn", 4, run.requester)
            await until(lambda: ended(group, "a"))
            told = await outside.runs.revising.ask(run.text)
            assert (told.status, told.step, len(told.weights)) == ("done", 4, 64)

    play(scenario)
