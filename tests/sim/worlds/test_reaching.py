"""Peers that cannot be reached detect it, and no table lists them, in a world of cores and in one of whole
nodes."""

from collections import Counter
from functools import cache
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from crypto.identity import PeerId
from dht.kademlia import Kademlia
from dht.messages import CLIENT_ADDRESSES
from gossip.member import Status
from node.services.autonat_core import OTHERS
from sim.churn.model import ChurnEvent
from sim.events import ReachabilityJudged, RecordGot
from sim.network.model import Access, Nat, NetworkModel
from sim.observers import Observation
from sim.scenario import MembershipScenario, RecordsScenario, Scenario, SwarmStart
from sim.worlds.cores import CoresWorld
from sim.worlds.factories import Cores
from sim.worlds.stack import StackWorld

MIXED = Scenario(
    name="mixed",
    about="some behind NATs of three kinds",
    nodes=10,
    seconds=110.0,
    signatures="ed25519",
    start=SwarmStart(spread_seconds=5.0),
    network=NetworkModel(
        nearest_seconds=0.01,
        farthest_seconds=0.05,
        access=(
            Access(share=0.15, nat="restricted"),
            Access(share=0.12, nat="symmetric"),
            Access(share=0.18, nat="full-cone"),
        ),
    ),
    membership=MembershipScenario(preset="local"),
    records=RecordsScenario(enabled=False),
)


class Told:
    """One world's events about reachability, the peers that finally call themselves clients in their
    messages, and the number of live peers in each peer's list.
    """

    def __init__(self, world: type[CoresWorld] | type[StackWorld], scenario: Scenario, seed: int) -> None:
        self.judged: dict[PeerId, list[ReachabilityJudged]] = {}
        self.world = world(scenario, seed, self._see)
        self.clients: set[PeerId] = set()
        self.live: dict[PeerId, int] = {}
        self.world.at(scenario.seconds - 0.001, self._look)
        self.world.play(lambda: None)

    def _see(self, observed: Observation) -> None:
        if observed.peer is not None and isinstance(observed.event, ReachabilityJudged):
            self.judged.setdefault(observed.peer, []).append(observed.event)

    def _look(self) -> None:
        for peer, life in self.world.lives.items():
            self.live[peer] = sum(
                each in (Status.ALIVE, Status.SUSPECT) for each in life.swim.statuses.values()
            )
            assert isinstance(life.kademlia, Kademlia)
            if life.kademlia.addresses == CLIENT_ADDRESSES:
                self.clients.add(peer)

    def nats(self) -> dict[PeerId, Nat]:
        return {peer: self.world.links.at(peer).access.nat for peer in self.world.peers}


cores = cache(lambda seed: Told(CoresWorld, MIXED, seed))
stack = cache(lambda seed: Told(StackWorld, MIXED, seed))
SEEDS = (11,)
"""A scenario with peers of all kinds of access, and a first peer that others can dial."""


@pytest.mark.parametrize("seed", SEEDS)
def test_both_kinds_of_world_find_the_same_peers_unreachable(seed: int) -> None:
    last = [
        {peer: judged[-1].reachable for peer, judged in told.judged.items()}
        for told in (cores(seed), stack(seed))
    ]
    assert last[0] == last[1]
    assert cores(seed).clients == stack(seed).clients


@pytest.mark.parametrize("seed", SEEDS)
def test_exactly_the_unreachable_peers_are_clients(seed: int) -> None:
    nats = cores(seed).nats()
    assert cores(seed).clients == {peer for peer, nat in nats.items() if nat in ("restricted", "symmetric")}
    # A peer with a public address does not need to ask.
    assert set(cores(seed).judged) == {peer for peer, nat in nats.items() if nat != "none"}


def test_every_kind_of_reachability_verdict_occurs() -> None:
    assert {nat for seed in SEEDS for nat in cores(seed).nats().values()} == {
        "none",
        "full-cone",
        "restricted",
        "symmetric",
    }


def test_no_peer_becomes_a_client_before_three_failed_dial_backs() -> None:
    told = cores(SEEDS[0])
    for peer in told.clients:
        verdicts = [(judged.reachable, judged.asked) for judged in told.judged[peer]]
        assert verdicts[:OTHERS] == [(None, 1), (None, 2), (False, 3)]


def test_without_dial_back_servers_no_peer_becomes_a_client() -> None:
    network = replace(MIXED.network, access=(Access(share=1.0, nat="restricted"),))
    told = Told(CoresWorld, replace(MIXED, network=network), 1)
    assert told.judged == {}
    assert told.clients == set()


@pytest.mark.parametrize("world", [CoresWorld, StackWorld])
def test_a_swarm_forms_around_a_first_peer_behind_a_full_cone_nat(
    world: type[CoresWorld] | type[StackWorld],
) -> None:
    network = replace(MIXED.network, access=(Access(share=0.3, nat="full-cone"),))
    told = Told(world, replace(MIXED, nodes=6, seconds=40.0, network=network), 3)
    assert told.nats()[told.world.peers[0]] == "full-cone"
    assert set(told.live.values()) == {6}


def test_a_restarted_peer_must_detect_its_reachability_again() -> None:
    network = replace(MIXED.network, access=(Access(share=0.5, nat="symmetric"),))
    restart = ChurnEvent(at_seconds=100.0, kind="restart", share=1.0)
    told = Told(CoresWorld, replace(MIXED, network=network, events=(restart,)), 1)
    assert told.judged
    assert told.clients == set()


class Counting(Kademlia):
    """Counts the requests of all peers, and those that stay unanswered."""

    counts: ClassVar[Counter[str]] = Counter()

    def ask(self, *arguments: Any, **options: Any) -> None:
        self.counts["asked"] += 1
        super().ask(*arguments, **options)

    def _silent(self, *arguments: Any) -> None:
        self.counts["silent"] += 1
        super()._silent(*arguments)


class Unaware(Counting):
    """A node that stays in tables even if it is unreachable."""

    def appear(self, addresses: Any, *, client: bool = False) -> None:
        del client
        super().appear(addresses)


def lookups(core: type[Counting]) -> tuple[float, float, float]:
    """Play a world in which two fifths of the peers are behind symmetric NATs. Return the share of lookups
    that found their record, of requests without an answer, and of unreachable contacts in tables.
    """

    counts = Counting.counts
    got: list[RecordGot] = []

    def see(observed: Observation) -> None:
        if isinstance(observed.event, RecordGot) and not observed.event.storing and observed.event.expected:
            got.append(observed.event)

    scenario = replace(
        MIXED,
        nodes=30,
        seconds=300.0,
        signatures="hash",
        membership=MembershipScenario(preset="wan"),
        network=replace(MIXED.network, access=(Access(share=0.4, nat="symmetric"),)),
        records=RecordsScenario(stores_per_second=0.5, lookups_per_second=2.0),
    )
    world = CoresWorld(scenario, 1, see, cores=Cores(kademlia=core))
    # Count from the time at which most peers have been judged.
    world.at(scenario.seconds / 2, counts.clear)
    world.play(lambda: None)
    tables = [life.kademlia.table for life in world.lives.values() if isinstance(life.kademlia, core)]
    contacts = [contact.peer for table in tables for contact in table]
    hidden = sum(world.links.at(peer).nat is not None for peer in contacts)
    found = sum(each.copies > 0 for each in got) / len(got)
    return found, counts["silent"] / counts["asked"], hidden / len(contacts)


@pytest.mark.slow
def test_tables_without_unreachable_peers_avoid_most_unanswered_requests() -> None:
    found_before, silent_before, hidden_before = lookups(Unaware)
    found, silent, hidden = lookups(Counting)
    assert found >= found_before > 0.98
    assert silent < silent_before / 3
    # Peers without successful requests have not yet detected that they are unreachable.
    assert hidden < hidden_before / 5
