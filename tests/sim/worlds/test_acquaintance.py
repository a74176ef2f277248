"""A swarm that starts settled: from the beginning, all peers know the peers that they would know after a long
time.
"""

from typing import Any

import pytest

from dht.keys import node_number
from dht.messages import PROTOCOL as KADEMLIA
from dht.routing import WAITING_MAX
from gossip.member import MemberDown, MemberForgotten, MemberSuspected, MemberUp
from gossip.swim import PROTOCOL as SWIM
from sim.churn.model import ChurnEvent
from sim.events import PeerStarted, RecordGot
from sim.network.model import NetworkModel
from sim.scenario import MembershipScenario, Scenario, SwarmStart
from tests.sim.worlds.test_cores import Played, scenario

KNOWN = SwarmStart(spread_seconds=0, acquainted=True)
LINKS = NetworkModel(nearest_seconds=0.01, farthest_seconds=0.09, loss=0.01)


def acquainted(**changes: Any) -> Scenario:
    fields: dict[str, Any] = {"nodes": 60, "seconds": 1.0, "start": KNOWN, "network": LINKS}
    return scenario(**(fields | changes))


def test_all_peers_list_each_other_and_report_each_other_as_joined() -> None:
    played = Played(acquainted())
    assert played.live_views() == [set(played.world.peers)] * 60
    ups = played.of(MemberUp)
    assert len(ups) == 60 * 59
    assert {o.time for o in (*ups, *played.of(PeerStarted))} == {0.0}


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_peers_of_very_small_swarms_list_each_other_too(nodes: int) -> None:
    played = Played(acquainted(nodes=nodes, seconds=60.0))
    assert played.live_views() == [set(played.world.peers)] * nodes


def test_the_routing_tables_are_full() -> None:
    world = Played(acquainted(nodes=150)).world
    numbers = {peer: node_number(peer) for peer in world.peers}
    for life in world.lives.values():
        table, k = life.kademlia.table, life.kademlia.settings.k  # type: ignore[attr-defined]  # ours, not just any
        for bucket in table.buckets:
            lower, upper = bucket.range
            there = sum(lower <= number <= upper for number in numbers.values())
            there -= lower <= numbers[life.peer] <= upper
            assert len(bucket.nodes) == min(there, k)
            assert len(bucket.replacement_nodes) == min(there - len(bucket.nodes), WAITING_MAX)


def test_a_settled_swarm_has_no_backlog_of_messages() -> None:
    """Only probes, their answers, and each peer's own fact are sent; each peer forwards such a fact once."""
    world = Played(acquainted(seconds=20.0)).world
    counters = world.counters()
    assert counters[f"messages {SWIM}"] < 60 * 20 * 4
    assert counters[f"messages {KADEMLIA}"] < 60 * 20 * 1.5
    assert "refused" not in counters


def test_a_swarm_that_starts_settled_behaves_like_one_that_grew() -> None:
    crash = ChurnEvent(at_seconds=20.0, kind="crash", share=0.05, lasts_seconds=30.0)
    played = Played(acquainted(seconds=100.0, events=(crash,)))
    down = {o.event.peer for o in played.of(MemberDown)}
    assert len(down) == 3
    assert played.live_views() == [set(played.world.peers)] * 60
    lookups = [o.event for o in played.of(RecordGot) if not o.event.storing and o.event.expected]
    assert len(lookups) > 50
    assert all(got.copies for got in lookups)


@pytest.mark.slow
def test_neighbourhood_lists_are_complete_also_for_late_peers() -> None:
    crowd = acquainted(
        nodes=500,
        seconds=7.0,
        start=SwarmStart(spread_seconds=0, acquainted=True, late_share=0.01),
        membership=MembershipScenario(scope="neighbourhood"),
        events=(ChurnEvent(at_seconds=2.0, kind="join", share=1.0, lasts_seconds=1.0),),
    )
    played = Played(crowd)
    world = played.world
    assert not played.of(MemberSuspected)
    running = [peer for peer in world.peers if world.is_up(peer)]
    assert len([o for o in played.of(PeerStarted) if o.time > 0]) > 3
    for peer in running[::50]:
        wanted = {other for other in running if world.in_scope(peer, other)}
        assert 200 < len(wanted) <= 600
        assert set(world.believes(peer)) == wanted


def test_the_same_seed_gives_the_same_events() -> None:
    digests = [Played(acquainted(nodes=30, seconds=30.0), seed).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_real_keys_give_the_same_lists() -> None:
    played = Played(acquainted(nodes=8, seconds=5.0, signatures="ed25519"))
    assert played.live_views() == [set(played.world.peers)] * 8


def test_in_the_routing_table_only_members_are_watched() -> None:
    world = Played(acquainted(nodes=3)).world
    one, other, _ = world.peers
    contact = world.lives[one].kademlia.table.get(other)  # type: ignore[attr-defined]  # ours, not just any
    assert contact.watched
    world._learnt(world.now, one, MemberForgotten(other))
    assert not contact.watched
