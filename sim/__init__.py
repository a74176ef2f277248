"""The simulator: runs real protocol code in virtual time, as bare cores (`engine`) or as whole nodes
(`seams`).

sim.run("churn", seed=7).write("out")      play a scenario, check it and measure it: `sim.experiment`
"""

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.experiment import Result as Result
    from sim.experiment import run as run

__all__ = ["Result", "run"]


def _check_node() -> None:
    """Import `node`, which resolves all other names, and check that it is the package next to this one.

    Raises ImportError. Under `python -m` it prints two lines on stderr and raises SystemExit.
    """
    found = find_spec("node")
    place = (
        None if found is None else found.origin or next(iter(found.submodule_search_locations or ()), None)
    )
    if place is None or os.path.realpath(place).startswith(
        os.path.realpath(f"{__file__}/../../node") + os.sep
    ):
        import node

        assert node.__name__, "importing node runs its own checks; its name is not needed"
        return
    what = f"{place} hides the package node, which the simulator needs"
    if sys.argv[:1] != ["-m"]:
        raise ImportError(f"{what}: rename it", name="node", path=place)
    sys.stderr.write(f"error: {what}\n  do: rename it, or use the command peerloom sim\n")
    raise SystemExit(2)


_check_node()


def __getattr__(name: str) -> Any:
    # Loaded lazily (PEP 562), so that code that imports only a seed or an engine does not load everything
    # that an experiment needs.
    if name not in __all__:
        raise AttributeError(f"module 'sim' has no attribute '{name}'")
    from sim import experiment

    return getattr(experiment, name)
