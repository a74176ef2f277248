"""A member of a run in local mode that a partition isolates trains on. Afterwards its state is merged,
weighted by its progress."""

import pytest
import trio

from crypto.identity import PeerId
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


async def next_mean(heard: HeardRounds, peer: PeerId, members: int) -> Round:
    """Wait for a mean of at least `members` members to which `peer` offers its values from now on. The round
    in which the peer is now does not count, because its values were offered earlier."""
    now = trio.current_time()
    with trio.fail_after(60):
        while True:
            for each in heard:
                is_whole = each.made.vector is not None and len(each.made.shares) >= members
                if each.peer == peer and each.begun_at >= now and is_whole:
                    return each.made
            await trio.sleep(0.1)


@pytest.mark.slow
def test_an_isolated_member_is_merged_by_its_progress() -> None:
    heard = HeardRounds()

    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW, preset="lan", parts=heard.parts) as group:
            nodes = {name: group.nodes[name].peer for name in "abc"}
            local = LocalSettings(local_steps=2, aggregate="mean")
            await submit(group, microbatch=4, local=local, steps=60, save_every=0)
            usual = (await next_mean(heard, nodes["c"], 3)).shares[nodes["c"]]
            group.medium.split([nodes["c"]], [nodes["a"], nodes["b"]])
            before = steps_of(group, "c")
            await trio.sleep(PARTED_SECONDS)
            alone = steps_of(group, "c") - before
            group.medium.heal()
            assert alone > 4, f"the isolated member made only {alone} steps"
            share = (await next_mean(heard, nodes["c"], 2)).shares[nodes["c"]]
            assert usual < 0.5 < share, f"weights {usual} before and {share} after {alone} steps alone"
            found = await ends(group, "abc", 400.0)
            assert {event.outcome for event in found} == {"done"}
            assert len({event.weights for event in found}) == 1

    run_virtually(play)
