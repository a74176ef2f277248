"""Convergence of a run in local mode: the manifest's rule, applied to a series of evaluations.

The latest evaluation carries the state of the whole series (`SeriesProgress`), so the next evaluator can
continue the series even if the previous evaluator has died.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class SeriesProgress:
    """A series up to an evaluation at `step`: the `best` loss, and the number of evaluations `since` that
    loss was reached."""

    step: int = -1
    best: float = inf
    since: int = 0


def advance(progress: SeriesProgress, step: int, loss: float, improvement: float) -> SeriesProgress:
    """Return the series with one more evaluation. A loss counts as better if it is lower than the best one,
    and lower by at least `improvement`."""
    if loss < progress.best and loss <= progress.best - improvement:
        return SeriesProgress(step, loss, 0)
    return SeriesProgress(step, progress.best, progress.since + 1)


def has_converged(progress: SeriesProgress, patience: int) -> bool:
    """Return whether the latest `patience` evaluations all failed to improve; always False if `patience` is
    0."""
    return patience > 0 and progress.since >= patience
