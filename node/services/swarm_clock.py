"""The wall clock by which a node signs and checks what other machines compare: its own, unless that is wrong.

A machine whose clock stands hours off would sign records that are over for everybody else, and take theirs
for such. So its clock is compared with those of its peers (`gossip.clocks`), and where it is further from the
time of the swarm than SKEW_SECONDS, the swarm's is used. What a person of this machine sees, its log and the
times of its events go by its own clock.

After a jump of the wall clock against the monotonic one, which a person makes, or NTP, or a suspended laptop,
the peers are heard anew before anything is corrected.
"""

from collections.abc import Callable
from statistics import median_low

import trio

from gossip.clocks import PeerClocks
from node.events import ClockCompared
from node.seams import Clock
from node.text import seconds_text

COMPARE_SECONDS = 1.0
"""How often the clock is compared: a record that is stored later than this after a jump is signed rightly."""
SKEW_SECONDS = 60.0
"""Below it the machine's own clock is used: records may be ten minutes off, a round trip blurs a second."""
STEP_SECONDS = 2.0
"""A jump of the wall clock. NTP slews what is less than an eighth of a second."""
TOLD_SECONDS = 60.0
"""Another skew than was told is news if it differs by so much."""


def skew_text(clock: Clock, swarm_clock: Clock) -> str:
    """Return what an error adds where this machine's clock is known to be wrong; empty where it is not."""
    ahead = clock.wall() - swarm_clock.wall()
    if abs(ahead) <= SKEW_SECONDS:
        return ""
    way = "ahead of" if ahead > 0 else "behind"
    return f"this machine's clock is {seconds_text(round(abs(ahead)))} {way} its peers'"


class SwarmClock:
    """A `Clock` over this machine's. `clocks` and `others` say what peers show, and how many live."""

    def __init__(
        self,
        clock: Clock,
        clocks: Callable[[], PeerClocks | None] = lambda: None,
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        self._clock = clock
        self._clocks = clocks
        self._others = others
        # Not before the first look: a node may be made outside of the event loop that its clock belongs to.
        self._own: float | None = None
        self._swarm: float | None = None
        self._told: tuple[float, int] | None = None

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def wall(self) -> float:
        """The time of the swarm where it is known to be another than this machine's."""
        return self._clock.wall() if self._swarm is None else self._clock.monotonic() + self._swarm

    @property
    def own_offset(self) -> float:
        """How far the wall clock of this machine is ahead of its monotonic one."""
        return self._clock.wall() - self._clock.monotonic()

    async def watch(self, follow: Callable[[], None], publish: Callable[[ClockCompared], None]) -> None:
        """Compare with the peers' clocks until cancelled; `follow` is called each time."""
        while True:
            await trio.sleep(COMPARE_SECONDS)
            found = self.look()
            follow()
            if found is not None:
                publish(found)

    def look(self) -> ClockCompared | None:
        """Compare with the peers; the event, where it comes to something else than was told."""
        now, own, clocks = self._clock.monotonic(), self.own_offset, self._clocks()
        jumped = self._own is not None and abs(own - self._own) > STEP_SECONDS
        self._own = own
        if clocks is None:
            return None
        if jumped:
            clocks.forget()
        swarm = clocks.swarm(now, own, self._others())
        self._swarm = swarm if swarm is not None and abs(own - swarm) > SKEW_SECONDS else None
        if swarm is None:
            return None
        peers = clocks.peers(now)
        skew = own - swarm
        if len(peers) == 1:
            skew = own - median_low(peers)  # one of the two is wrong: both are told
        if abs(skew) <= SKEW_SECONDS:
            skew = 0.0
        told = 0.0 if self._told is None else self._told[0]
        if abs(skew - told) <= TOLD_SECONDS and bool(skew) == bool(told):
            return None
        self._told = skew, len(peers)
        return ClockCompared(at=self._clock.wall(), seconds=skew, peers=len(peers))
