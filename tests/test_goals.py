"""If a run misses its goal, only its requester gets an alert."""

import os
from pathlib import Path
from typing import Any

import pytest
import trio

from node.alerts.service import Alerts
from node.cli.client import ask
from node.cli.runs import run_lines, runs_lines
from node.commands import Commands
from node.errors import UsageError
from node.events import AlertCleared, AlertRaised, RunChanged
from node.protocols.run_file import GoalTable
from node.settings_events import RunGoalSet
from node.state_documents import run_document
from tests.kills import playground
from tests.serving_swarm import until
from tests.stack import manifest, prepare, simple_cnn, simulate, swarm

GOAL = GoalTable(samples_per_second=100_000.0, seconds=5)


def test_only_the_requester_learns_that_its_run_is_too_slow() -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan", stage_seconds=3.0) as group:
            await trio.sleep(5)
            a, b = group.nodes["a"], group.nodes["b"]
            run = prepare(a, manifest(stages=1, replicas=1, steps=10_000_000, microbatches=2))
            a.runs.revising.ask_for(run, priority=5, deadline_minutes=0, goal=GOAL)
            await a.runs.submit(run)
            reasons = [each.reason for each in group.events["a"] if isinstance(each, RunChanged)]
            assert any("its goal of 100000 samples/s cannot be reached" in each for each in reasons)
            alerts, others = (Alerts(node, lambda _: (50 << 30, 100 << 30)) for node in (a, b))
            told: list[Any] = []
            with trio.fail_after(300):
                while not told:
                    await trio.sleep(1)
                    told = [each for each in alerts.look() if isinstance(each, AlertRaised)]
                    assert not others.look()
            assert [(each.alert, each.about) for each in told] == [("run_below_goal", run.text)]
            assert "100000 are wanted" in told[0].text
            assert [type(each) for each in group.events["b"]].count(RunGoalSet) == 0
            document = run_document(a.state.runs[run.text])
            for lines in (run_lines(document), runs_lines({"runs": [document]})):
                assert any("100000 samples/s over 5 s; the latest step had" in line for line in lines)
            # A changed goal applies from the next step on. Without a goal there is no alert.
            said = await Commands(a).revise(run.text, samples_per_second=50.0)
            assert said["goal"] == {"samples_per_second": 50.0, "seconds": 5}
            await Commands(a).revise(run.text, samples_per_second=0.0)
            cleared: list[Any] = []
            with trio.fail_after(300):
                while not cleared:
                    await trio.sleep(1)
                    cleared = alerts.look()
            assert [type(each) for each in cleared] == [AlertCleared]
            assert run_document(a.state.runs[run.text])["goal"] is None
            for wrong in ({"goal_seconds": 60}, {"samples_per_second": -1.0}, {"goal_seconds": 1}):
                with pytest.raises(UsageError):
                    await Commands(a).revise(run.text, **wrong)
            await a.runs.stopping.stop(run.text)

    simulate(scenario)


@pytest.mark.skipif("PEERLOOM_PROCESSES" not in os.environ, reason="real processes: PEERLOOM_PROCESSES=1")
def test_a_missed_goal_of_a_run_alerts_its_requester(tmp_path: Path) -> None:
    goal = "[goal]\nsamples_per_second = 1e8\nseconds = 5"
    with playground(tmp_path, simple_cnn().data) as ground:
        ground.train(steps=100_000, more=goal)

        def kinds(name: str) -> list[str]:
            return [each["kind"] for each in ask(ground.folder / name, "status")["alerts"]]

        until(lambda: kinds("a") == ["run_below_goal"], what="no alert")
        assert [kinds(name) for name in "bc"] == [[], []]
        (run,) = ask(ground.folder / "a", "status")["runs"]
        assert run["goal"] == {"samples_per_second": 1e8, "seconds": 5}
