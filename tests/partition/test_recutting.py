"""When a committer checks the replicas' times, and under which conditions it moves borders."""

from partition.plan.change import Change
from partition.run.rate_watch import DOUBLINGS_MAX, LOOK_STEPS, RateWatch
from partition.run.recutting import INF, RECUT_SECONDS_MAX, Recutting

CHECKPOINT = bytes([2]) * 32


def steps_to_a_look(watch: RateWatch) -> int:
    return next(number for number in range(1, 10_000) if watch.stepped(1.0))


def test_two_checks_must_agree_before_borders_move() -> None:
    watch = RateWatch()
    assert not watch.found((3,))
    assert watch.found((4,))
    assert not watch.found(())
    assert not watch.found((3,))


def test_each_plan_that_moved_borders_doubles_the_steps_until_the_next_check() -> None:
    watch = RateWatch()
    assert steps_to_a_look(watch) == LOOK_STEPS
    for doubling in range(1, DOUBLINGS_MAX + 3):
        watch.begin(has_moved=True)
        assert steps_to_a_look(watch) == LOOK_STEPS << min(doubling, DOUBLINGS_MAX)
    watch.begin(has_moved=False)
    assert steps_to_a_look(watch) == LOOK_STEPS << DOUBLINGS_MAX


def test_the_step_time_ignores_the_first_step_which_loads_libraries() -> None:
    watch = RateWatch()
    for seconds in (60.0, 1.0, 1.0):
        watch.stepped(seconds)
    assert watch.seconds == 1.0


def test_only_a_checkpoint_of_the_pause_moves_borders() -> None:
    recutting = Recutting()
    assert not recutting.paused(0.0, 7)
    recutting.begin(Change(cuts=(1, 2)))
    assert recutting.deadline == INF
    assert recutting.paused(5.0, 8)
    assert recutting.deadline == 5.0 + RECUT_SECONDS_MAX
    assert recutting.saved((CHECKPOINT, 6)) is None
    found = recutting.saved((CHECKPOINT, 8))
    assert found == Change(restored=CHECKPOINT, step=8, cuts=(1, 2))
    recutting.end()
    assert not recutting.is_open
    assert recutting.saved((CHECKPOINT, 8)) is None
