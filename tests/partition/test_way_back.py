"""The state to which a run goes back when a stage is lost: its newest checkpoint, or its start if the run is
young.
"""

import pytest
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from partition.plan.plan import FIRST_VALUES, NO_HASH, Plan, StagePlan, plan_hash
from partition.run.messages import Checkpointed
from partition.run.way_back import WayBack, WaysBack

ONE, TWO = bytes([1]) * 32, bytes([2]) * 32
PLAN = Plan(
    run=bytes(32),
    parent=NO_HASH,
    height=0,
    roster=(ONE, TWO),
    trainers=(ONE,),
    microbatches=1,
    stages=(StagePlan(0, 1, (TWO,), (1,)),),
)
BEGINNING = FIRST_VALUES, 0


LATER = replace(PLAN, parent=ONE, height=1)
RESTORED = replace(LATER, restored=TWO, step=3)


def member_of(*plans: Plan, save_every: int = 4) -> WaysBack:
    """Return a member that was in the run under these plans."""
    ways = WaysBack(save_every)
    for plan in plans:
        ways.entered(plan)
    return ways


@pytest.mark.parametrize(("furthest", "found"), [(0, BEGINNING), (4, BEGINNING), (5, None)])
@pytest.mark.parametrize("plans", [(PLAN,), (PLAN, LATER)])
def test_a_young_run_without_a_checkpoint_restarts(
    plans: tuple[Plan, ...], furthest: int, found: WayBack | None
) -> None:
    assert member_of(*plans).find(None, furthest) == found


def test_a_run_that_makes_no_checkpoints_does_not_restart() -> None:
    assert member_of(PLAN, save_every=0).find(None, 0) is None


def test_an_uninformed_newcomer_does_not_restart_the_run() -> None:
    newcomer = member_of(LATER)
    assert newcomer.find(None, 0) is None
    news = member_of(PLAN, LATER).news(LATER, None)
    assert news == Checkpointed(plan_hash(LATER), 0, FIRST_VALUES)
    assert newcomer.told(news) is None
    assert newcomer.find(None, 0) == BEGINNING


def test_an_uninformed_newcomer_informs_no_other_member() -> None:
    assert member_of(LATER).news(LATER, None) is None
    assert member_of(PLAN, save_every=0).news(PLAN, None) is None


def test_the_newest_checkpoint_of_any_plan_is_preferred_and_announced() -> None:
    newest = TWO, 3
    for plans in ((PLAN,), (LATER,)):
        ways = member_of(*plans, save_every=0)
        assert ways.find(newest, 90) == newest
        assert ways.news(plans[-1], newest) == Checkpointed(plan_hash(plans[-1]), 3, TWO)


def test_a_plan_that_went_back_announces_its_checkpoint() -> None:
    assert member_of().entered(RESTORED) == (TWO, 3)
    assert member_of().entered(replace(LATER, restored=FIRST_VALUES)) is None


def test_a_final_plan_announces_only_its_own_checkpoint() -> None:
    assert member_of(PLAN).news(replace(RESTORED, is_final=True), (TWO, 3)) is None


def test_initial_values_after_some_steps_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="with 3 steps"):
        member_of(PLAN).told(Checkpointed(plan_hash(PLAN), 3, FIRST_VALUES))
