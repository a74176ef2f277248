"""The machine of each peer of a stack: its speed, its disk, and whether it takes stages of runs."""

import math
from dataclasses import replace

from node.services.capacity import Capacity
from sim.scenario import Scenario
from sim.seeds import draw_share, seeded_identity
from sim.storage import MemoryStorage
from sim.worlds.roster import capacity

SPEEDS = (0.5, 2.0)
"""Range of speeds of computing peers, relative to an ordinary one."""


def machine(scenario: Scenario, seed: int, number: int, region: str) -> Capacity:
    """Return the capacity that a peer offers: as in a world of cores, but with different speeds if peers
    compute."""
    ordinary = capacity(region)
    if not scenario.runs:
        return ordinary
    slowest, fastest = map(math.log, SPEEDS)
    speed = math.exp(slowest + (fastest - slowest) * draw_share(seed, "speed", number))
    return replace(ordinary, flops_per_second=float(round(ordinary.flops_per_second * speed)))


def takes_stages(scenario: Scenario, number: int) -> bool:
    """Return whether this peer may be a member of the scenario's runs."""
    runs = scenario.runs
    return not runs or number < max(training.members for training in runs)


def new_disk(seed: int, number: int) -> MemoryStorage:
    """Return a disk that contains only keys, so that a peer that forgets everything else keeps its
    identity."""
    storage = MemoryStorage()
    storage.write("identity.key", seeded_identity(seed, number).seed)
    storage.write("static.key", bytes(32))
    return storage
