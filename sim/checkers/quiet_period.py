"""The quiet periods between disturbances of a peer or the network, for which checkers of membership must
allow. No I/O.

Starts, stops, goodbyes and freezes are observed for each peer as they happen. Links that are cut, deaf or
lossy are read from the scenario's events, and count for all peers.
"""

from collections.abc import Mapping
from typing import Any

from crypto.identity import PeerId
from gossip.member import MemberLeft
from gossip.settings import PRESETS
from sim.checkers.checker import Handler
from sim.events import PeerFrozen, PeerStarted, PeerStopped
from sim.observers import Observation, World
from sim.scenario import Scenario

_DISTURBING = ("partition", "one-way", "no-datagrams", "freeze", "loss")
_SPREAD_SECONDS = 5.0
"""How long a verdict takes to spread, at most. Gossip reaches thousands of peers within a few rounds, each of
at most half a second."""


class QuietPeriods:
    """The quiet periods. The owner must pass on the events named in `handlers`."""

    def __init__(self, scenario: Scenario) -> None:
        self._events = tuple(event for event in scenario.events if event.kind in _DISTURBING)
        self._changed: dict[PeerId, float] = {}
        self.handlers: Mapping[type[Any], Handler] = {
            PeerStarted: self._see_change,
            PeerStopped: self._see_change,
            PeerFrozen: self._see_frozen,
            MemberLeft: self._see_left,
        }

    def since(self, peer: PeerId) -> float:
        """Return when this peer last started, stopped or was frozen, 0 if never. The time may be in the
        future."""
        return self._changed.get(peer, 0.0)

    def network_since(self, now: float) -> float:
        """Return the time since which the network is undisturbed. It is after `now` while a disturbance
        lasts."""
        latest = 0.0
        for event in self._events:
            if event.at_seconds > now:
                continue
            begun = event.at_seconds
            if event.every_seconds:
                begun += (now - event.at_seconds) // event.every_seconds * event.every_seconds
            latest = max(latest, begun + event.lasts_seconds)
        return latest

    def both_since(self, world: World, one: PeerId, other: PeerId) -> float:
        """Return the time since which the link between two peers has been undisturbed."""
        return max(self.since(one), self.since(other), self.network_since(world.now))

    def _see_change(self, observed: Observation, _world: World) -> None:
        if observed.peer is not None:
            self._changed[observed.peer] = observed.time

    def _see_frozen(self, observed: Observation, _world: World) -> None:
        if observed.peer is not None:
            self._changed[observed.peer] = observed.time + observed.event.seconds

    def _see_left(self, observed: Observation, world: World) -> None:
        # Other peers hear a goodbye a moment before its sender has stopped, and only the sender itself can
        # send one.
        if world.is_up(observed.event.peer):
            self._changed[observed.event.peer] = observed.time


def detection_seconds(scenario: Scenario) -> float:
    """Return how long an accusation of an earlier process may still be in circulation: the longest suspicion,
    begun by the slowest probe, plus the time it takes to spread."""
    settings = PRESETS[scenario.membership.preset]
    probe_seconds = settings.probe_interval_seconds * (2 + settings.health_max)
    return settings.suspicion_bounds_seconds(scenario.nodes)[1] + probe_seconds + _SPREAD_SECONDS


def refutation_seconds(scenario: Scenario) -> float:
    """Return how long a live peer may be listed as dead. It learns of the verdict from the next member that
    it probes, and refutes it by gossip. Members that miss the gossip learn it from an exchange of lists, at
    the latest the second."""
    settings = PRESETS[scenario.membership.preset]
    return detection_seconds(scenario) + 2 * settings.sync_period_seconds(scenario.nodes)
