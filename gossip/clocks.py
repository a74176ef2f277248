"""What time the clocks of peers show, as their acks say it: who is right where this machine's clock is not.

Each ack of a ping says the wall clock of its sender. What is kept of it is how far that clock is ahead of
this node's *monotonic* one, which no correction of this machine's wall clock changes. The time of a swarm is
the lower median of all clocks known, this machine's among them: the same at all members. A minority of liars
or of broken clocks moves it nowhere beyond the honest ones; of two machines alone the earlier one counts.

Not here: what follows from it (`node.services.swarm_clock`).
"""

from collections import OrderedDict
from statistics import median_low

from crypto.identity import PeerId

PEERS_MIN = 3
"""Others that have to say what time it is; in a smaller swarm all of them."""
PEERS_KEPT_MAX = 16
"""The peers asked last. More do not make a median better."""
KEPT_SECONDS = 600.0
"""A clock that is off by 100 in a million has gone wrong by 0.06 s since."""
ROUND_TRIP_SECONDS_MAX = 10.0
"""An answer that took longer tells too little: its clock is wrong by half of that at most."""


class PeerClocks:
    """`now` is monotonic seconds, `own` how far this machine's wall clock is ahead of that."""

    __slots__ = ("_heard",)

    def __init__(self) -> None:
        self._heard: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heard)

    def learn(self, now: float, peer: PeerId, wall_milliseconds: int, round_trip_seconds: float) -> None:
        """A ping was answered now, after so long, by a peer whose clock showed this when it did."""
        if not 0 <= round_trip_seconds <= ROUND_TRIP_SECONDS_MAX:
            return
        ahead = wall_milliseconds / 1000 - (now - round_trip_seconds / 2)
        self._heard[peer] = ahead, now
        self._heard.move_to_end(peer)
        if len(self._heard) > PEERS_KEPT_MAX:
            self._heard.popitem(last=False)

    def forget(self) -> None:
        """This machine has slept, perhaps: what is known means nothing any more."""
        self._heard.clear()

    def peers(self, now: float) -> list[float]:
        """Return how far the clocks of others are ahead, of each that was heard lately."""
        return [ahead for ahead, at in self._heard.values() if now - at <= KEPT_SECONDS]

    def swarm(self, now: float, own: float, others: int) -> float | None:
        """Return how far the time of a swarm with so many `others` is ahead; None while too few are heard."""
        known = self.peers(now)
        if not known or len(known) < min(PEERS_MIN, others):
            return None
        return median_low([*known, own])
