"""Guarantees of every network about a peer's addresses and about how other peers learn them."""

import pytest
import trio

from crypto.contact import ADDRESSES_MAX, make_address
from node.errors import StreamEnded, Unreachable
from node.seams import Stream
from tests.node.behaviour.worlds import TALK, World, arrival, conversation, echo, on_both_networks, running


@on_both_networks
async def test_the_address_that_a_network_announces_leads_to_its_peer(world: World) -> None:
    alice, bob = world.network("a"), world.network("b")
    async with trio.open_nursery() as nursery:
        for network in (alice, bob):
            await nursery.start(network.run)
        assert bob.addresses
        for address in bob.addresses:
            assert address.peer == bob.peer
            assert await alice.identify(address.of(None)) == bob.peer
        # From now on alice can send to the peer that she found there.
        bob.inbox(TALK)
        alice.send(bob.peer, TALK, b"found")
        assert await arrival(bob) == (alice.peer, b"found")
        nursery.cancel_scope.cancel()


@on_both_networks
async def test_both_ends_of_a_stream_see_the_others_host(
    world: World,
) -> None:
    seen = []

    async def look(stream: Stream) -> None:
        seen.append(stream.source)
        await echo(stream)

    async with conversation(world, look) as (stream, alice, bob):
        await stream.send(b"?")
        await stream.receive()
        assert stream.source == bob.addresses[0].of(None)
        (source,) = seen
        assert source is not None
        assert (source.host, source.peer) == (alice.addresses[0].host, None)
        assert source.port not in [address.port for address in alice.addresses]


@on_both_networks
async def test_opening_a_stream_reveals_no_listening_address(world: World) -> None:
    reached: list[str] = []

    async def answer(stream: Stream) -> None:
        try:
            await bob.open(stream.peer, TALK)
        except Unreachable as error:
            reached.append(error.reason)
        bob.send(stream.peer, TALK, b"are you there?")

    alice, bob = world.network("a"), world.network("b")
    bob.handle(TALK, answer)
    async with trio.open_nursery() as nursery:
        for network in (alice, bob):
            await nursery.start(network.run)
        alice.learn(bob.peer, bob.addresses)
        stream = await alice.open(bob.peer, TALK)
        with pytest.raises(StreamEnded):
            await stream.receive()
        assert reached == ["unknown"]
        assert bob.counters["messages_without_address"] == 1
        nursery.cancel_scope.cancel()


@on_both_networks
async def test_announced_addresses_are_stored_once_and_limited(world: World) -> None:
    alice = world.network("a")
    async with running(alice):
        own = alice.addresses
        elsewhere = make_address("198.51.100.7", 9747)
        for _ in range(2):
            alice.announce(elsewhere)
        assert alice.addresses == (*own, elsewhere.of(alice.peer))
        for number in range(2 * ADDRESSES_MAX):
            alice.announce(newest := make_address("198.51.100.8", 1 + number))
        assert len(alice.addresses) == ADDRESSES_MAX
        assert alice.addresses[: len(own) + 1] == (*own, newest.of(alice.peer))


@on_both_networks
async def test_a_hidden_peers_claimed_address_is_wrong_and_unreachable(world: World) -> None:
    hidden, bob = world.hidden("h"), world.network("b")
    hidden.handle(TALK, echo)
    bob.handle(TALK, echo)
    inbox = hidden.inbox(TALK)
    bob.inbox(TALK)
    async with trio.open_nursery() as nursery:
        for network in (hidden, bob):
            await nursery.start(network.run)
        outside = world.outside(hidden)
        assert outside.host not in [address.host for address in hidden.addresses]
        bob.learn(hidden.peer, [outside])
        hidden.learn(bob.peer, bob.addresses)
        with pytest.raises(Unreachable):
            await bob.identify(outside)
        with pytest.raises(Unreachable):
            await bob.open(hidden.peer, TALK)
        bob.send(hidden.peer, TALK, b"too early")
        assert await inbox.take(trio.current_time() + 5) == []
        # The hidden peer can dial out, and the other peer can answer on that stream.
        stream = await hidden.open(bob.peer, TALK)
        await stream.send(b"hello")
        assert await stream.receive() == b"hello"
        hidden.send(bob.peer, TALK, b"a question")
        assert await arrival(bob) == (hidden.peer, b"a question")
        bob.send(hidden.peer, TALK, b"an answer")
        came: list[bytes] = []
        while b"an answer" not in came:
            taken = await inbox.take(trio.current_time() + 60)
            assert taken
            came += [data for _, data in taken]
        # Messages that were undeliverable before may now arrive, or never.
        assert set(came) <= {b"too early", b"an answer"}
        nursery.cancel_scope.cancel()


@on_both_networks
async def test_a_node_may_know_its_reachability_without_asking(world: World) -> None:
    alice, hidden = world.network("a"), world.hidden("h")
    assert alice.reachable in (True, None)
    assert hidden.reachable is None
