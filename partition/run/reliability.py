"""Recent reliability of other members as this node saw it: deaths, not goodbyes."""

from collections import OrderedDict, deque

from crypto.identity import PeerId

DAY_SECONDS = 86_400.0
"""How long a loss counts."""
PEERS_MAX = 1_024
"""Peers that are remembered, as many as a roster has; the one lost longest ago makes room."""
LOSSES_MAX = 8
"""Losses of one peer that are kept; more change nothing."""
AVAILABLE = 0.9
"""The chance that a member without a loss survives another's death in its stage: assumed, not measured."""


class RunLosses:
    """One node's record of all its runs, since it started."""

    def __init__(self) -> None:
        self._lost: OrderedDict[PeerId, deque[float]] = OrderedDict()

    def note(self, now: float, peer: PeerId) -> None:
        """Note that this peer was found dead."""
        times = self._lost.pop(peer, None) or deque(maxlen=LOSSES_MAX)
        times.append(now)
        self._lost[peer] = times
        if len(self._lost) > PEERS_MAX:
            self._lost.popitem(last=False)

    def count(self, now: float, peer: PeerId) -> int:
        """Return how often the peer was lost within the last day."""
        return sum(now - time < DAY_SECONDS for time in self._lost.get(peer, ()))


def availability(losses: int) -> float:
    """Return the chance that a member is there when needed; each loss of the last day halves it."""
    return AVAILABLE * 0.5 ** min(losses, LOSSES_MAX)
