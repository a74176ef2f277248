"""The membership service: its interface to the rest of a node, and what each call costs."""

from itertools import pairwise
from math import inf
from typing import Any

import pytest
import trio

from crypto.contact import Address
from crypto.encoding import encode
from crypto.identity import Identity, PeerId
from gossip.member import CandidateFound, FactsRefused, MemberUp, Status
from gossip.table import MemberRow, MemberTable
from node.seams import RealClock
from node.services.driver import BATCH_BYTES_MAX, Driver
from node.transport.network import RealNetwork
from tests.gossip.swarm import peer_of
from tests.stack import simulate, swarm


def test_no_event_builds_a_list_of_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    snapshot = MemberRow.snapshot

    def counted_snapshot(row: MemberRow) -> object:
        made.append("member")
        return snapshot(row)

    def counted_list(table: MemberTable) -> object:
        made.append("list")
        return tuple(map(counted_snapshot, table.rows.values()))

    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:
            node, other = group.nodes["a"], group.nodes["b"]
            monkeypatch.setattr(MemberRow, "snapshot", counted_snapshot)
            monkeypatch.setattr(MemberTable, "snapshot", counted_list)
            for number in range(100):
                event = MemberUp(peer_of(number), "x", (), b"", 1, other.peer)
                node.membership._on_event(event)
                assert node.joining._is_member(other.peer)
                assert not node.joining._is_member(peer_of(number))
            # Each event shows the member and the peer that found it.
            assert made.count("member") <= 200
            assert "list" not in made

    simulate(scenario)


def test_live_and_departed_members_are_distinguished() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            node, peers = group.nodes["a"], {name: node.peer for name, node in group.nodes.items()}
            live, gone = node.membership.live, node.membership.gone
            assert (list(live), len(live), list(gone)) == (sorted(peers.values()), 3, [])
            group.kill("b")
            await trio.sleep(10)
            assert (set(live), len(live)) == ({peers["a"], peers["c"]}, 2)
            assert (list(gone), len(gone)) == ([peers["b"]], 1)
            assert peers["b"] in gone
            assert peers["b"] not in live
            assert peer_of(1) not in gone

    simulate(scenario)


def test_candidates_are_pinged_at_claimed_addresses_and_false_ones_counted() -> None:
    async def scenario() -> None:
        async with swarm("ab") as group:
            node, liar = group.nodes["a"], group.nodes["b"].peer
            learnt: list[object] = []
            address = Address("ip4", "10.0.0.1", 9747)
            node.network.learn = lambda *said: learnt.append(said)  # type: ignore[method-assign]  # to look on
            node.membership._on_event(CandidateFound(peer_of(1), (address,), liar))
            assert learnt == [(peer_of(1), (address,))]
            assert node.membership._swim.status(peer_of(1)) is not Status.ALIVE
            before = node.counters.get("protocol_errors", 0)
            node.membership._on_event(FactsRefused(liar, "a forged fact"))
            assert node.counters["protocol_errors"] == before + 1

    simulate(scenario)


class Reader:
    """A core that accepts every message."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.deadline = inf
        self.count = 0

    def receive(self, now: float, sender: PeerId, message: bytes) -> list[Any]:
        del now, sender, message
        self.count += 1
        return []

    def wake(self, now: float) -> list[Any]:
        del now
        return []


async def test_other_tasks_run_while_a_backlog_is_read() -> None:
    core, clock = Reader(), RealClock()
    network = RealNetwork(Identity(bytes(32)), bytes(32), "test", clock=clock, entropy=bytes)
    driver = Driver(
        core,
        "/test/1",
        bytes,
        message_bytes_max=2 * BATCH_BYTES_MAX,
        network=network,
        clock=clock,
        publish=core.events.append,
        refuse=lambda _peer, error: pytest.fail(str(error)),
    )
    for _ in range(8):
        network.inbox("/test/1").put(peer_of(1), encode(bytes(BATCH_BYTES_MAX)))
    seen = []
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        while core.count < 8:
            await trio.lowlevel.checkpoint()
            seen.append(core.count)
        nursery.cancel_scope.cancel()
    assert all(after - before <= 2 for before, after in pairwise([0, *seen]))
