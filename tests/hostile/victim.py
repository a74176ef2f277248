"""The process that is attacked: a whole node on loopback, which also serves an echo."""

import os
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import trio

from node import config
from node.runtime import Node
from node.seams import RealClock, Stream
from node.services.capacity import Capacity
from node.storage.folder import FolderStorage
from node.storage.keys import keys_of
from node.transport.network import RealNetwork
from tests.hostile.attack import Target
from tests.hostile.guests import ECHO

HOST = "127.0.0.1"
SWARM = "hostile"
ASK = "/hostile/ask/1"
"""The datagram protocol of the echo."""


def be_victim(connection: Connection, folder: Path, beacon_port: int) -> None:
    """Run the process. It sends its `Target`, and then its figures at each request, until it is told to stop
    or the other end of `connection` is gone."""
    trio.run(_be_victim, connection, folder, beacon_port)


async def _be_victim(connection: Connection, folder: Path, beacon_port: int) -> None:
    storage = FolderStorage(folder)
    keys = keys_of(storage, os.urandom)
    network = RealNetwork(
        keys.identity,
        keys.static,
        SWARM,
        clock=RealClock(),
        entropy=os.urandom,
        listen=[(HOST, 0)],
        beacon_port=beacon_port,
    )
    settings = config.Config(
        name="victim",
        data_dir=folder,
        swarm=config.SwarmSettings(name=SWARM),
        join=config.JoinSettings(lan=True),
    )
    capacity = Capacity("cpu", 1, 8 << 30, 16 << 30, 5e9, "")
    async with Node(settings, network=network, storage=storage, capacity=capacity) as node:
        network.handle(ECHO, echo)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer, network)
            connection.send(Target(HOST, network.port, beacon_port, node.peer, SWARM))
            while await trio.to_thread.run_sync(_asked, connection, abandon_on_cancel=True):
                connection.send(figures(lambda: node.counters))
            nursery.cancel_scope.cancel()


def _asked(connection: Connection) -> bool:
    try:
        return bool(connection.recv())
    except EOFError:
        return False


async def echo(stream: Stream) -> None:
    """Echo messages until the other side closes the stream."""
    while True:
        await stream.send(await stream.receive())


async def answer(network: RealNetwork) -> None:
    """Echo every datagram."""
    inbox = network.inbox(ASK)
    while True:
        for sender, message in await inbox.take(trio.current_time() + 3_600):
            network.send(sender, ASK, message)


def figures(counters: Callable[[], Mapping[str, int]]) -> dict[str, Any]:
    """Return the process's usage and refusals so far."""
    return {
        "cpu_seconds": time.process_time(),
        "rss_bytes": psutil.Process().memory_info().rss,
        "counters": dict(counters()),
    }
