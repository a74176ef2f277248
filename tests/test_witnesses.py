"""A run of two members and an idle neighbour: any one of the three may die, and the run continues.

Whole nodes in virtual time. The choice of the witness (a member with a vote but without a stage) is tested in
`partition/test_next_change`.
"""

import pytest
import trio

from crypto.identity import PeerId, short_peer
from node.cli.screen import EventScreen
from node.events import CheckpointKept, RunChanged, RunPlanned, RunResumed
from node.state_documents import event_document
from partition.run.witnesses import PROMISES_MAX, PROMISES_PER_PEER_MAX, WitnessPromises
from sim.executor import SimExecutor
from tests.partition_world import World, standing
from tests.test_takeover import PASS_SECONDS, SAVE_EVERY, newest, play, said, small

GOES_ON_SECONDS = 10.0
REPORT_ERROR_SECONDS = 0.5
ONE_STAGE = {"stages": 1, "steps": 40}
PLANNER, OTHER = PeerId(bytes(32)), PeerId(bytes([1]) * 32)


def roster(world: World, name: str) -> tuple[str, ...]:
    """Return the names of the run's members, according to this node's newest plan."""
    plan = world.group.nodes[name].runs.members[world.run.id].plan
    assert plan is not None
    return tuple(sorted(world.group.name_of(peer) for peer in plan.members))


def roles(world: World) -> dict[str, str]:
    """Return which node has each role in the first plan of a run of one stage."""
    (first, *_) = said(world, RunPlanned)
    ((holder,),) = first.stages
    parts = {"requester": first.trainer, "replica": holder}
    if first.witnesses:
        parts["witness"] = first.witnesses[0]
    return {part: world.group.name_of(peer) for part, peer in parts.items()}


@pytest.mark.parametrize(
    ("names", "role"), [("abc", "requester"), ("abcd", "replica"), ("abcd", "witness")], ids=str
)
def test_two_members_and_idle_nodes_survive_any_death(names: str, role: str) -> None:
    died_at: list[float] = []

    async def scenario(world: World) -> None:
        await world.kept(2 * SAVE_EVERY)
        await world.reached(2 * SAVE_EVERY + 2)
        victim = roles(world)[role]
        world.crash(victim)
        died = world.now
        died_at.append(died)
        resumed = await world.committed(died + 2.0, GOES_ON_SECONDS)
        assert resumed is not None, standing(world)
        alive = next(name for name in roles(world).values() if name != victim)
        with trio.fail_after(30):
            while victim in roster(world, alive) or len(roster(world, alive)) < len(names) - 1:  # noqa: ASYNC110
                await trio.sleep(0.1)

    world = play(names, small(**ONE_STAGE), scenario)
    assert "paused" not in {event.state for event in said(world, RunChanged)}
    if role == "replica":  # an idle node takes over the dead replica's stage; the trainer does not
        assert newest(world).stages[0][0] != newest(world).trainer
    resumptions = said(world, RunResumed)
    if role == "witness":
        assert {event.lost_steps for event in resumptions} <= {0}
    else:  # the reported stall counts from the crash, so it includes the time taken to detect it
        longest = max(resumptions, key=lambda event: float(event.seconds))
        assert longest.seconds == pytest.approx(longest.at - died_at[0], abs=REPORT_ERROR_SECONDS)


def test_replicas_and_witnesses_preload_stage_processes_once_leased() -> None:
    told: list[tuple[SimExecutor, bool]] = []

    class ToldExecutor(SimExecutor):
        def keep_stage_ready(self, machine: tuple[int, str] | None) -> None:
            told.append((self, machine is not None))

    async def scenario(world: World) -> None:
        await world.kept(SAVE_EVERY)
        nodes = world.group.nodes
        computing = {part for part, name in roles(world).items() if nodes[name].measurements.is_computing()}
        assert computing == {"requester", "replica"}, (
            "only the requester and the replica should be marked busy, which suspends their measurements"
        )
        loading = {part for part, name in roles(world).items() if (nodes[name].seams.executor, True) in told}
        assert loading == {"replica", "witness"}
        first = next(one for one, is_ready in told if is_ready)
        assert first is nodes[roles(world)["replica"]].seams.executor
        await world.reached(ONE_STAGE["steps"])
        with trio.fail_after(60):
            while any(node.measurements.is_computing() for node in nodes.values()):  # noqa: ASYNC110
                await trio.sleep(0.5)

    executors = {name: ToldExecutor(lambda _: PASS_SECONDS) for name in "abc"}
    play("abc", small(**ONE_STAGE), scenario, executors=executors)
    assert not told[-1][1], "the process is still kept ready after the run has ended"


@pytest.mark.parametrize("steps", [0, 1])
def test_a_replica_lost_before_the_first_checkpoint_restarts_the_run(steps: int) -> None:
    async def scenario(world: World) -> None:
        if steps:
            await world.reached(steps)
        else:
            with trio.fail_after(30):
                while not said(world, RunPlanned):  # noqa: ASYNC110
                    await trio.sleep(0.01)
        assert not said(world, CheckpointKept)
        world.crash(roles(world)["replica"])
        assert await world.committed(world.now + 2.0, 2 * GOES_ON_SECONDS) is not None, standing(world)

    world = play("abcd", small(**ONE_STAGE), scenario)
    assert newest(world).height > 0


def test_a_trained_stage_restarts_together_with_a_lost_one() -> None:
    async def scenario(world: World) -> None:
        await world.reached(1)
        assert not said(world, CheckpointKept)
        (first, *_) = said(world, RunPlanned)
        world.crash(world.group.name_of(first.stages[1][0]))
        assert await world.committed(world.now + 2.0, 2 * GOES_ON_SECONDS) is not None, standing(world)

    world = play("abcde", small(stages=2, replicas=1, steps=24), scenario)
    (first, *_), last = said(world, RunPlanned), newest(world)
    assert last.stages[0] == first.stages[0], "the survivor does not keep its stage"


@pytest.mark.parametrize("rule", ["wait", "requester"])
def test_a_plan_for_two_nodes_says_whose_death_pauses_it(rule: str) -> None:
    async def scenario(world: World) -> None:
        await world.kept(2 * SAVE_EVERY)
        world.crash(roles(world)["replica"])
        if rule == "requester":
            assert await world.committed(world.now + 2.0, GOES_ON_SECONDS) is not None, standing(world)
        else:
            with trio.fail_after(60):
                while not paused(world):  # noqa: ASYNC110
                    await trio.sleep(0.5)

    # The requester alone has room to take over the stage.
    world = play("ab", small(**ONE_STAGE, on_lost_quorum=rule), scenario, ends=rule == "requester")
    (first, *_) = said(world, RunPlanned)
    requester, replica = first.trainer, first.stages[0][0]
    assert set(first.pauses_without) == ({requester} if rule == "requester" else {requester, replica})
    lines = EventScreen().lines(event_document(first))
    assert any("pauses until it is back" in line for line in lines)
    if rule == "wait":
        said_why = paused(world)[0]
        assert f"it goes on when {short_peer(replica)} is back" in said_why.reason
        assert said_why.waits_for == (replica,)


def paused(world: World) -> list[RunChanged]:
    return [event for event in said(world, RunChanged) if event.state == "paused" and "votes" in event.reason]


def test_a_partitioned_replica_abandons_its_run_when_it_hears_the_requester() -> None:
    """Both nodes are alive but disconnected for a while. One side continues, and there is never a second plan
    at a height.
    """

    async def scenario(world: World) -> None:
        await world.kept(2 * SAVE_EVERY)
        other = roles(world)["replica"]
        world.split(other)
        assert await world.committed(world.now + 2.0, 2 * GOES_ON_SECONDS) is not None, standing(world)
        await trio.sleep(20)
        world.heal()
        with trio.fail_after(60):
            while world.run.id in world.group.nodes[other].runs.members:  # noqa: ASYNC110
                await trio.sleep(0.5)

    world = play("ab", small(stages=1, steps=90, on_lost_quorum="requester"), scenario)
    hashes = {(event.height, event.plan) for event in said(world, RunPlanned)}
    assert len(hashes) == len({height for height, _ in hashes}), "two plans at one height"


def test_a_promise_to_witness_expires_and_planners_have_separate_limits() -> None:
    promises = WitnessPromises()
    promises.promise(0.0, b"run", b"plan", PLANNER, 10.0)
    assert promises.holds(9.0, b"run", b"plan")
    assert not promises.holds(10.0, b"run", b"plan")
    assert not promises.holds(9.0, b"other", b"plan")
    promises.release(b"plan", OTHER)
    assert promises.holds(9.0, b"run", b"plan"), "released by a peer that is not its planner"
    for number in range(2 * PROMISES_PER_PEER_MAX):
        promises.promise(1.0, b"run", bytes([number]), OTHER, 10.0)
    assert promises.holds(9.0, b"run", b"plan")
    held = [promises.holds(2.0, b"run", bytes([number])) for number in range(2 * PROMISES_PER_PEER_MAX)]
    assert held == [False] * PROMISES_PER_PEER_MAX + [True] * PROMISES_PER_PEER_MAX
    promises.release(b"plan", PLANNER)
    assert not promises.holds(9.0, b"run", b"plan")
    for number in range(2 * PROMISES_MAX):
        promises.promise(1.0, b"run", bytes(number + 1), PeerId(number.to_bytes(32)), 10.0)
    assert sum(promises.holds(2.0, b"run", bytes(n + 1)) for n in range(2 * PROMISES_MAX)) == PROMISES_MAX


def test_planners_that_ask_often_evict_only_each_other() -> None:
    promises = WitnessPromises()
    honest, run, plan = PeerId(bytes(32)), bytes(32), bytes(32)
    promises.promise(0.0, run, plan, honest, 60.0)
    for number in range(1, 200):
        planner = PeerId(bytes([1 + number % 9]) * 32)
        promises.promise(0.0, run, number.to_bytes(32, "big"), planner, 60.0)
    assert promises.holds(1.0, run, plan)
