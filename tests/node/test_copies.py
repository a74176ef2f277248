"""Copies of checkpoints: how the peers that keep them (keepers) are chosen, the transfer, and runs that
outlive all members that trained them.

Whole nodes in simulation, with the real DHT.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.checkpoints import replication as protocol
from node.checkpoints.replication import (
    COPIES_PROTOCOL,
    CheckpointOffer,
    CheckpointReplicator,
    Conclude,
    Here,
    Keep,
    Which,
    ask,
)
from node.checkpoints.service import Checkpoints
from node.content.blobs import BLOBS_PROTOCOL, BlobServer
from node.errors import StreamClosed, Unreachable
from node.protocols.checkpoint import StageState
from node.protocols.manifest import Run, make_run
from node.runtime import Node
from node.storage.blobs import Blobs
from partition.run.asks import Declined, Done
from partition.run.checkpoint_rounds import (
    COPIES,
    KEEP_SECONDS_MAX,
    NAME_SECONDS_MAX,
    checkpoint_holders,
)
from sim.peer_network import SimNetwork
from tests.node.saved import Saved, saved, use_small_chunks
from tests.stack import Swarm, simulate, swarm

# The choice of keepers


def peers(numbers: st.SearchStrategy[set[int]]) -> st.SearchStrategy[list[PeerId]]:
    return numbers.map(lambda several: [PeerId(bytes([number]) * 32) for number in sorted(several)])


rosters = peers(st.sets(st.integers(0, 40), max_size=20))


@given(st.binary(min_size=32, max_size=32), st.integers(0, 63), rosters, rosters)
def test_a_stage_gets_enough_keepers_in_addition_to_its_replicas(
    run: bytes, stage: int, roster: list[PeerId], replicas: list[PeerId]
) -> None:
    chosen = checkpoint_holders(run, stage, roster, replicas)
    assert len(chosen) == len(set(chosen)) == min(COPIES, len(roster))
    assert set(chosen) <= set(roster)
    assert chosen == checkpoint_holders(run, stage, [*reversed(roster), *roster], replicas)
    if set(roster) - set(replicas):
        assert set(chosen) - set(replicas)


@given(st.binary(min_size=32, max_size=32), rosters.filter(lambda roster: len(roster) > COPIES))
def test_the_share_of_a_departing_keeper_goes_to_one_peer(run: bytes, roster: list[PeerId]) -> None:
    chosen = checkpoint_holders(run, 0, roster, [])
    for gone in roster:
        left = checkpoint_holders(run, 0, [peer for peer in roster if peer != gone], [])
        assert set(chosen) - {gone} <= set(left)


def test_stages_are_spread_over_the_roster() -> None:
    roster = [PeerId(bytes([number]) * 32) for number in range(12)]
    counts = [
        sum(peer in checkpoint_holders(bytes(32), stage, roster, []) for stage in range(64))
        for peer in roster
    ]
    assert sum(counts) == 64 * COPIES
    assert min(counts) >= 6


# Keeping


@dataclass
class Keeper:
    """A node's parts for keeping checkpoints, assembled as in a node. They replace the node's own parts."""

    node: Node
    guest_bytes_max: int = 1 << 30
    admits: Callable[[PeerId, bytes], str | None] = lambda peer, run: None
    refused: list[PeerId] = field(default_factory=list)

    def __post_init__(self) -> None:
        seams = self.node.seams
        for name in (BLOBS_PROTOCOL, COPIES_PROTOCOL):
            cast("SimNetwork", seams.network)._handlers._handlers.pop(name)
        self.blobs = Blobs(seams.storage, guest_bytes_max=self.guest_bytes_max)
        self.checkpoints = Checkpoints(seams, self.node.signer, self.blobs, refuse=self.refuse)
        BlobServer(seams, self.blobs, refuse=self.refuse)
        self.copies = CheckpointReplicator(
            seams,
            self.checkpoints,
            self.node.discovery,
            admits=lambda peer, run: self.admits(peer, run),
            ours=lambda run: False,
            learn_graph=self.node.runs.models.get,
            refuse=self.refuse,
        )

    def refuse(self, peer: PeerId, error: RemoteProtocolError) -> None:
        self.refused.append(peer)

    @property
    def peer(self) -> PeerId:
        return self.node.peer

    async def snapshot(self, of: Saved, stage: int, step: int = 4) -> StageState:
        return await self.checkpoints.snapshot(
            of.run,
            step,
            stage,
            of.ranges[stage],
            memoryview(of.parameters[stage]),
            memoryview(of.moments[stage]),
            is_guest=False,
        )

    async def seal(self, of: Saved, states: list[StageState], step: int = 4) -> bytes:
        return await self.checkpoints.seal(
            of.run, of.plan, step=step, samples=step, stages=states, is_guest=False
        )

    def whole(self, run: Run) -> bool:
        kept = self.checkpoints.store.find(run.text)
        return kept is not None and kept.is_whole


Keepers = dict[str, Keeper]


@asynccontextmanager
async def keeping(names: str) -> AsyncIterator[tuple[Swarm, Keepers]]:
    async with swarm(names) as group:
        yield group, {name: Keeper(group.nodes[name]) for name in names}


def scenario(names: str, test: Callable[[Swarm, Keepers], Awaitable[None]]) -> None:
    async def main() -> None:
        async with keeping(names) as (group, all_keepers):
            await test(group, all_keepers)

    simulate(main)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_chunks(monkeypatch)


def run_by(keeper: Keeper, name: str = "gpt") -> Saved:
    """Return a run that this node requests, with its model stored on the node."""
    of = saved(name)
    of.run = make_run(keeper.node.signer, of.run.manifest)
    of.model.put(keeper.node)
    return of


async def keep_all(
    a: Keeper,
    of: Saved,
    step: int,
    states: list[StageState],
    holders: list[PeerId],
    wanted: list[list[PeerId]],
) -> tuple[list[PeerId], ...]:
    """Have `a` ask the peers `wanted[i]` to keep stage i, which they fetch from `holders[i]`. Return the
    peers that then have each stage."""
    have: tuple[list[PeerId], ...] = tuple([] for _ in states)

    async def go_through(peer: PeerId) -> None:
        for stage, state in enumerate(states):
            if peer in wanted[stage]:
                request = Keep(of.run.id, step, stage, state, (holders[stage],))
                with suppress(Unreachable):
                    if await a.copies.put(peer, request, KEEP_SECONDS_MAX) == Done():
                        have[stage].append(peer)

    async with trio.open_nursery() as nursery:
        for peer in dict.fromkeys(peer for each in wanted for peer in each):
            nursery.start_soon(go_through, peer)
    return have


async def name_all(a: Keeper, of: Saved, step: int, name: bytes, peers: list[PeerId]) -> list[PeerId]:
    """Send the name of a checkpoint that `a` sealed to these peers, and announce it in the DHT. Return the
    peers that accepted the name."""
    request = Conclude(of.run.id, step, name)
    taken = [
        peer
        for peer in peers
        if peer != a.peer and await a.copies.put(peer, request, NAME_SECONDS_MAX) == Done()
    ]
    await a.copies.announce(of.run.text, CheckpointOffer(step, name))
    return taken


async def spread(a: Keeper, b: Keeper, of: Saved, others: list[Keeper], step: int = 4) -> bytes:
    """Make a checkpoint of `a`, the committer with stage 0, and `b` with stage 1, and have `others` keep
    copies of both stages. Return its name."""
    states = [await a.snapshot(of, 0, step), await b.snapshot(of, 1, step)]
    wanted = [[other.peer for other in others]] * 2
    have = await keep_all(a, of, step, states, [a.peer, b.peer], wanted)
    assert [sorted(each) for each in have] == [sorted(each) for each in wanted]
    name = await a.seal(of, states, step)
    done = await name_all(a, of, step, name, [other.peer for other in others])
    assert sorted(done) == sorted(other.peer for other in others if other is not a)
    return name


def test_a_run_outlives_its_requester_and_all_its_replicas(tmp_path: Path) -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c, d, e = (several[name] for name in "abcde")
        of = run_by(a)
        name = await spread(a, b, of, [c, d])
        assert c.whole(of.run)
        assert d.whole(of.run)
        await trio.sleep(5)
        for gone in "abc":
            group.kill(gone)
        await trio.sleep(60)
        holders = await e.copies.holders(of.run.text)
        assert holders[d.peer] == CheckpointOffer(4, name)
        kept = await e.copies.fetch(of.run.text, None, list(holders))
        assert kept.is_whole
        assert await e.copies.holders(of.run.text) == {**holders, e.peer: CheckpointOffer(4, name)}
        for stage, state in enumerate(kept.checkpoint.stages):
            arenas = bytearray(state.parameters_bytes), bytearray(state.moments_bytes)
            await e.checkpoints.restore(state, memoryview(arenas[0]), memoryview(arenas[1]), [])
            assert arenas == (of.parameters[stage], of.moments[stage])
        graph = e.checkpoints.store.graph(kept.checkpoint.graph)
        assert graph == of.model.graph
        assert graph is not None
        size = await e.checkpoints.export(kept, graph, tmp_path / "out", [])
        assert size > sum(map(len, of.parameters))

    scenario("abcde", test)


def test_a_second_checkpoint_copies_only_changed_chunks() -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c = (several[name] for name in "abc")
        of = run_by(a)
        await spread(a, b, of, [a, c], step=3)
        before = c.node.seams.storage.sizes("blobs")
        of.parameters[1][0] ^= 1
        await spread(a, b, of, [a, c], step=4)
        new = c.node.seams.storage.sizes("blobs").keys() - before.keys()
        assert len(new) == 3, "more was copied than one chunk, its stage's list of chunks, and the manifest"
        assert a.whole(of.run)
        assert [step for step, _ in c.checkpoints.store.steps(of.run.text)] == [3, 4]
        assert a.refused == b.refused == c.refused == []

    scenario("abc", test)


def test_a_keeper_without_room_says_so_and_keeps_nothing() -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c = (several[name] for name in "abc")
        c.blobs.guest_bytes_max = 1_000
        of = run_by(a)
        states = [await a.snapshot(of, 0), await b.snapshot(of, 1)]
        wanted = [[c.peer, b.peer]] * 2
        have = await keep_all(a, of, 4, states, [a.peer, b.peer], wanted)
        assert have == ([b.peer], [b.peer])
        keep = Keep(of.run.id, 4, 0, states[0])
        reply = await ask(a.node.network, c.peer, keep, seconds=30)
        assert isinstance(reply, Declined)
        assert "at most 1000 are allowed" in reply.reason
        assert c.blobs.labels() == []
        name = await a.seal(of, states)
        assert await name_all(a, of, 4, name, [b.peer, c.peer]) == [b.peer]
        assert c.checkpoints.store.all() == []
        c.blobs.sweep()
        assert c.node.seams.storage.sizes("blobs") == {}

    scenario("abc", test)


def test_a_keeper_that_dies_midway_costs_only_its_copy() -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c, d = (several[name] for name in "abcd")
        of = run_by(a)
        states = [await a.snapshot(of, 0), await b.snapshot(of, 1)]

        async def kill() -> None:
            await trio.sleep(0.5)
            group.kill("c")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            have = await keep_all(a, of, 4, states, [a.peer, b.peer], [[c.peer, d.peer]] * 2)
        assert have == ([d.peer], [d.peer])

    scenario("abcd", test)


def test_a_stage_that_no_peer_hands_out_is_declined_and_not_kept() -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c = (several[name] for name in "abc")
        of = run_by(a)
        state = await b.snapshot(of, 1)
        group.kill("b")
        reply = await ask(a.node.network, c.peer, Keep(of.run.id, 4, 1, state, (b.peer,)), seconds=200)
        assert isinstance(reply, Declined)
        assert "could not be fetched" in reply.reason
        assert c.blobs.labels() == []

    scenario("abc", test)


def test_a_replica_that_misreports_its_state_gets_no_copies() -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c = (several[name] for name in "abc")
        of = run_by(a)
        states = [await a.snapshot(of, 0), await b.snapshot(of, 1)]
        lie = msgspec.structs.replace(states[1], digest=bytes(32))
        wanted = [[a.peer, c.peer]] * 2
        have = await keep_all(a, of, 4, [states[0], lie], [a.peer, b.peer], wanted)
        assert [sorted(each) for each in have] == [sorted(wanted[0]), []]
        assert c.refused == [], "a peer was blamed for a false digest that it only passed on"

    scenario("abc", test)


def test_peers_outside_a_run_cannot_make_a_node_keep_anything() -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c = (several[name] for name in "abc")
        of = run_by(a)
        states = [await a.snapshot(of, 0), await b.snapshot(of, 1)]
        c.admits = lambda peer, run: None if peer == b.peer else "only b may"
        keep = Keep(of.run.id, 4, 0, states[0])
        assert await ask(a.node.network, c.peer, keep, seconds=30) == Declined("only b may")
        assert await ask(b.node.network, c.peer, Keep(of.run.id, 4, 1, states[1]), seconds=30) == Done()
        # A name that a signed does not give access to the copy that was kept for b.
        await b.checkpoints.bring_stage(of.run.id, 4, 0, states[0], [a.peer], is_guest=False)
        name = await a.seal(of, states)
        conclude = Conclude(of.run.id, 4, name, (a.peer,))
        assert await ask(a.node.network, c.peer, conclude, seconds=30) == Declined("only b may")
        reply = await ask(b.node.network, c.peer, conclude, seconds=30)
        assert reply == Declined("its author: only b may")

    scenario("abc", test)


def test_named_checkpoints_are_not_displaced_by_later_ones() -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c = (several[name] for name in "abc")
        of = run_by(a)
        name = await spread(a, b, of, [c])
        kept = c.checkpoints.store.find(of.run.text)
        assert kept is not None
        states = kept.checkpoint.stages
        same = Keep(of.run.id, 4, 0, states[0])
        other = Keep(of.run.id, 4, 0, states[1])
        older = Keep(of.run.id, 3, 0, states[0])
        network = b.node.network
        assert await ask(network, c.peer, same, seconds=30) == Done()
        for request in (other, older):
            assert isinstance(await ask(network, c.peer, request, seconds=30), Declined)
        assert c.whole(of.run)
        # Step 5 has no name yet. The first copy stays until it gets a name or the node restarts.
        assert await ask(network, c.peer, Keep(of.run.id, 5, 0, states[0], (a.peer,)), seconds=30) == Done()
        replied = await ask(network, c.peer, Keep(of.run.id, 5, 0, states[1], (b.peer,)), seconds=30)
        assert replied == Declined("a different state of this step is kept here")
        with pytest.raises(Unreachable, match="no answer"):
            await ask(network, c.peer, Conclude(of.run.id, 5, name, (a.peer,)), seconds=30)
        assert c.refused == [b.peer], "the peer that sent the name of a different step was not refused"
        await c.copies.start()
        assert not [label for label in c.blobs.labels() if f"/{of.run.text}/5/" in label]
        assert c.whole(of.run)

    scenario("abc", test)


def test_a_conclusion_that_does_not_match_the_copies_is_refused() -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c = (several[name] for name in "abc")
        of = run_by(a)
        states = [await a.snapshot(of, 0), await b.snapshot(of, 1)]
        await keep_all(a, of, 4, states, [a.peer, b.peer], [[c.peer]] * 2)
        of.parameters[0][0] ^= 1
        other_states = [await a.snapshot(of, 0), states[1]]
        name = await a.seal(of, other_states)
        network = a.node.network
        reply = await ask(network, c.peer, Conclude(of.run.id, 4, name), seconds=30)
        assert reply == Declined("a different state of this step is kept here")
        lie = msgspec.structs.replace(states[0], digest=bytes(32))
        liar = await a.seal(of, [lie, states[1]])
        reply = await ask(network, c.peer, Conclude(of.run.id, 4, liar), seconds=30)
        assert reply == Declined("a different state of this step is kept here")
        nothing = await ask(network, c.peer, Conclude(of.run.id, 3, name), seconds=30)
        assert nothing == Declined("no part of it is kept here")
        no_checkpoint = a.blobs.put(b"no checkpoint at all")
        with pytest.raises(Unreachable, match="no answer"):
            await ask(network, c.peer, Conclude(of.run.id, 4, no_checkpoint), seconds=30)
        assert c.refused == [a.peer]
        assert c.checkpoints.store.all() == []

    scenario("abc", test)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(Which("../../etc/passwd")),
        encode(Which("0" * 17)),
        encode(Conclude(b"short", 1, bytes(32))),
        encode(Conclude(bytes(32), -1, bytes(32))),
        encode(Keep(bytes(32), 1, 64, StageState(0, 1, bytes(32), 1, 1, 1, bytes(32)))),
        encode(Keep(bytes(32), 1, 1, StageState(0, 1, bytes(32), 1 << 40, 1, 1, bytes(32)))),
        encode(Conclude(bytes(32), 1, bytes(32), (bytes(32),) * 65)),
        bytes(protocol.MESSAGE_BYTES_MAX + 1),
    ],
)
def test_malformed_requests_are_counted_and_not_answered(data: bytes) -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b = several["a"], several["b"]
        stream = await a.node.network.open(b.peer, COPIES_PROTOCOL)
        await stream.send(data)
        with pytest.raises(StreamClosed):
            await stream.receive()
        assert b.refused == [a.peer]

    scenario("ab", test)


def test_the_number_of_concurrent_requests_is_limited() -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b = several["a"], several["b"]
        streams = [
            await a.node.network.open(b.peer, COPIES_PROTOCOL)
            for _ in range(protocol.REQUESTS_PER_PEER_MAX + 1)
        ]
        await trio.sleep(1)
        await streams[-1].send(encode(Which("0" * 16)))
        reply: object = decode(await streams[-1].receive(), protocol.Reply, bytes_max=1_000)
        assert reply == Declined("busy: too many requests")
        await streams[0].send(encode(Which("0" * 16)))
        assert decode(await streams[0].receive(), protocol.Reply, bytes_max=1_000) == Here(())
        await trio.sleep(protocol.REQUEST_SECONDS_MAX + 1)
        assert len(b.copies._permits) == 0, "a stream without a request still has its permit"

    scenario("ab", test)


# Fetching


def test_a_checkpoint_is_fetched_by_its_step_or_as_the_newest() -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c, d = (several[name] for name in "abcd")
        of = run_by(a)
        for step in (1, 2, 3):
            of.parameters[0][0] ^= step
            await spread(a, b, of, [c], step=step)
        kept = await d.copies.fetch(of.run.text, 2, [c.peer])
        assert (kept.checkpoint.step, kept.is_whole) == (2, True)
        kept = await d.copies.fetch(of.run.text, None, [c.peer, b.peer])
        assert kept.checkpoint.step == 3
        with pytest.raises(Unreachable, match="there are those of steps 2, 3"):
            await d.copies.fetch(of.run.text, 1, [c.peer])
        with pytest.raises(Unreachable, match="nobody who answers keeps one"):
            await d.copies.fetch("ab" * 8, None, [c.peer, b.peer])

    scenario("abcd", test)


def test_a_liar_does_not_prevent_fetching_a_checkpoint() -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c, d, e = (several[name] for name in "abcde")
        of = run_by(a)
        name = await spread(a, b, of, [c, d])
        # b claims a later checkpoint, but its name belongs to an arbitrary blob.
        made_up = b.blobs.put(b"made up")
        b.node.seams.storage.write(f"runs/{of.run.text}/checkpoints/5", made_up)
        kept = await e.copies.fetch(of.run.text, None, [b.peer, c.peer, d.peer])
        assert kept.name == name
        # It is useless even if no other checkpoint of that step is known.
        with pytest.raises(Unreachable, match=r"not a valid message|could not be fetched"):
            await e.copies.fetch(of.run.text, 5, [b.peer])
        await c.copies.announce(of.run.text, CheckpointOffer(7, bytes(32)))
        await group.nodes["b"].discovery.publish(
            protocol.CHECKPOINT_PURPOSE, bytes.fromhex(of.run.text), b"\xff"
        )
        holders = await e.copies.holders(of.run.text)
        assert b.peer not in holders
        assert b.peer in e.refused

    scenario("abcde", test)


def test_a_damaged_blob_is_fetched_again_before_it_is_used(tmp_path: Path) -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c = (several[name] for name in "abc")
        of = run_by(a)
        await spread(a, b, of, [c])
        kept = c.checkpoints.store.find(of.run.text)
        assert kept is not None

        def damage() -> None:
            for hashes in c.checkpoints.store.stage_pins(of.run.text, 4).values():
                for name in (hashes[0], hashes[3]):
                    c.node.seams.storage.write(f"blobs/{name.hex()[:2]}/{name.hex()}", b"holed")

        damage()
        state = kept.checkpoint.stages[1]
        arenas = bytearray(state.parameters_bytes), bytearray(state.moments_bytes)
        await c.checkpoints.restore(state, memoryview(arenas[0]), memoryview(arenas[1]), [a.peer, b.peer])
        assert arenas == (of.parameters[1], of.moments[1])
        damage()
        out = tmp_path / "out"
        await c.checkpoints.export(kept, of.model.graph, out, [a.peer, b.peer])
        assert out.stat().st_size > sum(map(len, of.parameters))
        damage()
        with pytest.raises(Unreachable, match="could not be fetched"):
            await c.checkpoints.export(kept, of.model.graph, out, [])

    scenario("abc", test)


def test_every_message_stays_below_its_size_limit() -> None:
    top = 2**53
    state = StageState(2**16 - 2, 2**16 - 1, bytes(32), 1 << 20, 1 << 34, 1 << 35, bytes(32))
    keep = Keep(bytes(32), top, 63, state, (bytes(32),) * protocol.HOLDERS_MAX)
    assert len(encode(keep)) <= protocol.MESSAGE_BYTES_MAX
    assert msgspec.msgpack.decode(encode(keep), type=Keep) == keep
