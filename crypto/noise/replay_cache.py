"""A cache of the first flights that a node of a private swarm has accepted: a repeated flight is an
outsider's replay.

Only holders of a key can add entries, so an outsider cannot push any out. The cache has three limits: a
restart clears it, a flight is forgotten after `KNOCKS_MAX` later ones, and each node has only its own cache.
In these cases an attacker that captured a first flight can get it answered once more. It learns that a member
is there, but it cannot read the answer. A flight is also not bound to its receiver: a member that has taken
over another member's address must answer with its own identity instead of staying silent.
"""

from collections import OrderedDict

KNOCKS_MAX = 16_384
"""Maximum number of cached flights, about 150 bytes each. A member of a busy run opens a few hundred streams
an hour."""


class ReplayCache:
    def __init__(self, knocks_max: int = KNOCKS_MAX) -> None:
        self._knocks_max = knocks_max
        self._taken: OrderedDict[bytes, None] = OrderedDict()

    def take(self, tag: bytes) -> bool:
        """Return whether the flight with this tag is new, and remember the tag."""
        if tag in self._taken:
            return False
        self._taken[tag] = None
        if len(self._taken) > self._knocks_max:
            self._taken.popitem(last=False)
        return True
