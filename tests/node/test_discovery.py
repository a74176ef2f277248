"""A node's records in the DHT, and how other nodes find them. Whole nodes in virtual time."""

import sqlite3
from pathlib import Path

import pytest
import trio

from gossip.member import MemberForgotten
from node.checkpoints.weights import WEIGHTS_PURPOSE, weights_name
from node.commands import Commands
from node.protocols.manifest import Run
from node.services.discovery import RECORD_SECONDS, RENEW_SECONDS
from node.services.metadata import encode_metadata, read_metadata
from tests.stack import Swarm, manifest, simulate, swarm, train


def test_every_node_finds_the_signed_records_of_all_others() -> None:
    async def scenario() -> None:
        async with swarm("abcd", preset="lan") as group:
            await trio.sleep(5)
            for owner in group.nodes.values():
                metadata = encode_metadata(owner.capacity, accepts_runs=True)
                await owner.discovery.publish("offer", owner.peer, metadata)
            for finder in group.nodes.values():
                for owner in group.nodes.values():
                    records = await finder.discovery.find("offer", owner.peer)
                    assert [record.publisher for record in records] == [owner.peer]
                    claim = read_metadata(records[0].value)
                    assert claim is not None
                    assert claim.flops_per_second == owner.capacity.flops_per_second

    simulate(scenario)


def test_records_are_stored_on_other_nodes_and_counted() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            await trio.sleep(5)
            assert await group.nodes["a"].discovery.publish("test", b"name", b"value") == 3
            group.kill("a")
            await trio.sleep(5)
            records = await group.nodes["c"].discovery.find("test", b"name")
            assert [record.value for record in records] == [b"value"]

    simulate(scenario)


def test_a_node_that_stops_closes_its_file_of_records() -> None:
    async def scenario() -> None:
        async with swarm("a") as group:
            file = group.nodes["a"].discovery._file
            assert file is not None
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
            file.save({})

    simulate(scenario)


def test_the_routing_table_knows_the_peers_that_membership_watches() -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            await trio.sleep(5)
            node, other = group.nodes["a"], group.nodes["b"].peer
            contact = node.discovery._core.table.get(other)
            assert contact is not None
            seen = [contact.watched]
            node.membership._on_event(MemberForgotten(other))
            assert [*seen, contact.watched] == [True, False]

    simulate(scenario)


def test_records_are_signed_again_well_before_they_expire() -> None:
    assert RENEW_SECONDS * 2 < RECORD_SECONDS


def test_an_outside_node_fetches_the_weights_that_most_holders_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with swarm("abcdefg", preset="lan") as group:
            run, _ = await train(group, "f", manifest(steps=1, replicas=1))
            await trio.sleep(5)
            outside = next(name for name in "abcdefg" if not keeps(group, name, run))
            liar = group.nodes[outside]
            await liar.discovery.publish(WEIGHTS_PURPOSE, bytes.fromhex(run.text), bytes(32))
            asker = next(name for name in "gfedcba" if name != outside and not keeps(group, name, run))
            out = tmp_path / "model.safetensors"
            fetch = Commands(group.nodes[asker]).handlers["runs.fetch"]
            await fetch({"run": run.text, "out": str(out)}, ignore)
            assert out.read_bytes() == group.nodes["f"].seams.storage.read(weights_name(run.text))

    simulate(scenario)


def keeps(group: Swarm, name: str, run: Run) -> bool:
    return group.nodes[name].seams.storage.read(weights_name(run.text)) is not None


async def ignore(_: object) -> None:
    """Discard a progress report."""
