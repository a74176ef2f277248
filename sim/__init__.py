"""The simulator: real protocol code in virtual time, as bare cores (`engine`) or whole nodes (`seams`).

sim.run("churn", seed=7).write("out")      a scenario, watched, checked and measured: `sim.experiment`
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.experiment import Result as Result
    from sim.experiment import run as run

__all__ = ["Result", "run"]


def __getattr__(name: str) -> Any:
    # Code that imports a seed or an engine should not have to load what an experiment needs (PEP 562).
    if name not in __all__:
        raise AttributeError(f"module 'sim' has no attribute '{name}'")
    from sim import experiment

    return getattr(experiment, name)
