"""A requester is warned of a deadline that cannot be met, both when its run is planned and while it
trains."""

import trio

from node.events import Event, RunChanged
from node.placement.deadline import DeadlineWatch, late_text
from tests.stack import manifest, prepare, simulate, swarm


def test_a_late_run_is_warned_of_once_and_its_recovery_reported() -> None:
    watch = DeadlineWatch()
    told = [watch.moved(10.0 * step, step, 100, 900.0 - 10.0 * step) for step in range(6)]
    assert told[:3] == [None] * 3
    assert told[3] is not None
    assert "cannot be met: at the pace of its steps it takes about 16 min more" in told[3]
    assert told[4:] == [None, None], "the same delay was warned of twice"
    assert watch.moved(60.0, 6, 50, 840.0) == "", (
        "a run shortened enough to be in time did not clear the warning"
    )
    assert late_text(100.0, 99.0, by="") == ""


def test_a_requester_is_warned_when_planning_and_while_training() -> None:
    async def scenario() -> None:
        async with swarm("abc", preset="lan", stage_seconds=3.0) as group:
            await trio.sleep(5)
            a = group.nodes["a"]
            run = prepare(a, manifest(stages=1, replicas=1, steps=10_000_000, microbatches=2))
            a.runs.revising.ask_for(run, priority=5, deadline_minutes=1)
            await a.runs.submit(run)
            assert any("according to its peers' speed" in each for each in _reasons(group.events["a"]))
            with trio.fail_after(300):
                while True:
                    if any("pace of its steps" in each for each in _reasons(group.events["a"])):
                        break
                    await trio.sleep(1)
            assert sum("deadline cannot be met" in each for each in _reasons(group.events["b"])) == 0
            await a.runs.stopping.stop(run.text)

    simulate(scenario)


def _reasons(events: list[Event]) -> list[str]:
    return [event.reason for event in events if isinstance(event, RunChanged)]
