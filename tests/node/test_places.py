"""Runs that require a location, in a simulated swarm of two regions."""

from collections.abc import Sequence
from typing import Any

import pytest
import trio

from crypto.identity import PeerId
from node.events import RunChanged
from node.placement.leases import Offer, PlacementFailed
from node.placement.places import on_devices
from node.planning.peers import Peers, PeerSpecification, in_place
from node.planning.peers import on_devices as peers_on_devices
from node.protocols.manifest import PlaceWish
from partition.plan.plan import Plan, StagePlan
from partition.plan.rates import assumed
from partition.run.local_settings import LocalSettings
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


def test_distance_is_measured_from_the_requester_and_gaps_are_reported() -> None:
    async def scenario() -> None:
        async with swarm("abcdefgh", network=TWO, preset="lan") as group:
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


def test_round_trips_reveal_a_wrong_location_and_it_gets_no_stage() -> None:
    """One node claims a wrong location. The round trips that others measure to it reveal the right one."""

    async def scenario() -> None:
        # The timers of one machine reach every peer in a different region late.
        async with swarm("abcdefgh", network=TWO, preset="lan") as group:
            regions = {name: group.medium.links.region(node.peer) for name, node in group.nodes.items()}
            liar = next(name for name in "hgfedcb" if regions[name] == regions["a"])
            elsewhere = next(region.name for region in TWO.regions if region.name != regions[liar])
            for name, node in group.nodes.items():
                node.set("location", elsewhere if name == liar else regions[name])
            await trio.sleep(SETTLE_SECONDS)
            for name, node in group.nodes.items():
                found = node.runs.places.located()
                for other, region in regions.items():
                    row = found[group.nodes[other].peer]
                    assert (row.location, row.is_doubted) == (region, other == liar), (name, other)
            a = group.nodes["a"]
            others = sum(region == elsewhere for region in regions.values())
            place = PlaceWish(location=elsewhere)
            run = prepare(a, manifest(stages=1, replicas=others, microbatches=2, place=place))
            await a.runs.submit(run)
            plan = a.runs.members[run.id].plan
            assert plan is not None
            held = {group.name_of(PeerId(peer)) for stage in plan.stages for peer in stage.replicas}
            assert held == {name for name, region in regions.items() if region == elsewhere}
            await all_ended(group)

    simulate(scenario)


def test_a_plan_for_a_location_excludes_and_reports_other_peers() -> None:
    rows = [
        PeerSpecification(name, 1 << 30, assumed(10**9), location=place)
        for name, place in (("a", "eu"), ("b", ""))
    ]
    kept, left = in_place(Peers(tuple(rows)), "eu").peers
    assert (kept.reason, left.reason) == ("", "not in eu")
    assert in_place(Peers(tuple(rows)), "").peers == tuple(rows)


def offered(kinds: str) -> list[Offer]:
    """Return offers of peers 0, 1, ... on devices: c is cuda, m is mps, p is cpu."""
    names = {"c": "cuda", "m": "mps", "p": "cpu"}
    return [
        Offer(PeerId(bytes([number]) * 34), 1e9, 1 << 30, has_slot=True, device=names[kind])
        for number, kind in enumerate(kinds)
    ]


def test_only_peers_on_the_requested_devices_have_a_slot() -> None:
    found = on_devices(offered("cmpp"), ("cuda", "cpu"))
    assert [offer.has_slot for offer in found] == [True, False, True, True]


@pytest.mark.parametrize(
    ("kinds", "devices", "tried", "said"),
    [
        ("ccp", ("cuda", "cpu"), ["0,1"], ""),
        ("cpp", ("cuda", "cpu"), ["0", "0,1,2"], "2 stages are placed, 1 on cuda and 1 on cpu"),
        ("mpp", ("cuda", "mps", "cpu"), ["0", "0,1,2"], "2 stages are placed, 1 on mps and 1 on cpu"),
        ("cpp", ("cpu",), ["1,2"], ""),
        ("ppp", (), ["0,1,2"], ""),
    ],
)
def test_devices_are_tried_in_order_and_the_outcome_is_reported(
    kinds: str, devices: tuple[Any, ...], tried: list[str], said: str
) -> None:
    """Return a manifest of two stages, each of which needs a peer of its own."""
    attempts: list[str] = []
    heard: list[str] = []

    async def attempt(offers: Sequence[Offer], is_last: bool) -> Plan:
        free = [offer.peer for offer in offers if offer.has_slot]
        attempts.append(",".join(str(peer[0]) for peer in free))
        if len(free) < 2:
            raise PlacementFailed("too few")
        stages = tuple(StagePlan(row, row, (peer,), (1,)) for row, peer in enumerate(free[:2]))
        return Plan(bytes(32), bytes(32), 0, tuple(sorted(free[:2])), tuple(free[:1]), 1, stages)

    async def scenario() -> None:
        async with swarm("a", preset="lan") as group:
            a = group.nodes["a"]
            run = prepare(a, manifest(place=PlaceWish(devices=devices) if devices else None))
            await a.runs.places.keeping(run, attempt, heard.append)(offered(kinds), False)

    simulate(scenario)
    assert attempts == tried
    assert [line.partition(": ")[2] for line in heard] == ([said] if said else [])


def test_a_run_for_a_gpu_uses_a_cpu_only_if_allowed() -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            a = group.nodes["a"]
            wish = PlaceWish(devices=("cuda", "mps"))
            run = prepare(a, manifest(stages=1, replicas=1, place=wish))
            with pytest.raises(PlacementFailed, match=r"of 2 with a slot 0 are on cuda or mps"):
                await a.runs.submit(run)
            wish = PlaceWish(devices=("cuda", "mps", "cpu"))
            run = prepare(a, manifest(stages=1, replicas=1, created_milliseconds=2, place=wish))
            await a.runs.submit(run)
            said = [e.reason for e in group.events["a"] if isinstance(e, RunChanged) and e.run == run.text]
            assert "too few peers with a slot on cuda: 1 stage is placed, 1 on cpu" in said
            await all_ended(group)

    simulate(scenario)


def test_local_mode_asks_only_nodes_in_the_requested_place() -> None:
    """The requester does not train either if its own device is not among the requested ones."""

    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            a = group.nodes["a"]
            local = LocalSettings(local_steps=2)
            fields: dict[str, Any] = {
                "dtype": "float32",
                "stages": 1,
                "replicas": 0,
                "steps": 4,
                "local": local,
            }
            run = prepare(a, manifest(place=PlaceWish(devices=("cuda",)), **fields))
            with pytest.raises(PlacementFailed, match="no known node takes part"):
                await a.runs.submit(run)
            run = prepare(a, manifest(place=PlaceWish(devices=("cpu",)), created_milliseconds=2, **fields))
            await a.runs.submit(run)
            await all_ended(group)

    simulate(scenario)


def test_a_plan_reports_peers_on_other_devices() -> None:
    rows = [
        PeerSpecification(name, 1 << 30, assumed(10**9), device=kind)
        for name, kind in (("a", "cuda"), ("b", "cpu"), ("c", ""))
    ]
    found = peers_on_devices(Peers(tuple(rows)), ["cuda", "mps"]).peers
    assert [peer.reason for peer in found] == ["", "not on cuda or mps", "not on cuda or mps"]
    assert peers_on_devices(Peers(tuple(rows)), []).peers == tuple(rows)
