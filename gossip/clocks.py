"""The clocks of peers, as their acks report them: the reference where this machine's own clock is wrong.

Each ack of a ping says the wall clock of its sender. It is kept as its offset from this node's *monotonic*
clock, which no correction of this machine's wall clock changes. The time of a swarm is the lower median of
all clocks known, this machine's among them. A clock counts once, and only while its peer is a live member:
changing ids in turn adds no clocks. The clocks of one host together count as PLACE_WEIGHT_MAX at most, so the
ids that one machine makes up outvote no other ones.

A time outside of the years in which this release can run is discarded. A machine that shows such a time
itself is wrong for certain, and goes by its peers alone. Two machines cannot tell which of them is wrong: the
earlier time counts where they differ by a day at most, and each keeps its own where it is more.

Not here: which acks are taken (`gossip.answers`), and what follows (`node.services.swarm_clock`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from crypto.identity import PeerId

PEERS_MIN = 3
"""Other members whose clocks must be heard; in a smaller swarm all of them."""
QUORUM_MAX = 32
"""Half of the others, or this many, are heard before anything is corrected: of a random sample of this size
one in a thousand has a majority of liars where a quarter of the members lie."""
PEERS_KEPT_MAX = 512
"""The most recently heard clocks that are kept; more do not make a median better."""
PLACE_WEIGHT_MAX = 4
"""The most that the clocks of one host together count: a few nodes of one machine, or of a household."""
KEPT_SECONDS = 600.0
"""A clock that is off by 100 in a million has gone wrong by 0.06 s since."""
ROUND_TRIP_SECONDS_MAX = 10.0
"""An answer that took longer tells too little: its clock is wrong by half of that at most."""
RELEASED_SECONDS = 1_767_225_600.0
"""2026-01-01, in unix seconds: before it nothing of this release ran. Raise it with a release."""
PLAUSIBLE_SECONDS_MAX = RELEASED_SECONDS + 30 * 365.25 * 86_400.0
"""30 years on. No machine runs this release then, and a signature for that time would be valid for ever."""
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
    """The clocks of peers, in monotonic seconds. A clock counts while its peer `is_live`."""

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
        """Record an ack: the peer's clock showed `wall_milliseconds` during a round trip of
        `round_trip_seconds`. `place`: the host that the answer came from; None where that is not known."""
        wall = wall_milliseconds / 1000
        if not 0 <= round_trip_seconds <= ROUND_TRIP_SECONDS_MAX or not is_plausible(wall):
            return
        ahead = wall - (now - round_trip_seconds / 2)
        self._heard[peer] = _Heard(ahead, now, peer if place is None else place)
        self._heard.move_to_end(peer)
        if len(self._heard) > PEERS_KEPT_MAX:
            self._heard.popitem(last=False)

    def forget(self) -> None:
        """Forget all clocks: this machine may have slept, and offsets mean nothing any more."""
        self._heard.clear()

    def peers(self, now: float) -> list[float]:
        """Return the offsets of the clocks of live peers heard lately."""
        return [heard.ahead for heard in self._known(now)]

    def swarm(self, now: float, own: float, others: int) -> float | None:
        """Return the swarm's offset with `others` other members; None while too few clocks are heard. `own`
        is this machine's own."""
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
    """Return the least value at which half of the weight is reached."""
    ordered = sorted(weighted)
    half = sum(weight for _, weight in ordered) / 2
    passed = 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half - 1e-9:
            return value
    raise AssertionError("no values")
