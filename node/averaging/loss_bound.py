"""Limits on the loss that other members' states may have on this member's own data. Pure."""

from math import inf, isfinite

LOST_SHARE = 0.5
"""A state may lose this share of what the member has gained since its initial values. The others train on
different data, and a member that trained alone for a while may overfit its own."""
SLACK_SHARE = 0.1
"""In addition, a state may be worse by this share of the initial loss, as states after early steps often
are."""
APART_SHARE = 0.5
"""If every member has its own kind of data, a state may be worse than the initial values by this share."""


def loss_max(first: float, own: float) -> float:
    """Return the highest loss with which a state of others is accepted. `first` is the loss of the values
    with which this member began, `own` that of the present ones; either is not finite if unknown."""
    if not isfinite(own):
        own = first
    if not isfinite(own):
        return inf
    first = first if isfinite(first) else own
    return own + LOST_SHARE * max(0.0, first - own) + SLACK_SHARE * abs(first)


def apart_loss_max(first: float) -> float:
    """Return the same limit if the others have a different kind of data, so that the member's own loss says
    little."""
    return first + APART_SHARE * abs(first) if isfinite(first) else inf


def is_within(found: float, limit: float) -> bool:
    """Return whether to accept a state with the loss `found`. A state whose loss is not finite is always
    refused."""
    return isfinite(found) and found <= limit
