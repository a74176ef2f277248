"""How fast a replica is taken to be, from what its steps took."""

import pytest

from partition.plan.plan import StagePlan
from partition.steps.messages import Work
from partition.steps.pace import Pace
from tests.partition.small_plan import MIDDLES

HERE, THERE = MIDDLES


def test_micro_batches_are_dealt_by_what_was_measured() -> None:
    pace = Pace()
    stage = StagePlan(0, 1, (HERE, THERE), (100, 50))
    assert pace.rates(stage)[0] == 2 * pace.rates(stage)[1]
    pace.measured(HERE, Work(2 * 10**9), 2)
    # The other is taken to be half as fast still, as the plan says.
    assert pace.rates(stage)[0] == 2 * pace.rates(stage)[1]
    pace.measured(THERE, Work(10**9), 2)
    assert 2 * pace.rates(stage)[0] == pace.rates(stage)[1]


def test_noise_between_equal_machines_deals_equally() -> None:
    pace = Pace()
    pace.measured(HERE, Work(1_001_000_000), 1)
    pace.measured(THERE, Work(1_003_000_000), 1)
    assert len(set(pace.rates(StagePlan(0, 1, (HERE, THERE), (7, 3))))) == 1


def test_one_slow_step_does_not_make_a_slow_machine() -> None:
    pace = Pace()
    stage = StagePlan(0, 1, (HERE,), (1,))
    pace.measured(HERE, Work(10**9), 1)
    before = pace.rates(stage)[0]
    pace.measured(HERE, Work(2 * 10**9), 1)
    assert before / 2 < pace.rates(stage)[0] < before
    pace.measured(HERE, Work(), 1)  # it was not measured
    pace.measured(HERE, Work(10**9), 0)
    assert pace.patience_seconds(HERE) == pytest.approx(8 * 1.3)
