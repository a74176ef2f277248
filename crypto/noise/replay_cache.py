"""A cache of the first flights that a node of a private swarm has accepted: a repeated one is an outsider's
replay.

Only holders of a key can add to it, so an outsider cannot push anything out. Its limits: a restart clears it,
a flight is forgotten after `KNOCKS_MAX` later ones, and each node knows only its own. In these cases an
attacker that captured a first flight can have it answered once more, and so learns that a member is there; it
cannot read the answer. A flight is not bound to its receiver: a member that has taken over another's address
must answer with its own identity instead of staying silent.
"""

from collections import OrderedDict

KNOCKS_MAX = 16_384
"""At about 150 bytes each; a member of a busy run opens some hundred streams an hour."""


class ReplayCache:
    def __init__(self, knocks_max: int = KNOCKS_MAX) -> None:
        self._knocks_max = knocks_max
        self._taken: OrderedDict[bytes, None] = OrderedDict()

    def take(self, tag: bytes) -> bool:
        """Return whether the flight with this tag is new, and remember it."""
        if tag in self._taken:
            return False
        self._taken[tag] = None
        if len(self._taken) > self._knocks_max:
            self._taken.popitem(last=False)
        return True
