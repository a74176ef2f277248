"""A committer pauses between two steps, even if an earlier plan opened the next one."""

from partition.steps.committer import StepsPaused
from tests.partition.small_plan import synced
from tests.partition.test_committer import REPLICAS, apply_all, committer, count, opens, reduce_all


def test_a_step_opened_under_an_earlier_plan_precedes_a_pause() -> None:
    core = committer()
    assert core.pause(0.0) == []
    sends = [row for who in REPLICAS for row in core.receive(0.0, who, synced(0, begun=(0,)))]
    assert opens(sends), (
        "the step of the earlier plan was not opened first, so a leaving "
        "member would take its micro-batches along"
    )
    assert core.phase == "counting"
    count(core, 0, 1)
    reduce_all(core)
    assert opens(apply_all(core)) == []
    assert core.events[-1] == StepsPaused(1)


def test_a_pause_does_not_wait_for_an_unopened_step() -> None:
    core = committer()
    core.pause(0.0)
    for who in REPLICAS:
        core.receive(0.0, who, synced(0))
    assert (core.phase, core.events[-1]) == ("paused", StepsPaused(0))
