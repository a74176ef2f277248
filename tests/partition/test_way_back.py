"""What a run goes back to when a stage is lost: its newest checkpoint, or its beginning while it is young."""

import pytest
from msgspec.structs import replace

from partition.plan.plan import FIRST_VALUES, NO_HASH, Plan, StagePlan
from partition.run.way_back import way_back

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


@pytest.mark.parametrize(("furthest", "found"), [(0, BEGINNING), (4, BEGINNING), (5, None)])
def test_a_run_without_a_checkpoint_begins_anew_while_little_is_lost(
    furthest: int, found: tuple[bytes, int] | None
) -> None:
    assert way_back(None, PLAN, furthest, 4) == found


def test_a_run_begins_anew_only_under_its_first_plan_and_with_checkpoints_on() -> None:
    assert way_back(None, replace(PLAN, parent=ONE, height=1), 0, 4) is None
    assert way_back(None, None, 0, 4) is None
    assert way_back(None, PLAN, 0, 0) is None


def test_a_checkpoint_comes_before_the_beginning() -> None:
    newest = TWO, 3
    assert way_back(newest, PLAN, 3, 4) == newest
    assert way_back(newest, replace(PLAN, parent=ONE, height=1), 90, 0) == newest
