"""The wall clock for signing and checking data that other machines compare: the node's own clock, unless that
is wrong.

If a machine's clock is hours off, its records would be expired for all others, and theirs for it. So its
clock is compared with its peers' (`gossip.clocks`). If it is further from the swarm's time than SKEW_SECONDS,
the swarm's time is used. Screens, log and events of this machine use its own clock. After a jump of the wall
clock relative to the monotonic one (caused by a user, NTP, or a suspended laptop), the peers' clocks are
collected again before anything is corrected.
"""

from collections.abc import Callable
from statistics import median_low

import trio

from gossip.clocks import PeerClocks
from node.events import ClockCompared
from node.seams import Clock
from node.text import seconds_text

COMPARE_SECONDS = 1.0
"""Seconds between comparisons of the clock. A record that is stored later than this after a jump has the
right time."""
SKEW_SECONDS = 60.0
"""Least skew that is corrected. Records may be ten minutes off, and a round trip makes a second uncertain."""
STEP_SECONDS = 2.0
"""Least change of the wall clock that counts as a jump. NTP slews anything below an eighth of a second."""
TOLD_SECONDS = 60.0
"""A skew is reported again if it differs by this much from the reported one."""


def skew_text(clock: Clock, swarm_clock: Clock) -> str:
    """Return a note for errors if this machine's clock is known to be wrong; else empty."""
    ahead = clock.wall() - swarm_clock.wall()
    if abs(ahead) <= SKEW_SECONDS:
        return ""
    way = "ahead of" if ahead > 0 else "behind"
    return f"this machine's clock is {seconds_text(round(abs(ahead)))} {way} its peers'"


class SwarmClock:
    """A `Clock` based on this machine's clock. `clocks` returns the peers' clocks, and `others` the number of
    live peers."""

    def __init__(
        self,
        clock: Clock,
        clocks: Callable[[], PeerClocks | None] = lambda: None,
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        self._clock = clock
        self._clocks = clocks
        self._others = others
        # Unset until the first `look`, because a node may be made outside of its clock's event loop.
        self._own: float | None = None
        self._swarm: float | None = None
        self._told: tuple[float, int] | None = None

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def wall(self) -> float:
        """Return the swarm's time if it is known to differ from this machine's, else this machine's."""
        return self._clock.wall() if self._swarm is None else self._clock.monotonic() + self._swarm

    @property
    def own_offset(self) -> float:
        """How far this machine's wall clock is ahead of its monotonic one."""
        return self._clock.wall() - self._clock.monotonic()

    async def watch(self, follow: Callable[[], None], publish: Callable[[ClockCompared], None]) -> None:
        """Compare with the peers' clocks until cancelled. `follow` is called each time."""
        while True:
            await trio.sleep(COMPARE_SECONDS)
            found = self.look()
            follow()
            if found is not None:
                publish(found)

    def look(self) -> ClockCompared | None:
        """Compare with the peers; return the event if the result differs from the reported one."""
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
            skew = own - median_low(peers)  # one of two clocks is wrong, so both nodes report it
        if abs(skew) <= SKEW_SECONDS:
            skew = 0.0
        told = 0.0 if self._told is None else self._told[0]
        if abs(skew - told) <= TOLD_SECONDS and bool(skew) == bool(told):
            return None
        self._told = skew, len(peers)
        return ClockCompared(at=self._clock.wall(), seconds=skew, peers=len(peers))
