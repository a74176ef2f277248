"""A world of cores and a world of whole nodes agree: one scenario gives the same memberships in both.

In both worlds, each peer's SWIM core has its own random generator and joins through the same peer. So both
worlds have the same views, and every membership event happens at the same microsecond, even if all messages
sent at one instant also arrive at one instant.
"""

from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from crypto.identity import PeerId
from gossip.member import Event as MemberEvent
from gossip.member import MemberDown, MemberLeft, MemberRefuted, MemberUp, Status
from sim.churn.model import Churn, ChurnEvent
from sim.events import NetworkHealed, NetworkSplit, PeerFrozen, PeerStarted, PeerStopped
from sim.network.model import NetworkModel, Region
from sim.observers import Observation
from sim.scenario import MembershipScenario, RecordsScenario, Scenario, SwarmStart
from sim.worlds.cores import CoresWorld
from sim.worlds.stack import StackWorld

HAPPENED = (PeerStarted, PeerStopped, PeerFrozen, NetworkSplit, NetworkHealed)
SCENARIO = Scenario(
    name="agreement",
    about="",
    nodes=6,
    seconds=54.0,
    signatures="ed25519",
    membership=MembershipScenario(preset="local"),
    records=RecordsScenario(stores_per_second=0.2, lookups_per_second=0.5),
    churn=Churn(remembers=False),
    start=SwarmStart(spread_seconds=4.0),
    events=(
        ChurnEvent(at_seconds=8.1, kind="crash", share=0.2, lasts_seconds=7.0),
        ChurnEvent(at_seconds=18.2, kind="leave", share=0.2, lasts_seconds=4.0),
        ChurnEvent(at_seconds=25.3, kind="partition", share=0.4, lasts_seconds=5.0),
        ChurnEvent(at_seconds=33.4, kind="freeze", share=0.2, lasts_seconds=0.6),
        ChurnEvent(at_seconds=36.5, kind="one-way", share=0.2, lasts_seconds=3.0),
        ChurnEvent(at_seconds=42.6, kind="restart", share=0.4),
        ChurnEvent(at_seconds=45.7, kind="loss", share=0.5, loss=0.4, lasts_seconds=3.0),
        ChurnEvent(at_seconds=49.0, kind="no-datagrams", share=0.4, lasts_seconds=4.0),
    ),
)
NETWORKS = {
    1: NetworkModel(nearest_seconds=0.003, farthest_seconds=0.017, jitter_seconds=0.001, loss=0.05),
    2: NetworkModel(nearest_seconds=0.01, farthest_seconds=0.01, duplication=0.1),
    3: NetworkModel(
        regions=(Region(name="here", share=0.5), Region(name="there", share=0.5)),
        between_seconds=((0.0, 0.03), (0.02, 0.0)),
    ),
}
"""The network model of each seed: links of different lengths with loss; equal links, so that many events are
simultaneous; and links that are longer in one direction.
"""
SEEDS = tuple(NETWORKS)


class Told:
    """The events of one world: each peer's membership events with their instants, and all final views."""

    def __init__(self, world: type[CoresWorld] | type[StackWorld], seed: int) -> None:
        self.seen: list[Observation] = []
        scenario = replace(SCENARIO, network=NETWORKS[seed])
        self.world = world(scenario, seed, self.seen.append)
        self.views: dict[PeerId, dict[PeerId, Status]] = {}
        self.world.at(SCENARIO.seconds - 0.001, self._look)
        self.world.play(lambda: None)

    def _look(self) -> None:
        for peer in self.world.lives:
            self.views[peer] = dict(sorted(self.world.believes(peer).items()))

    def of(self, kinds: Any) -> dict[PeerId | None, list[tuple[float, Any]]]:
        told: dict[PeerId | None, list[tuple[float, Any]]] = {}
        for observed in self.seen:
            if isinstance(observed.event, kinds):
                told.setdefault(observed.peer, []).append((observed.time, observed.event))
        return told


cores = cache(lambda seed: Told(CoresWorld, seed))
stack = cache(lambda seed: Told(StackWorld, seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_both_worlds_have_the_same_disturbances(seed: int) -> None:
    assert cores(seed).of(HAPPENED) == stack(seed).of(HAPPENED)


@pytest.mark.parametrize("seed", SEEDS)
def test_both_worlds_end_with_the_same_views(seed: int) -> None:
    assert cores(seed).views == stack(seed).views


@pytest.mark.parametrize("seed", SEEDS)
def test_each_peer_has_the_same_events_at_the_same_instants(seed: int) -> None:
    by_cores, by_stack = cores(seed).of(MemberEvent), stack(seed).of(MemberEvent)
    for peer in cores(seed).world.peers:
        assert by_cores[peer] == by_stack[peer]


def test_the_compared_lists_of_events_are_not_empty() -> None:
    kinds = {type(observed.event) for observed in cores(1).seen}
    assert kinds >= {MemberUp, MemberDown, MemberLeft, MemberRefuted, NetworkSplit}
