"""One network of `nat.py`, on a machine of the laboratory: it says what it found in lines of JSON.

    python benchmarks/_nat_node.py relay
    python benchmarks/_nat_node.py hidden RELAY_ADDRESS
    python benchmarks/_nat_node.py guest SECONDS ADDRESS...

The relay and the hidden node print their addresses and serve until their input ends; the guest sends bulk to
the peer of the addresses for some seconds, with a small message beside it every 20 ms.
"""

import json
import os
import sys
from collections import Counter
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

PORT = 9747
BULK, PROBE = "/peerloom/bulk/1", "/peerloom/probe/1"
PIECE_BYTES = 2**20
PROBE_SECONDS = 0.02
IN_FLIGHT = 4
LIMITS = StreamLimits(message_bytes_max=2**10)


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
    """Send bulk with a few pieces in flight, and probe the same peer meanwhile."""
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


async def main(*words: str) -> None:
    role, *arguments = words
    network = RealNetwork(
        Identity(os.urandom(32)),
        os.urandom(32),
        "nat",
        clock=RealClock(),
        entropy=os.urandom,
        listen=[("0.0.0.0", PORT)],
    )
    counters: Counter[str] = Counter()
    network.handle(BULK, take_bulk, LIMITS)
    network.handle(PROBE, echo)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        with trio.fail_after(10):  # a cable that was just plugged in takes a moment to carry
            while all(each.host == "127.0.0.1" for each in network.addresses):
                await trio.sleep(0.1)
                network.look()
        if role == "relay":
            RelayServer(network, RealClock(), RelayLedger(Limits(True, 64, 0), os.urandom), counters)
            say(addresses=[str(each) for each in network.addresses])
            await until_input_ends()
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
            nursery.start_soon(places.run)
            await told.wait()
            say(addresses=[str(each.of(network.peer)) for each in network.circuits])
            await until_input_ends()
        else:
            await measure(network, float(arguments[0]), list(arguments[1:]))
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
