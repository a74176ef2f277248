"""Recent reliability of other members, as this node saw it: how often they died, not how often they left
properly."""

from collections import OrderedDict, deque

from crypto.identity import PeerId

DAY_SECONDS = 86_400.0
"""How long a loss counts."""
PEERS_MAX = 1_024
"""Maximum number of peers that are remembered, as many as a roster holds. The one lost longest ago is
forgotten first."""
LOSSES_MAX = 8
"""Maximum number of losses of one peer that are kept. Further losses change nothing."""
AVAILABLE = 0.9
"""Probability that a member without a loss survives when another member of its stage dies. It is assumed, not
measured."""


class RunLosses:
    """One node's record of losses in all its runs, since it started."""

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
    """Return the probability that a member is available when needed. Each loss within the last day halves
    it."""
    return AVAILABLE * 0.5 ** min(losses, LOSSES_MAX)
