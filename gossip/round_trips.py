"""Round trips of slow members, used to lengthen their probes: mean and deviation as in RFC 6298.

Members whose usual answer fits the preset's timeout have no entry, so this costs nothing on a network that is
as fast as the preset expects. The probes of a member behind a slow link are stretched, up to the preset's
limit: there is more time before relays are asked, and more time before the member is suspected. A lost ping
measures nothing, because each ping has its own number.

A member that stalled also answers late, several pings together, although its distance has not changed. So a
single late answer has no effect until a second one at a different time, and an answer that took longer than
any path has no effect at all.
"""

from crypto.identity import PeerId
from gossip.settings import SwimSettings

FIRST_DEVIATION = 0.25
"""The deviation assumed for a first measurement, as a share of it. With DEVIATIONS of them, the estimate is
twice the measurement."""
DEVIATIONS = 4.0
"""Number of deviations added to the mean: the 99th percentile of most paths (RFC 6298)."""
STALL_TIMES = 2.0
"""An answer that took this many times the longest timeout shows that the member stalled."""


class RoundTrips:
    """Smoothed round trips of the slow members, in seconds."""

    __slots__ = ("_late", "_settings", "_slow")

    def __init__(self, settings: SwimSettings) -> None:
        self._settings = settings
        self._slow: dict[PeerId, tuple[float, float]] = {}
        # The time of a late answer of a member that does not count as slow.
        self._late: dict[PeerId, float] = {}

    def __len__(self) -> int:
        return len(self._slow) + len(self._late)

    def learn(self, now: float, peer: PeerId, seconds: float) -> None:
        """Record that the target of a ping answered after `seconds`."""
        if seconds > STALL_TIMES * self._settings.probe_timeout_max_seconds:
            return
        known = self._slow.get(peer)
        if known is None:
            mean, deviation = seconds, FIRST_DEVIATION * seconds
            if mean + DEVIATIONS * deviation <= self._settings.probe_timeout_seconds:
                self._late.pop(peer, None)
                return
            if now - self._late.setdefault(peer, now) < self._settings.probe_interval_seconds:
                return
            del self._late[peer]
        else:
            mean, deviation = known
            deviation += (abs(seconds - mean) - deviation) / 4
            mean += (seconds - mean) / 8
        if mean + DEVIATIONS * deviation > self._settings.probe_timeout_seconds:
            self._slow[peer] = mean, deviation
        elif known is not None:
            del self._slow[peer]

    def stretch(self, peer: PeerId) -> float:
        """Return the factor by which to lengthen this member's probes relative to the preset; at least 1."""
        known = self._slow.get(peer)
        if known is None:
            return 1.0
        usual, longest = self._settings.probe_timeout_seconds, self._settings.probe_timeout_max_seconds
        return min(max(known[0] + DEVIATIONS * known[1], usual), longest) / usual

    def forget(self, peer: PeerId) -> None:
        """Forget a member that is dead, or no longer listed."""
        self._slow.pop(peer, None)
        self._late.pop(peer, None)
