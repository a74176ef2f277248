"""Events of the results of runs that are over."""

from crypto.identity import PeerId
from node.events import Event

RESULTS_SHOWN_MAX = 8
"""Members with another result that are shown for one run."""


class ResultDiffers(Event, frozen=True, kw_only=True):
    """A run in local mode is over here, and `peer`, which was in it, says that it ended otherwise: with the
    result `weights` (hex), empty where it failed. They lost sight of each other, or one of them lies."""

    run: str
    peer: PeerId
    weights: str


class RunRemembered(Event, frozen=True, kw_only=True):
    """A run that ended in an earlier life of this node, as its disk tells; `ended_at` is when (unix
    seconds), `others` what other members said of it (`ResultDiffers`)."""

    run: str
    model: str
    data: str
    requester: PeerId
    steps: int
    step: int
    loss: float | None
    accuracy: float | None
    outcome: str
    detail: str
    weights: str
    is_here: bool
    ended_at: float
    others: tuple[tuple[PeerId, str], ...] = ()


class ResultEvicted(Event, frozen=True, kw_only=True):
    """The result of another's run had to make room for others on this disk."""

    run: str
