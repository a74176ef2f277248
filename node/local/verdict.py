"""The verdict of a member on a result that another proposes, from its own measurements.

Every training member evaluates the result on the held-out samples, beside its own model and the common
initial values. It relies on no other member's claims. A liar can still end a run early, with a result as good
as the others' own models at that time.
"""

from dataclasses import dataclass
from math import inf, isfinite

from node.averaging.loss_bound import apart_loss_max, is_within

GAIN_SHARE = 0.5
"""The share of this member's own gain over the initial values that a result must reach: members that trained
apart for a while differ by a fifth and more while the loss falls fast."""
SERIES_SHARE = 0.1
"""The share of a series' gain: it has stopped improving if no member is better by more than that."""
NOISE_SHARE = 0.01
"""The share of the first loss that is noise."""


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

    `best` is the lowest reported loss of the series, inf for none. Unless the steps are done (`is_at_end`), a
    result claims that the series has stopped improving, so this member's own model must not be better than
    the best by more than `improvement`, or a tenth of the gain.

    If every member judges by samples of its `own`, others' losses say nothing about it, and the common model
    may be worse here than the own one. Then only an unusable state is refused.
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
    """Return whether parameters with the held-out loss `found` are usable."""
    return is_within(found, apart_loss_max(first))
