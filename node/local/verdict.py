"""The verdict of a member on a result that another proposes, from its own measurements.

Every member that trains evaluates the result on the held-out samples, beside its own model and the first
values that all began with. It needs nobody's word for that. What a liar can still do is end a run early with
a result that is as good as the others' own models are at that time.
"""

from dataclasses import dataclass
from math import inf, isfinite

from node.averaging.loss_bound import apart_loss_max, is_within

GAIN_SHARE = 0.5
"""The share that a result must have of what this member's own model has gained over the first values: members
that trained apart for a while differ by a fifth and more where the loss falls fast."""
SERIES_SHARE = 0.1
"""The share of what a series has gained: it has stopped improving where nobody is better by more than
that."""
NOISE_SHARE = 0.01
"""The share of the first loss that means nothing."""


@dataclass(frozen=True)
class HeldOutLosses:
    """Held-out losses as this member measured them: of the `first` values, its `own` model, the `result`."""

    first: float
    own: float
    result: float


def fault_of(
    losses: HeldOutLosses, best: float, improvement: float, *, is_at_end: bool, is_own: bool = False
) -> str:
    """Return why a result is refused, empty where it is not.

    `best` is the lowest loss of the series as it was told, inf for none. Unless the steps are done
    (`is_at_end`), a result says that the series has stopped improving, so this member's own model must not be
    better than the best by more than `improvement`, or a tenth of what was gained.

    Where every member judges by samples of its `own`, another's losses say nothing about it, and a model of
    all is not as good here as the own one may be: only what is no state to go on from is refused.
    """
    if not isfinite(losses.result):
        return "its held-out loss is no number"
    if is_own:
        if is_usable(losses.first, losses.result):
            return ""
        return f"its held-out loss is {losses.result:.4g} here, and {losses.first:.4g} of the first values"
    gained = losses.first - losses.own
    tolerance = (1 - GAIN_SHARE) * abs(gained) + NOISE_SHARE * abs(losses.first)
    if losses.result > losses.own + tolerance:
        return f"its held-out loss is {losses.result:.4g} here, and {losses.own:.4g} of the own model"
    noise = SERIES_SHARE * abs(losses.first - best) + NOISE_SHARE * abs(losses.first)
    if not is_at_end and best < inf and losses.own < best - max(improvement, noise):
        return f"the run still improves: {losses.own:.4g} here, and {best:.4g} by the evaluations told"
    return ""


def is_usable(first: float, found: float) -> bool:
    """Return whether numbers whose held-out loss is `found` are some to go on from."""
    return is_within(found, apart_loss_max(first))
