"""Blobs are fetched from several peers: the peers share the work, and some of them die midway, lie, stall,
refuse or send garbage.

Most tests use virtual time and the simulated network; the last one repeats the scenario over real sockets.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.content import blobs as protocol
from node.content.blobs import (
    BLOBS_PROTOCOL,
    BlobAbsent,
    BlobServer,
    BlobSink,
    BlobsMissing,
    Busy,
    Found,
    Want,
    fetch_all,
)
from node.errors import StreamClosed, Unreachable
from node.executor import RealExecutor
from node.seams import Handler, RealClock, Seams, Stream
from node.storage.blobs import BLOB_BYTES_MAX, Blobs, hash_of
from node.storage.folder import FolderStorage
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seams import SimNetworkFabric, simulated_seams
from sim.storage import MemoryStorage
from tests.node.nets import acquaint, make_network, running
from tests.stack import simulate

Data = Mapping[bytes, bytes]


def some_blobs(count: int, size: int = 1_000) -> Data:
    rng = Random(count)
    several = [rng.randbytes(size) for _ in range(count)]
    return {hash_of(data): data for data in several}


def sizes_of(data: Data) -> dict[bytes, int]:
    return {name: len(each) for name, each in data.items()}


@dataclass
class Peer:
    """A simulated node with blobs that records which peers it rejected."""

    seams: Seams
    blobs: Blobs
    refused: list[tuple[PeerId, str]] = field(default_factory=list)

    @property
    def id(self) -> PeerId:
        return self.seams.network.peer

    def refuse(self, peer: PeerId, error: RemoteProtocolError) -> None:
        self.refused.append((peer, str(error)))

    def hold(self, data: Data, *names: bytes) -> None:
        for name in names or data:
            self.blobs.put(data[name])

    async def fetch(self, wanted: Mapping[bytes, int], *holders: "Peer") -> Mapping[PeerId, int]:
        return await fetch_all(
            self.seams.network,
            wanted,
            [holder.id for holder in holders],
            sink=BlobSink(self.blobs, self.seams.executor),
            refuse=self.refuse,
            clock=self.seams.clock,
        )


class Group:
    """The peers of one simulation."""

    def __init__(self, nursery: trio.Nursery, medium: SimNetworkFabric) -> None:
        self.medium = medium
        self.peers: list[Peer] = []
        self._nursery = nursery

    async def add(self, handler: Handler | None = None) -> Peer:
        """Add a peer that serves its blobs, or that answers with `handler` instead."""
        name = PeerId(bytes([len(self.peers) + 1]) * 32)
        seams = simulated_seams(self.medium, name, 1, MemoryStorage())
        peer = Peer(seams, Blobs(seams.storage))
        if handler is None:
            BlobServer(seams, peer.blobs, refuse=peer.refuse)
        else:
            seams.network.handle(BLOBS_PROTOCOL, handler)
        await self._nursery.start(seams.network.run)
        for other in self.peers:
            other.seams.network.learn(name, seams.network.addresses)
            seams.network.learn(other.id, other.seams.network.addresses)
        self.peers.append(peer)
        return peer


@asynccontextmanager
async def peers(model: NetworkModel | None = None) -> AsyncIterator[Group]:
    async with trio.open_nursery() as nursery:
        yield Group(nursery, SimNetworkFabric(SimLinks(model or NetworkModel(), 1)))
        nursery.cancel_scope.cancel()


def scenario(test: Callable[[Group], Awaitable[None]], model: NetworkModel | None = None) -> None:
    async def main() -> None:
        async with peers(model) as group:
            await test(group)

    simulate(main)


async def asked(stream: Stream) -> bytes:
    want: Want = decode(await stream.receive(), Want, bytes_max=64)
    return want.name


def test_all_holders_share_the_work_and_local_blobs_are_not_fetched() -> None:
    async def test(group: Group) -> None:
        data = some_blobs(90)
        one = await group.add()
        holders = [await group.add() for _ in range(3)]
        for holder in holders:
            holder.hold(data)
        names = list(data)
        one.hold(data, *names[:30])
        delivered = await one.fetch(sizes_of(data), *holders, one)
        assert all(one.blobs.get(name) == data[name] for name in names)
        assert sum(delivered.values()) == 60 * 1_000
        assert set(delivered) == {holder.id for holder in holders}
        assert min(delivered.values()) >= 10 * 1_000
        assert await one.fetch(sizes_of(data), *holders) == {}
        assert one.refused == []

    scenario(test)


def test_requests_are_pipelined() -> None:
    async def test(group: Group) -> None:
        data = some_blobs(40)
        one, holder = await group.add(), await group.add()
        holder.hold(data)
        began = trio.current_time()
        await one.fetch(sizes_of(data), holder)
        # A round trip takes 50 ms. The handshake takes four of them, and the requests, four at a time, at
        # most ten.
        assert trio.current_time() - began <= 0.2 + 0.1 * (40 / protocol.IN_FLIGHT_MAX) + 0.01

    scenario(test)


def test_holders_of_different_blobs_complete_each_other() -> None:
    async def test(group: Group) -> None:
        data = some_blobs(60)
        names = list(data)
        one = await group.add()
        first, second, none = [await group.add() for _ in range(3)]
        first.hold(data, *names[:30])
        second.hold(data, *names[30:])
        delivered = await one.fetch(sizes_of(data), none, first, second)
        assert delivered == {first.id: 30_000, second.id: 30_000}

    scenario(test)


def test_missing_blobs_are_named_and_all_others_arrive() -> None:
    async def test(group: Group) -> None:
        data = some_blobs(10)
        names = list(data)
        one, two, three = [await group.add() for _ in range(3)]
        two.hold(data, *names[:4])
        three.hold(data, *names[2:8])
        with pytest.raises(BlobsMissing, match="2 blobs could not be fetched") as error:
            await one.fetch(sizes_of(data), two, three)
        assert set(error.value.missing) == set(names[8:])
        assert isinstance(error.value, Unreachable)
        assert one.blobs.missing(names) == names[8:]
        with pytest.raises(BlobsMissing, match="no peer is known"):
            await one.fetch(sizes_of(data))

    scenario(test)


def test_a_peer_that_has_no_blob_is_asked_only_a_few_times() -> None:
    async def test(group: Group) -> None:
        questions = 0

        async def empty(stream: Stream) -> None:
            nonlocal questions
            while True:
                await asked(stream)
                questions += 1
                await stream.send(encode(BlobAbsent()))

        wanted = sizes_of(some_blobs(2 * protocol.MISSES_MAX, 10))
        one, other = await group.add(), await group.add(empty)
        with pytest.raises(BlobsMissing, match="it is not there"):
            await one.fetch(wanted, other)
        assert questions <= protocol.MISSES_MAX + protocol.IN_FLIGHT_MAX

    scenario(test)


def test_other_holders_take_over_the_share_of_one_that_dies() -> None:
    async def test(group: Group) -> None:
        data = some_blobs(200)
        one = await group.add()
        holders = [await group.add() for _ in range(3)]
        for holder in holders:
            holder.hold(data)

        async def kill() -> None:
            await trio.sleep(0.6)
            group.medium.kill(holders[0].id)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            delivered = await one.fetch(sizes_of(data), *holders)
        assert one.blobs.missing(data) == []
        assert 0 < delivered[holders[0].id] < min(delivered[holder.id] for holder in holders[1:])

    scenario(test)


def misbehaving(*messages: bytes) -> Handler:
    async def serve(stream: Stream) -> None:
        while True:
            await asked(stream)
            for message in messages:
                await stream.send(message)

    return serve


async def answer(stream: Stream, data: bytes) -> None:
    await stream.send(encode(Found(len(data))))
    await stream.send(data)


LIES = {
    "another blob": (encode(Found(14)), b"something else"),
    "less than announced": (encode(Found(14)), b"short"),
    "more than announced": (encode(Found(14)), bytes(15)),
    "too much": (encode(Found(BLOB_BYTES_MAX)), bytes(BLOB_BYTES_MAX)),
    "more than a blob may be": (encode(Found(BLOB_BYTES_MAX + 1)),),
    "more than an answer may be": (bytes(protocol.REPLY_BYTES_MAX + 1),),
    "no message": (b"\xc1\xc1",),
    "empty": (b"",),
    "another message": (encode(Want(bytes(32))),),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_holder_that_sends_wrong_bytes_is_counted_and_replaced(lie: str) -> None:
    async def test(group: Group) -> None:
        data = some_blobs(20)
        one, good = await group.add(), await group.add()
        bad = await group.add(misbehaving(*LIES[lie]))
        good.hold(data)
        delivered = await one.fetch(sizes_of(data), bad, good)
        assert delivered == {good.id: 20_000}
        assert [peer for peer, _ in one.refused] == [bad.id]
        with pytest.raises(BlobsMissing):
            await one.fetch({bytes(32): 100}, bad)

    scenario(test)


def test_a_blob_longer_than_announced_is_refused() -> None:
    async def test(group: Group) -> None:
        data = some_blobs(1)
        one, other = await group.add(), await group.add()
        other.hold(data)
        with pytest.raises(BlobsMissing):
            await one.fetch(dict.fromkeys(data, 999), other)
        assert one.blobs.bytes_here == 0
        assert len(one.refused) == 1

    scenario(test)


def test_blobs_of_a_silent_holder_are_soon_requested_from_another() -> None:
    async def test(group: Group) -> None:
        async def silent(stream: Stream) -> None:
            await trio.sleep_forever()

        data = some_blobs(20)
        one, good, bad = await group.add(), await group.add(), await group.add(silent)
        good.hold(data)
        began = trio.current_time()
        await one.fetch(sizes_of(data), bad, good)
        assert one.blobs.missing(data) == []
        assert trio.current_time() - began < 2 * protocol.HEDGE_SECONDS, (
            "the fetch waited until the silent holder was given up"
        )
        began = trio.current_time()
        with pytest.raises(BlobsMissing, match="no answer in 30 s"):
            await one.fetch({bytes(32): 1}, bad)
        assert trio.current_time() - began < protocol.STALL_SECONDS_MAX + 1
        assert one.refused == [], "the slow holder was reported as a liar"

    scenario(test)


def test_a_blob_that_arrives_twice_does_no_harm() -> None:
    async def test(group: Group) -> None:
        data = some_blobs(9)

        async def slow(stream: Stream) -> None:
            while True:
                name = await asked(stream)
                await trio.sleep(protocol.HEDGE_SECONDS + 0.3)
                await answer(stream, data[name])

        one = await group.add()
        holders = [await group.add(slow) for _ in range(2)]
        delivered = await one.fetch(sizes_of(data), *holders)
        assert one.blobs.missing(data) == []
        assert sum(delivered.values()) >= 9_000
        assert one.refused == []

    scenario(test)


def test_holders_that_refuse_or_are_unreachable_are_skipped() -> None:
    async def test(group: Group) -> None:
        async def busy(stream: Stream) -> None:
            await asked(stream)
            await stream.send(encode(Busy()))

        async def hang_up(stream: Stream) -> None:
            return

        data = some_blobs(5)
        one, good = await group.add(), await group.add()
        others = [await group.add(handler) for handler in (busy, hang_up)]
        gone = await group.add()
        group.medium.kill(gone.id)
        good.hold(data)
        delivered = await one.fetch(sizes_of(data), *others, gone, good)
        assert delivered == {good.id: 5_000}
        with pytest.raises(BlobsMissing, match=r"(?=.*busy)(?=.*closed)(?=.*not running)"):
            await one.fetch({bytes(32): 1}, *others, gone)

    scenario(test)


def test_a_fetch_asks_few_holders_at_a_time_and_reserves_others() -> None:
    async def test(group: Group) -> None:
        open_now = most = 0

        async def watched(stream: Stream) -> None:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            try:
                while True:
                    await asked(stream)
                    await stream.send(encode(BlobAbsent()))
            finally:
                open_now -= 1

        data = some_blobs(30)
        one = await group.add()
        empty = [await group.add(watched) for _ in range(3 * protocol.PARALLEL_MAX)]
        last = await group.add()
        last.hold(data)
        assert await one.fetch(sizes_of(data), *empty, last) == {last.id: 30_000}
        assert 1 < most <= protocol.PARALLEL_MAX

    scenario(test)


def test_a_full_disk_ends_the_fetch_with_the_disks_error() -> None:
    class Full(MemoryStorage):
        def write_soon(self, name: str, data: bytes | memoryview) -> None:
            raise OSError("no space left")

    async def test(group: Group) -> None:
        data = some_blobs(20)
        one, two, three = [await group.add() for _ in range(3)]
        two.hold(data)
        three.hold(data)
        one.blobs = Blobs(Full())
        with pytest.raises(OSError, match="no space left"):
            await one.fetch(sizes_of(data), two, three)

    scenario(test)


# The server


def test_a_damaged_blob_counts_as_missing_and_the_stream_continues() -> None:
    async def test(group: Group) -> None:
        one, two = await group.add(), await group.add()
        name = two.blobs.put(b"whole")
        two.seams.storage.write(f"blobs/{name.hex()[:2]}/{name.hex()}", b"holed")
        other = two.blobs.put(b"another")
        stream = await one.seams.network.open(two.id, BLOBS_PROTOCOL)
        for each in (name, bytes(32), other):
            await stream.send(encode(Want(each)))
        replies = [await stream.receive() for _ in range(4)]
        assert replies == [encode(BlobAbsent()), encode(BlobAbsent()), encode(Found(7)), b"another"]

    scenario(test)


@pytest.mark.parametrize("request_bytes", [b"", b"\xff", encode(Want(b"short")), bytes(65)])
def test_a_client_that_sends_garbage_is_counted_and_disconnected(request_bytes: bytes) -> None:
    async def test(group: Group) -> None:
        one, two = await group.add(), await group.add()
        stream = await one.seams.network.open(two.id, BLOBS_PROTOCOL)
        await stream.send(request_bytes)
        with pytest.raises(StreamClosed):
            await stream.receive()
        assert [peer for peer, _ in two.refused] == [one.id]

    scenario(test)


def test_streams_are_limited_per_peer_and_overall_and_idle_ones_end() -> None:
    async def test(group: Group) -> None:
        server = await group.add()
        name = server.blobs.put(b"x")
        clients = [await group.add() for _ in range(12)]

        async def ask(client: Peer) -> tuple[Stream, object]:
            stream = await client.seams.network.open(server.id, BLOBS_PROTOCOL)
            await stream.send(encode(Want(name)))
            reply: object = decode(await stream.receive(), protocol.Reply, bytes_max=100)
            if isinstance(reply, Found):
                assert await stream.receive() == b"x"
            return stream, reply

        first = [await ask(clients[0]) for _ in range(protocol.UPLOADS_PER_PEER_MAX + 1)]
        assert [reply for _, reply in first] == [Found(1)] * protocol.UPLOADS_PER_PEER_MAX + [Busy()]
        served: set[PeerId] = set()

        async def ask_also(client: Peer) -> None:
            with suppress(StreamClosed):  # clients that share an address get fewer streams
                if (await ask(client))[1] == Found(1):
                    served.add(client.id)

        # all together, so that no time-out ends a stream meanwhile
        async with trio.open_nursery() as nursery:
            for client in clients[1:]:
                for _ in range(protocol.UPLOADS_PER_PEER_MAX):
                    nursery.start_soon(ask_also, client)
        assert served == {client.id for client in clients[1:]}, "a client got no stream at all"
        await trio.sleep(protocol.IDLE_SECONDS_MAX + 1)
        with pytest.raises(StreamClosed):
            await first[0][0].receive()
        assert (await ask(clients[-1]))[1] == Found(1)

    scenario(test)


def test_idle_streams_make_room_for_a_client_with_a_request() -> None:
    async def test(group: Group) -> None:
        server = await group.add()
        name = server.blobs.put(b"x")
        crowd = [await group.add() for _ in range(protocol.UPLOADS_MAX // protocol.UPLOADS_PER_PEER_MAX)]
        honest = await group.add()
        for peer in crowd:
            for _ in range(protocol.UPLOADS_PER_PEER_MAX):
                await peer.seams.network.open(server.id, BLOBS_PROTOCOL)
        await trio.sleep(protocol.PATIENCE_SECONDS)
        await honest.fetch({name: 1}, server)
        assert honest.blobs.get(name) == b"x"

    scenario(test)


def test_a_peer_that_never_reads_loses_its_streams() -> None:
    async def test(group: Group) -> None:
        server, slow = [await group.add() for _ in range(2)]
        name = server.blobs.put(bytes(BLOB_BYTES_MAX))
        streams = [await slow.seams.network.open(server.id, BLOBS_PROTOCOL) for _ in range(4)]
        for stream in streams:
            for _ in range(10):
                await stream.send(encode(Want(name)))
        await trio.sleep(protocol.SEND_SECONDS_MAX + 2)
        again = await slow.seams.network.open(server.id, BLOBS_PROTOCOL)
        await again.send(encode(Want(name)))
        assert isinstance(decode(await again.receive(), protocol.Reply, bytes_max=1 << 22), Found)

    scenario(test)


# Real sockets


async def test_a_fetch_completes_despite_dead_lying_and_stalled_holders(tmp_path: Path) -> None:
    executor = RealExecutor(2)
    data = some_blobs(60, 200_000)
    networks = [make_network(letter) for letter in "abcdef"]
    asker, good, better, dying, lying, stalling = networks
    refused: list[PeerId] = []

    def refuse(peer: PeerId, error: RemoteProtocolError) -> None:
        refused.append(peer)

    def blobs_in(name: str) -> Blobs:
        return Blobs(FolderStorage(tmp_path / name))

    for network, name in ((good, "good"), (better, "better")):
        blobs = blobs_in(name)
        for each in data.values():
            blobs.put(each)
        seams = Seams(network, RealClock(), Random(1), os.urandom, executor, FolderStorage(tmp_path / name))
        BlobServer(seams, blobs, refuse=refuse)

    async def die(stream: Stream) -> None:
        for _ in range(3):
            await answer(stream, data[await asked(stream)])

    async def stall(stream: Stream) -> None:
        await trio.sleep_forever()

    dying.handle(BLOBS_PROTOCOL, die)
    lying.handle(BLOBS_PROTOCOL, misbehaving(*LIES["another blob"]))
    stalling.handle(BLOBS_PROTOCOL, stall)
    mine = blobs_in("mine")
    async with running(*networks):
        acquaint(*networks)
        delivered = await fetch_all(
            asker,
            sizes_of(data),
            [stalling.peer, lying.peer, dying.peer, good.peer, better.peer],
            sink=BlobSink(mine, executor),
            refuse=refuse,
            clock=RealClock(),
        )
    assert mine.missing(data) == []
    assert all(mine.get(name) == each for name, each in data.items())
    assert delivered[dying.peer] <= 3 * 200_000
    assert refused == [lying.peer]
    assert blobs_in("mine").missing(data) == []
