"""A node reaches the same verdict on its reachability on every network: `node.services.autonat` runs on
both."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

import trio

from crypto.contact import Address
from crypto.encoding import decode, encode
from node.seams import Network, RealClock
from node.services.autonat import PROTOCOL, Echo, ReachService, ask_dial_back
from node.services.autonat_core import OTHERS, REACH
from tests.node.behaviour.worlds import TALK, World, arrival, echo, on_both_networks

CLOCK = RealClock()
Found = tuple[bool | None, int, tuple[Address, ...]]


@asynccontextmanager
async def asking(network: Network, others: Sequence[Network]) -> AsyncIterator[list[Found]]:
    """A network that knows the other peers. They serve it as dial-back servers: it asks them and records
    their verdicts."""
    told: list[Found] = []
    async with trio.open_nursery() as nursery:
        for each in (network, *others):
            await nursery.start(each.run)
        for other in others:
            ReachService(other, CLOCK, counters=Counter())
            network.learn(other.peer, other.addresses)
        reach = ReachService(network, CLOCK, counters=Counter())
        peers = [network.peer, *(other.peer for other in others)]

        def changed(verdict: bool | None, asked: int, unknown: tuple[Address, ...]) -> None:
            told.append((verdict, asked, unknown))

        nursery.start_soon(reach.run, Random(1), lambda: peers, changed)
        yield told
        nursery.cancel_scope.cancel()


def strangers(world: World) -> list[Network]:
    """Return peers in as many different networks as are needed to confirm an address."""
    return [world.network(letter, abroad=number) for number, letter in enumerate("xyz"[:OTHERS], 1)]


@on_both_networks
async def test_a_dial_back_confirms_addresses_and_reports_the_outer_one(world: World) -> None:
    alice, bob = world.network("a"), world.network("b")
    async with asking(alice, [bob]):
        report = await ask_dial_back(alice, CLOCK, bob.peer)
        assert report.worked == tuple(address.of(None) for address in alice.addresses)
        assert report.outcomes == tuple((address, "") for address in report.worked)
        assert report.there == bob.addresses[0].of(None)


@on_both_networks
async def test_a_dial_back_of_a_hidden_peer_confirms_nothing(world: World) -> None:
    hidden, bob = world.hidden("h"), world.network("b")
    async with asking(hidden, [bob]):
        report = await ask_dial_back(hidden, CLOCK, bob.peer)
        assert report.worked == ()
        ((address, reason),) = report.outcomes
        assert address == world.outside(hidden).of(None)
        assert reason in ("refused", "timeout")


@on_both_networks
async def test_one_successful_dial_back_proves_reachability(world: World) -> None:
    alice = world.network("a")
    async with asking(alice, strangers(world)) as told:
        await trio.sleep(OTHERS * REACH.soon_seconds + 60)
        assert told == [(True, number, ()) for number in range(1, OTHERS + 1)]


@on_both_networks
async def test_a_hidden_peer_knows_that_it_is_hidden_after_three_failures(world: World) -> None:
    hidden = world.hidden("h")
    async with asking(hidden, strangers(world)) as told:
        await trio.sleep(OTHERS * REACH.soon_seconds + 60)
        assert [(verdict, asked) for verdict, asked, _ in told] == [(None, 1), (None, 2), (False, 3)]
        assert not any(unknown for _, _, unknown in told)


@on_both_networks
async def test_a_peer_learns_its_address_after_port_forwarding(
    world: World,
) -> None:
    hidden, stranger = world.hidden("h"), world.network("s")
    hidden.handle(TALK, echo)
    async with asking(hidden, strangers(world)) as told, trio.open_nursery() as nursery:
        await nursery.start(stranger.run)
        await trio.sleep(OTHERS * REACH.soon_seconds + 60)
        assert told[-1][0] is False
        async with world.forwarding(hidden):
            await trio.sleep((OTHERS + 1) * REACH.doubt_seconds)
            verdict, _, unknown = told[-1]
            assert (verdict, unknown) == (True, (world.outside(hidden).of(None),))
            # Before that, no single report was believed.
            assert [found for _, _, found in told if found] == [unknown]
            hidden.announce(unknown[0])
            assert hidden.addresses[-1] == world.outside(hidden)
            stranger.learn(hidden.peer, hidden.addresses[-1:])
            stream = await stranger.open(hidden.peer, TALK)
            await stream.send(b"through")
            assert await stream.receive() == b"through"
            nursery.cancel_scope.cancel()


@on_both_networks
async def test_a_datagram_is_echoed_unchanged(world: World) -> None:
    hidden, bob = world.hidden("h"), world.network("b")
    for network in (hidden, bob):
        network.inbox(PROTOCOL)  # no answer has come yet
    async with trio.open_nursery() as nursery:
        for network in (hidden, bob):
            await nursery.start(network.run)
        nursery.start_soon(ReachService(bob, CLOCK, counters=Counter()).echo)
        hidden.learn(bob.peer, bob.addresses)
        hidden.send(bob.peer, PROTOCOL, encode(Echo(True, 7, b"filling")))
        sender, data = await arrival(hidden, PROTOCOL)
        assert (sender, decode(data, Echo, bytes_max=100)) == (bob.peer, Echo(False, 7, b"filling"))
        nursery.cancel_scope.cancel()
