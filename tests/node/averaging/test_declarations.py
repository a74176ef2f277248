"""More peers declare themselves under one name than one DHT key holds. Whole nodes in virtual time."""

from functools import partial

import trio

from crypto.identity import PeerId
from dht.settings import KademliaSettings
from node.averaging.declarations import Declarations
from node.seams import Parts
from node.services.discovery import Discovery
from sim.worlds.scheduling import run_virtually
from tests.stack import Swarm, swarm

KEPT = 4
"""Maximum number of records per key in these tests (64 in production), so that few publishers fill a key."""
NAMES = "abcdefghijkl"
NAME = bytes(32)


SMALL: Parts = {Discovery: partial(Discovery, settings=KademliaSettings(records_per_key_max=KEPT))}


def declarations(group: Swarm) -> dict[str, Declarations]:
    nodes = group.nodes.items()
    return {name: Declarations(node.discovery, node.peer, "test", NAME) for name, node in nodes}


async def settle(found: list[Declarations], looks: int = 5) -> list[set[PeerId]]:
    """Have all peers declare themselves and look at the same time, as participants do. Return the final view
    of each."""
    seen: dict[int, set[PeerId]] = {}

    async def follow(place: int) -> None:
        for _ in range(looks):
            await found[place].declare(b"")
            seen[place] = set(await found[place].look())
            await trio.sleep(1.0)

    async with trio.open_nursery() as nursery:
        for place in range(len(found)):
            nursery.start_soon(follow, place)
    return [seen[place] for place in range(len(found))]


def test_all_declared_peers_are_seen_beyond_the_capacity_of_a_key() -> None:
    async def play() -> None:
        async with swarm(NAMES, parts=SMALL) as group:
            seen = await settle(list(declarations(group).values()))
            everybody = {node.peer for node in group.nodes.values()}
            assert all(each == everybody for each in seen), [len(each) for each in seen]
            for node in group.nodes.values():  # no key was asked to hold more than its limit
                assert len(await node.discovery.find("test", NAME)) < len(NAMES)

    run_virtually(play)


def test_records_of_departed_peers_do_not_hide_others() -> None:
    async def play() -> None:
        async with swarm(NAMES, parts=SMALL) as group:
            all_of_them = declarations(group)
            await settle([all_of_them[name] for name in NAMES[:KEPT]], 2)
            for name in NAMES[:KEPT]:
                group.kill(name)
            late = NAMES[KEPT:]
            seen = await settle([all_of_them[name] for name in late])
            alive = {group.nodes[name].peer for name in late}
            assert all(each >= alive for each in seen), [len(each & alive) for each in seen]

    run_virtually(play)
