"""If a requester restarts and its run continues without it, the requester still shows how the run ends.

Whole nodes in virtual time. `test_runs_end` shows that the requester may stop its run.
"""

from contextlib import suppress
from pathlib import Path

import pytest
import trio
from blake3 import blake3

from node.commands import Commands
from node.errors import Unreachable
from node.events import RunEnded, RunPlanned, StepCommitted
from node.protocols import runs as wire
from node.protocols.manifest import Run
from node.runs.outside import NOBODY_LEFT
from partition.plan.plan import plan_hash
from partition.run.settings import RunSettings
from tests.stack import STAGE_SECONDS, Swarm, _live, manifest, prepare, simulate, swarm

STEPS = 12


async def restart(group: Swarm, name: str, nursery: trio.Nursery) -> None:
    """Kill a process and restart it immediately, with its disk."""
    storage = group.storages[name]
    group.kill(name)
    await nursery.start(_live, group, name, "a", 1, STAGE_SECONDS, storage)


async def begun(group: Swarm, requester: str, steps: int) -> Run:
    """Return a run after its second step, in which others may train in place of the requester."""
    wanted = manifest(
        steps=steps, stages=2, replicas=1, trainers=2, microbatch=8, microbatches=2, test_samples=16
    )
    run = prepare(group.nodes[requester], wanted)
    with group.nodes[requester].watch() as events:
        await group.nodes[requester].runs.submit(run)
        with trio.fail_after(120):
            async for event in events:
                if isinstance(event, StepCommitted) and event.step >= 1:
                    return run
    raise AssertionError("no step was committed")


async def ignore(value: object) -> None:
    """Discard progress reports."""


def end_of(group: Swarm, name: str) -> RunEnded | None:
    found = [event for event in group.events[name] if isinstance(event, RunEnded)]
    return found[-1] if found else None


async def ended(group: Swarm, name: str, seconds: float) -> RunEnded:
    with trio.fail_after(seconds):
        while (end := end_of(group, name)) is None:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.1)
    return end


def has_left(group: Swarm, name: str) -> bool:
    """Return whether this node is no longer a member, and knows a plan without itself."""
    plans = [event for event in group.events[name] if isinstance(event, RunPlanned)]
    return not group.nodes[name].runs.members and plans[-1].height > 0


async def restart_outside(group: Swarm, name: str, nursery: trio.Nursery) -> None:
    """Restart this node. Its run continues without it, and the node declines to be a witness."""
    await restart(group, name, nursery)
    group.nodes[name].runs.accepts = lambda run: "this node only looks on"
    with trio.fail_after(60):
        while not has_left(group, name):  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.1)


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_restarted_requester_learns_how_its_run_ended(restarts: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with swarm("abcd") as group, trio.open_nursery() as nursery:
            run = await begun(group, "d", STEPS)
            for _ in range(restarts):
                await restart_outside(group, "d", nursery)
            node = group.nodes["d"]
            view = node.state.runs[run.text]
            assert (view.status, view.reason) == ("paused", "the run goes on without this node")
            assert end_of(group, "a") is None
            first, own = await ended(group, "a", 300), await ended(group, "d", 30)
            assert (own.outcome, own.detail, own.weights) == ("done", "", first.weights)
            view = node.state.runs[run.text]
            assert (view.status, view.result) == ("done", "here")
            out = tmp_path / "model.safetensors"
            fetch = Commands(node).handlers["runs.fetch"]
            await fetch({"run": run.text[:8], "out": str(out)}, ignore)
            assert blake3(out.read_bytes()).hexdigest() == first.weights
            assert node.runs.stopping.known() == []
            nursery.cancel_scope.cancel()

    simulate(scenario)


def test_a_requester_outside_of_its_run_may_stop_it_and_reports_it() -> None:
    async def scenario() -> None:
        async with swarm("abcd") as group, trio.open_nursery() as nursery:
            run = await begun(group, "d", 100_000)
            await restart_outside(group, "d", nursery)
            await group.nodes["d"].runs.stopping.stop(run.text)
            await ended(group, "a", 30)
            assert (await ended(group, "d", 1)).outcome == "stopped"
            assert group.nodes["d"].state.runs[run.text].status == "stopped"
            nursery.cancel_scope.cancel()

    simulate(scenario)


def test_a_requester_outside_of_its_run_believes_only_members() -> None:
    async def scenario() -> None:
        async with swarm("abcde") as group, trio.open_nursery() as nursery:
            run = await begun(group, "d", 100_000)
            await restart_outside(group, "d", nursery)
            requester = group.nodes["d"]
            # The requester asks the members of the last plan that it knows. For some seconds these may be one
            # plan ahead.
            with trio.fail_after(30):
                while True:
                    plan = group.nodes["a"].runs.members[run.id].plan
                    assert plan is not None
                    if requester.runs.outside.by_plan(plan_hash(plan)) is not None:
                        break
                    await trio.sleep(0.1)
            stranger = next(node for node in group.nodes.values() if node.peer not in plan.roster)
            assert stranger.peer != requester.peer
            before = requester.counters.get("protocol_errors", 0)
            with suppress(Unreachable):
                await stranger.runs.ask(requester.peer, wire.End(plan_hash(plan), "failed", "a lie", ""), 5)
            assert requester.counters["protocol_errors"] == before + 1
            assert end_of(group, "d") is None
            nursery.cancel_scope.cancel()

    simulate(scenario)


def test_a_requester_reports_that_no_member_is_left_to_ask() -> None:
    async def scenario() -> None:
        async with swarm("abcd") as group, trio.open_nursery() as nursery:
            run = await begun(group, "d", 100_000)
            await restart_outside(group, "d", nursery)
            for name in "abc":
                group.kill(name)
            end = await ended(group, "d", 2 * RunSettings().silence_seconds_max)
            assert (end.outcome, end.detail) == ("failed", NOBODY_LEFT)
            assert group.nodes["d"].state.runs[run.text].status == "failed"
            nursery.cancel_scope.cancel()

    simulate(scenario)
