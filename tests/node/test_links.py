"""Links, the queues of messages to each peer: with and without payloads, over the real network and to the
node itself."""

import numpy as np
import trio

from crypto.identity import PeerId
from node.pipeline.links import FormerVersion, Links
from node.seams import RealClock, Stream
from tests.node.nets import BULK, acquaint, make_network, running, until
from tests.node.test_relays import behind_a_relay

Arrived = tuple[PeerId, bytes, bytes]


async def test_a_link_carries_messages_and_payloads_in_order() -> None:
    alice, bob = make_network("a"), make_network("b")
    put, take = trio.open_memory_channel[Arrived](10)

    async def deliver(peer: PeerId, message: bytes, payload: memoryview | None = None) -> None:
        await put.send((peer, message, bytes(payload or b"")))

    async def serve(stream: Stream) -> None:
        while True:
            await deliver(stream.peer, *await stream.receive_with_payload(10**6))

    bob.handle(BULK, serve)
    links = Links(
        alice, BULK, RealClock(), deliver=deliver, on_reconnected=lambda _: None, on_stuck=lambda _: None
    )
    tensor = np.arange(100_000, dtype=np.float32).reshape(100, 1_000)
    async with running(alice, bob), trio.open_nursery() as nursery:
        acquaint(alice, bob)
        await nursery.start(links.run)
        for peer in (bob.peer, alice.peer):
            links.send(peer, b"no payload")
            links.send(peer, b"one piece", tensor.data)
            links.send(peer, b"two pieces", b"two ", memoryview(b"pieces"))
            with trio.fail_after(20):
                arrived = [await take.receive() for _ in range(3)]
            assert arrived == [
                (alice.peer, b"no payload", b""),
                (alice.peer, b"one piece", tensor.tobytes()),
                (alice.peer, b"two pieces", b"two pieces"),
            ]
        nursery.cancel_scope.cancel()


async def test_a_link_moves_to_a_direct_path_without_loss_or_reordering() -> None:
    count, reconnected = 400, list[PeerId]()
    arrived = list[int]()

    async def serve(stream: Stream) -> None:
        while True:
            message, payload = await stream.receive_with_payload(10**5)
            assert len(payload) == 10**4
            arrived.append(int(message))

    async def deliver(*_: object) -> None:
        raise AssertionError

    async with behind_a_relay() as world, trio.open_nursery() as nursery:
        world.hidden.handle("/peerloom/moving/1", serve)
        links = Links(
            world.guest,
            "/peerloom/moving/1",
            RealClock(),
            deliver=deliver,
            on_reconnected=reconnected.append,
            on_stuck=reconnected.append,
        )
        await nursery.start(links.run)
        await until(lambda: bool(world.hidden.circuits))
        for number in range(count):
            links.send(world.hidden.peer, str(number).encode(), bytes(10**4))
            await trio.sleep(0.001)
            if number == count // 4:
                world.hidden.learn(world.guest.peer, world.guest.addresses)
                await world.hidden.multiplexed.offer(world.guest.peer)
        await until(lambda: len(arrived) == count)
        assert arrived == list(range(count))
        assert not reconnected
        assert world.server.ledger.carried_bytes < count // 2 * 10**4
        nursery.cancel_scope.cancel()


async def test_a_link_speaks_the_older_protocol_version_of_a_peer() -> None:
    alice, bob = make_network("a"), make_network("b")
    put, take = trio.open_memory_channel[Arrived](10)
    found: list[PeerId] = []

    async def deliver(peer: PeerId, message: bytes, payload: memoryview | None = None) -> None:
        await put.send((peer, message, bytes(payload or b"")))

    async def serve(stream: Stream) -> None:
        while True:
            await deliver(stream.peer, *await stream.receive_with_payload(10**6))

    bob.handle(BULK, serve)
    former = FormerVersion(BULK, lambda message: message.upper(), found.append)
    links = Links(
        alice,
        "/test/newer/2",
        RealClock(),
        deliver=deliver,
        on_reconnected=lambda _: None,
        on_stuck=lambda _: None,
        former=former,
    )
    async with running(alice, bob), trio.open_nursery() as nursery:
        acquaint(alice, bob)
        await nursery.start(links.run)
        links.send(bob.peer, b"a message", b"a payload")
        with trio.fail_after(20):
            assert await take.receive() == (alice.peer, b"A MESSAGE", b"a payload")
        assert found == [bob.peer]
        nursery.cancel_scope.cancel()
