"""One column (a chain of members that hold all stages) under seeded deaths, partitions and newcomers, in all
phases of its run.

Whole nodes in virtual time. For every seed: two nodes never serve as the same stage for one head for longer
than a column needs to notice it; no stage lacks a holder for long while a node could hold it; and the run
ends with one result on all remaining nodes. PEERLOOM_COLUMN_SEEDS is the number of seeds.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
import trio

from crypto.identity import PeerId
from node.local.saved import state_name
from partition.run.local.seat import CALL_SECONDS_MAX
from sim.worlds.scheduling import run_virtually
from tests import stack
from tests.local_runs import local_runs
from tests.node.local.test_merging_columns import begin, held, steps_made
from tests.node.local.test_runs import SLOW, ends
from tests.stack import Swarm, swarm

SEEDS = int(os.environ.get("PEERLOOM_COLUMN_SEEDS", "0"))
STEPS = 60
DISTURBED_SECONDS = 30.0
PARTED_SECONDS = (2.0, 15.0)
TWICE_SECONDS_MAX = CALL_SECONDS_MAX
"""How long two nodes may serve as one stage: a head behind a partition may wait this long for an answer while
its holder already works for another head."""
NOBODY_SECONDS_MAX = 60.0
"""How long a stage may lack a holder, in seconds after the last disturbance."""
END_SECONDS_MAX = 600.0
LOOK_SECONDS = 0.5


@dataclass
class Watch:
    """Observes a column twice a second."""

    group: Swarm
    stages: int
    alive: set[str]
    calm_since: float = 0.0
    twice: Counter[tuple[PeerId, int]] = field(default_factory=Counter)
    nobody: float = 0.0
    longest_twice: float = 0.0
    longest_nobody: float = 0.0

    async def run(self) -> None:
        while True:
            await trio.sleep(LOOK_SECONDS)
            self._look()

    def can_lose(self, victim: str) -> bool:
        """Return whether others hold or have copied each stage. A death before that may lose a stage."""
        others = self.alive - {victim}
        return all(any(self._has(name, stage) for name in others) for stage in range(self.stages))

    def _has(self, name: str, stage: int) -> bool:
        members = local_runs(self.group.nodes[name]).members.values()
        return any(
            (member._stage == stage and member.has_state)
            or (stage in member.crew.further and member.crew.further[stage].held.has_state)
            or self.group.storages[name].read(state_name(member.run.text, stage)) is not None
            for member in members
        )

    def _look(self) -> None:
        working: Counter[tuple[PeerId, int]] = Counter()
        present: set[int] = set()
        is_over = False
        for name in self.alive:
            runs = local_runs(self.group.nodes[name])
            is_over = is_over or not runs.members
            present |= held(self.group, name)
            for member in runs.members.values():
                is_over = is_over or member.ending.best is not None
                for server in member.crew.servers:
                    if server.head is not None:
                        working[server.head, server.number] += 1
        for key in [key for key in self.twice if working[key] < 2]:
            del self.twice[key]
        for key, count in working.items():
            self.twice[key] += count > 1
        most = max(self.twice.values(), default=0) * LOOK_SECONDS
        self.longest_twice = max(self.longest_twice, most)
        is_calm = trio.current_time() >= self.calm_since
        self.nobody = (
            self.nobody + LOOK_SECONDS if is_calm and not is_over and len(present) < self.stages else 0
        )
        self.longest_nobody = max(self.longest_nobody, self.nobody)


async def disturb(watch: Watch, rng: Random, nursery: trio.Nursery) -> list[str]:
    """Disturb the column until DISTURBED_SECONDS have passed. Return the list of disturbances."""
    group, said = watch.group, list[str]()
    until, number = trio.current_time() + DISTURBED_SECONDS, 0
    while trio.current_time() < until:
        await trio.sleep(rng.uniform(0.0, 10.0))
        kind = rng.choice(("death", "death", "part", "join"))
        if kind == "death":
            victim = rng.choice(sorted(watch.alive))
            if not watch.can_lose(victim):
                continue
            watch.alive.discard(victim)
            group.kill(victim)
            said.append(f"{trio.current_time():.1f} {victim} dies")
        elif kind == "part" and len(watch.alive) > 1:
            minority = {rng.choice(sorted(watch.alive))}
            seconds = rng.uniform(*PARTED_SECONDS)
            said.append(f"{trio.current_time():.1f} {minority} parted for {seconds:.1f}")
            group.medium.split(
                [group.nodes[name].peer for name in minority],
                [group.nodes[name].peer for name in group.nodes if name not in minority],
            )
            await trio.sleep(seconds)
            group.medium.heal()
        elif kind == "join" and number < 2:
            name, through = "xy"[number], rng.choice(sorted(watch.alive))
            number += 1
            await nursery.start(stack._live, group, name, through, 1, SLOW)
            watch.alive.add(name)
            said.append(f"{trio.current_time():.1f} {name} joins")
    watch.calm_since = trio.current_time()
    return said


@pytest.mark.skipif(not SEEDS, reason="takes ten seconds a seed: set PEERLOOM_COLUMN_SEEDS=200")
@pytest.mark.parametrize("seed", range(1, 1 + max(1, SEEDS)))
def test_disturbed_columns_keep_one_holder_per_stage_and_end(seed: int) -> None:
    async def play() -> None:
        rng = Random(seed)
        stages = rng.choice((2, 3))
        async with swarm("abc", stage_seconds=SLOW, preset="lan") as group, trio.open_nursery() as nursery:
            watch = Watch(group, stages, set("abc"), calm_since=trio.current_time() + 1e9)
            await begin(group, stages=stages, steps=STEPS)
            nursery.start_soon(watch.run)
            with trio.fail_after(60):
                while steps_made(group, "a") < 4:  # noqa: ASYNC110 - virtual time
                    await trio.sleep(0.1)
            said = await disturb(watch, rng, nursery)
            members = "".join(name for name in sorted(watch.alive) if local_runs(group.nodes[name]).members)
            try:
                found = await ends(group, members, END_SECONDS_MAX)
            except trio.TooSlowError:
                raise AssertionError(f"the run did not end: {said}, {sorted(watch.alive)}") from None
            assert {event.outcome for event in found} <= {"done"}, said
            assert len({event.weights for event in found}) <= 1, said
            assert watch.longest_twice <= TWICE_SECONDS_MAX, said
            assert watch.longest_nobody <= NOBODY_SECONDS_MAX, said
            nursery.cancel_scope.cancel()

    run_virtually(play)
