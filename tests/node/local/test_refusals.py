"""Runs in local mode whose nodes refuse results. They end with one result, or report that the results
differ."""

from collections.abc import Callable
from typing import Any

import pytest
import trio

from node.cli.runs import run_lines
from node.commands import Commands
from node.local import evaluations as module
from node.local.verdict import fault_of
from node.protocols.calls import ask
from node.protocols.runs import Join
from node.result_events import ResultDiffers
from partition.run.local.round_schedule import RoundSchedule
from partition.run.tickets import make_ticket
from sim.worlds.scheduling import run_virtually
from tests import stack
from tests.node.local.test_runs import QUICK, SLOW, ends, train
from tests.stack import swarm

MINUTES_SECONDS = 900.0


def refuse(monkeypatch: pytest.MonkeyPatch, is_refused: Callable[[int], bool]) -> list[str]:
    """Have the members refuse some results. `is_refused` takes the number of a trial, in order of all trials.
    Return the list of verdicts, which grows."""
    verdicts: list[str] = []

    def judge(*arguments: Any, **named: Any) -> str:
        verdicts.append("refused here" if is_refused(len(verdicts)) else fault_of(*arguments, **named))
        return verdicts[-1]

    monkeypatch.setattr(module, "fault_of", judge)
    return verdicts


def test_an_author_does_not_settle_a_result_that_others_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both others refuse the first result, so another member proposes one."""

    async def play() -> None:
        verdicts = refuse(monkeypatch, lambda number: number < 2)
        async with swarm("abc", stage_seconds=SLOW, preset="lan") as group:
            await train(group, QUICK, steps=8)
            found = await ends(group, "abc", MINUTES_SECONDS)
            assert {event.outcome for event in found} == {"done"}
            assert len({event.weights for event in found}) == 1
            assert all(event.is_here for event in found)
            assert verdicts[:2] == ["refused here"] * 2

    run_virtually(play)


def test_the_requester_breaks_a_tie_between_two_members(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        refuse(monkeypatch, lambda number: True)
        async with swarm("ab", stage_seconds=SLOW, preset="lan") as group:
            await train(group, QUICK, steps=8)
            found = await ends(group, "ab", MINUTES_SECONDS)
            assert [event.outcome for event in found] == ["done"] * 2
            assert len({event.weights for event in found}) == 1
            await trio.sleep(30.0)
            assert not [
                each for name in "ab" for each in group.events[name] if isinstance(each, ResultDiffers)
            ]

    run_virtually(play)


@pytest.mark.slow
def test_members_that_never_agree_end_with_different_results_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The requester follows without training. So there is no third member to break the tie between the two
    that train."""

    async def play() -> None:
        refuse(monkeypatch, lambda number: True)
        # Without rounds the models of the members differ, and the last round never happens.
        monkeypatch.setattr(RoundSchedule, "is_due", lambda *_, **__: False)
        async with swarm("abc", stage_seconds=SLOW, preset="lan") as group:
            group.nodes["a"].limit(accept_runs="never")
            node = group.nodes["a"]
            wanted = stack.manifest(
                stages=1, microbatch=16, replicas=0, dtype="float32", local=QUICK, steps=30
            )
            run = stack.prepare(node, wanted)
            await node.runs.submit(run, wait_seconds=60.0)
            found = await ends(group, "abc", MINUTES_SECONDS)
            assert [event.outcome for event in found] == ["done"] * 3
            own = {name: event.weights for name, event in zip("abc", found, strict=True)}
            assert own["b"] != own["c"]
            await trio.sleep(60.0)
            for name, other in ("bc", "cb"):
                told = [each for each in group.events[name] if isinstance(each, ResultDiffers)]
                assert (group.nodes[other].peer, own[other]) in {(each.peer, each.weights) for each in told}
            document = await Commands(group.nodes["b"]).show(run.text)
            assert own["c"] in {row["weights"] for row in document["other_results"]}
            assert any(line.lstrip().startswith("differs") for line in run_lines(document))
            result = await group.nodes["b"].run(run.text).result()
            assert own["c"] in {each.weights for each in result.others}

    run_virtually(play)


def test_a_node_asked_to_join_after_the_end_learns_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The members have left by the time the node looks for them, and they never knew the node."""

    async def play() -> None:
        async with swarm("abx", stage_seconds=SLOW, preset="lan") as group:
            asker, late = group.nodes["a"], group.nodes["x"]
            late.limit(accept_runs="never")
            run, _ = await train(group, QUICK, steps=8)
            await ends(group, "ab")
            wall = asker.seams.clock.wall()
            ticket = make_ticket(asker.signer, run.id, late.peer, wall)
            late.limit(accept_runs="swarm")
            await trio.sleep(20.0)  # by now the former members announce the run only now and then
            await ask(asker.network, late.peer, Join(run.fact, (ticket,)), seconds=20)
            (found,) = await ends(group, "x")
            assert found.outcome == "done"
            assert found.weights == (await ends(group, "a"))[0].weights

    run_virtually(play)
