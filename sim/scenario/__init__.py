"""Scenarios: their parts, how they are read and written, and the values that contradict each other."""

from sim.scenario.loading import BUILT_IN, load, text_of, to_toml, with_values
from sim.scenario.model import NODES_MAX, Checks, Membership, Records, Scenario, Start, Training

__all__ = [
    "BUILT_IN",
    "NODES_MAX",
    "Checks",
    "Membership",
    "Records",
    "Scenario",
    "Start",
    "Training",
    "load",
    "text_of",
    "to_toml",
    "with_values",
]
