"""Seven nodes under a partition of a minute and crashes: the majority continues, the minority commits
nothing, and soon after healing all continue together.

Whole nodes in virtual time, with troubles drawn from a seed (`partition_world`). PEERLOOM_PARTITION_SEEDS is
the number of seeds.
"""

import os
from functools import partial
from statistics import median
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from node.events import Event, RunEnded, RunPlanned, StepCommitted
from partition.plan.quorum import Reach
from tests.partition_world import (
    NAMES,
    PASS_SECONDS,
    Trial,
    World,
    draw_troubles,
    faults,
    repeatably,
    run_manifest,
    try_seed,
)
from tests.stack import prepare, swarm

NOTED = (8, 15, 16)
"""In these seeds, a stage loses one replica to the partition and the other to a crash, nodes crash while a
checkpoint spreads, or a member is away when the run ends."""
SEEDS = int(os.environ.get("PEERLOOM_PARTITION_SEEDS", "1"))


def test_the_majority_continues_and_all_rejoin_soon_after_healing() -> None:
    trials: list[Trial] = []
    for seed in [*NOTED, *(seed for seed in range(1, SEEDS + 1) if seed not in NOTED)][:SEEDS]:
        repeatably(seed, partial(try_seed, seed, trials))
    times = [trial.resumed_seconds for trial in trials if trial.resumed_seconds is not None]
    print(  # noqa: T201 - what the soak is run for
        f"{len(trials)} seeds: a step {median(times):.2f} s after healing, at worst "
        f"{max(times):.2f} s; {sum(trial.steps_parted > 0 for trial in trials)} "
        f"continued during the split, {sum(trial.is_restored for trial in trials)} "
        "went back to a checkpoint"
    )
    wrong = {trial.seed: (trial.faults, draw_troubles(trial.seed)) for trial in trials if trial.faults}
    assert not wrong, wrong


async def parted(found: list[World]) -> None:
    """Play a run with one partition of half a minute, between one replica of each stage and all other
    nodes."""
    async with swarm(NAMES, stage_seconds=PASS_SECONDS) as group, trio.open_nursery() as nursery:
        world = World(group, prepare(group.nodes["g"], run_manifest()), nursery)
        found.append(world)
        world.begin()
        await world.committed(0.0, 60)
        first = next(event for event in group.events["g"] if isinstance(event, RunPlanned))
        world.split("".join(group.name_of(stage[0]) for stage in first.stages))
        await trio.sleep(25)
        world.heal()
        await trio.sleep(2)
        nursery.cancel_scope.cancel()


def test_the_checker_finds_a_proposer_that_counts_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above covers proposers that count correctly: for them the checker reports nothing."""
    worlds: list[World] = []
    monkeypatch.setattr(Reach, "decides", lambda self, instance, votes: bool(votes))
    repeatably(1, partial(parted, worlds))
    found = " ".join(faults(worlds[0]))
    assert "which its side cannot have decided alone" in found
    assert "height 1" in found


async def restored(found: list[World]) -> None:
    """Play a run in which a stage loses both replicas after five steps, and goes back to the fourth."""
    async with swarm(NAMES, stage_seconds=PASS_SECONDS) as group, trio.open_nursery() as nursery:
        wanted = run_manifest(steps=8, stages=2)
        world = World(group, prepare(group.nodes["g"], wanted), nursery)
        found.append(world)
        world.begin()
        await world.reached(5)
        await world.kept(4)
        first = next(event for event in group.events["g"] if isinstance(event, RunPlanned))
        for peer in first.stages[1]:
            world.crash(group.name_of(peer))
        assert await world.ended()
        nursery.cancel_scope.cancel()


def of_whom(world: World, kind: type[Event], changes: dict[str, Any]) -> list[str]:
    """Return the checker's report after a change to the last event of a kind at one node."""
    events = next(rows for name, rows in world.group.events.items() if name not in world.down)
    place = max(place for place, event in enumerate(events) if isinstance(event, kind))
    said = events[place]
    events[place] = replace(said, **changes)
    try:
        return faults(world)
    finally:
        events[place] = said


def test_the_checker_finds_tampered_events() -> None:
    worlds: list[World] = []
    repeatably(1, partial(restored, worlds))
    (world,) = worlds
    assert faults(world) == []
    tampered = (
        (RunPlanned, {"plan": "0" * 16}, "has plan"),
        (StepCommitted, {"step": 6}, "reports twice that step 6"),
        (RunEnded, {"weights": "0" * 64}, "different weights"),
    )
    for kind, changes, expected in tampered:
        assert expected in " ".join(of_whom(world, kind, changes))
    for events in world.group.events.values():
        events[:] = [
            replace(event, restored_step=None) if isinstance(event, RunPlanned) else event for event in events
        ]
    assert any("was committed under plan 0 and again under" in fault for fault in faults(world))
