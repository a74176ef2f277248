"""Proof of work on node ids as a swarm's setting: new keys fulfil it, and ids that do not are ignored."""

import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from crypto.identity import Identity
from dht.work import has_work, work_of
from node import config
from node.config import resolve
from node.errors import UsageError
from node.quantities import Memory
from node.runtime import Node
from node.storage.budget import ScratchBudget
from node.storage.folder import locked_folder
from node.storage.keys import keys_of
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seams import SimNetworkFabric
from sim.seeds import seeded_identity
from tests.gossip.swarm import peer_of
from tests.node.simulated import SEED, simulated_node


def test_a_new_node_id_has_the_work_that_its_swarm_requires(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "data", ScratchBudget(Memory(bytes=1), tmp_path / "data")) as storage:
        keys = keys_of(storage, os.urandom, 6)
        assert keys.is_new
        assert has_work(keys.identity.peer, 6)
        again = keys_of(storage, os.urandom, 6)
        assert (again.is_new, again.identity.peer) == (False, keys.identity.peer)
        wanted = work_of(keys.identity.peer) + 1
        with pytest.raises(UsageError, match=f"swarm.work_bits requires {wanted}"):
            keys_of(storage, os.urandom, wanted)
        assert keys_of(storage, os.urandom, 6).identity.peer == keys.identity.peer, (
            "the existing key was overwritten"
        )


def test_the_setting_is_limited_in_file_flag_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("[swarm]\nwork_bits = 12\n")
    assert resolve({"config": str(path)}, {}).swarm.work_bits == 12
    assert resolve({"config": str(path)}, {"PEERLOOM_WORK_BITS": "3"}).swarm.work_bits == 3
    for wrong in ("33", "-1", "x", "1.5"):
        with pytest.raises(UsageError):
            resolve({}, {"PEERLOOM_WORK_BITS": wrong})


def test_an_id_without_work_enters_no_list_by_any_path() -> None:
    medium = SimNetworkFabric(SimLinks(NetworkModel(), 1))
    peers = [seeded_identity(SEED, number).peer for number in range(12)]
    able = [number for number in range(12) if has_work(peers[number], 1)]
    assert 2 < len(able) < 12
    unable = next(number for number in range(12) if number not in able)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:

            async def begin(number: int, bits: int) -> Node:
                swarm = config.SwarmSettings(preset="local", work_bits=bits)
                join = [first.network.addresses[0].short] if number != able[0] else []
                made = simulated_node(medium, number, *join, settings={"swarm": swarm})
                return await stack.enter_async_context(made)

            first = await begin(able[0], 1)
            members = [first, *[await begin(number, 1) for number in able[1:]]]
            outsider = await begin(unable, 0)
            await trio.sleep(30)
            for member in members:
                assert sorted(member.membership.live) == sorted(peers[number] for number in able)
                assert member.discovery._core.table.get(peers[unable]) is None
            assert await outsider.discovery.publish("user", b"k", b"v") <= 1
            assert await first.discovery.find("user", b"k") == ()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_work_is_checked_on_the_bits_of_the_node_id() -> None:
    found = [work_of(peer_of(number)) for number in range(4_096)]
    for bits in (1, 4, 8):
        share = sum(has_work(peer_of(number), bits) for number in range(4_096)) / 4_096
        assert 0.4 * 2**-bits < share < 2.0 * 2**-bits
    assert max(found) >= 8
    assert has_work(Identity(bytes(32)).peer, 0)
