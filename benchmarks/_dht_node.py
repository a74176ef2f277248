"""One node of `benchmarks/dht_sockets.py` in its own process: one of ours, of the plain `kademlia` package,
or of hivemind.

    python benchmarks/_dht_node.py ours|package|hivemind NUMBER K [FOLDER PORT]

With a folder, which only our node accepts, it keeps its records there and starts with those it finds. It
prints the address on which it listens, then executes JSON lines from its stdin and answers each with one JSON
line.
"""

import asyncio
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import trio

VALUE_BYTES = 200


def value_of(key: str) -> bytes:
    """Return the value that belongs to a key."""
    return Random(key).randbytes(VALUE_BYTES)


def say(document: Any) -> None:
    """Send an answer to the parent."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


async def timed(run: Any, work: Any) -> float:
    """Return how long one operation took; -1 if it failed."""
    begun = time.perf_counter()
    is_done = await run(work)
    return time.perf_counter() - begun if is_done else -1.0


def seams_in(folder: str, network: Any, clock: Any, rng: Random) -> Any:
    """Return the seams of a node that keeps its records in `folder`."""
    from node.executor import RealExecutor
    from node.seams import Seams
    from node.storage.folder import FolderStorage

    return Seams(network, clock, rng, os.urandom, RealExecutor(), FolderStorage(Path(folder)))


async def ours(number: int, k: int, folder: str = "", port: str = "0") -> None:
    """Serve as one of our nodes: sessions, signatures and the core, without membership."""
    from crypto.contact import parse_address
    from crypto.facts import IdentitySigner
    from crypto.identity import Identity
    from dht.events import Joined
    from dht.settings import KademliaSettings
    from node.seams import RealClock
    from node.services.discovery import Discovery
    from node.transport.network import RealNetwork

    joined = trio.Event()
    identity, clock = Identity(number.to_bytes(32, "big")), RealClock()
    network = RealNetwork(
        identity,
        bytes([number + 1]) * 32,
        "bench",
        clock=clock,
        entropy=os.urandom,
        listen=[("127.0.0.1", int(port))],
        announce=(),
        beacon_port=None,
        keys=(),
    )
    rng = Random()
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        discovery = Discovery(
            network,
            clock,
            rng,
            IdentitySigner(identity, "bench"),
            refuse=lambda _peer, _error: None,
            observe=lambda event: joined.set() if isinstance(event, Joined) else None,
            seams=seams_in(folder, network, clock, rng) if folder else None,
            settings=KademliaSettings(k=k, find_width=min(3, k)),
        )
        await nursery.start(discovery.run)
        say({"address": network.addresses[0].short})

        async def store(key: str, seconds: float = 3_600.0) -> bool:
            stored = await discovery.publish_for("bench", key.encode(), value_of(key), seconds)
            return stored.is_safe

        async def get(key: str) -> bool:
            records = await discovery.find("bench", key.encode())
            return any(record.value == value_of(key) for record in records)

        async def fetch(
            store_or_get: str, keys: list[str], parallel: int, seconds: float = 3_600.0
        ) -> list[float]:
            found: list[float] = []
            waiting = iter(keys)
            work = partial(store, seconds=seconds) if store_or_get == "store" else get

            async def one() -> None:
                for key in waiting:
                    found.append(await timed(work, key))

            async with trio.open_nursery() as inner:
                for _ in range(parallel):
                    inner.start_soon(one)
            return found

        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            order = json.loads(line)
            if order["do"] == "join":
                begun = time.perf_counter()
                peer = await network.identify(parse_address(order["address"]))
                discovery.join([peer])
                await joined.wait()
                say({"seconds": time.perf_counter() - begun})
            elif order["do"] == "save":
                await discovery.save()
                say({})
            elif order["do"] == "count":
                say(discovery.document())
            elif order["do"] == "end":
                break
            else:
                begun = time.perf_counter()
                seconds = order.get("lasts", 3_600.0)
                each = await fetch(order["do"], order["keys"], order["parallel"], seconds)
                say({"each": each, "seconds": time.perf_counter() - begun})
        nursery.cancel_scope.cancel()


async def package(k: int) -> None:
    """Serve as a node of the plain package."""
    from kademlia.network import Server

    server = Server(ksize=k)
    await server.listen(0, "127.0.0.1")
    host, port = server.transport.get_extra_info("sockname")
    say({"address": f"{host}:{port}"})
    loop = asyncio.get_running_loop()

    async def store(key: str) -> bool:
        return bool(await server.set(key, value_of(key)))

    async def get(key: str) -> bool:
        return bool(await server.get(key) == value_of(key))

    async def some(work: Any, keys: list[str], parallel: int) -> list[float]:
        found: list[float] = []
        waiting = iter(keys)

        async def one() -> None:
            for key in waiting:
                found.append(await timed(work, key))

        await asyncio.gather(*(one() for _ in range(parallel)))
        return found

    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        if order["do"] == "join":
            begun = time.perf_counter()
            address, _, to = order["address"].rpartition(":")
            await server.bootstrap([(address, int(to))])
            say({"seconds": time.perf_counter() - begun})
        elif order["do"] == "end":
            break
        else:
            begun = time.perf_counter()
            each = await some(store if order["do"] == "store" else get, order["keys"], order["parallel"])
            say({"each": each, "seconds": time.perf_counter() - begun})
    server.stop()


def hivemind() -> None:
    """Serve as one of hivemind's nodes, which are separate processes behind a blocking call."""
    from hivemind import DHT
    from hivemind.utils.timed_storage import get_dht_time

    say({"address": ""})
    table: Any = None

    def begin(store_or_get: str, key: str) -> Any:
        if store_or_get == "store":
            until = get_dht_time() + 3_600.0
            return table.store(key, value_of(key), expiration_time=until, return_future=True)
        return table.get(key, return_future=True)

    for line in sys.stdin:
        order = json.loads(line)
        begun = time.perf_counter()
        if order["do"] == "join":
            known = [order["address"]] if order["address"] else []
            table = DHT(initial_peers=known, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
            address = str(table.get_visible_maddrs()[0])
            say({"seconds": time.perf_counter() - begun, "address": address})
        elif order["do"] == "end":
            break
        else:
            each: list[float] = []
            waiting = list(reversed(order["keys"]))
            flying: list[tuple[str, float, Any]] = []
            while waiting or flying:
                while waiting and len(flying) < order["parallel"]:
                    key = waiting.pop()
                    flying.append((key, time.perf_counter(), begin(order["do"], key)))
                key, since, future = flying.pop(0)
                found = future.result()
                is_done = bool(found) if order["do"] == "store" else found and found.value == value_of(key)
                each.append(time.perf_counter() - since if is_done else -1.0)
            say({"each": each, "seconds": time.perf_counter() - begun})
    if table is not None:
        table.shutdown()


def main() -> None:
    """Serve until the parent ends this process."""
    kind, number, k = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if kind == "ours":
        trio.run(partial(ours, number, k, *sys.argv[4:]))
    elif kind == "hivemind":
        hivemind()
    else:
        asyncio.run(package(k))


if __name__ == "__main__":
    main()
