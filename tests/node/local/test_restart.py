"""Runs in local mode whose members stop and come back with their disks, in virtual time."""

import numpy as np
import trio

from crypto.facts import IdentitySigner
from crypto.identity import Identity
from node.averaging.snapshot import make_snapshot
from node.averaging_events import StateFetched
from node.events import Event, StepCommitted
from node.local.saved import load_state, run_name, save_state, saved_runs, state_name
from sim.storage import MemoryStorage
from sim.worlds.scheduling import run_virtually
from tests import stack
from tests.local_runs import local_runs
from tests.node.local.test_runs import SLOW, ends, submit
from tests.stack import Swarm, swarm

STEPS = 48
SAVE_EVERY = 4


async def begin(group: Swarm) -> None:
    """Request a run whose members keep their states on disk."""
    await submit(group, wait_seconds=0.0, steps=STEPS, save_every=SAVE_EVERY)


async def trained(group: Swarm, steps: int) -> None:
    """Wait until all members have made this many steps."""
    with trio.fail_after(120):
        while True:
            members = [list(local_runs(node).members.values()) for node in group.nodes.values()]
            if all(each and each[0].step >= steps for each in members):
                return
            await trio.sleep(0.2)


async def killed(group: Swarm, steps: int) -> MemoryStorage:
    """Start a run, kill `b` after this many steps, and return its disk."""
    await begin(group)
    await trained(group, steps)
    group.kill("b")
    group.events["b"] = []
    return group.storages["b"]


def steps_of(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, StepCommitted)]


def test_a_run_whose_members_all_stop_resumes_from_the_saved_states() -> None:
    storages: dict[str, MemoryStorage] = {}

    async def first() -> None:
        async with swarm("abc", stage_seconds=SLOW) as group:
            await begin(group)
            await trained(group, 24)
            storages.update(group.storages)
            for name in "abc":
                group.kill(name)

    async def second() -> None:
        async with swarm("abc", stage_seconds=SLOW, storages=storages) as group:
            found = await ends(group, "abc")
            assert [event.outcome for event in found] == ["done"] * 3
            assert len({event.weights for event in found}) == 1
            for name in "abc":
                assert min(steps_of(group.events[name])) >= 16, "the run started from the beginning"
                assert not storages[name].sizes("runs").keys() & {
                    f"runs/{found[0].run}/local",
                    f"runs/{found[0].run}/local.state",
                }, "the saved states are still on the disk after the run"

    run_virtually(first)
    run_virtually(second)


def test_a_returning_member_adopts_the_state_of_the_others() -> None:
    async def play() -> None:
        async with swarm("ab", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            disk = await killed(group, 8)
            at = local_runs(group.nodes["a"])
            (member,) = at.members.values()
            while member.step < 36:  # noqa: ASYNC110 - virtual time: waiting costs nothing
                await trio.sleep(0.2)
            await nursery.start(stack._live, group, "b", "a", 1, SLOW, disk)
            found = await ends(group, "ab")
            assert len({event.weights for event in found}) == 1
            assert [event for event in group.events["b"] if isinstance(event, StateFetched)]
            nursery.cancel_scope.cancel()

    run_virtually(play)


def test_a_member_that_returns_after_the_end_gets_the_result() -> None:
    async def play() -> None:
        async with swarm("ab", stage_seconds=SLOW) as group, trio.open_nursery() as nursery:
            disk = await killed(group, 40)
            (end,) = await ends(group, "a")
            await nursery.start(stack._live, group, "b", "a", 1, SLOW, disk)
            (late,) = await ends(group, "b")
            assert (late.outcome, late.weights, late.is_here) == ("done", end.weights, True)
            nursery.cancel_scope.cancel()

    run_virtually(play)


def test_a_damaged_state_is_ignored_and_a_damaged_run_forgotten() -> None:
    storage = MemoryStorage()
    vector = np.arange(1_000_000, dtype=np.float32)
    snapshot = make_snapshot(7, 2, bytes(32), {"v": ("float32", (vector.size,), vector.view(np.uint8))})
    save_state(storage, "r", snapshot)
    found = load_state(storage, "r", 1 << 30)
    assert found is not None
    assert found.table == snapshot.table
    assert np.array_equal(found.data, snapshot.data)
    assert load_state(storage, "r", 1_000) is None, "a state larger than the model was loaded"
    data = bytearray(storage.read(state_name("r")) or b"")
    for place in (0, 9, len(data) // 2, len(data) - 1):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        storage.write(state_name("r"), bytes(damaged))
        assert load_state(storage, "r", 1 << 30) is None
    storage.write(state_name("r"), bytes(data[:-3]))
    assert load_state(storage, "r", 1 << 30) is None
    storage.write(run_name("0123456789abcdef"), b"\xc1")
    assert list(saved_runs(storage, IdentitySigner(Identity(bytes([1]) * 32), "tests"), 0.0)) == []
    assert storage.read(run_name("0123456789abcdef")) is None
