"""The start of a run's stall, as far as one member can know it."""

from crypto.identity import PeerId
from partition.run.stall import StallClock

ONE, TWO = PeerId(bytes([1]) * 32), PeerId(bytes([2]) * 32)


def running() -> StallClock:
    clock = StallClock(0.0)
    clock.entered(1.0, None)
    clock.moved(10.0)
    return clock


def test_a_stall_begins_when_the_last_step_was_committed() -> None:
    clock = running()
    clock.entered(15.0, (ONE,))
    assert clock.since == 10.0


def test_a_stall_begins_later_if_the_lost_member_was_heard_later() -> None:
    clock = running()
    clock.heard(9.0, TWO)
    clock.heard(12.0, ONE)
    clock.entered(15.0, (ONE,))
    assert clock.since == 12.0
    clock = running()
    clock.heard(9.0, TWO)
    clock.heard(12.0, ONE)
    clock.entered(15.0, (ONE, TWO))
    assert clock.since == 10.0, "the stall does not begin with the first of two deaths"


def test_a_plan_without_losses_stalls_from_its_own_start() -> None:
    clock = running()
    clock.entered(15.0, ())
    assert clock.since == 15.0


def test_a_second_death_before_any_progress_prolongs_the_first_stall() -> None:
    clock = running()
    clock.entered(15.0, (ONE,))
    clock.heard(20.0, TWO)
    clock.entered(25.0, (TWO,))
    assert clock.since == 10.0
    clock.moved(30.0)
    clock.entered(40.0, (TWO,))
    assert clock.since == 30.0
