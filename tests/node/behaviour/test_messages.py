"""Guarantees of every network about single messages, which are sent outside streams."""

import pytest
import trio

from crypto.errors import LocalProtocolError
from node.transport.router import ONE_SHOT_BYTES_MAX
from tests.node.behaviour.worlds import (
    OLD_TALK,
    TALK,
    World,
    arrival,
    content,
    on_both_networks,
    running,
    until,
)


@on_both_networks
async def test_a_message_reaches_the_inbox_of_its_protocol_and_can_be_answered(world: World) -> None:
    alice, bob = world.network("a"), world.network("b")
    alice.inbox(TALK), bob.inbox(TALK), bob.inbox(OLD_TALK)
    async with running(alice, bob):
        alice.send(bob.peer, TALK, b"hello")
        assert await arrival(bob) == (alice.peer, b"hello")
        bob.send(alice.peer, TALK, b"hello back")
        assert await arrival(alice) == (bob.peer, b"hello back")
        assert await bob.inbox(OLD_TALK).take(trio.current_time()) == []


@on_both_networks
async def test_messages_of_every_allowed_length_arrive_whole(
    world: World,
) -> None:
    alice, bob = world.network("a"), world.network("b")
    bob.inbox(TALK)
    async with running(alice, bob):
        for length in (0, 1, 1_000, 1_300, 5_000, ONE_SHOT_BYTES_MAX):
            alice.send(bob.peer, TALK, content(length % 256, length))
            assert await arrival(bob) == (alice.peer, content(length % 256, length))
        with pytest.raises(LocalProtocolError):
            alice.send(bob.peer, TALK, bytes(ONE_SHOT_BYTES_MAX + 1))


@on_both_networks
async def test_many_long_messages_sent_at_once_all_arrive(world: World) -> None:
    alice, bob = world.network("a"), world.network("b")
    inbox = bob.inbox(TALK)
    async with running(alice, bob):
        sent = {content(number, 50_000) for number in range(40)}
        for message in sent:
            alice.send(bob.peer, TALK, message)
        came: list[bytes] = []
        while len(came) < len(sent):
            taken = await inbox.take(trio.current_time() + 60)
            assert taken
            came += [message for _, message in taken]
        assert set(came) == sent


@on_both_networks
async def test_undeliverable_messages_are_counted_and_raise_no_error(
    world: World,
) -> None:
    alice, bob, stranger = world.network("a"), world.network("b"), world.network("s")
    async with running(alice, bob):
        alice.send(stranger.peer, TALK, b"to a peer without address")
        assert alice.counters["messages_without_address"] == 1
        for length in (10, 5_000):
            alice.send(bob.peer, TALK, bytes(length))
        await until(
            lambda: bob.counters["messages_refused_protocol"] + bob.counters["streams_refused_protocol"] == 2
        )


@on_both_networks
async def test_a_full_inbox_discards_messages_and_counts_them(world: World) -> None:
    alice, bob = world.network("a"), world.network("b")
    inbox = bob.inbox(TALK)
    async with running(alice, bob):
        while not bob.counters["inbox_full"]:
            # A kernel's buffer has room for all these messages.
            for number in range(64):
                alice.send(bob.peer, TALK, bytes(number))
            await trio.sleep(0.1)
        taken = await inbox.take(trio.current_time() + 60)
        assert len(taken) == world.inbox_max
        # The newest messages were discarded.
        assert sorted(taken[:64]) == [(alice.peer, bytes(number)) for number in range(64)]


@on_both_networks
async def test_a_waiting_take_ends_at_its_deadline_or_on_wake(world: World) -> None:
    alice = world.network("a")
    inbox = alice.inbox(TALK)
    async with running(alice):
        begun = trio.current_time()
        assert await inbox.take(begun + 5) == []
        assert trio.current_time() == pytest.approx(begun + 5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inbox.take, begun + 1_000)
            await trio.sleep(1)
            inbox.notify()
        assert trio.current_time() == pytest.approx(begun + 6)
