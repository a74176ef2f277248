"""Scenarios: their parts, how they are read and written, and the checks for contradictory values."""

from sim.scenario.loading import BUILT_IN, load, text_of, to_toml, with_values
from sim.scenario.model import (
    NODES_MAX,
    Checks,
    MembershipScenario,
    RecordsScenario,
    Scenario,
    SwarmStart,
    TrainingScenario,
)

__all__ = [
    "BUILT_IN",
    "NODES_MAX",
    "Checks",
    "MembershipScenario",
    "RecordsScenario",
    "Scenario",
    "SwarmStart",
    "TrainingScenario",
    "load",
    "text_of",
    "to_toml",
    "with_values",
]
