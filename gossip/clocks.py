"""The clocks of peers, as reported in their acks: the reference if this machine's own clock is wrong.

Each ack of a ping carries the wall clock of its sender. It is stored as its offset from this node's
*monotonic* clock, which corrections of the wall clock do not change. The time of a swarm is the lower median
of all known clocks, including this machine's. A peer's clock counts once, and only while the peer is a live
member, so changing ids adds no clocks. The clocks of one host together count as at most PLACE_WEIGHT_MAX, so
the invented ids of one machine cannot outvote others.

A time outside the plausible years of this release is discarded. If this machine's own clock shows such a
time, it is certainly wrong, so only the peers' clocks count. If there are only two machines, it is unknown
which one is wrong: the earlier time counts if they differ by at most a day; otherwise each keeps its own.

Not here: the choice of acks (`gossip.answers`), and the consequences (`node.services.swarm_clock`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from crypto.identity import PeerId

PEERS_MIN = 3
"""Number of other members whose clocks are needed; in a smaller swarm, all members are needed."""
QUORUM_MAX = 32
"""A correction requires the clocks of half of the other members, or of this many. If a quarter of the members
lie, one random sample of this size in a thousand has a majority of liars."""
PEERS_KEPT_MAX = 512
"""Maximum number of clocks kept, the most recent ones; more would not improve the median."""
PLACE_WEIGHT_MAX = 4
"""Maximum total weight of the clocks of one host: that of a few nodes on one machine, or in a household."""
KEPT_SECONDS = 600.0
"""How long a reading is kept. After this time, a clock that drifts by 100 ppm is off by 0.06 s."""
ROUND_TRIP_SECONDS_MAX = 10.0
"""Maximum usable round trip: the uncertainty of a clock is half of it."""
RELEASED_SECONDS = 1_767_225_600.0
"""2026-01-01, in Unix seconds: this release did not exist before. Raise it with each release."""
PLAUSIBLE_SECONDS_MAX = RELEASED_SECONDS + 30 * 365.25 * 86_400.0
"""30 years later: no machine will run this release then, and a signature for that time would in effect never
expire."""
PAIR_SKEW_SECONDS_MAX = 86_400.0
"""How far a single other member may shift this node's time: enough for a wrong time zone or a wrong day."""


def is_plausible(wall: float) -> bool:
    """Return whether a wall clock reading, in Unix seconds, is plausible."""
    return RELEASED_SECONDS <= wall <= PLAUSIBLE_SECONDS_MAX


class _Heard(NamedTuple):
    ahead: float
    at: float
    place: Hashable


class PeerClocks:
    """The clocks of peers, relative to monotonic time. A clock counts as long as its peer `is_live`."""

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
        `round_trip_seconds`. `place` is the host that answered; None if unknown."""
        wall = wall_milliseconds / 1000
        if not 0 <= round_trip_seconds <= ROUND_TRIP_SECONDS_MAX or not is_plausible(wall):
            return
        ahead = wall - (now - round_trip_seconds / 2)
        self._heard[peer] = _Heard(ahead, now, peer if place is None else place)
        self._heard.move_to_end(peer)
        if len(self._heard) > PEERS_KEPT_MAX:
            self._heard.popitem(last=False)

    def forget(self) -> None:
        """Forget all clocks, because this machine may have slept, which makes the offsets meaningless."""
        self._heard.clear()

    def peers(self, now: float) -> list[float]:
        """Return the offsets of recently received clocks of live peers."""
        return [heard.ahead for heard in self._known(now)]

    def swarm(self, now: float, own: float, others: int) -> float | None:
        """Return the swarm's offset if there are `others` other members; None while too few clocks are known.
        `own` is this machine's offset."""
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
