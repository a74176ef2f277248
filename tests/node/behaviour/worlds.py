"""Two worlds with the same guarantees: real networks on 127.0.0.1, and simulated networks. A behaviour test
is a scenario that cannot tell which of the two worlds it runs in.

Time is virtual in both: if every task waits, the clock jumps. Bytes on loopback arrive immediately, so in the
real world a short real pause is enough to know that no bytes are on their way. The pause must not be too
short: while another test floods the loopback, the kernel delivers packets up to some ten milliseconds later.
"""

import functools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from functools import partial
from itertools import count
from typing import Protocol

import pytest
import trio
from trio.testing import MockClock

from crypto.contact import Address, make_address
from crypto.identity import PeerId
from node.seams import Network, Stream, StreamLimits
from node.transport.inbox import INBOX_MESSAGES_MAX
from node.transport.network import RealNetwork
from sim.inbox import INBOX_MAX
from sim.network.links import SimLinks
from sim.network.model import Access, NetworkModel
from sim.network.places import Place
from sim.peer_network import SimNetwork
from sim.seams import SimNetworkFabric
from sim.seeds import seeded_peer
from tests.node.nets import free_port, make_network

TALK = "/peerloom/talk/2"
OLD_TALK = "/peerloom/talk/1"
LONG_BYTES_MAX = 2**22
"""The longest message that both ends of a `conversation` accept."""


class World(Protocol):
    """`inbox_max`: how many messages an inbox holds. `pause_seconds`: see MockClock."""

    inbox_max: int
    pause_seconds: float

    def network(self, letter: str, *, abroad: int = 0, has_local: bool = False) -> Network:
        """Return the network of a new peer. Peers with different values of `abroad` are in different IP
        networks."""

    def hidden(self, letter: str) -> Network:
        """Return the network of a peer behind a router that blocks incoming connections."""

    def outside(self, network: Network) -> Address:
        """Return the address at which other peers see a running peer: its own address, or the outer address
        of its router."""

    def forwarding(self, network: Network) -> AbstractAsyncContextManager[None]:
        """Let streams pass the router of a hidden peer while the context lasts."""

    def close(self) -> None:
        """End the scenario."""

    def cut(self, network: Network) -> None:
        """Reset all streams of a network without notifying the peers at their other ends."""


class RealWorld:
    """Sockets on loopback. A hidden peer listens at 127.0.0.2. Whatever leaves this machine's loopback comes
    from 127.0.0.1, so that address serves as the outer side of the hidden peer's router. There the peer's
    port is reserved, without a listener.
    """

    inbox_max = INBOX_MESSAGES_MAX
    pause_seconds = 0.05

    def __init__(self) -> None:
        self._beacon_port = free_port()
        self._routers: dict[PeerId, socket.socket] = {}

    def network(self, letter: str, *, abroad: int = 0, has_local: bool = False) -> Network:
        beacon_port = self._beacon_port if has_local else None
        return make_network(letter, listen=(f"127.0.{abroad}.1", 0), beacon_port=beacon_port)

    def hidden(self, letter: str) -> Network:
        router = socket.socket()
        router.bind(("127.0.0.1", 0))
        network = make_network(letter, listen=("127.0.0.2", router.getsockname()[1]))
        self._routers[network.peer] = router
        return network

    def outside(self, network: Network) -> Address:
        router = self._routers.get(network.peer)
        if router is None:
            return network.addresses[0]
        return make_address("127.0.0.1", router.getsockname()[1], network.peer)

    @asynccontextmanager
    async def forwarding(self, network: Network) -> AsyncIterator[None]:
        assert isinstance(network, RealNetwork)
        assert network.moved == ()
        router = self._routers[network.peer]
        router.listen()
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(router.dup()))
        inner = network.addresses[0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, partial(_relay, inner), [listener])
            yield
            nursery.cancel_scope.cancel()

    def close(self) -> None:
        for router in self._routers.values():
            router.close()

    def cut(self, network: Network) -> None:
        assert isinstance(network, RealNetwork)
        for connection in tuple(network._connections._open):
            connection.end("cut by the test")


async def _relay(inner: Address, outer: trio.SocketStream) -> None:
    """Copy bytes to the inner address, and answers back."""

    async def pump(one: trio.SocketStream, other: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in one:
                await other.send_all(data)
            await other.send_eof()

    async with await trio.open_tcp_stream(inner.host, inner.port) as behind, trio.open_nursery() as nursery:
        nursery.start_soon(pump, outer, behind)
        nursery.start_soon(pump, behind, outer)


class SimulatedWorld:
    """One lossless medium for all peers. A hidden peer is behind an address-restricted NAT."""

    inbox_max = INBOX_MAX
    pause_seconds = 0.0

    def __init__(self) -> None:
        self._model = NetworkModel(access=(Access(0.5), Access(0.5, nat="restricted")))
        self._medium = SimNetworkFabric(SimLinks(self._model, 1))

    def network(self, letter: str, *, abroad: int = 0, has_local: bool = False) -> Network:
        return self._attach(letter, is_hidden=False, has_local=has_local)

    def hidden(self, letter: str) -> Network:
        return self._attach(letter, is_hidden=True)

    def _attach(self, letter: str, *, is_hidden: bool, has_local: bool = False) -> SimNetwork:
        peer = seeded_peer(1, ord(letter))
        # A peer's number decides whether it is behind a NAT.
        numbers = (n for n in count() if (Place(peer, self._model, 1, n).nat is not None) == is_hidden)
        self._medium.links.place(peer, next(numbers))
        self._medium.has_local = has_local
        return self._medium.attach(peer)

    def outside(self, network: Network) -> Address:
        assert isinstance(network, SimNetwork)
        return network.outside

    @asynccontextmanager
    async def forwarding(self, network: Network) -> AsyncIterator[None]:
        router = self._medium.links.at(network.peer).nat
        assert router is not None
        router.forward()
        yield

    def close(self) -> None:
        pass

    def cut(self, network: Network) -> None:
        self._medium.kill(network.peer)


def on_both_networks(scenario: Callable[[World], Awaitable[None]]) -> Callable[[type[World]], None]:
    """Turn a scenario into a test that runs on each network, under a clock that jumps. A deadlock ends after
    a virtual hour. A scenario that this machine cannot run is skipped.
    """

    @pytest.mark.parametrize("kind", [RealWorld, SimulatedWorld], ids=["real", "simulated"])
    def play(kind: type[World]) -> None:
        async def main() -> None:
            with trio.fail_after(3_600), closing(kind()) as world:
                await scenario(world)

        reasons = []
        try:
            trio.run(main, clock=MockClock(autojump_threshold=kind.pause_seconds))
        except* pytest.skip.Exception as skips:
            reasons += [str(skip) for skip in skips.exceptions]
        if reasons:
            pytest.skip(reasons[0])

    play.__name__, play.__doc__ = scenario.__name__, scenario.__doc__
    return play


@asynccontextmanager
async def running(*networks: Network) -> AsyncIterator[None]:
    """Yield two networks that listen and know each other."""
    async with trio.open_nursery() as nursery:
        for network in networks:
            await nursery.start(network.run)
        for network in networks:
            for other in networks:
                network.learn(other.peer, other.addresses)
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def conversation(
    world: World, handler: Callable[[Stream], Awaitable[None]]
) -> AsyncIterator[tuple[Stream, Network, Network]]:
    """Yield a stream from `a` to `b` that `handler` serves, and both networks."""
    alice, bob = world.network("a"), world.network("b")
    bob.handle(TALK, handler, StreamLimits(LONG_BYTES_MAX))
    async with running(alice, bob):
        yield await alice.open(bob.peer, TALK, message_bytes_max=LONG_BYTES_MAX), alice, bob


async def echo(stream: Stream) -> None:
    """Send every message back to its sender, with its payload."""
    while True:
        await stream.send(*await stream.receive_with_payload(2**26))


async def arrival(network: Network, protocol: str = TALK) -> tuple[PeerId, bytes]:
    """Return the next message of the inbox, and check that there is no other."""
    (message,) = await network.inbox(protocol).take(trio.current_time() + 60)
    return message


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a counter reaches a value; it moves when another task runs."""
    while not condition():  # noqa: ASYNC110 - a counter wakes nobody
        await trio.sleep(0.01)


@functools.cache
def content(number: int, length: int) -> bytes:
    """Return the content of message `number`: different for each number, and the same at each call."""
    return bytes((number,)) + os.urandom(max(0, length - 1)) if length else b""
