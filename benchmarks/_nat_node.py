"""One network node of `nat.py`, on a machine of the laboratory; it reports in JSON lines.

    python benchmarks/_nat_node.py relay
    python benchmarks/_nat_node.py hidden RELAY_ADDRESS
    python benchmarks/_nat_node.py guest SECONDS ADDRESS...
    python benchmarks/_nat_node.py crowd COUNT ADDRESS
    python benchmarks/_nat_node.py puncher ADDRESS OBSERVER_ADDRESS...
    python benchmarks/_nat_node.py stranger ADDRESS OBSERVER_ADDRESS...

The relay and the hidden node print their addresses and serve until their input ends; for each line of input
the relay reports its resource usage. The guest sends bulk data for some seconds to the peer at the addresses,
and a small message every 20 ms. The crowd is a process with several peers, each with one circuit to the peer
at the address. A puncher opens a circuit. It reports how long that took, also in round trips to the peer, and
how long until there was a punched path. A stranger does the same without an idle connection to the relay. A
hidden node that knows other peers in addition to its relay punches too.
"""

import json
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any

import trio

from crypto.contact import parse_address
from crypto.identity import Identity
from node.seams import RealClock, Stream, StreamLimits
from node.services.relays.ledger import Limits, RelayLedger
from node.services.relays.reservations import Reservations
from node.services.relays.server import RelayServer
from node.transport.network import RealNetwork
from node.transport.observers import OBSERVERS_WANTED
from node.transport.puncher import Puncher

PORT = 9747
BULK, PROBE = "/peerloom/bulk/1", "/peerloom/probe/1"
PIECE_BYTES = 2**20
PROBE_SECONDS = 0.02
IN_FLIGHT = 4
LIMITS = StreamLimits(message_bytes_max=2**10)
PUNCHED_SECONDS_MAX = 20.0
LOOK_SECONDS = 0.01


def say(**told: Any) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


async def take_bulk(stream: Stream) -> None:
    while True:
        await stream.receive_with_payload(PIECE_BYTES)
        await stream.send(b"")


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive())


async def until_input_ends() -> None:
    await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


async def measure(network: RealNetwork, seconds: float, texts: list[str]) -> None:
    """Send bulk data with a few pieces in flight, and probe the same peer meanwhile."""
    addresses = [parse_address(text) for text in texts]
    peer = addresses[0].peer
    assert peer is not None
    network.learn(peer, addresses)
    began = trio.current_time()
    stream, probe = await network.open(peer, BULK), await network.open(peer, PROBE)
    opened, sent, delays = trio.current_time() - began, 0, []
    ways = [path.way for path in network.multiplexed.of(peer)] or ["direct"]

    async def send() -> None:
        while True:
            await stream.send(b"", bytes(PIECE_BYTES))

    async def count() -> None:
        nonlocal sent
        while True:
            await stream.receive()
            sent += PIECE_BYTES

    async def ask() -> None:
        while True:
            at = trio.current_time()
            await probe.send(b"there?")
            await probe.receive()
            delays.append(trio.current_time() - at)
            await trio.sleep(PROBE_SECONDS)

    async with trio.open_nursery() as nursery:
        for task in (send, count, ask):
            nursery.start_soon(task)
        await trio.sleep(1.0)
        sent, delays[:] = 0, []
        await trio.sleep(seconds)
        rate, tail = sent / seconds, quantiles(delays, n=20)[-1]
        nursery.cancel_scope.cancel()
    say(way=ways[0], bytes_per_second=rate, probe_p95_seconds=tail, opened_seconds=opened)


def made(port: int = PORT) -> RealNetwork:
    return RealNetwork(
        Identity(os.urandom(32)),
        os.urandom(32),
        "nat",
        clock=RealClock(),
        entropy=os.urandom,
        listen=[("0.0.0.0", port)],
    )


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what the product counts sets no event of ours
        await trio.sleep(LOOK_SECONDS)


async def tell_usage(ledger: RelayLedger) -> None:
    """Report the resource usage of this process for each line of input."""
    while await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        used = resource.getrusage(resource.RUSAGE_SELF)
        pages = resident_pages()
        say(
            cpu_seconds=used.ru_utime + used.ru_stime,
            carried_bytes=ledger.carried_bytes,
            circuits=ledger.circuits,
            resident_bytes=pages * resource.getpagesize(),
        )


async def crowd(count: int, text: str) -> None:
    """Open one circuit to one peer for each of `count` peers, and keep them open."""
    address = parse_address(text)
    assert address.peer is not None
    async with trio.open_nursery() as nursery:
        for number in range(count):
            network = made(PORT + 1 + number)
            await nursery.start(network.run)
            network.learn(address.peer, [address])
            stream = await network.open(address.peer, PROBE)
            await stream.send(b"there?")
            await stream.receive()
        say(opened=count)
        await until_input_ends()
        nursery.cancel_scope.cancel()


async def observed(network: RealNetwork, nursery: trio.Nursery, texts: list[str]) -> Puncher:
    """Let peers with public addresses report this node's outside address to it."""
    addresses = [parse_address(text) for text in texts]
    peers = [address.peer for address in addresses if address.peer is not None]
    for address in addresses:
        assert address.peer is not None
        network.learn(address.peer, [address])
        await network.identify(address)
    puncher = Puncher(network, RealClock(), Random(1), lambda: peers, Counter())
    nursery.start_soon(puncher.run)
    with trio.fail_after(PUNCHED_SECONDS_MAX):
        await until(lambda: len(puncher.observers.asked) >= OBSERVERS_WANTED)
    return puncher


async def punch(network: RealNetwork, text: str) -> None:
    """Open a stream through a relay, and wait for a direct path."""
    address = parse_address(text)
    peer = address.peer
    assert peer is not None
    network.learn(peer, [address])
    began = trio.current_time()
    probe = await network.open(peer, PROBE)
    opened = trio.current_time()
    trips = []
    for _ in range(3):
        at = trio.current_time()
        await probe.send(b"there?")
        await probe.receive()
        trips.append(trio.current_time() - at)
    punched = None
    with trio.move_on_after(PUNCHED_SECONDS_MAX):
        await until(lambda: any(path.way == "punched" for path in network.multiplexed.of(peer)))
        punched = trio.current_time() - opened
    say(opened_seconds=opened - began, round_trip_seconds=min(trips), punched_seconds=punched)


async def main(*words: str) -> None:
    role, *arguments = words
    if role == "crowd":
        await crowd(int(arguments[0]), arguments[1])
        return
    network = made()
    counters: Counter[str] = Counter()
    network.handle(BULK, take_bulk, LIMITS)
    network.handle(PROBE, echo)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        with trio.fail_after(10):  # a newly connected virtual cable takes a moment
            while all(each.host == "127.0.0.1" for each in network.addresses):
                await trio.sleep(0.1)
                network.look()
        if role == "relay":
            ledger = RelayLedger(Limits(True, 64, 0), os.urandom)
            RelayServer(network, RealClock(), ledger, counters)
            # reports their outside addresses to other nodes
            Puncher(network, RealClock(), Random(1), list, counters)
            say(addresses=[str(each) for each in network.addresses])
            await tell_usage(ledger)
        elif role == "hidden":
            relay = parse_address(arguments[0])
            assert relay.peer is not None
            network.learn(relay.peer, [relay])
            wanted, told = [relay.peer], trio.Event()
            places = Reservations(
                network,
                RealClock(),
                candidates=lambda: wanted,
                is_wanted=lambda: True,
                changed=told.set,
                counters=counters,
            )
            if arguments[1:]:
                await observed(network, nursery, arguments)
            nursery.start_soon(places.run)
            await told.wait()
            say(addresses=[str(each.of(network.peer)) for each in network.circuits])
            await until_input_ends()
        elif role in ("puncher", "stranger"):
            await observed(network, nursery, arguments[1:])
            if role == "stranger":
                network._connections._idle.clear()
            await punch(network, arguments[0])
        else:
            await measure(network, float(arguments[0]), list(arguments[1:]))
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
