"""Newcomers find the swarm even if most peers cannot be reached before they have sent a packet."""

from gossip.member import Status
from sim.network.model import Access, NetworkModel
from sim.scenario import MembershipScenario, RecordsScenario, Scenario, SwarmStart
from sim.worlds.cores import CoresWorld

HOMES = Scenario(
    name="homes",
    about="two thirds behind NATs, all started within seconds",
    nodes=16,
    seconds=25.0,
    start=SwarmStart(spread_seconds=6.0),
    network=NetworkModel(
        nearest_seconds=0.01,
        farthest_seconds=0.05,
        access=(Access(share=0.67, nat="full-cone"),),
    ),
    membership=MembershipScenario(preset="local"),
    records=RecordsScenario(enabled=False),
)


def test_peers_whose_first_dials_fail_form_no_second_swarm() -> None:
    for seed in (3, 4, 5):
        world = CoresWorld(HOMES, seed, lambda _: None)
        world.play(lambda: None)
        sizes = [
            sum(status is Status.ALIVE for status in world.believes(peer).values()) for peer in world.peers
        ]
        assert sizes == [HOMES.nodes] * HOMES.nodes, f"seed {seed}"
