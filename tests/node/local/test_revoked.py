"""Members of a run in local mode whose tickets the requester revokes. Virtual time."""

import pytest
import trio

from crypto.identity import peer_text
from node.averaging_events import AveragingEnded
from node.commands import Commands
from node.errors import UsageError
from node.events import RunChanged, RunEnded, RunReleased
from sim.worlds.scheduling import run_virtually
from tests.local_runs import local_runs
from tests.node.local.test_runs import SLOW, ends, submit
from tests.stack import Swarm, swarm


def rounds(group: Swarm, name: str) -> list[AveragingEnded]:
    return [each for each in group.events[name] if isinstance(each, AveragingEnded) and each.outcome == "ok"]


def test_a_revoked_member_leaves_and_the_others_end_the_run() -> None:
    async def play() -> None:
        async with swarm("abc", stage_seconds=SLOW, preset="lan") as group:
            run = await submit(group, steps=40)
            out = group.nodes["b"].peer
            with trio.fail_after(120):
                while not any(out in each.averaged for each in rounds(group, "c")):  # noqa: ASYNC110 - virtual
                    await trio.sleep(0.1)
            with pytest.raises(UsageError, match="belongs to another node"):
                await Commands(group.nodes["c"]).revoke(run.text, peer_text(out))
            assert await Commands(group.nodes["a"]).revoke(run.text, peer_text(out)) == 1
            before = {name: len(rounds(group, name)) for name in "ac"}
            found = await ends(group, "ac")
            assert [each.outcome for each in found] == ["done", "done"]
            for name, count in before.items():
                # the round in progress may have included the revoked member
                later = rounds(group, name)[count + 1 :]
                assert later
                assert not any(out in each.averaged for each in later)
            told = [each for each in group.events["b"] if isinstance(each, RunChanged) and each.reason]
            assert "was revoked" in told[-1].reason
            assert [each for each in group.events["b"] if isinstance(each, RunReleased)]
            assert not [each for each in group.events["b"] if isinstance(each, RunEnded)]
            assert not local_runs(group.nodes["b"]).members

    run_virtually(play)
