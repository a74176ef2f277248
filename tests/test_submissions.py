"""Many runs submitted concurrently to whole nodes: no slot is given twice, no run waits forever, and each
requester gets its share.

This is in virtual time; `benchmarks/submissions.py` does the same with processes. PEERLOOM_SUBMISSIONS=10
plays a hundred runs on twenty nodes with this many seeds.
"""

import os
from random import Random

import pytest
import trio

from node.events import Event, RunEnded, StageLeased
from node.protocols.manifest import Run
from tests.stack import Swarm, manifest, prepare, simulate, swarm
from tests.submissions import Told, most_at_once, served, shares

SEEDS = int(os.environ.get("PEERLOOM_SUBMISSIONS", "0"))
OFF_MAX = 0.1
"""Maximum deviation from a fair share, after a hundred runs."""
WAIT_SECONDS = 6 * 3_600.0
LOOK_SECONDS = 0.05


def test_ten_runs_submitted_together_to_four_nodes_are_all_served() -> None:
    drain(1, nodes="abcd", requesters="ab", submissions=10)


@pytest.mark.skipif(not SEEDS, reason="four minutes a seed: PEERLOOM_SUBMISSIONS=10")
@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_a_hundred_simultaneous_runs_get_their_fair_shares(seed: int) -> None:
    off = drain(seed, nodes="abcdefghijklmnopqrst", requesters="abc", submissions=100)
    print(f"seed {seed}: {off:.3f} off the fair share")  # noqa: T201 - what the soak is run for
    assert off <= OFF_MAX


def drain(seed: int, *, nodes: str, requesters: str, submissions: int) -> float:
    """Submit runs of about a minute and wait for their ends; return the largest deviation of a requester's
    share from its fair share.
    """
    found: list[float] = []

    async def play() -> None:
        rng = Random(seed)
        async with swarm(nodes, seed=seed, stage_seconds=3.0, preset="lan") as group:
            whose = {}
            async with trio.open_nursery() as looking:
                looking.start_soon(_no_slot_twice, group)
                async with trio.open_nursery() as nursery:
                    for number in range(submissions):
                        name = requesters[number % len(requesters)]
                        # A step takes six seconds, and its final evaluation eighteen.
                        wanted = manifest(
                            steps=rng.choice([6, 7, 8]),
                            stages=1,
                            replicas=1,
                            microbatch=60,
                            microbatches=1,
                            created_milliseconds=1 + number,
                        )
                        run = prepare(group.nodes[name], wanted)
                        whose[run.text] = name
                        await trio.sleep(rng.random() / submissions)
                        nursery.start_soon(_submit, group, name, run)
                await _all_end(group, set(whose))
                looking.cancel_scope.cancel()
            rows = served(told for name in nodes for told in _told(name, group.events[name]))
            assert {row.run for row in rows} == whose.keys()
            assert max(most_at_once(rows).values()) == 1
            found.append(max(abs(share - 1) for share in shares(rows, whose).values()))

    simulate(play)
    return found[0]


async def _submit(group: Swarm, name: str, run: Run) -> None:
    await group.nodes[name].runs.submit(run, wait_seconds=WAIT_SECONDS)


async def _no_slot_twice(group: Swarm) -> None:
    while True:
        for name, node in group.nodes.items():
            taken = node.runs.slots.taken()
            assert len(taken) <= 1, f"{name} promised its slot to {len(taken)} runs"
        await trio.sleep(LOOK_SECONDS)


async def _all_end(group: Swarm, runs: set[str]) -> None:
    """Assert that each run succeeds."""
    with trio.fail_after(WAIT_SECONDS):
        while True:
            ends = {
                event.run: event.outcome
                for events in group.events.values()
                for event in events
                if isinstance(event, RunEnded)
            }
            if runs <= ends.keys():
                break
            await trio.sleep(1)
    assert set(ends.values()) == {"done"}


def _told(name: str, events: list[Event]) -> list[Told]:
    return [
        Told(name, event.run, event.at, isinstance(event, RunEnded))
        for event in events
        if isinstance(event, StageLeased | RunEnded)
    ]
