"""The progress of an experiment, for screens."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExperimentProgress:
    """The progress of an experiment. `population` is the number of running peers."""

    virtual_seconds: float
    scenario_seconds: float
    wall_seconds: float
    population: int
    events: int

    @property
    def rate(self) -> float:
        """Return the virtual seconds per real second so far."""
        return self.virtual_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def left_seconds(self) -> float | None:
        """Return the seconds left; None before they can be estimated."""
        return (self.scenario_seconds - self.virtual_seconds) / self.rate if self.rate > 0 else None
