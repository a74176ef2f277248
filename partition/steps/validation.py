"""Validation of a run in exact mode: its schedule, the best state so far, and convergence.

The latest validation carries the state of the whole series (`Series`), in the Apply of every later step. So
the next committer continues the same series, and all members come to the same end.
"""

from math import isfinite
from typing import Annotated, Literal

import msgspec

from partition.plan.plan import Count, StepNumber
from partition.stage import METRICS_MAX

VALIDATIONS_MAX = 1_000_000
EVERY_MAX = 10_000_000


class ValidationSettings(msgspec.Struct, frozen=True, array_like=True):
    """The settings of validation. The validation samples are evaluated after every `every` steps, and after
    the last step.

    `watched` selects the value by which states are compared: 0 is the loss, n is the n-th metric, divided by
    the number of samples. Less is better, unless `more_is_better`. The run ends after `patience` successive
    validations that did not improve the best value by at least `improvement`; if `patience` is 0, it ends
    only after its last step. `keep`: the result is the last state, or the state with the best validation.
    """

    every: Annotated[int, msgspec.Meta(ge=1, le=EVERY_MAX)]
    patience: Annotated[int, msgspec.Meta(ge=0, le=VALIDATIONS_MAX)] = 0
    improvement: float = 0.0
    watched: Annotated[int, msgspec.Meta(ge=0, le=METRICS_MAX)] = 0
    more_is_better: bool = False
    keep: Literal["last", "best"] = "last"

    def __post_init__(self) -> None:
        if not (isfinite(self.improvement) and self.improvement >= 0):
            raise ValueError("an improvement must be finite and not negative")

    def value(self, samples: int, loss: float, metrics: tuple[float, ...]) -> float:
        """Return the value by which a validation is compared, from its sums."""
        total = metrics[self.watched - 1] if self.watched else loss
        return total / max(1, samples)


class Series(msgspec.Struct, frozen=True, array_like=True):
    """The series up to the validation after `step` steps. The best value, `best`, was reached after
    `best_step` steps, and `since` validations followed it."""

    step: StepNumber
    best_step: StepNumber
    best: float
    since: Count = 0


def advance(settings: ValidationSettings, series: Series | None, step: int, value: float) -> Series:
    """Return the series with one more validation."""
    if series is None:
        return Series(step, step, value)
    gain = (value - series.best) * (1 if settings.more_is_better else -1)
    if gain > 0 and gain >= settings.improvement:
        return Series(step, step, value)
    return Series(step, series.best_step, series.best, series.since + 1)


class ValidationSchedule:
    """One committer's schedule of validations, and what follows from them."""

    def __init__(self, settings: ValidationSettings | None, series: Series | None) -> None:
        self.settings = settings
        self.series = series

    def learn(self, series: Series | None) -> None:
        """Take over the series in an Apply, if it is newer."""
        if series is not None and (self.series is None or series.step > self.series.step):
            self.series = series

    def is_due(self, step: int, *, is_over: bool) -> bool:
        """Return whether the state after `step` steps must still be validated."""
        if self.settings is None or step == 0 or (self.series is not None and self.series.step >= step):
            return False
        return is_over or step % self.settings.every == 0

    def take(self, step: int, samples: int, loss: float, metrics: tuple[float, ...]) -> Series:
        """Add a validation. Return the series."""
        assert self.settings is not None
        value = self.settings.value(samples, loss, metrics)
        self.series = advance(self.settings, self.series, step, value)
        return self.series

    @property
    def has_converged(self) -> bool:
        """Whether the latest `patience` validations all failed to improve."""
        if self.settings is None or self.series is None:
            return False
        return 0 < self.settings.patience <= self.series.since

    @property
    def keeps_best(self) -> bool:
        """Whether the result is the state with the best validation."""
        return self.settings is not None and self.settings.keep == "best"

    def wanted_back(self, step: int) -> int | None:
        """Return the step whose state must be restored before the run ends at `step`; None if none must
        be."""
        if not self.keeps_best or self.series is None or self.series.best_step >= step:
            return None
        return self.series.best_step
