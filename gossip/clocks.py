"""What time the clocks of peers show, as their acks say it: who is right where this machine's clock is not.

Each ack of a ping says the wall clock of its sender. What is kept of it is how far that clock is ahead of
this node's *monotonic* one, which no correction of this machine's wall clock changes. The time of a swarm is
the lower median of all clocks known, this machine's among them. A clock counts while its peer is a live
member, and once: those who change their ids in turn are no more than they are at one time. The clocks of one
host together count as PLACE_WEIGHT_MAX at most, so the ids that one machine makes up outvote no other ones.

A time outside of the years in which this release can run is none. A machine that shows such a time itself is
wrong for certain, and goes by its peers alone. Two machines cannot tell which of them is wrong: the earlier
time counts where they differ by a day at most, and each keeps its own where it is more.

Not here: which acks are taken (`gossip.answers`), and what follows (`node.services.swarm_clock`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from crypto.identity import PeerId

PEERS_MIN = 3
"""Others that have to say what time it is; in a smaller swarm all of them."""
QUORUM_MAX = 32
"""Half of the others are heard before anything is corrected, or so many: of a random sample of this size one
in a thousand has a majority of liars where a quarter of the members lie."""
PEERS_KEPT_MAX = 512
"""The clocks heard last, the longest unheard go first. More do not make a median better."""
PLACE_WEIGHT_MAX = 4
"""What the clocks of one host count together: a few nodes of one machine, or of a household."""
KEPT_SECONDS = 600.0
"""A clock that is off by 100 in a million has gone wrong by 0.06 s since."""
ROUND_TRIP_SECONDS_MAX = 10.0
"""An answer that took longer tells too little: its clock is wrong by half of that at most."""
RELEASED_SECONDS = 1_767_225_600.0
"""2026-01-01, in unix seconds: before it nothing of this release ran. Raise it with a release."""
PLAUSIBLE_SECONDS_MAX = RELEASED_SECONDS + 30 * 365.25 * 86_400.0
"""30 years on. No machine runs this release then, and whatever is signed for that time would be for ever."""
PAIR_SKEW_SECONDS_MAX = 86_400.0
"""How far one other member alone may move this node's time: a wrong time zone or day, no more."""


def is_plausible(wall: float) -> bool:
    """Return whether a clock that shows this, in unix seconds, may be right."""
    return RELEASED_SECONDS <= wall <= PLAUSIBLE_SECONDS_MAX


class _Heard(NamedTuple):
    ahead: float
    at: float
    place: Hashable


class PeerClocks:
    """`now` is monotonic seconds, `own` how far this machine's wall clock is ahead of that. The clock of a
    peer counts while it `is_live`."""

    __slots__ = ("_heard", "_is_live")

    def __init__(self, is_live: Callable[[PeerId], bool] = lambda _peer: True) -> None:
        self._is_live = is_live
        self._heard: OrderedDict[PeerId, _Heard] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heard)

    def learn(
        self,
        now: float,
        peer: PeerId,
        wall_milliseconds: int,
        round_trip_seconds: float,
        place: Hashable = None,
    ) -> None:
        """A ping was answered now, after so long, by a peer whose clock showed this when it did. `place`: the
        host that the answer came from; None where that is not known."""
        wall = wall_milliseconds / 1000
        if not 0 <= round_trip_seconds <= ROUND_TRIP_SECONDS_MAX or not is_plausible(wall):
            return
        ahead = wall - (now - round_trip_seconds / 2)
        self._heard[peer] = _Heard(ahead, now, peer if place is None else place)
        self._heard.move_to_end(peer)
        if len(self._heard) > PEERS_KEPT_MAX:
            self._heard.popitem(last=False)

    def forget(self) -> None:
        """This machine has slept, perhaps: what is known means nothing any more."""
        self._heard.clear()

    def peers(self, now: float) -> list[float]:
        """Return how far the clocks of live others are ahead, of each that was heard lately."""
        return [heard.ahead for heard in self._known(now)]

    def swarm(self, now: float, own: float, others: int) -> float | None:
        """Return how far the time of a swarm with so many `others` is ahead; None while too few are heard."""
        known = self._known(now)
        is_own_plausible = is_plausible(now + own)
        quorum = max(PEERS_MIN, min((others + 1) // 2, QUORUM_MAX)) if is_own_plausible else PEERS_MIN
        if not known or len(known) < min(quorum, others):
            return None
        crowds = Counter(heard.place for heard in known)
        clocks = [(each.ahead, min(1.0, PLACE_WEIGHT_MAX / crowds[each.place])) for each in known]
        if not is_own_plausible:
            return _median_low(clocks)
        if len(known) == 1 and abs(known[0].ahead - own) > PAIR_SKEW_SECONDS_MAX:
            return own
        return _median_low([*clocks, (own, 1.0)])

    def _known(self, now: float) -> list[_Heard]:
        found = self._heard.items()
        return [heard for peer, heard in found if now - heard.at <= KEPT_SECONDS and self._is_live(peer)]


def _median_low(weighted: Sequence[tuple[float, float]]) -> float:
    """Return the least value up to which lies half of the weight."""
    ordered = sorted(weighted)
    half = sum(weight for _, weight in ordered) / 2
    passed = 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half - 1e-9:
            return value
    raise AssertionError("no values")
