"""Events about the results of runs that have ended."""

from crypto.identity import PeerId
from node.events import Event

RESULTS_SHOWN_MAX = 8
"""Maximum number of members with a different result that are shown for one run."""


class ResultDiffers(Event, frozen=True, kw_only=True):
    """A local-mode run has ended on this node, and `peer`, which was in it, reports a different result.
    `weights` is that result (hex), empty if the run failed there. Either the two lost contact, or one of them
    lies."""

    run: str
    peer: PeerId
    weights: str


class RunRemembered(Event, frozen=True, kw_only=True):
    """A run that ended before this node was last started, read from its disk. `ended_at` is when the run
    ended (Unix seconds); `others` has the different results that other members reported (`ResultDiffers`)."""

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
    """The result of another peer's run was deleted from this disk to make room for other data."""

    run: str
