"""A hostile member of the swarm, and of a run, sends every message in every state, and no node crashes.

Whole nodes in virtual time, in which an unexpected exception ends the simulation. The hostile peer is outside
of a run, is its member, or has requested a run itself; at the end an honest run is exact.
PEERLOOM_MEMBER_SEEDS sets the number of seeds. `tests.test_hostile_member_processes` measures the cost for
real nodes; `tests.test_hostile_wire` checks that no message is omitted.
"""

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import trio

from crypto.identity import PeerId
from node.averaging.participation import Participation
from node.averaging.rounds import Round, RoundWish
from node.errors import StreamClosed, Unreachable
from node.events import Event, RunChanged, RunEnded, RunEvaluated, RunPlanned, StepCommitted
from node.placement.leases import PlacementFailed
from node.protocols.manifest import Manifest, Run
from partition.run.local_settings import LocalSettings
from tests.hostile.own_run import learn_run, take_in
from tests.hostile.virtual import NAME, Hostile, hostile_in
from tests.local_runs import local_runs
from tests.node.local.test_runs import ends
from tests.stack import Swarm, assert_equal, manifest, prepare, reference, simulate, swarm, train, weights
from tests.test_revisions import revise

SEEDS = range(1, 1 + int(os.environ.get("PEERLOOM_MEMBER_SEEDS", "1")))
PASS_SECONDS = 0.3
"""Seconds of a stage's pass: a step is long compared with a round of hostile messages."""
QUIET_SECONDS = 30.0
"""Seconds within which hostile streams and their victims' deadlines end."""
PARTED_SECONDS = 20.0
HOSTILE_RUN_SECONDS = 60.0
ROUNDS = 4
LIES_SECONDS = 10.0
"""Seconds between two rounds of lies about a run in local mode."""
LOCAL_PASS_SECONDS = 0.2
LOCAL_STEPS = 10
LOSS_RISE_MAX = 0.1
"""Ten steps move the loss by some 0.03 either way; a state of a different run moves it far more."""
LOCAL_SECONDS_MAX = 600.0
HELD_ROUNDS = 12
ROUNDS_MAX = 200
"""The test of averaging makes more rounds until the hostile peer has sent these messages."""
OF_AVERAGING = {
    "/peerloom/roster/1 Report",
    "/peerloom/catchup/1 StateRequest",
    "/peerloom/matchmaking/2 Ready",
}
TAKEN_IN_MIN = 2
"""The test counts only if at least this many of the hostile peer's own runs start."""


def small(**changes: Any) -> Manifest:
    """Return a run with little arithmetic, and with checkpoints."""
    fields: dict[str, Any] = {
        "steps": 6,
        "microbatch": 8,
        "microbatches": 2,
        "test_samples": 16,
        "save_every": 2,
    }
    return manifest(**(fields | changes))


def living(group: Swarm) -> list[PeerId]:
    """Return all live peers except the hostile one."""
    return [
        node.peer
        for name, node in group.nodes.items()
        if name != NAME and group.medium.living(node.peer) is not None
    ]


def states_in(group: Swarm) -> set[str]:
    """Return the states of a run at its members. A run without a plan still has to be placed."""
    members = [member for node in group.nodes.values() for member in node.runs.members.values()]
    return {"placing" if member.plan is None else member.state for member in members}


async def watch(group: Swarm, name: str, hear: Callable[[Event], Awaitable[None]]) -> None:
    """Call `hear` with a node's events from now on."""
    with group.nodes[name].watch() as events:
        async for event in events:
            await hear(event)


class Speaker:
    """A peer that sends everything to all live nodes repeatedly, and immediately when a run enters a new
    state."""

    def __init__(self, group: Swarm, bad: Hostile, nursery: trio.Nursery) -> None:
        self._group = group
        self._bad = bad
        self._nursery = nursery
        self.states: set[str] = set()
        for name in group.nodes:
            nursery.start_soon(watch, group, name, self._hear)
        nursery.start_soon(self._keep_speaking)

    async def _keep_speaking(self) -> None:
        while True:
            await self.speak()

    async def speak(self) -> None:
        self.states |= states_in(self._group)
        self._learn()
        await self._bad.insider.round(living(self._group))

    def _learn(self) -> None:
        for node in self._group.nodes.values():
            for member in node.runs.members.values():
                learn_run(self._bad.known, member.run, member.plan)

    async def _hear(self, event: Event) -> None:
        self._bad.known.learn(event)
        if isinstance(event, RunChanged) and event.state not in self.states:
            self.states.add(event.state)
            self._nursery.start_soon(self.speak)


async def assert_an_honest_run_is_right(group: Swarm, requester: str) -> None:
    """Play an honest run while the hostile peer is active, if it still sends."""
    run, events = await train(group, requester, small(stages=1, steps=3, seed=99))
    end = events[-1]
    assert isinstance(end, RunEnded)
    assert end.outcome == "done", end.detail
    assert_equal(weights(group, requester, run), reference(run), "float64")


async def ended(group: Swarm, run: Run) -> str:
    """Return the first node that reports a successful end of the run."""
    with trio.fail_after(600):
        while True:
            for name, events in group.events.items():
                if any(isinstance(event, RunEnded) and event.outcome == "done" for event in events):
                    return name
            await trio.sleep(0.5)


async def part(group: Swarm, minority: str) -> None:
    """Disconnect these nodes from the others for a while."""
    sides = [node.peer for name, node in group.nodes.items() if name in minority]
    others = [node.peer for name, node in group.nodes.items() if name not in minority]
    group.medium.split(sides, others)
    await trio.sleep(PARTED_SECONDS)
    group.medium.heal()


async def pause(group: Swarm, run: Run, states: set[str]) -> None:
    """Let the requester pause its run, until the pause has been noticed."""
    await revise(group, "g", run, is_paused=True)
    with trio.fail_after(QUIET_SECONDS):
        while "paused" not in states:  # noqa: ASYNC110 - virtual time: waiting costs nothing
            await trio.sleep(0.1)
    await revise(group, "g", run, is_paused=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hostile_member_changes_no_run_in_any_state(seed: int) -> None:
    states: set[str] = set()

    async def scenario() -> None:
        async with (
            swarm("abcdefg", seed=seed, stage_seconds=PASS_SECONDS) as group,
            hostile_in(group, seed) as bad,
            trio.open_nursery() as nursery,
        ):
            speaker = Speaker(group, bad, nursery)
            plans: list[RunPlanned] = []

            async def disturb(event: Event) -> None:
                if isinstance(event, RunPlanned):
                    plans.append(event)
                if isinstance(event, StepCommitted) and event.step == 0:
                    nursery.start_soon(pause, group, run, speaker.states)
                if isinstance(event, StepCommitted) and event.step == 1:
                    group.kill(group.name_of(plans[-1].stages[1][0]))
                if isinstance(event, StepCommitted) and event.step == 3:
                    nursery.start_soon(part, group, "g" + NAME)

            run = prepare(group.nodes["g"], small())
            nursery.start_soon(watch, group, "g", disturb)
            await group.nodes["g"].runs.submit(run)
            name = await ended(group, run)
            assert_equal(weights(group, name, run), reference(run), "float64")
            await speaker.speak()
            states.update(speaker.states)
            nursery.cancel_scope.cancel()

    simulate(scenario)
    assert {"placing", "running", "degraded", "paused", "ending"} <= states


@pytest.mark.parametrize("seed", SEEDS)
def test_no_message_of_a_runs_member_crashes_a_node(seed: int) -> None:
    """That run may fail. A second run of the same nodes, without the hostile one, succeeds."""
    states: set[str] = set()
    has_stage = False

    async def scenario() -> None:
        async with swarm("abc", seed=seed, stage_seconds=PASS_SECONDS) as group:
            async with (
                hostile_in(group, seed, takes_stages=True) as bad,
                trio.open_nursery() as nursery,
            ):
                found: list[Speaker] = []

                async def hear(event: Event) -> None:
                    if isinstance(event, RunPlanned) and not found:
                        nonlocal has_stage
                        has_stage = bad.node.peer in [peer for stage in event.stages for peer in stage]
                        if not has_stage:
                            nursery.cancel_scope.cancel()
                            return
                        found.append(Speaker(group, bad, nursery))

                with trio.move_on_after(HOSTILE_RUN_SECONDS), suppress(PlacementFailed):
                    await train(group, "a", small(), hear)
                states.update(found[0].states)
                nursery.cancel_scope.cancel()
            await trio.sleep(QUIET_SECONDS)
            assert len(living(group)) == 3

    simulate(scenario)
    if not has_stage:
        assert seed > 1
        pytest.skip("the hostile peer got no stage")
    assert "running" in states


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("takes_part", [False, True], ids=["outside", "inside"])
def test_a_hostile_peer_stops_no_run_in_local_mode(seed: int, takes_part: bool) -> None:
    """The hostile peer sends all messages of such a run: rosters, groups, attempts, evaluations, ends,
    columns and states for late members. They are made from its members' messages, with different values."""
    said: set[str] = set()

    async def scenario() -> None:
        async with (
            swarm("ab", seed=seed, stage_seconds=LOCAL_PASS_SECONDS, preset="lan") as group,
            hostile_in(group, seed, takes_stages=takes_part) as bad,
            trio.open_nursery() as nursery,
        ):

            async def lie() -> None:
                while True:
                    for node in group.nodes.values():
                        for member in local_runs(node).members.values():
                            bad.known.learn(member.run.id, "run")
                        for roster in node.averaging._rosters._rosters.values():
                            bad.known.learn((roster.own, *roster.claims.values()))
                    await bad.insider.round(living(group))
                    await trio.sleep(LIES_SECONDS)

            nursery.start_soon(lie)
            local = LocalSettings(local_steps=2)
            run = prepare(group.nodes["a"], small(dtype="float32", local=local, steps=LOCAL_STEPS))
            await group.nodes["a"].runs.submit(run)
            # The hostile node may have got the other node's place, in which case that node is not in the run.
            both = "a" if takes_part else "ab"
            found = await ends(group, both, LOCAL_SECONDS_MAX)
            assert [event.outcome for event in found] == ["done"] * len(both)
            assert len({event.weights for event in found}) == 1
            losses = [event.loss for event in group.events["a"] if isinstance(event, RunEvaluated)]
            assert losses[-1] < losses[0] + LOSS_RISE_MAX
            steps = [event.step for event in group.events["a"] if isinstance(event, StepCommitted)]
            assert max(steps) < LOCAL_STEPS
            said.update(bad.insider.sent)
            nursery.cancel_scope.cancel()

    simulate(scenario)
    assert {"/peerloom/roster/1 Report", "/peerloom/local/1 Said", "/peerloom/column/1 Attach"} <= said


@pytest.mark.parametrize("seed", SEEDS)
def test_an_averaging_run_continues_with_a_hostile_participant(seed: int) -> None:
    """Rounds are numbered like those of `me.optimizer`, with reports and states. The hostile peer declares
    itself and sends everything. Honest peers must hold equal means, within the range of their own values."""
    made: dict[str, list[Round]] = {"a": [], "b": [], "c": []}
    said: set[str] = set()

    async def scenario() -> None:
        async with (
            swarm("abc", seed=seed, preset="lan") as group,
            hostile_in(group, seed) as bad,
            trio.open_nursery() as nursery,
        ):
            nodes = [group.nodes[name] for name in made]
            runs = [node.averaging.open("x", bytes(32), aggregate="trimmed-mean") for node in nodes]

            async def take_part(name: str, run: Participation, own: float) -> None:
                await run.wait_for_peers(2)
                for number in range(ROUNDS_MAX):
                    if number >= HELD_ROUNDS and bad.insider.sent.keys() >= OF_AVERAGING:
                        return
                    run.tell(step=number, samples=8, rounds=number, lineage=bytes(32), has_state=True)
                    wanted = RoundWish(round=number, window_seconds=2.0, patience_seconds=20.0)
                    made[name].append(await run.average(np.full(64, own, np.float32), 8.0, wanted))

            async def lie() -> None:
                while True:
                    for run in runs:
                        bad.known.learn(run.key, "run")
                        bad.known.learn((run.roster.own, *run.roster.claims.values()))
                    await bad.insider.round([node.peer for node in nodes])
                    await trio.sleep(LIES_SECONDS)

            nursery.start_soon(lie)
            async with trio.open_nursery() as honest:
                for number, (name, run) in enumerate(zip(made, runs, strict=True)):
                    honest.start_soon(take_part, name, run, float(number))
            said.update(bad.insider.sent)
            nursery.cancel_scope.cancel()

    simulate(scenario)
    held = [each for rounds in made.values() for each in rounds if each.vector is not None]
    assert len(held) >= 3 * HELD_ROUNDS // 2
    by_attempt: dict[bytes, set[bytes]] = {}
    for each in held:
        assert each.vector is not None
        assert 0.0 <= each.vector.min() <= each.vector.max() <= 2.0
        by_attempt.setdefault(each.attempt, set()).add(each.vector.tobytes())
    assert {len(found) for found in by_attempt.values()} == {1}
    assert said >= OF_AVERAGING


@pytest.mark.parametrize("seed", SEEDS)
def test_no_message_of_a_runs_requester_crashes_a_node(seed: int) -> None:
    begun = 0

    async def scenario() -> None:
        nonlocal begun
        async with (
            swarm("abcd", seed=seed, stage_seconds=PASS_SECONDS) as group,
            hostile_in(group, seed) as bad,
            trio.open_nursery() as nursery,
        ):
            speaker = Speaker(group, bad, nursery)
            await train(group, "a", small(stages=1, replicas=1, steps=2))
            await speaker.speak()
            for _ in range(ROUNDS):
                for victim in living(group):
                    with suppress(StreamClosed, Unreachable):
                        begun += await take_in(bad.insider, bad.values, bad.node.signer, victim)
            await trio.sleep(QUIET_SECONDS)
            await assert_an_honest_run_is_right(group, "a")
            nursery.cancel_scope.cancel()

    simulate(scenario)
    assert begun >= TAKEN_IN_MIN
