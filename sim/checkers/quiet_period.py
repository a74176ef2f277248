"""Disturbances of a peer or the network, and the quiet times between them, which checkers of membership must
allow for. Pure.

Starts, stops, goodbyes and freezes are seen peer by peer as they happen. Cut, deaf and lossy links are read
from the scenario's events, for all peers alike.
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
"""Gossip reaches thousands within a few rounds of at most half a second each."""


class QuietPeriods:
    """The quiet periods; feed it the events named in `handlers`."""

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
        """Return when this peer last started, stopped or was frozen, 0 if never; it may lie ahead."""
        return self._changed.get(peer, 0.0)

    def network_since(self, now: float) -> float:
        """Return the time since which the network is whole; it is ahead of `now` while the network is not."""
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
        """Return the time since which the link between two peers is undisturbed."""
        return max(self.since(one), self.since(other), self.network_since(world.now))

    def _see_change(self, observed: Observation, _world: World) -> None:
        if observed.peer is not None:
            self._changed[observed.peer] = observed.time

    def _see_frozen(self, observed: Observation, _world: World) -> None:
        if observed.peer is not None:
            self._changed[observed.peer] = observed.time + observed.event.seconds

    def _see_left(self, observed: Observation, world: World) -> None:
        # Others hear a goodbye a moment before the peer has stopped. Only the peer itself can send one.
        if world.is_up(observed.event.peer):
            self._changed[observed.event.peer] = observed.time


def detection_seconds(scenario: Scenario) -> float:
    """Return how long an accusation of an earlier life may be under way: the longest suspicion, begun by the
    slowest probe, and its spreading."""
    settings = PRESETS[scenario.membership.preset]
    probe_seconds = settings.probe_interval_seconds * (2 + settings.health_max)
    return settings.suspicion_bounds_seconds(scenario.nodes)[1] + probe_seconds + _SPREAD_SECONDS


def refutation_seconds(scenario: Scenario) -> float:
    """Return how long a live peer may be held dead. It learns of the verdict from the next member that it
    probes and answers by gossip; members that miss the gossip learn it from an exchange of lists, the second
    at the latest."""
    settings = PRESETS[scenario.membership.preset]
    return detection_seconds(scenario) + 2 * settings.sync_period_seconds(scenario.nodes)
