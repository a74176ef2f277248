"""Adverts and searches by capability: their classes and shards, and what searches find."""

from hypothesis import given
from hypothesis import strategies as st

from crypto.identity import PeerId
from dht.capabilities import (
    ADVERT_VERSION,
    SHARD_ADVERTS_MAX,
    Advert,
    Query,
    classes_of,
    encode_advert,
    estimate_nodes,
    first_depth,
    memory_class,
    prefix_of,
    read_advert,
)
from dht.events import CapabilitiesFound
from dht.kademlia import Kademlia
from dht.keys import node_key, record_key
from dht.records import check_record
from dht.routing import Contact
from dht.settings import KademliaSettings
from sim.seeds import HashSigner, seeded_peer
from tests.dht.swarm import Swarm, lone, record, signer

GB = 10**9


def advert(
    device: str = "cpu", memory_bytes: int = 8 * GB, region: str = "", *, has_slot: bool = True
) -> Advert:
    return Advert(ADVERT_VERSION, device, memory_bytes, 1e9, has_slot, region)


def many(seed: int, settings: KademliaSettings) -> Swarm:
    """Return a swarm with free signatures, because it checks hundreds of adverts."""
    return Swarm(
        seed, settings=settings, signer_of=lambda number: HashSigner(seeded_peer(seed, number), "test", seed)
    )


def hunt(swarm: Swarm, node: Kademlia, query: Query) -> CapabilitiesFound:
    return swarm.ask(node, lambda now: node.hunt(now, query), CapabilitiesFound)


def offering(swarm: Swarm, node: Kademlia, offered: Advert | None) -> None:
    swarm.send(node, node.advertise(swarm.now, offered))


@given(
    st.integers(0, 2**50),
    st.integers(0, 2**50),
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from(["", "eu"]),
)
def test_every_matching_advert_is_in_a_searched_class(
    wanted: int, offered: int, device: str, region: str
) -> None:
    query = Query(device=device, memory_bytes=wanted, near=region)
    shown = advert(device, offered, region)
    assert query.fits(shown) == (offered >= wanted)
    if query.fits(shown):
        assert set(query.classes) & set(classes_of(shown))
    assert memory_class(wanted) <= memory_class(max(wanted, offered))


@given(st.integers(0, 2**159), st.integers(0, 24))
def test_a_shard_is_the_first_bits_of_a_key(number: int, depth: int) -> None:
    key = number.to_bytes(20, "big")
    assert prefix_of(key, depth) == int(f"{number:0160b}"[:depth] or "0", 2)  # type: ignore[arg-type]  # a Key is bytes


def test_the_size_of_a_network_is_known_within_a_factor_of_two() -> None:
    for size in (100, 1_000, 5_000):
        peers = [PeerId(number.to_bytes(32, "big")) for number in range(size)]
        own = node_key(PeerId(bytes(31) + b"\xff" + b""))
        place = int.from_bytes(own, "big")
        near = sorted((Contact(peer) for peer in peers), key=lambda each: each.long_id ^ place)[1:21]
        assert size / 2 < estimate_nodes(own, near, 20) < 2 * size
    assert estimate_nodes(own, near[:7], 20) == 8
    assert first_depth(1) <= 1
    assert 2 ** first_depth(1_000) > 1_000 / SHARD_ADVERTS_MAX


def test_a_record_that_is_not_an_advert_is_ignored() -> None:
    key = record_key("test", b"key")
    assert read_advert(check_record(signer(0), record(1, key, b"\x00nonsense"))) is None
    later = encode_advert(Advert(ADVERT_VERSION + 1, "cpu", 1, 1.0, True, ""))
    assert read_advert(check_record(signer(0), record(1, key, later))) is None


def test_a_search_finds_only_matching_nodes() -> None:
    swarm = many(41, KademliaSettings(k=8, find_width=4))
    nodes = swarm.grow(30)
    for number, node in enumerate(nodes):
        cuda = number % 3 == 0
        offering(
            swarm,
            node,
            advert(
                "cuda" if cuda else "cpu",
                (number + 1) * GB,
                "eu" if number % 2 else "us",
                has_slot=number < 20,
            ),
        )
        swarm.run(2)
    swarm.run(10)
    asker = nodes[1]
    found = hunt(swarm, asker, Query("cuda", 8 * GB, count=20))
    fitting = {node.peer for number, node in enumerate(nodes) if number % 3 == 0 and number >= 7}
    assert {offer.peer for offer in found.offers} == fitting - {asker.peer}
    assert [offer.seconds for offer in found.offers] == sorted(offer.seconds for offer in found.offers)
    near = hunt(swarm, asker, Query("cuda", 8 * GB, near="us", needs_slot=True))
    assert {offer.peer for offer in near.offers} == {nodes[12].peer, nodes[18].peer}
    assert hunt(swarm, asker, Query("mps")).offers == ()


def test_dead_nodes_are_not_found_and_others_replace_them() -> None:
    swarm = many(42, KademliaSettings(k=8, find_width=4))
    nodes = swarm.grow(24)
    for node in nodes:
        offering(swarm, node, advert())
        swarm.run(1)
    swarm.run(10)
    for node in nodes[4:14]:
        del swarm.nodes[node.peer]
    found = hunt(swarm, nodes[0], Query("cpu", count=8))
    assert len(found.offers) == 8
    assert all(offer.peer in swarm.nodes for offer in found.offers)


def test_shards_follow_the_size_of_their_class() -> None:
    swarm = many(43, KademliaSettings(k=8, find_width=4, advert_renew_seconds=60, advert_seconds=150))
    nodes = swarm.grow(40)
    for node in nodes:
        offering(swarm, node, advert())
    swarm.run(200)
    sizes: dict[bytes, set[PeerId]] = {}
    for node in swarm.nodes.values():
        for held in node.records:
            if held.expires > node.wall(swarm.now):
                sizes.setdefault(held.key, set()).add(held.publisher)
    assert max(len(publishers) for publishers in sizes.values()) <= 2 * SHARD_ADVERTS_MAX
    assert all(node._advertising.depths["cpu/1/"] >= 1 for node in nodes)
    for node in nodes[2:]:
        offering(swarm, node, None)
    swarm.run(900)
    assert nodes[0]._advertising.depths["cpu/1/"] == 0
    assert {offer.peer for offer in hunt(swarm, nodes[1], Query("cpu")).offers} == {nodes[0].peer}


def test_nodes_with_near_coordinates_are_asked_first() -> None:
    swarm = many(44, KademliaSettings(k=8, find_width=4))
    nodes = swarm.grow(20)
    for number, node in enumerate(nodes):
        offering(swarm, node, Advert(ADVERT_VERSION, "cpu", GB, 1e9, True, "", (), (float(number),)))
        swarm.run(1)
    swarm.run(10)
    nodes[0].estimate = lambda coordinates: coordinates[0]
    found = hunt(swarm, nodes[0], Query("cpu", count=4))
    assert {offer.advert.coordinates[0] for offer in found.offers} <= {1.0, 2.0, 3.0, 4.0, 5.0}


def test_a_search_near_a_place_lists_nodes_by_latency() -> None:
    """Five nodes of one region are near and nine are far. One of the far nodes claims to be the nearest, but
    its latency exposes it.
    """
    swarm = many(46, KademliaSettings(k=8, find_width=4))
    nodes = swarm.grow(16)
    near, liar, elsewhere = nodes[1:6], nodes[15], nodes[6]
    for number, node in enumerate(nodes):
        place = 0.0 if node is liar else 0.01 * number if node in near else 0.2
        region = "us" if node is elsewhere else "eu"
        offering(swarm, node, Advert(ADVERT_VERSION, "cpu", GB, 1e9, True, region, (), (place,)))
        swarm.run(1)
    swarm.run(10)
    swarm.far_seconds = {node.peer: 0.1 for node in nodes[6:]}
    nodes[0].estimate = lambda coordinates: coordinates[0]
    found = hunt(swarm, nodes[0], Query("cpu", near="eu", count=6))
    named = [offer.peer for offer in found.offers]
    assert set(named[:5]) == {node.peer for node in near}
    assert named[5:] == [liar.peer], "farther nodes were asked although nearer ones were enough"
    assert [offer.seconds for offer in found.offers] == sorted({offer.seconds for offer in found.offers})


def test_a_lone_nodes_search_ends_immediately_without_results() -> None:
    node = lone()
    node.advertise(0.0, advert())
    number, sends = node.hunt(0.0, Query("cpu"))
    assert sends == []
    assert node.events[-1] == CapabilitiesFound(number, ())


def test_concurrent_searches_are_bounded() -> None:
    swarm = Swarm(45)
    nodes = swarm.grow(3)
    for _ in range(70):
        nodes[0].hunt(swarm.now, Query("cpu"))
    (size, limit) = nodes[0].sizes["searches by capability"]
    assert size == limit
    assert any(isinstance(event, CapabilitiesFound) for event in nodes[0].events)
