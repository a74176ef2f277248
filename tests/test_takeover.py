"""Roles change hands: the last replica of a stage dies, members leave, newcomers come, all nodes stop and
restart.

Whole nodes in virtual time. Deaths that a stage survives are in `test_equivalence`, partitions in
`test_partitions`. The result is always that of one process, because repeated work uses the same
micro-batches.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import trio

from crypto.identity import Identity, PeerId
from node import config
from node.errors import StageFailed
from node.events import (
    Event,
    RunAccepted,
    RunChanged,
    RunPlanned,
    RunReleased,
    RunResumed,
    StepCommitted,
)
from node.protocols.manifest import Manifest
from node.protocols.runs import PrepareStage
from node.seams import Parts, Stage
from node.service_settings import ServiceSettings
from partition.plan.quorum import FORK_SECONDS
from partition.run.settings import RunSettings
from sim.executor import SimExecutor
from tests.asking import Ask, asking_through
from tests.partition_world import World, faults, repeatably, result_faults, run_manifest, standing
from tests.stack import _live, prepare, swarm

SAVE_EVERY = 3
PASS_SECONDS = 0.1
SEED = 1
LATE_SECONDS = 120.0
"""Longer than a run in which a stage is opened too late."""
FREE_AGAIN_SECONDS = 8.0
"""Maximum seconds from a planner's death until the run continues, even if it had asked all idle nodes."""
LEAVES = int(os.environ.get("PEERLOOM_LEAVES", "1"))
LEAVE_LATER_SECONDS = 0.07
"""Seconds between the moments of two trials: a fraction of a step."""

Scenario = Callable[[World], Awaitable[None]]


def small(**changes: Any) -> Manifest:
    """Return a run of two stages with one replica each."""
    return run_manifest(**({"steps": 10, "stages": 2, "replicas": 1, "save_every": SAVE_EVERY} | changes))


def play(
    names: str,
    wanted: Manifest,
    scenario: Scenario,
    *,
    pass_seconds: float = PASS_SECONDS,
    ends: bool = True,
    forks: bool = False,
    preset: config.Preset = "lan",
    settings: RunSettings | None = None,
    parts: Parts | None = None,
    executors: Mapping[str, SimExecutor] | None = None,
) -> World:
    """Play a run that the last of `names` requests and `scenario` disturbs; return the final world.

    If it `ends`, the checker must find no violation; if it `forks`, only the result is checked.
    """
    worlds: list[World] = []
    services = ServiceSettings(runs=settings or RunSettings())

    async def run() -> None:
        async with (
            swarm(
                names,
                seed=SEED,
                stage_seconds=pass_seconds,
                preset=preset,
                settings=services,
                parts=parts,
                executors=executors,
            ) as group,
            trio.open_nursery() as nursery,
        ):
            requester = group.nodes[names[-1]]
            world = World(group, prepare(requester, wanted), nursery, SEED, pass_seconds)
            worlds.append(world)
            world.begin()
            await scenario(world)
            if ends:
                assert await world.ended(), standing(world)
            nursery.cancel_scope.cancel()

    repeatably(SEED, run)
    (world,) = worlds
    if ends:
        assert [*result_faults(world), *(() if forks else faults(world))] == []
    return world


def said(world: World, kind: type[Event]) -> list[Any]:
    """Return all published events of a kind, by time; several nodes publish the same event."""
    found = [event for events in world.group.events.values() for event in events if isinstance(event, kind)]
    return sorted(found, key=lambda event: event.at)


def holders(world: World) -> list[str]:
    """Return the nodes that hold a stage under the newest plan."""
    return [world.group.name_of(peer) for stage in newest(world).stages for peer in stage]


def other(world: World, requester: str) -> str:
    """Return the first replica that is not the requester."""
    return next(name for name in holders(world) if name != requester)


def newest(world: World) -> RunPlanned:
    plans: list[RunPlanned] = said(world, RunPlanned)
    return max(plans, key=lambda plan: plan.height)


async def spare(world: World, name: str) -> None:
    """Start a provider after the run has begun."""
    through = next(other for other in world.group.nodes if other not in world.down)
    await world.nursery.start(_live, world.group, name, through, SEED, PASS_SECONDS)


# Replicas that come later


def test_members_that_join_later_keep_the_runs_number_of_replicas() -> None:
    """Any member may be the next to propose. So those that joined while there was one replica must also know
    that three are wanted.
    """

    async def replicas(world: World, count: int) -> None:
        with trio.fail_after(60):
            while len(holders(world)) != count:  # noqa: ASYNC110 - virtual time
                await trio.sleep(0.1)

    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        for _ in range(2):
            count = len(holders(world))
            world.crash(other(world, "d"))
            await replicas(world, count - 1)
        await spare(world, "x")
        await replicas(world, 2)
        (newcomer,) = world.group.nodes["x"].runs.members.values()
        life = newcomer.core._life
        assert life is not None
        assert life.proposer.wanted == (3,)
        await spare(world, "y")
        await replicas(world, 3)

    play("abcd", small(stages=1, replicas=3, steps=60), scenario)


# The last replica of a stage


def test_a_newcomer_restores_a_lost_stage_from_the_newest_checkpoint() -> None:
    async def scenario(world: World) -> None:
        await spare(world, "x")
        await world.kept(SAVE_EVERY)
        await world.reached(SAVE_EVERY + 2)
        world.crash(other(world, "c"))

    world = play("abc", small(stages=3), scenario)
    (resumed,) = {(event.step, event.lost_steps) for event in said(world, RunResumed)}
    assert resumed[0] == SAVE_EVERY
    assert 2 <= resumed[1] <= SAVE_EVERY
    assert {event.restored_step for event in said(world, RunPlanned)} == {None, SAVE_EVERY}
    assert "x" in holders(world)


def test_a_newcomer_learns_from_others_that_it_must_commit() -> None:
    """Only the requester commits, and it holds the only replica of a stage. All remaining members hold a
    stage too, so the member with the lowest peer id must commit: the newcomer.
    """
    members = {name: Identity(bytes([SEED, ord(name)]) * 16).peer for name in "ab"}
    newcomer = next(
        name
        for name in "defghijklmnopqrstuvwxyz"
        if Identity(bytes([SEED, ord(name)]) * 16).peer < min(members.values())
    )

    async def scenario(world: World) -> None:
        await spare(world, newcomer)
        await world.kept(SAVE_EVERY)
        await world.reached(SAVE_EVERY + 1)
        world.crash("c")
        assert await world.committed(world.now, 30) is not None, standing(world)

    world = play("abc", small(stages=3), scenario)
    assert world.group.name_of(newest(world).trainer) == newcomer


def test_without_a_free_provider_the_run_waits_and_reports_it() -> None:
    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        for node in world.group.nodes.values():  # they keep their stages, and cannot hold more
            node.machine.capacity = replace(node.machine.capacity, memory_free_bytes=1)
        world.crash(other(world, "c"))
        await trio.sleep(60)
        await spare(world, "x")

    world = play("abc", small(stages=3), scenario)
    reasons = " ".join(event.reason for event in said(world, RunChanged) if event.state == "paused")
    assert "has no replica left, and no member has room for it" in reasons
    assert "x" in holders(world)


def test_without_a_checkpoint_a_lost_stage_fails_the_run() -> None:
    async def scenario(world: World) -> None:
        await world.reached(2)
        world.crash(other(world, "c"))
        with trio.fail_after(2 * RunSettings().lost_seconds_max):
            while not world.ends():  # noqa: ASYNC110
                await trio.sleep(1)

    world = play("abc", small(stages=3, save_every=0), scenario, ends=False)
    for end in world.ends().values():
        assert end.outcome == "failed"
        assert "lost its last replica, and no checkpoint holds its parameters" in end.detail


def test_the_cause_of_a_lost_stage_is_reported() -> None:
    async def scenario(world: World) -> None:
        await world.reached(2)
        shell = world.group.nodes[other(world, "c")].runs.members[world.run.id].hosting.replica
        assert shell is not None
        shell._failure = StageFailed("its disk is full")
        shell._more.set()
        with trio.fail_after(2 * RunSettings().lost_seconds_max):
            while not world.ends():  # noqa: ASYNC110
                await trio.sleep(1)

    world = play("abc", small(stages=3, save_every=0), scenario, ends=False)
    reasons = [event.reason for event in said(world, RunChanged) if event.state == "paused"]
    for text in reasons:
        assert ": its disk is full); it goes on when ..." in text
    for end in world.ends().values():
        assert end.detail.endswith(": its disk is full)"), end.detail
    assert reasons


# Leaving


@pytest.mark.parametrize("trial", range(LEAVES))
@pytest.mark.parametrize("role", ["replica", "last replica", "committer", "committer and replica"])
def test_a_leaving_member_loses_no_work(role: str, trial: int) -> None:
    """The members that leave are a replica with a partner, the last replica of its stage if a provider is
    free, and the committer. Each trial is a run of its own, left at a different moment of a step. No step is
    open when a member leaves, so nothing is computed twice.
    """
    left: list[str] = []

    async def scenario(world: World) -> None:
        if role == "last replica":
            await spare(world, "x")
        await world.reached(4)
        await trio.sleep(LEAVE_LATER_SECONDS * trial)
        left.append("e" if role.startswith("committer") else other(world, "e"))
        began = trio.current_time()
        await world.group.nodes[left[0]].leave()
        assert trio.current_time() - began < 20
        world.crash(left[0])

    replicas = 1 if role == "last replica" else 2
    names = {"last replica": "abe", "committer and replica": "abce"}.get(role, "abcde")
    stages = 3 if role == "last replica" else 2
    wanted = small(stages=stages, replicas=replicas, created_milliseconds=1 + trial)
    world = play(names, wanted, scenario)
    assert left[0] not in holders(world)
    assert left[0] != world.group.name_of(newest(world).trainer)
    assert {event.restored_step for event in said(world, RunPlanned)} == {None}
    for event in said(world, RunResumed):
        assert (event.lost_steps, event.replayed) == (0, 0)
    assert sorted({event.step for event in said(world, StepCommitted)}) == list(range(10))


# Coming


def test_a_newcomer_refills_a_stage_and_fetches_its_state_from_peers() -> None:
    async def scenario(world: World) -> None:
        await world.reached(2)
        world.crash(other(world, "d"))
        await world.reached(4)
        await spare(world, "x")

    world = play("abcd", small(stages=2, replicas=2, steps=32), scenario)
    assert "x" in holders(world)
    newcomer = world.group.nodes["x"].peer
    (resumed,) = {event.step for event in said(world, RunResumed) if event.filled == (newcomer,)}
    assert resumed > 4
    assert {event.restored_step for event in said(world, RunPlanned)} == {None}
    states = [event.state for event in said(world, RunChanged)]
    assert "degraded" in states
    assert states.index("degraded") < len(states) - 1 - states[::-1].index("running")


def test_a_newcomer_asked_by_a_dead_planner_serves_the_next_planner() -> None:
    """The planner lets the newcomer open a stage, and dies before the plan is decided."""
    worlds, died = list[World](), list[float]()

    async def scenario(world: World) -> None:
        await world.reached(2)
        worlds.append(world)  # from now on
        world.crash(other(world, "e"))
        await world.reached(4)
        await spare(world, "x")
        with trio.fail_after(120):
            while not died or "x" not in holders(world):  # noqa: ASYNC110
                await trio.sleep(0.2)
        assert world.now - died[0] < 15

    wanted, parts = small(stages=2, replicas=2, steps=60), dying_once(worlds, died)
    play("abcde", wanted, scenario, preset="local", parts=parts)


def test_a_lost_stage_gets_the_node_held_for_a_dead_planner() -> None:
    """No step is computed meanwhile, and every idle node is needed."""
    worlds, died = list[World](), list[float]()

    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        for name in "xy":
            await spare(world, name)
        await world.reached(SAVE_EVERY + 2)
        worlds.append(world)  # from now on
        world.crash(other(world, "e"))
        with trio.fail_after(30):
            while not died:  # noqa: ASYNC110
                await trio.sleep(0.1)
        assert await world.committed(died[0], 2 * FREE_AGAIN_SECONDS) is not None, standing(world)
        resumed = min(event.at for event in said(world, RunResumed) if event.at > died[0])
        assert resumed - died[0] <= FREE_AGAIN_SECONDS
        assert {"x", "y"} <= set(holders(world))

    wanted, parts = small(stages=4, replicas=1, steps=60), dying_once(worlds, died)
    play("abcde", wanted, scenario, ends=False, preset="local", parts=parts)


def dying_once(worlds: list[World], died: list[float]) -> Parts:
    """Return replacement classes for nodes: the first for which another node has opened a stage dies."""

    async def ask_then_die(me: PeerId, _: PeerId, request: Any, ask: Ask) -> Any:
        reply = await ask()
        if isinstance(request, PrepareStage) and worlds and not died:
            died.append(worlds[0].now)
            worlds[0].crash(worlds[0].group.name_of(me))
            await trio.sleep_forever()
        return reply

    return asking_through(ask_then_die)


def test_a_newcomer_whose_plan_comes_too_late_is_freed_at_the_end() -> None:
    async def scenario(world: World) -> None:
        await world.reached(2)
        world.crash(other(world, "d"))
        await world.reached(4)
        await spare(world, "x")
        newcomer = world.group.nodes["x"]
        open_stage = newcomer.seams.executor.open_stage

        async def open_late(specification: bytes) -> Stage:
            await trio.sleep(LATE_SECONDS)
            return await open_stage(specification)

        newcomer.seams.executor.open_stage = open_late  # type: ignore[method-assign]  # a slow disk
        assert await world.ended(60), standing(world)
        assert [type(event) for event in world.group.events["x"] if hasattr(event, "run")] == [
            RunAccepted,
            RunReleased,
        ]
        assert newcomer.runs.has_slot
        await trio.sleep(LATE_SECONDS)
        assert newcomer.runs.has_slot
        assert newcomer.runs.members == {}

    play("abcd", small(stages=2, replicas=2, steps=24), scenario, ends=False)


# All nodes together


def test_a_run_resumes_from_disk_after_all_nodes_stop() -> None:
    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        await world.reached(SAVE_EVERY + 2)
        names = list(world.group.nodes)
        for name in names:
            world.crash(name)
        await trio.sleep(30)
        for name in names:
            await world.restart(name)

    world = play("abcde", small(replicas=2), scenario)
    assert SAVE_EVERY in {event.restored_step for event in said(world, RunPlanned)}
    assert {end.outcome for end in world.ends().values()} == {"done"}


# A fork


def test_allowed_forks_continue_and_one_branch_survives() -> None:
    halves: list[set[str]] = []
    healed: list[float] = []

    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        name_of, stages = world.group.name_of, newest(world).stages
        halves.extend({name_of(stage[index]) for stage in stages} for index in (0, 1))
        world.split("".join(halves[0]))
        await trio.sleep(FORK_SECONDS + 30)
        world.heal()
        healed.append(world.now)

    wanted = small(replicas=2, steps=40, on_lost_quorum="fork")
    world = play("abcd", wanted, scenario, pass_seconds=0.3, forks=True)
    events = world.group.events
    alone = [
        {
            event.step
            for name in half
            for event in events[name]
            if isinstance(event, StepCommitted) and healed[0] - 25 < event.at < healed[0]
        }
        for half in halves
    ]
    assert alone[0] & alone[1], "the sides have not committed the same steps independently"
    reasons = {
        name: [event.reason for event in events[name] if isinstance(event, RunChanged)] for name in events
    }
    said_by_losers = "steps that were committed here are discarded"
    gave_up = {name for name, texts in reasons.items() if any(said_by_losers in text for text in texts)}
    assert gave_up in halves
    discarded = next(text for text in reasons[min(gave_up)] if said_by_losers in text)
    assert discarded.startswith("another branch of the run goes on: ")
    assert int(discarded.split()[7]) >= len(alone[halves.index(gave_up)]), discarded
    assert any("alone since step" in text for name in events for text in reasons[name])
    kept = [name for name in events if any("gave way: about" in text for text in reasons[name])]
    assert not gave_up.intersection(kept), "a member that gave up does not report the kept branch"
    assert {end.outcome for end in world.ends().values()} == {"done"}
    assert set(world.ends()) >= set(events) - gave_up
