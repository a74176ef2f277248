"""Scenarios: what they are made of, how they are read and written, and what cannot all be true of one."""

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
