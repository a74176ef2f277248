"""Real networks on 127.0.0.1 for tests: they are made, run and introduced to each other."""

import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import trio
import trio.testing

from crypto.contact import Address, make_address
from crypto.identity import Identity, PeerId
from node.seams import USUAL_STREAMS, Handler, Network, RealClock, Stream, StreamLimits
from node.transport.address_policy import Place
from node.transport.network import RealNetwork
from node.transport.settings import TRANSPORT, TransportSettings
from node.transport.streams import SecureStream

PING = "/peerloom/ping/1"
BULK = "/peerloom/bulk/1"
LOOPBACK: Place = ("127.0.0.1", 0)


def make_network(
    letter: str,
    *,
    swarm: str = "test",
    listen: Place | Sequence[Place] = LOOPBACK,
    identity: Identity | None = None,
    kind: type[RealNetwork] = RealNetwork,
    **options: Any,
) -> RealNetwork:
    """Make a network. `listen` is one address or several. Without an `identity`, the network gets the
    identity of its letter."""
    places = [listen] if isinstance(listen[0], str) else listen
    return kind(
        identity or Identity(letter.encode() * 32),
        os.urandom(32),
        swarm,
        clock=RealClock(),
        entropy=os.urandom,
        listen=cast("Sequence[Place]", places),
        **options,
    )


@asynccontextmanager
async def running(*networks: RealNetwork) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for network in networks:
            await nursery.start(network.run)
        yield
        nursery.cancel_scope.cancel()


def acquaint(*networks: Network) -> None:
    for network in networks:
        for other in networks:
            network.learn(other.peer, other.addresses)


@asynccontextmanager
async def acquainted(
    handler: Handler, limits: StreamLimits = USUAL_STREAMS, *, settings: TransportSettings = TRANSPORT
) -> AsyncIterator[tuple[RealNetwork, RealNetwork]]:
    """Yield two networks that know each other; `handler` serves BULK at the second."""
    alice, bob = make_network("a", settings=settings), make_network("b", settings=settings)
    bob.handle(BULK, handler, limits)
    async with running(alice, bob):
        acquaint(alice, bob)
        yield alice, bob


@asynccontextmanager
async def conversation(
    handler: Handler, limits: StreamLimits = USUAL_STREAMS, *, settings: TransportSettings = TRANSPORT
) -> AsyncIterator[tuple[SecureStream, RealNetwork, RealNetwork]]:
    """Yield a stream between two networks that carries messages both ways within `limits`."""
    async with acquainted(handler, limits, settings=settings) as (alice, bob):
        stream = await alice.open(bob.peer, BULK, message_bytes_max=limits.message_bytes_max)
        yield stream, alice, bob


async def arrival(network: RealNetwork, protocol: str = PING) -> tuple[PeerId, bytes]:
    """Return the next message, which must arrive alone."""
    messages = await network.inbox(protocol).take(trio.current_time() + 20)
    assert len(messages) == 1
    return messages[0]


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a counter reaches a value; it moves when another task runs. The test's own deadline is the
    limit."""
    while not condition():  # noqa: ASYNC110 - a counter wakes nobody
        await trio.sleep(0.002)


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive())


def raw_address(network: RealNetwork) -> tuple[str, int]:
    return "127.0.0.1", network.port


def unused_address() -> Address:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return make_address(*probe.getsockname())


def free_port() -> int:
    """Return a UDP port that nothing else uses, for the beacons of one test."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
