"""What a node says of itself in the DHT, and what others find there. Whole nodes in virtual time."""

import trio

from node.runtime import CAPACITY_PURPOSE
from node.services.discovery import RECORD_SECONDS, RENEW_SECONDS
from node.services.membership import read_metadata
from tests.stack import simulate, swarm


def test_every_node_finds_every_capacity_in_the_dht_signed_by_its_owner() -> None:
    async def scenario() -> None:
        async with swarm("abcd") as group:
            await trio.sleep(5)
            for finder in group.nodes.values():
                for owner in group.nodes.values():
                    records = await finder.discovery.find(CAPACITY_PURPOSE, owner.peer)
                    assert [record.publisher for record in records] == [owner.peer]
                    claim = read_metadata(records[0].value)
                    assert claim is not None
                    assert claim.flops_per_second == owner.capacity.flops_per_second

    simulate(scenario)


def test_a_record_is_stored_by_others_and_counts_them() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            await trio.sleep(5)
            assert await group.nodes["a"].discovery.publish("test", b"name", b"value") == 3
            group.kill("a")
            await trio.sleep(5)
            records = await group.nodes["c"].discovery.find("test", b"name")
            assert [record.value for record in records] == [b"value"]

    simulate(scenario)


def test_records_are_signed_anew_well_before_they_expire() -> None:
    assert RENEW_SECONDS * 2 < RECORD_SECONDS
