"""A member of a run in local mode that a partition isolates trains on, and its state is merged by weight."""

import pytest
import trio

from node.averaging.rounds import Round
from partition.run.local_settings import LocalSettings
from sim.worlds.scheduling import run_virtually
from tests.local_runs import local_runs
from tests.node.local.heard_rounds import HeardRounds
from tests.node.local.test_runs import SLOW, ends, submit
from tests.stack import Swarm, swarm

PARTED_SECONDS = 15.0


def steps_of(group: Swarm, name: str) -> int:
    (member,) = local_runs(group.nodes[name]).members.values()
    return member.step


async def mean_of_all(heard: HeardRounds) -> Round:
    """Wait for a round of all three members."""
    heard.clear()
    with trio.fail_after(60):
        while True:
            for each in [row.made for row in heard]:
                if each.vector is not None and len(each.shares) == 3:
                    return each
            await trio.sleep(0.1)


@pytest.mark.slow
def test_an_isolated_member_is_merged_by_its_progress() -> None:
    heard = HeardRounds()

    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW, preset="lan", parts=heard.parts) as group:
            nodes = {name: group.nodes[name].peer for name in "abc"}
            local = LocalSettings(local_steps=2, aggregate="mean")
            await submit(group, microbatch=4, local=local, steps=60, save_every=0)
            usual = (await mean_of_all(heard)).shares[nodes["c"]]
            group.medium.split([nodes["c"]], [nodes["a"], nodes["b"]])
            before = steps_of(group, "c")
            await trio.sleep(PARTED_SECONDS)
            alone = steps_of(group, "c") - before
            group.medium.heal()
            assert alone > 4, f"the member trains on: {alone} steps"
            share = (await mean_of_all(heard)).shares[nodes["c"]]
            assert usual < 0.5 < share, f"{usual}, {share} after {alone} steps"
            found = await ends(group, "abc", 400.0)
            assert {event.outcome for event in found} == {"done"}
            assert len({event.weights for event in found}) == 1

    run_virtually(play)
