"""The clocks of peers, as their acks report them: the reference if this machine's own clock is wrong.

Each ack of a ping carries the wall clock of its sender. It is stored as its offset from this node's
*monotonic* clock, which corrections of the wall clock do not change. The time of a swarm is the lower median
of all known clocks, including this machine's. A clock counts once, and only while its peer is a live member,
so changing ids adds no clocks. The clocks of one host together count as PLACE_WEIGHT_MAX at most, so the
invented ids of one machine cannot outvote others.

A time outside of this release's possible years is discarded. A machine with such a clock is certainly wrong,
and uses its peers' alone. Of two machines it is unknown which one is wrong: the earlier time counts if they
differ by at most a day; otherwise each keeps its own.

Not here: the choice of acks (`gossip.answers`), and the consequences (`node.services.swarm_clock`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from crypto.identity import PeerId

PEERS_MIN = 3
"""Other members whose clocks are needed; in a smaller swarm all of them."""
QUORUM_MAX = 32
"""Half of the others, or this many, are needed before a correction: if a quarter of the members lie, one
random sample in a thousand of this size has a majority of liars."""
PEERS_KEPT_MAX = 512
"""Number of kept clocks, the latest ones; more do not improve the median."""
PLACE_WEIGHT_MAX = 4
"""The largest weight of all clocks of one host: a few nodes of one machine, or of a household."""
KEPT_SECONDS = 600.0
"""The lifetime of a reading: a clock that drifts by 100 in a million is off by 0.06 s after it."""
ROUND_TRIP_SECONDS_MAX = 10.0
"""The longest usable round trip: a clock is uncertain by half of it."""
RELEASED_SECONDS = 1_767_225_600.0
"""2026-01-01, in unix seconds: this release did not run before. Raise it with a release."""
PLAUSIBLE_SECONDS_MAX = RELEASED_SECONDS + 30 * 365.25 * 86_400.0
"""30 years on: no machine runs this release then, and a signature for that time would be valid forever."""
PAIR_SKEW_SECONDS_MAX = 86_400.0
"""How far a single other member may move this node's time: a wrong time zone or day, no more."""


def is_plausible(wall: float) -> bool:
    """Return whether a wall clock reading, in unix seconds, may be right."""
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
        `round_trip_seconds`. `place` is the host of the answer, None if unknown."""
        wall = wall_milliseconds / 1000
        if not 0 <= round_trip_seconds <= ROUND_TRIP_SECONDS_MAX or not is_plausible(wall):
            return
        ahead = wall - (now - round_trip_seconds / 2)
        self._heard[peer] = _Heard(ahead, now, peer if place is None else place)
        self._heard.move_to_end(peer)
        if len(self._heard) > PEERS_KEPT_MAX:
            self._heard.popitem(last=False)

    def forget(self) -> None:
        """Forget all clocks: this machine may have slept, which makes offsets meaningless."""
        self._heard.clear()

    def peers(self, now: float) -> list[float]:
        """Return the offsets of recently heard clocks of live peers."""
        return [heard.ahead for heard in self._known(now)]

    def swarm(self, now: float, own: float, others: int) -> float | None:
        """Return the swarm's offset with `others` other members; None while too few clocks are known. `own`
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
    """Return the smallest value at which half of the weight is reached."""
    ordered = sorted(weighted)
    half = sum(weight for _, weight in ordered) / 2
    passed = 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half - 1e-9:
            return value
    raise AssertionError("no values")
