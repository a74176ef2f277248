"""How a served model is cut into stages, and which nodes are chosen for them."""

from collections.abc import Sequence
from functools import cache

import msgspec
import pytest

from crypto.identity import Identity, PeerId
from node.placement.leases import Offer
from node.serving.planning import plan_service, served_graph
from partition.capture.models.model_spec import capture_built_in
from partition.model.graph import Graph, decode_graph
from partition.plan.observed import Knowledge, LinkRow, Observed
from partition.plan.rates import REFERENCE

PEERS = [Identity(bytes([1 + number]) * 32).peer for number in range(3)]
OTHERS = [Identity(bytes([10 + number]) * 32).peer for number in range(3)]
NEAR, FAR = 1_000_000, 100_000_000


@cache
def graph() -> Graph:
    captured = capture_built_in("gpt", (64,), 256, options={"layers": 4, "heads": 2, "width": 32})
    return served_graph(decode_graph(captured.data), "gpt", 64)


def offer(peer: PeerId, gigaflops: float = 10.0, memory_bytes: int = 4 << 30) -> Offer:
    return Offer(peer, gigaflops * 1e9, memory_bytes, True, "cpu")


def links(far: PeerId) -> Knowledge:
    """Return measured links between all peers; those of the peer `far` are slow."""
    observed = {
        one: Observed(
            tuple(
                LinkRow(other, 10**8, 10**8, FAR if far in (one, other) else NEAR)
                for other in PEERS
                if other != one
            )
        )
        for one in PEERS
    }
    return Knowledge(observed=observed)


def test_stages_are_placed_on_nodes_with_short_links() -> None:
    for far in PEERS:
        _, peers = plan_service(graph(), [offer(peer) for peer in PEERS], 2, links(far))
        assert set(peers) == set(PEERS) - {far}


def test_a_far_node_is_chosen_if_its_speed_outweighs_its_link() -> None:
    offers = [offer(PEERS[0], 0.0001), offer(PEERS[1], 0.0001), offer(PEERS[2], 10.0)]
    _, peers = plan_service(graph(), offers, 1, links(PEERS[2]))
    assert peers == [PEERS[2]]


def test_a_model_that_fits_one_node_is_not_split() -> None:
    ranges, _ = plan_service(graph(), [offer(peer) for peer in PEERS], 0, links(PEERS[0]))
    assert len(ranges) == 1


def kinds(*groups: Sequence[PeerId]) -> Knowledge:
    """Return calibrations for groups of machines. The machines of a group are of one kind."""
    rows = {
        peer: msgspec.structs.replace(REFERENCE, hardware=f"processor {number}")
        for number, group in enumerate(groups)
        for peer in group
    }
    return Knowledge(calibrations=rows)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_service_starts_where_a_spare_machine_of_the_kind_exists(stages: int) -> None:
    alone, alike = OTHERS[:1], PEERS
    offers = [offer(alone[0], 11.0), *(offer(peer, 10.0) for peer in alike)]
    _, peers = plan_service(graph(), offers, stages, kinds(alone, alike))
    assert set(peers) <= set(alike)


def test_a_kind_of_much_slower_machines_is_not_preferred() -> None:
    offers = [offer(OTHERS[0], 40.0), *(offer(peer, 10.0) for peer in PEERS)]
    _, peers = plan_service(graph(), offers, 1, kinds(OTHERS[:1], PEERS))
    assert peers == OTHERS[:1]


def test_a_kind_whose_machines_would_all_hold_stages_is_avoided() -> None:
    offers = [*(offer(peer, 11.0) for peer in OTHERS[:2]), *(offer(peer, 10.0) for peer in PEERS)]
    _, peers = plan_service(graph(), offers, 2, kinds(OTHERS[:2], PEERS))
    assert set(peers) <= set(PEERS)
