"""The weight of a member's values in rounds of local mode: the samples that it has learned since its last
mean."""

from partition.run.local.round_schedule import RoundSchedule
from partition.run.local_settings import LocalSettings


def hold_round(schedule: RoundSchedule, step: int, samples: int, *, is_averaged: bool) -> None:
    """Hold one round from this step on."""
    schedule.begin(float(step), step, samples)
    schedule.ended(schedule.life, has_result=True)
    schedule.use()
    if is_averaged:
        schedule.averaged(is_included=True)
    else:
        schedule.failed()


def test_samples_count_until_a_mean_includes_them() -> None:
    schedule = RoundSchedule(LocalSettings(local_steps=2), needs_all=False)
    hold_round(schedule, 2, 16, is_averaged=False)
    schedule.skip(4.0, 4, 32)  # the member is alone
    assert schedule.weight(48, 0) == 48
    hold_round(schedule, 6, 48, is_averaged=True)
    assert schedule.weight(64, 0) == 16
