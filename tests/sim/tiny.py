"""A scenario that plays within a fraction of a second, and one that breaks its invariant."""

from pathlib import Path
from typing import Any

import sim
from sim.scenario import Scenario, load, with_values

TINY = """\
name = "tiny"
about = "five peers and a few records"
nodes = 5
seconds = 30.0
[start]
spread_seconds = 2.0
[membership]
preset = "local"
[records]
stores_per_second = 0.3
lookups_per_second = 1.0
"""
DEAF = {"network.loss": "1.0", "checks.converge_seconds": "8", "seconds": "20"}
"""Return a scenario in which no peer can reach another, although all must find each other."""


def tiny(folder: Path, **values: Any) -> Scenario:
    return with_values(load(written(folder)), {name: str(value) for name, value in values.items()})


def written(folder: Path) -> str:
    path = folder / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def deaf(folder: Path) -> Scenario:
    return with_values(load(written(folder)), DEAF)


def digest(where: Path, **keywords: Any) -> str:
    return sim.run(written(where), **keywords).digest
