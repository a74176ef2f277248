"""Convergence of a run in local mode: the rule of its manifest over a series of evaluations.

A series is carried by its last evaluation alone (`SeriesProgress`), so the next evaluator goes on with it,
also after the death of the one before.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class SeriesProgress:
    """A series up to an evaluation at `step`: the `best` loss, and the number of evaluations `since` it was
    reached."""

    step: int = -1
    best: float = inf
    since: int = 0


def advance(progress: SeriesProgress, step: int, loss: float, improvement: float) -> SeriesProgress:
    """Return the series with one more evaluation. A loss counts as better if it is lower by `improvement` at
    least, and lower at all."""
    if loss < progress.best and loss <= progress.best - improvement:
        return SeriesProgress(step, loss, 0)
    return SeriesProgress(step, progress.best, progress.since + 1)


def has_converged(progress: SeriesProgress, patience: int) -> bool:
    """Return whether the last `patience` evaluations all failed to improve; with patience 0 none does."""
    return patience > 0 and progress.since >= patience
