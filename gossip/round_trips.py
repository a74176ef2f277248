"""Round trips of slow members, which lengthen their probes: RFC 6298's mean and deviation.

Members whose usual answer fits the preset's timeout have no entry, so this costs nothing on a network as fast
as its preset expects. A member behind a slow link has its probes stretched, up to the preset's bound: its
ping has more time before relays are asked, and these before it is suspected. A lost ping measures nothing,
since each copy of a ping has a number of its own.

A member that stalled also answers late, several pings at once, and is as near as before. So one late answer
has no effect before a second one at another time, and an answer that took longer than any path has none at
all.
"""

from crypto.identity import PeerId
from gossip.settings import SwimSettings

FIRST_DEVIATION = 0.25
"""The deviation of a first measurement, as a share of it: with DEVIATIONS of them, twice the measurement."""
DEVIATIONS = 4.0
"""Deviations above the mean: the 99th percentile of most paths (RFC 6298)."""
STALL_TIMES = 2.0
"""An answer that took this many times the longest timeout shows that its member stalled."""


class RoundTrips:
    """Smoothed round trips of the slow members, in seconds."""

    __slots__ = ("_late", "_settings", "_slow")

    def __init__(self, settings: SwimSettings) -> None:
        self._settings = settings
        self._slow: dict[PeerId, tuple[float, float]] = {}
        # The time of a late answer of a member that is not slow.
        self._late: dict[PeerId, float] = {}

    def __len__(self) -> int:
        return len(self._slow) + len(self._late)

    def learn(self, now: float, peer: PeerId, seconds: float) -> None:
        """Record that a ping was answered by its target after `seconds`."""
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
        """Return the factor by which a probe of this member is longer than the preset's; at least 1."""
        known = self._slow.get(peer)
        if known is None:
            return 1.0
        usual, longest = self._settings.probe_timeout_seconds, self._settings.probe_timeout_max_seconds
        return min(max(known[0] + DEVIATIONS * known[1], usual), longest) / usual

    def forget(self, peer: PeerId) -> None:
        """Forget a member that is dead, or no longer listed."""
        self._slow.pop(peer, None)
        self._late.pop(peer, None)
