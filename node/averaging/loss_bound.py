"""How much worse than a member's own numbers a state of others may be, on that member's own data: pure."""

from math import inf, isfinite

LOST_SHARE = 0.5
"""A state may have lost so much of what this member has gained since its first values: others train on other
data, and one that has trained alone for a while may know its own by heart."""
SLACK_SHARE = 0.1
"""And it may be worse by so much of the loss of the first values, as early steps often are."""
APART_SHARE = 0.5
"""Where every member has data of its own kind, a state may be worse than the first values by so much."""


def loss_max(first: float, own: float) -> float:
    """Return the highest loss with which a state of others is taken over. `first` is the loss of the values
    that this member began with, `own` that of the present ones; not finite where they have none."""
    if not isfinite(own):
        own = first
    if not isfinite(own):
        return inf
    first = first if isfinite(first) else own
    return own + LOST_SHARE * max(0.0, first - own) + SLACK_SHARE * abs(first)


def apart_loss_max(first: float) -> float:
    """Return the same where the data of others is of another kind, so that the own loss says little."""
    return first + APART_SHARE * abs(first) if isfinite(first) else inf


def is_within(found: float, limit: float) -> bool:
    """Return whether a state with the loss `found` is taken. One that is not finite never is."""
    return isfinite(found) and found <= limit
