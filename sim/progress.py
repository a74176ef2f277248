"""How far an experiment is, for whoever shows it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far an experiment is. `population`: how many peers are up."""

    virtual_seconds: float
    scenario_seconds: float
    wall_seconds: float
    population: int
    events: int

    @property
    def rate(self) -> float:
        """Virtual seconds a second, so far."""
        return self.virtual_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def left_seconds(self) -> float | None:
        """Return how long there is to wait; None before it can be said."""
        return (self.scenario_seconds - self.virtual_seconds) / self.rate if self.rate > 0 else None
