"""Checks the members that are excluded in the world of the step machines, and whether rightly."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crypto.identity import PeerId
from partition.steps.committer import ReplicaFailed
from partition.steps.frame_complaints import USELESS
from partition.steps.replica import ReduceAsked
from partition.steps.stall_detector import STUCK
from tests.partition.fake_stage import Broken
from tests.partition.steps_machine import ALL_STAGES, Machine, Sends
from tests.partition.steps_trouble import GONE

if TYPE_CHECKING:
    from tests.partition.steps_world import World


def waits(world: "World", machine: Machine, asked: ReduceAsked) -> Sends:
    """Return the machine's report on its reduction: the members that have contributed nothing so far."""
    assert machine.replica is not None
    missing: list[PeerId] = []
    for stage in (machine.stage.index, ALL_STAGES):
        row = world.reductions.get((asked.plan, asked.step, asked.attempt, stage))
        if row is not None:
            missing += [name for name in row.members if name not in row.brought and name != machine.me]
    return machine.replica.waits(asked.answer(len(missing), tuple(dict.fromkeys(missing))))


def check_given_up(world: "World", events: Sequence[ReplicaFailed]) -> None:
    """Return whether every excluded member has failed, lied or hung. A liar must be excluded because of its
    own lie.
    """
    told = [event for event in events if event.reason != GONE]
    useless = [event for event in told if event.reason.startswith(USELESS)]
    stuck = [event for event in told if event.reason.startswith(STUCK)]
    if len(useless) + len(stuck) < len(told) and not world.lied:
        raise Broken(f"nothing was wrong, and others are wanted: {told}")
    if useless and world.liar not in {event.peer for event in useless}:
        raise Broken(f"the liar {world.liar!r} keeps its place, and others lose theirs: {useless}")
    for event in stuck:
        machine = world.machines[event.peer]
        is_awake = not machine.is_frozen and world.now > machine.frozen_until + 1.0
        if machine.is_alive and is_awake and not machine.hangs:
            raise Broken(f"{event.peer!r} does what it can: {event.reason}")
        world.seen["stuck"] = world.seen.get("stuck", 0) + 1
