"""Real nodes that list only the peers near their key, connected to the DHT as in a public swarm."""

from gossip.member import NeighbourhoodLookupWanted
from sim.observers import Observation
from sim.scenario import Checks, MembershipScenario, RecordsScenario, Scenario, SwarmStart
from sim.worlds.stack import StackWorld


def test_nodes_with_partial_views_find_each_other_through_the_dht() -> None:
    seen: list[Observation] = []
    scenario = Scenario(
        name="neighbourhoods",
        about="whole nodes, each listing those near its key",
        fidelity="stack",
        nodes=6,
        seconds=60.0,
        start=SwarmStart(spread_seconds=5.0),
        membership=MembershipScenario(preset="lan", scope="neighbourhood"),
        records=RecordsScenario(enabled=False),
        checks=Checks(),
    )
    world = StackWorld(scenario, 3, seen.append)
    live: list[list[int]] = []
    world.play(lambda: live.append([len(world.believes(peer)) for peer in world.peers if world.is_up(peer)]))
    assert live[-1] == [6] * 6
    assert any(isinstance(observed.event, NeighbourhoodLookupWanted) for observed in seen)
