"""Runs that ask for a place, in a simulated swarm of two regions."""

import pytest
import trio

from node.placement.leases import PlacementFailed
from node.planning.peers import Peers, PeerSpecification, in_place
from node.protocols.manifest import PlaceWish
from partition.plan.rates import assumed
from sim.network.model import NetworkModel, Region
from tests.stack import manifest, prepare, simulate, swarm
from tests.test_runs_end import all_ended

TWO = NetworkModel(
    regions=(
        Region("eu-west", 0.5, (0.003, 0.006)),
        Region("us-east", 0.5, (0.003, 0.006)),
    ),
    between_seconds=((0.003, 0.045), (0.045, 0.003)),
)
SETTLE_SECONDS = 120


def test_nearness_is_counted_from_the_requester_and_what_is_missing_is_said() -> None:
    async def scenario() -> None:
        async with swarm("abcdefgh", network=TWO) as group:
            await trio.sleep(SETTLE_SECONDS)
            a = group.nodes["a"]
            mine = group.medium.links.region(a.peer)
            near = manifest(stages=1, replicas=2, microbatches=2, place=PlaceWish(max_rtt_milliseconds=40))
            run = prepare(a, near)
            await a.runs.submit(run)
            plan = a.runs.members[run.id].plan
            assert plan is not None
            held = {peer for stage in plan.stages for peer in stage.replicas}
            assert {group.medium.links.region(peer) for peer in map(type(a.peer), held)} == {mine}
            await all_ended(group)
            nowhere = prepare(a, manifest(created_milliseconds=2, place=PlaceWish(location="moon")))
            with pytest.raises(PlacementFailed, match=r"0 offer a slot; of 8 with a slot 0 are in moon"):
                await a.runs.submit(nowhere)

    simulate(scenario)


def test_a_plan_for_a_place_leaves_out_peers_elsewhere_and_says_so() -> None:
    rows = [
        PeerSpecification(name, 1 << 30, assumed(10**9), location=place)
        for name, place in (("a", "eu"), ("b", ""))
    ]
    kept, left = in_place(Peers(tuple(rows)), "eu").peers
    assert (kept.reason, left.reason) == ("", "not in eu")
    assert in_place(Peers(tuple(rows)), "").peers == tuple(rows)
