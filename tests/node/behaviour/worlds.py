"""Two worlds with the same promises: real networks on 127.0.0.1, and simulated ones. A behaviour is a
scenario that cannot tell which of them it plays in.

Time is virtual in both: where everybody waits, the clock jumps. Bytes on loopback are there at once, so in
the real world a short pause of the machine is enough to know that nothing is on its way.
"""

import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import pytest
import trio
from trio.testing import MockClock

from crypto.identity import PeerId
from node.seams import Network, Stream, StreamLimits
from node.transport.inbox import INBOX_MESSAGES_MAX
from node.transport.network import RealNetwork
from sim.inbox import INBOX_MAX
from sim.network.links import Links
from sim.network.model import NetworkModel
from sim.seams import Medium
from sim.seeds import seeded_peer
from tests.node.nets import make_network

TALK = "/peerloom/talk/2"
OLD_TALK = "/peerloom/talk/1"
LONG_BYTES_MAX = 2**22
"""What both ends of a `conversation` take as one message."""


class World(Protocol):
    """`inbox_max`: how many messages an inbox holds. `pause_seconds`: see MockClock."""

    inbox_max: int
    pause_seconds: float

    def network(self, letter: str) -> Network:
        """The network of a peer of its own."""

    def cut(self, network: Network) -> None:
        """All its streams break, without a word to anybody."""


class RealWorld:
    """Sockets on 127.0.0.1."""

    inbox_max = INBOX_MESSAGES_MAX
    pause_seconds = 0.01

    def network(self, letter: str) -> Network:
        return make_network(letter)

    def cut(self, network: Network) -> None:
        assert isinstance(network, RealNetwork)
        for connection in tuple(network._connections._open):
            connection.end("cut by the test")


class SimulatedWorld:
    """One medium for all, without loss."""

    inbox_max = INBOX_MAX
    pause_seconds = 0.0

    def __init__(self) -> None:
        self._medium = Medium(Links(NetworkModel(), 1))

    def network(self, letter: str) -> Network:
        return self._medium.attach(seeded_peer(1, ord(letter)))

    def cut(self, network: Network) -> None:
        self._medium.kill(network.peer)


def on_both_networks(scenario: Callable[[World], Awaitable[None]]) -> Callable[[type[World]], None]:
    """Make a test of a scenario: played on each network, under a clock that jumps. A deadlock ends after an
    hour that takes no time."""

    @pytest.mark.parametrize("kind", [RealWorld, SimulatedWorld], ids=["real", "simulated"])
    def play(kind: type[World]) -> None:
        async def main() -> None:
            with trio.fail_after(3_600):
                await scenario(kind())

        trio.run(main, clock=MockClock(autojump_threshold=kind.pause_seconds))

    play.__name__, play.__doc__ = scenario.__name__, scenario.__doc__
    return play


@asynccontextmanager
async def running(*networks: Network) -> AsyncIterator[None]:
    """They listen, and know each other."""
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
    """A stream from `a` to `b`, served by `handler`."""
    alice, bob = world.network("a"), world.network("b")
    bob.handle(TALK, handler, StreamLimits(LONG_BYTES_MAX))
    async with running(alice, bob):
        yield await alice.open(bob.peer, TALK, message_bytes_max=LONG_BYTES_MAX), alice, bob


async def echo(stream: Stream) -> None:
    """Every message comes back, with its payload."""
    while True:
        await stream.send(*await stream.receive_with_payload(2**26))


async def arrival(network: Network, protocol: str = TALK) -> tuple[PeerId, bytes]:
    """The next message of the inbox, alone."""
    (message,) = await network.inbox(protocol).take(trio.current_time() + 60)
    return message


async def until(condition: Callable[[], bool]) -> None:
    """Counters move when another task gets its turn."""
    while not condition():  # noqa: ASYNC110 - a counter wakes nobody
        await trio.sleep(0.01)


@functools.cache
def content(number: int, length: int) -> bytes:
    """What message `number` holds: different for each, and the same whenever it is asked for."""
    return bytes((number,)) + os.urandom(max(0, length - 1)) if length else b""
