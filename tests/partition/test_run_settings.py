"""The settings of a run's members must not contradict each other."""

from dataclasses import fields

import pytest

from partition.run.settings import RunSettings

CONTRADICTIONS = (
    {"witness_seconds_max": 31.0},
    {"lease_seconds_max": 121.0},
    {"start_seconds_max": 150.0},
    {"renew_seconds_max": 21.0},
    {"left_seconds": 39.0},
    {"silence_seconds_max": 150.0},
    {"pause_seconds_max": 239.0},
    {"busy_seconds": 1.0},
    {"refill_seconds": 120.0},
    {"lost_seconds_max": 3_601.0},
    {"retry_seconds": 60.0},
)


@pytest.mark.parametrize("changed", CONTRADICTIONS, ids=lambda changed: next(iter(changed)))
def test_settings_that_contradict_each_other_are_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="run settings: "):
        RunSettings(**changed)


@pytest.mark.parametrize("name", [field.name for field in fields(RunSettings)])
def test_no_setting_is_below_zero(name: str) -> None:
    with pytest.raises(ValueError, match="run settings: "):
        RunSettings(**{name: -1.0})
