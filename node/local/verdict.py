"""A member's verdict on a result that another member proposes, based on its own measurements.

Every training member evaluates the result on the held-out samples, and compares it with its own model and the
common initial values. It relies on no other member's claims. A liar can still end a run early, but only with
a result as good as the other members' own models at that time.
"""

from dataclasses import dataclass
from math import inf, isfinite

from node.averaging.loss_bound import apart_loss_max, is_within

GAIN_SHARE = 0.5
"""The share of this member's own gain over the initial values that a result must reach. Members that trained
separately for a while differ by a fifth and more while the loss falls fast."""
SERIES_SHARE = 0.1
"""The share of a series' gain below which an improvement does not count: the series has ended if no member is
better by more than that."""
NOISE_SHARE = 0.01
"""The share of the initial loss that counts as noise."""


@dataclass(frozen=True)
class HeldOutLosses:
    """Held-out losses as this member measured them: with the `first` (initial) values, with its `own` model,
    and with the `result`."""

    first: float
    own: float
    result: float


def fault_of(
    losses: HeldOutLosses, best: float, improvement: float, *, is_at_end: bool, is_own: bool = False
) -> str:
    """Return why a result is refused; empty if it is not.

    `best` is the lowest reported loss of the series, inf for none. Unless the run has made all its steps
    (`is_at_end`), a result claims that the series has stopped improving. In that case this member's own model
    must not be better than the best by more than `improvement`, or a tenth of the gain.

    If every member judges by samples of its `own`, other members' losses say nothing about it, and the common
    model may be worse here than the member's own. In that case only an unusable state is refused.
    """
    if not isfinite(losses.result):
        return "its held-out loss is not a number"
    if is_own:
        if is_usable(losses.first, losses.result):
            return ""
        return (
            f"its held-out loss is {losses.result:.4g} here, but {losses.first:.4g} with the initial values"
        )
    gained = losses.first - losses.own
    tolerance = (1 - GAIN_SHARE) * abs(gained) + NOISE_SHARE * abs(losses.first)
    if losses.result > losses.own + tolerance:
        return (
            f"its held-out loss is {losses.result:.4g} here, but {losses.own:.4g} with "
            "this member's own model"
        )
    noise = SERIES_SHARE * abs(losses.first - best) + NOISE_SHARE * abs(losses.first)
    if not is_at_end and best < inf and losses.own < best - max(improvement, noise):
        return (
            f"the run still improves: {losses.own:.4g} here, but {best:.4g} according "
            "to the reported evaluations"
        )
    return ""


def is_usable(first: float, found: float) -> bool:
    """Return whether parameters with the held-out loss `found` are usable."""
    return is_within(found, apart_loss_max(first))
