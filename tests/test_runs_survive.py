"""Under any deaths and restarts a run succeeds or fails, but never hangs. Whole nodes in virtual time.

Deaths inside of a step, and the exactness of their results, are in `test_equivalence`.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import trio

from crypto.identity import PeerId
from node.content.graphs import Models
from node.events import Event, ReplicaDropped, RunEnded, RunPlanned, StageLeased, StepCommitted
from node.placement.leases import PlacementFailed
from node.protocols import runs as wire
from node.protocols.manifest import Manifest
from node.runtime import Node
from node.service_settings import ServiceSettings
from partition.model.graph import Graph
from partition.plan.change import Change, successor
from partition.plan.paxos import PlanDecided
from partition.run.member import Member
from partition.run.parts import Parts
from partition.run.run_end import RunEnd
from partition.run.settings import RunSettings
from tests import stack
from tests.asking import Ask, asking_through
from tests.stack import (
    STAGE_SECONDS,
    Swarm,
    _live,
    assert_equal,
    manifest,
    prepare,
    reference,
    simulate,
    train,
    weights,
)

GIVEN_UP_SECONDS = 60
DEATH_SECONDS_MAX = 20
"""Seconds until all have noticed a death, with a wide margin."""


IMPATIENT = RunSettings(
    start_seconds_max=24.0,
    renew_seconds=4.0,
    renew_seconds_max=2.0,
    silence_seconds_max=48.0,
    committer_silence_seconds_max=30.0,
    left_seconds=12.0,
    pause_seconds_max=120.0,
    lost_seconds_max=120.0,
)
"""The same proportions as the defaults, but in less virtual time, because every virtual second means many
probes."""
swarm = partial(stack.swarm, settings=ServiceSettings(runs=IMPATIENT))


def small(**changes: Any) -> Manifest:
    """Return the run with the least arithmetic."""
    least: dict[str, Any] = {"steps": 3, "microbatch": 8, "microbatches": 2, "test_samples": 16}
    return manifest(**(least | changes))


def plan_in(group: Swarm) -> Any:
    """Return the plan of the only run, as a live member sees it."""
    views = [view for node in group.nodes.values() for view in node.state.runs.values() if view.plan]
    return views[0].plan


async def restart(group: Swarm, name: str, through: str, nursery: trio.Nursery) -> None:
    """Crash and restart immediately: the peer is the same, but without its memory."""
    group.kill(name)
    await nursery.start(_live, group, name, through, 1, STAGE_SECONDS)


async def ended(group: Swarm, name: str, run: str = "", seconds: float = GIVEN_UP_SECONDS) -> RunEnded:
    """Return how the run ended, according to this node."""
    with trio.fail_after(seconds):
        while True:
            for event in group.events[name]:
                if isinstance(event, RunEnded) and event.run.startswith(run):
                    return event
            await trio.sleep(1)


def test_a_replica_that_restarts_unnoticed_is_dropped_from_the_run() -> None:
    dropped: list[PeerId] = []

    async def scenario() -> None:
        async with swarm("abcde") as group, trio.open_nursery() as nursery:

            async def disturb(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 0:
                    victim = group.name_of(plan_in(group).stages[1][0])
                    await restart(group, victim, "e" if victim == "a" else "a", nursery)
                if isinstance(event, ReplicaDropped):
                    dropped.append(event.peer)

            _, events = await train(group, "e", small(), disturb)
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done", events[-1].detail
            nursery.cancel_scope.cancel()

    simulate(scenario)
    assert len(dropped) == 1


def test_a_trainer_that_restarts_too_fast_to_be_noticed_is_replaced() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group, trio.open_nursery() as nursery:

            async def disturb(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 0:
                    await restart(group, "c", "a", nursery)

            _, events = await train(group, "c", small(replicas=1), disturb, watcher="a")
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done", events[-1].detail
            nursery.cancel_scope.cancel()

    simulate(scenario)


@pytest.mark.parametrize("request_type", [wire.LeaseRequest, wire.Start])
def test_a_requester_that_dies_during_placement_leaves_no_waiting_peer(request_type: type) -> None:
    groups: list[Swarm] = []

    async def die_as_it_asks(me: PeerId, _: PeerId, request: wire.Request, ask: Ask) -> wire.Reply:
        if isinstance(request, request_type) and groups[0].name_of(me) == "a":
            groups[0].kill("a")
        return await ask()

    async def scenario() -> None:
        async with swarm("abcd", parts=asking_through(die_as_it_asks)) as group:
            groups.append(group)
            node = group.nodes["a"]
            # The submission is a task of the node, and dies with it.
            run = prepare(node, small(stages=1, replicas=1))
            node.runs.start_task(node.runs.submit, run, of=run)
            await trio.sleep(2 * GIVEN_UP_SECONDS)
            for name in "bcd":
                assert group.nodes[name].runs.known() == []
                assert group.nodes[name].runs.has_slot

    simulate(scenario)


def test_a_lease_granted_after_its_requester_died_holds_no_slot() -> None:
    groups, asked = list[Swarm](), list[bytes]()

    class SlowModels(Models):
        async def get(self, name: bytes, holders: Sequence[PeerId]) -> Graph:
            graph = await super().get(name, holders)
            asked.append(name)
            groups[0].kill("a")
            await trio.sleep(DEATH_SECONDS_MAX)
            return graph

    async def scenario() -> None:
        async with swarm("abcd", parts_of={name: {Models: SlowModels} for name in "bcd"}) as group:
            groups.append(group)
            node = group.nodes["a"]
            run = prepare(node, small(stages=1, replicas=1))
            node.runs.start_task(node.runs.submit, run, of=run)
            with trio.fail_after(GIVEN_UP_SECONDS):
                while not asked:  # noqa: ASYNC110
                    await trio.sleep(0.1)
            await trio.sleep(DEATH_SECONDS_MAX + 5)
            assert all(group.nodes[name].runs.has_slot for name in "bcd")

    simulate(scenario)


def test_steps_longer_than_the_silence_limit_end_no_run() -> None:
    async def scenario() -> None:
        async with swarm("abc", stage_seconds=60.0, preset="lan") as group:
            node = group.nodes["c"]
            run = prepare(node, small(steps=1, replicas=1, microbatches=1))
            await node.runs.submit(run)
            for name in "abc":
                end = await ended(group, name, seconds=2_000)
                assert end.outcome == "done", end.detail

    simulate(scenario)


def test_two_simultaneous_requests_leave_every_slot_free_at_the_end() -> None:
    outcomes: list[str] = []

    async def scenario() -> None:
        async with swarm("abcd", preset="lan") as group:

            async def ask_for(requester: str, seed: int) -> None:
                node = group.nodes[requester]
                run = prepare(node, small(seed=seed, replicas=1, steps=1))
                with suppress(PlacementFailed):
                    await node.runs.submit(run)
                outcomes.append((await ended(group, requester, run.text)).outcome)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_for, "c", 1)
                nursery.start_soon(ask_for, "d", 2)
            await trio.sleep(10)
            assert [name for name, node in group.nodes.items() if not node.runs.has_slot] == []

    simulate(scenario)
    assert "done" in outcomes


def test_a_run_continues_after_a_member_leaves() -> None:
    async def scenario() -> None:
        async with swarm("abcde") as group:

            async def disturb(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == 0:
                    name = group.name_of(plan_in(group).stages[0][0])
                    await group.nodes[name].leave()
                    group.kill(name)

            _, events = await train(group, "e", small(), disturb)
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done", events[-1].detail

    simulate(scenario)


def test_a_replica_that_dies_while_stages_open_is_replanned() -> None:
    async def scenario() -> None:
        async with swarm("abcde") as group, trio.open_nursery() as nursery:
            victim = "b"

            async def kill_when_leased() -> None:
                with group.nodes[victim].watch() as events:
                    async for event in events:
                        if isinstance(event, StageLeased):
                            group.kill(victim)
                            return

            nursery.start_soon(kill_when_leased)
            run, events = await train(group, "e", small(test_samples=360))
            assert isinstance(events[-1], RunEnded)
            assert events[-1].outcome == "done", events[-1].detail
            plan = next(event for event in reversed(events) if isinstance(event, RunPlanned))
            assert plan.height == 1
            assert sorted(len(stage) for stage in plan.stages) == [1, 2]
            assert_equal(weights(group, "e", run), reference(run), "float64")

    simulate(scenario)


def test_a_requester_waits_for_news_of_the_last_newcomer() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group, trio.open_nursery() as nursery:
            run = prepare(group.nodes["c"], small(stages=2, replicas=2))
            outcome: list[str] = []

            async def submit() -> None:
                with suppress(PlacementFailed):
                    await group.nodes["c"].runs.submit(run)
                    outcome.append("placed")

            # Three nodes are too few for two stages of two replicas; a fourth arrives at that moment.
            nursery.start_soon(submit)
            await nursery.start(_live, group, "d", "a", 1, STAGE_SECONDS)
            assert (await ended(group, "c")).outcome == "done"
            assert outcome == ["placed"]
            nursery.cancel_scope.cancel()

    simulate(scenario)


def test_a_plan_adopted_during_the_end_does_not_prevent_it() -> None:
    nodes: dict[str, Node] = {}

    class PlannedEnd(RunEnd):
        """Let each member adopt a later plan when the run has ended for it."""

        def finish(self, now: float, outcome: str, *rest: str) -> None:
            super().finish(now, outcome, *rest)
            plan = self._plan()
            assert plan is not None
            change = Change(lost=(plan.stages[0].replicas[0],))
            following = successor(plan, change)
            for node in nodes.values():
                for mine in list(node.runs.members.values()):
                    mine.core.on_chain(mine._now, PlanDecided(following, change, 1))
                    mine.act()

    class PlannedMember(Member):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named, parts=Parts(end=PlannedEnd))

    async def scenario() -> None:
        async with swarm("abcde", preset="lan", parts={Member: PlannedMember}) as group:
            nodes.update(group.nodes)
            run, _ = await train(group, "e", small())
            lost = {name for name in "abcde" if not any(isinstance(e, RunEnded) for e in group.events[name])}
            assert len(lost) == 1, "a member off the plan did not wait to be asked again"
            for name in set("abcde") - lost:
                assert (await ended(group, name)).outcome == "done"
                assert_equal(weights(group, name, run), reference(run), "float64")

    simulate(scenario)
