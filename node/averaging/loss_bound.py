"""The bound on the loss of others' states, on a member's own data: pure."""

from math import inf, isfinite

LOST_SHARE = 0.5
"""A state may lose this share of the member's gain since its initial values: others train on other data, and
a member that trained alone for a while may overfit its own."""
SLACK_SHARE = 0.1
"""It may also be worse by this share of the initial loss, as early steps often are."""
APART_SHARE = 0.5
"""If every member has data of its own kind, a state may be worse than the initial values by this share."""


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
    """Return the same bound for others with another kind of data, where the own loss says little."""
    return first + APART_SHARE * abs(first) if isfinite(first) else inf


def is_within(found: float, limit: float) -> bool:
    """Return whether to accept a state with the loss `found`. One that is not finite is always refused."""
    return isfinite(found) and found <= limit
