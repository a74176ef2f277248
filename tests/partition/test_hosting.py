"""One member's stage: opened, kept, superseded, or opened early for a plan that may fail."""

from math import inf

from msgspec.structs import replace

from crypto.identity import PeerId
from partition.plan.plan import FIRST_VALUES, NO_HASH, Plan, StagePlan, plan_hash
from partition.run.hosting import Hosting, StageEnded, StageKept, StageWanted
from partition.run.settings import RunSettings

SETTINGS = RunSettings()
ME, OTHER, FAR = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))


def plan(height: int, *stages: PeerId, cut: int = 4) -> Plan:
    """Return a plan whose two stages have these peers; the first stage has `cut` layers."""
    spans = (0, cut), (cut, 8)
    rows = tuple(
        StagePlan(first, last, (peer,), (1,)) for (first, last), peer in zip(spans, stages, strict=True)
    )
    return Plan(NO_HASH, NO_HASH, height, tuple(sorted(set(stages))), (OTHER,), 4, rows)


def opened(hosting: Hosting, first: Plan) -> None:
    wanted = hosting.adopt(first)
    assert isinstance(wanted, StageWanted)
    assert hosting.opened(wanted) == first


def test_a_stage_stays_open_while_its_layers_stay_the_same() -> None:
    hosting = Hosting(ME, SETTINGS)
    wanted = hosting.adopt(plan(0, ME, OTHER))
    assert isinstance(wanted, StageWanted)
    assert wanted.step == 0, "a stage of the first plan does not start from the beginning"
    assert hosting.occupies
    assert not hosting.is_open
    newer = plan(1, ME, FAR)
    assert hosting.adopt(newer) is None, "the plan was adopted while the stage was still opening"
    assert hosting.opened(wanted) == newer, "the opened stage did not get the newest plan"
    assert hosting.adopt(plan(2, ME, OTHER)) == StageKept(plan(2, ME, OTHER))
    moved = hosting.adopt(plan(3, ME, OTHER, cut=3))
    assert isinstance(moved, StageWanted), "a moved border did not lead to a new stage"
    assert moved.step is None


def test_a_trained_stage_is_opened_again_for_a_fresh_start() -> None:
    hosting = Hosting(ME, SETTINGS)
    opened(hosting, plan(0, ME, OTHER))
    anew = replace(plan(1, ME, OTHER), restored=FIRST_VALUES)
    assert isinstance(hosting.adopt(anew), StageWanted)
    hosting = Hosting(ME, SETTINGS)
    wanted = hosting.prepare(0.0, anew, OTHER)
    assert wanted is not None
    hosting.opened(wanted)
    assert hosting.adopt(anew) == StageKept(anew), (
        "the stage was not kept although it was opened for this plan and has not trained"
    )


def test_an_opening_superseded_by_a_newer_plan_is_dropped() -> None:
    hosting = Hosting(ME, SETTINGS)
    first = hosting.adopt(plan(0, ME, OTHER))
    assert isinstance(first, StageWanted)
    assert hosting.adopt(plan(1, FAR, OTHER)) == StageEnded()
    again = hosting.adopt(plan(2, ME, OTHER))
    assert isinstance(again, StageWanted)
    assert hosting.opened(first) is None, "an opening was requested twice"
    hosting.failed(first)
    assert hosting.wants(again)
    assert hosting.opened(again) == plan(2, ME, OTHER)


def test_a_stage_that_ended_or_failed_is_opened_by_the_next_plan() -> None:
    hosting = Hosting(ME, SETTINGS)
    opened(hosting, plan(0, ME, OTHER))
    hosting.closed()
    assert not hosting.occupies
    wanted = hosting.adopt(plan(1, ME, FAR))
    assert isinstance(wanted, StageWanted)
    hosting.failed(wanted)
    assert not hosting.occupies
    assert isinstance(hosting.adopt(plan(2, ME, OTHER)), StageWanted)


def test_a_stage_opened_early_is_closed_unless_its_plan_is_decided() -> None:
    early, other = plan(3, ME, OTHER), plan(4, ME, FAR)
    for lost in (True, False):
        hosting = Hosting(ME, SETTINGS)
        wanted = hosting.prepare(0.0, early, OTHER)
        assert wanted is not None
        assert hosting.prepare(0.0, other, FAR) is None, "a second stage was opened early"
        assert hosting.opened(wanted) == early
        assert hosting.planner_lost(FAR) is None
        assert hosting.unprepare(plan_hash(other)) is None
        closed = hosting.planner_lost(OTHER) if lost else hosting.unprepare(plan_hash(early))
        assert closed == StageEnded()
        assert not hosting.occupies
    hosting = Hosting(ME, SETTINGS)
    wanted = hosting.prepare(0.0, early, OTHER)
    assert wanted is not None
    hosting.opened(wanted)
    assert hosting.adopt(early) == StageKept(early)
    assert hosting.planner_lost(OTHER) is None, (
        "the early stage was given up although its plan is now in force"
    )


def test_an_early_stage_that_failed_is_given_up_only_once() -> None:
    hosting, early = Hosting(ME, SETTINGS), plan(3, ME, OTHER)
    wanted = hosting.prepare(0.0, early, OTHER)
    assert wanted is not None
    hosting.failed(wanted)
    assert not hosting.occupies
    assert hosting.unprepare(plan_hash(early)) == StageEnded()
    assert hosting.unprepare(plan_hash(early)) is None


def test_a_member_whose_run_is_over_opens_no_stage_again() -> None:
    hosting = Hosting(ME, SETTINGS)
    opened(hosting, plan(0, ME, OTHER))
    assert hosting.vacate() == StageEnded()
    opened(hosting, plan(1, ME, OTHER))
    assert hosting.end() == StageEnded()
    assert hosting.adopt(plan(2, ME, OTHER)) is None
    assert hosting.prepare(0.0, plan(3, ME, OTHER), OTHER) is None
    assert not hosting.occupies


def test_a_stage_opened_early_waits_for_its_plan_a_bounded_time() -> None:
    hosting, early = Hosting(ME, SETTINGS), plan(3, ME, OTHER)
    assert hosting.deadline == inf
    wanted = hosting.prepare(10.0, early, OTHER)
    assert wanted is not None
    due = hosting.deadline
    assert due == 10.0 + SETTINGS.silence_seconds_max
    hosting.opened(wanted)
    assert hosting.wake(due - 1) is None
    assert hosting.wake(due) == StageEnded()
    assert (hosting.occupies, hosting.deadline) == (False, inf)
