"""Paths and relays between real networks on loopback. No peer learns the hidden node's own address."""

import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import pytest
import trio
import trio.testing

from crypto.contact import make_address, parse_address
from crypto.encoding import decode, encode
from crypto.identity import PeerId
from node.errors import StreamClosed, Unreachable
from node.seams import RealClock, Stream, StreamLimits
from node.services.relays.ledger import (
    CIRCUITS_PER_PAIR_MAX,
    CIRCUITS_PER_PEER_MAX,
    HOUR_SECONDS,
    PLACE_SECONDS,
    PLACES_MAX,
    PLACES_PER_NETWORK_MAX,
    STRANGER_BYTES_PER_HOUR,
    WAITING_PER_PEER_MAX,
    Announced,
    Limits,
    NoPlace,
    RelayLedger,
    SharedPace,
)
from node.services.relays.reservations import TAKING_MAX, Reservations
from node.services.relays.server import STREAMS, RelayServer
from node.services.relays.settings import RELAYS, RelaySettings
from node.transport.network import RealNetwork
from node.transport.relay_messages import (
    BUSY,
    FULL,
    MESSAGE_BYTES_MAX,
    OFF,
    PROTOCOL,
    SPENT,
    UNKNOWN,
    AskCircuit,
    CircuitAnnounced,
    KeepPlace,
    PlaceKept,
    RelayRefused,
    Reply,
    Request,
    TakeCircuit,
)
from node.transport.settings import TRANSPORT, TransportSettings
from tests.node.nets import (
    BULK,
    PING,
    acquaint,
    arrival,
    echo,
    make_network,
    running,
    until,
    unused_address,
)
from tests.stack import simulate

LARGE = 3 * 2**20
LIMITS = StreamLimits(message_bytes_max=2**20)


async def count_bytes(stream: Stream) -> None:
    while True:
        _, payload = await stream.receive_with_payload(LARGE)
        await stream.send(str(len(payload)).encode())


@dataclass
class Hidden:
    """Three networks: only `relay` reaches `hidden`, and `guest` may know the route through the relay."""

    hidden: RealNetwork
    guest: RealNetwork
    relay: RealNetwork
    server: RelayServer
    places: Reservations
    counters: Counter[str]


@asynccontextmanager
async def behind_a_relay(
    limits: Limits = Limits(is_on=True, bytes_per_second=0),  # noqa: B008 - frozen
    *,
    settings: TransportSettings = TRANSPORT,
    relays: RelaySettings = RELAYS,
    make_ledger: Callable[[Limits, Callable[[int], bytes]], RelayLedger] = RelayLedger,
) -> AsyncIterator[Hidden]:
    hidden, guest, relay = (make_network(letter, settings=settings) for letter in "hgr")
    for network in (hidden, guest):
        network.handle(PING, echo)
        network.handle(BULK, count_bytes, LIMITS)
    counters: Counter[str] = Counter()
    server = RelayServer(relay, RealClock(), make_ledger(limits, os.urandom), counters)
    wanted = [relay.peer]
    places = Reservations(
        hidden,
        RealClock(),
        candidates=lambda: wanted,
        is_wanted=lambda: True,
        changed=lambda: guest.learn(hidden.peer, hidden.circuits),
        counters=counters,
        settings=relays,
    )
    async with running(hidden, guest, relay), trio.open_nursery() as nursery:
        hidden.learn(relay.peer, relay.addresses)
        nursery.start_soon(places.run)
        with trio.fail_after(20):
            yield Hidden(hidden, guest, relay, server, places, counters)
        nursery.cancel_scope.cancel()


async def ask(network: RealNetwork, other: PeerId, text: bytes = b"there?") -> bytes:
    stream = await network.open(other, PING)
    try:
        await stream.send(text)
        return await stream.receive()
    finally:
        await stream.aclose()


# --- paths ---------------------------------------------------------------------------------------------


async def test_a_node_that_offers_a_path_is_reached_over_it() -> None:
    hidden, other = make_network("h"), make_network("o")
    hidden.handle(PING, echo)
    async with running(hidden, other):
        with pytest.raises(Unreachable):
            await other.open(hidden.peer, PING)
        hidden.learn(other.peer, other.addresses)
        await hidden.multiplexed.offer(other.peer)
        assert await ask(other, hidden.peer) == b"there?"
        other.inbox(PING)
        hidden.inbox(PING)
        other.send(hidden.peer, PING, b"a short message")
        assert await arrival(hidden) == (other.peer, b"a short message")


async def test_many_streams_share_a_path_and_keep_payloads_whole() -> None:
    hidden, other = make_network("h"), make_network("o")
    hidden.handle(BULK, count_bytes, LIMITS)
    hidden.handle(PING, echo)
    async with running(hidden, other):
        hidden.learn(other.peer, other.addresses)
        await hidden.multiplexed.offer(other.peer)

        async def send_bulk() -> None:
            stream = await other.open(hidden.peer, BULK)
            await stream.send(b"", bytes(LARGE))
            assert await stream.receive() == str(LARGE).encode()
            await stream.aclose()

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(send_bulk)
                for number in range(20):
                    assert await ask(other, hidden.peer, str(number).encode()) == str(number).encode()
        assert [len(path) > 0 for path in other.multiplexed.of(hidden.peer)] == [True]


async def test_the_end_of_a_path_ends_its_streams_on_both_peers() -> None:
    hidden, other = make_network("h"), make_network("o")
    ended = trio.Event()

    async def wait(stream: Stream) -> None:
        try:
            await stream.receive()
        finally:
            ended.set()

    hidden.handle(PING, wait)
    async with running(hidden, other):
        hidden.learn(other.peer, other.addresses)
        path = await hidden.multiplexed.offer(other.peer)
        stream = await other.open(hidden.peer, PING)
        path.end("a test")
        with trio.fail_after(10):
            with pytest.raises(StreamClosed):
                await stream.receive()
            await ended.wait()
            await until(lambda: not len(other.multiplexed) and not len(hidden.multiplexed))


async def test_a_peer_that_sends_an_invalid_frame_loses_only_the_path() -> None:
    hostile, other = make_network("h"), make_network("o")
    hostile.handle(PING, echo)
    async with running(hostile, other):
        acquaint(hostile, other)
        path = await hostile.multiplexed.offer(other.peer)
        await path.connection.send(b"\xffnonsense")
        with trio.fail_after(10):
            await until(lambda: other.counters["streams_broken"] == 1 and not len(other.multiplexed))
        assert await ask(other, hostile.peer) == b"there?"


# --- relays --------------------------------------------------------------------------------------------


def test_a_circuit_can_be_written_as_an_address() -> None:
    relay, peer = make_network("r").peer, make_network("p").peer
    for host in ("203.0.113.7", "2a0f:1111:2222:3333:4444:5555:6666:7777"):
        at = make_address(host, 9747, relay)
        for circuit in (at.through(peer), at.through(None)):
            assert parse_address(str(circuit)) == circuit
            assert circuit.of_relay == at
    for wrong in (
        "",
        "/p2p-circuit",
        f"{at}/p2p-circuit/ip4/10.0.0.1/tcp/1",
        f"{at.through(peer)}/p2p-circuit",
    ):
        with pytest.raises(ValueError, match=r"circuit|multiaddr|want"):
            parse_address(wrong)


async def test_a_relay_connects_a_hidden_node_but_reads_nothing() -> None:
    async with behind_a_relay() as world:
        await until(lambda: bool(world.hidden.circuits))
        assert world.hidden.circuits[0].of_relay == world.relay.addresses[0]
        assert await ask(world.guest, world.hidden.peer) == b"there?"
        (path,) = world.guest.multiplexed.of(world.hidden.peer)
        assert (path.way, path.relay) == ("relayed", world.relay.peer)
        carried = world.server.ledger.carried_bytes
        stream = await world.guest.open(world.hidden.peer, BULK)
        assert stream.source is None, "the guest learned the hidden node's address"
        await stream.send(b"", bytes(LARGE))
        assert await stream.receive() == str(LARGE).encode()
        assert world.server.ledger.carried_bytes - carried > LARGE
        world.hidden.inbox(PING)
        world.guest.send(world.hidden.peer, PING, b"short")
        assert await arrival(world.hidden) == (world.guest.peer, b"short")
        assert await world.guest.identify(world.hidden.circuits[0].of(world.hidden.peer)) == world.hidden.peer
        with pytest.raises(Unreachable, match="does not name the peer"):
            await world.guest.identify(world.hidden.circuits[0])
        # The relay itself reaches the hidden node too.
        assert await ask(world.relay, world.hidden.peer) == b"there?"


async def test_a_circuit_whose_opener_is_cancelled_stays_for_other_waiters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with behind_a_relay() as world:
        await until(lambda: bool(world.hidden.circuits))
        circuit, paths = world.hidden.circuits[0].of(world.hidden.peer), world.guest.multiplexed
        opener = trio.CancelScope()

        async def wait(*_: object) -> None:
            await trio.sleep_forever()

        async def open_in_vain() -> None:
            with opener, monkeypatch.context() as patched:
                patched.setattr(paths._host, "open_bare", wait)
                await paths.through(circuit)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_in_vain)
            await until(lambda: circuit in paths._connecting)
            nursery.start_soon(paths.through, circuit)
            nursery.start_soon(paths.through, circuit)
            await trio.testing.wait_all_tasks_blocked(0.01)
            opener.cancel()
        assert len(paths.of(world.hidden.peer)) == 1


async def test_a_guest_that_can_be_dialled_is_dialled_directly() -> None:
    async with behind_a_relay() as world:
        world.hidden.learn(world.guest.peer, world.guest.addresses)
        await until(lambda: bool(world.hidden.circuits))
        assert await ask(world.guest, world.hidden.peer) == b"there?"
        await until(
            lambda: any(path.way == "direct" for path in world.guest.multiplexed.of(world.hidden.peer))
        )
        stream = await world.guest.open(world.hidden.peer, PING)
        assert stream.source == make_address("127.0.0.1", stream.source.port if stream.source else 0)
        back = await world.hidden.open(world.guest.peer, PING)
        assert back.source == world.guest.addresses[0].of(None)


async def test_a_lost_relay_is_reported_at_once_and_asked_again() -> None:
    async with behind_a_relay(relays=RelaySettings(lost_seconds=0.1)) as world:
        await until(lambda: bool(world.hidden.circuits))
        for path in world.relay.multiplexed:
            path.end("a test")
        for stream in list(world.server._kept.values()):
            stream.connection.end("a test")  # type: ignore[attr-defined]  # of the real network
        await until(lambda: not world.hidden.circuits)
        assert all(each.relay is None for each in world.hidden.addresses)
        await until(lambda: bool(world.hidden.circuits))


async def test_a_disabled_relay_reserves_no_place_and_carries_nothing() -> None:
    async with behind_a_relay(Limits()) as world:
        await until(lambda: world.counters["relays_failed"] > 0)
        assert not world.hidden.circuits
        world.guest.learn(world.relay.peer, world.relay.addresses)
        for request in (KeepPlace(), AskCircuit(world.hidden.peer, b"f"), TakeCircuit(bytes(16), b"f")):
            stream = await world.guest.open(world.relay.peer, PROTOCOL)
            await stream.send(encode(request))
            reply: Reply = decode(await stream.receive(), Reply, bytes_max=MESSAGE_BYTES_MAX)
            assert isinstance(reply, RelayRefused)


async def test_circuits_to_unknown_peers_and_over_dead_relays_fail_with_a_reason() -> None:
    async with behind_a_relay() as world:
        await until(lambda: bool(world.hidden.circuits))
        nobody = make_network("n").peer
        world.guest.learn(nobody, [world.relay.addresses[0].through(nobody)])
        with pytest.raises(Unreachable, match="does not serve the peer"):
            await world.guest.open(nobody, PING)
        dead = unused_address().of(world.relay.peer)
        world.guest.learn(nobody, [dead.through(nobody)])
        with pytest.raises(Unreachable):
            await world.guest.open(nobody, PING)


async def test_a_relay_cannot_substitute_the_node_at_the_end_of_a_circuit() -> None:
    wanted, real = make_network("w").peer, make_network("h").peer

    class Swapping(RelayLedger):
        """A ledger that connects each request for the wanted peer to a different node."""

        def announce(self, now: float, first: PeerId, target: PeerId, source: bytes) -> Announced:
            assert target == wanted
            return super().announce(now, first, real, source)

    async with behind_a_relay(make_ledger=Swapping) as world:
        await until(lambda: bool(world.hidden.circuits))
        world.guest.learn(wanted, [world.relay.addresses[0].through(wanted)])
        world.server._kept[wanted] = world.server._kept[real]
        with pytest.raises(Unreachable) as caught:
            await world.guest.open(wanted, PING)
        assert caught.value.reason == "wrong key"
        assert not world.guest.multiplexed.of(wanted)


async def test_a_flood_of_announcements_from_a_relay_opens_few_connections() -> None:
    hidden, relay = make_network("h"), make_network("r")
    asked, refused, counters = 0, trio.Event(), Counter[str]()

    async def flood(stream: Stream) -> None:
        nonlocal asked
        request: Request = decode(await stream.receive(), Request, bytes_max=MESSAGE_BYTES_MAX)
        if isinstance(request, TakeCircuit):
            asked += 1
            await refused.wait()
            return
        await stream.send(encode(PlaceKept(60, 0)))
        for number in range(20 * TAKING_MAX):
            flight = hidden.credentials.handshake(initiator=True).start()
            await stream.send(encode(CircuitAnnounced(number.to_bytes(16, "big"), peer(number), flight)))
        await trio.sleep_forever()

    relay.handle(PROTOCOL, flood, STREAMS)
    places = Reservations(
        hidden,
        RealClock(),
        candidates=lambda: [relay.peer],
        is_wanted=lambda: True,
        changed=lambda: None,
        counters=counters,
    )
    async with running(hidden, relay), trio.open_nursery() as nursery:
        hidden.learn(relay.peer, relay.addresses)
        nursery.start_soon(places.run)
        with trio.fail_after(20):
            await until(lambda: counters["circuits_not_taken"] >= 10 * TAKING_MAX)
            await until(lambda: asked >= TAKING_MAX // 2)
        assert asked <= TAKING_MAX
        refused.set()
        nursery.cancel_scope.cancel()


# --- a relay's limits -------------------------------------------------------------------------------


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def source(number: int) -> bytes:
    return bytes([45, 1 + number // 250, number % 250, 7])


def ledger(**limits: int) -> RelayLedger:
    return RelayLedger(Limits(is_on=True, **limits), os.urandom, is_known=lambda each: each == peer(1))


def refused(code: int) -> "pytest.RaisesExc[NoPlace]":
    return pytest.raises(NoPlace, match=str(code))


def announce(of: RelayLedger, first: int, target: int, now: float = 0.0) -> Announced:
    return of.announce(now, peer(first), peer(target), source(first))


def connected(of: RelayLedger, first: int, target: int) -> Announced:
    announced = announce(of, first, target)
    return of.accept(0.0, peer(target), announced.token)


def test_each_network_gets_a_share_of_places_and_places_expire() -> None:
    full = ledger()
    for number in range(PLACES_PER_NETWORK_MAX):
        full.reserve(0.0, peer(number), bytes([45, 1, 1, number]))
    with refused(FULL):
        full.reserve(0.0, peer(999), bytes([45, 1, 1, 200]))
    full.reserve(0.0, peer(999), source(999))
    full.reserve(PLACE_SECONDS + 1.0, peer(1_000), bytes([45, 1, 1, 200]))
    assert full.places == (peer(1_000),)


def test_all_memory_that_others_can_fill_in_a_relay_is_bounded() -> None:
    full = ledger(circuits_max=64)
    for number in range(PLACES_MAX):
        full.reserve(0.0, peer(number), source(number))
    with refused(FULL):
        full.reserve(0.0, peer(5_000), source(5_000))
    for number in range(WAITING_PER_PEER_MAX):
        announce(full, 1_000 * (number + 1), 2)
    with refused(BUSY):
        announce(full, 401, 2)
    for number in range(CIRCUITS_PER_PEER_MAX):
        connected(full, 402, 100 + number)
    with refused(BUSY):
        announce(full, 402, 4)
    for number in range(64 - CIRCUITS_PER_PEER_MAX):
        connected(full, 1_000 * (number + 1), 10 + number)
    with refused(FULL):
        announce(full, 600, 200)
    assert all(size <= limit for size, limit in full.sizes.values())


def test_no_peer_can_use_up_the_circuits_of_a_relay_or_target() -> None:
    full = ledger(circuits_max=64)
    for number in range(60):
        full.reserve(0.0, peer(number), source(number))

    def ask(first: int, target: int, where: bytes) -> None:
        announced = full.announce(0.0, peer(first), peer(target), where)
        full.accept(0.0, peer(target), announced.token)

    for _ in range(CIRCUITS_PER_PAIR_MAX):
        ask(100, 1, source(100))
    with refused(BUSY):
        ask(100, 1, source(100))
    crowd = [bytes([46, 1, 1, number]) for number in range(200)]
    for number in range(CIRCUITS_PER_PEER_MAX // 2):
        ask(200 + number, 2, crowd[number])
    with refused(BUSY):
        ask(300, 2, crowd[100])
    ask(301, 2, source(301))
    for number in range(64 // 4 - CIRCUITS_PER_PEER_MAX // 2):
        ask(400 + number, 10 + number, crowd[number])
    with refused(BUSY):
        ask(500, 30, crowd[0])
    ask(501, 30, source(501))
    for number in range(20):
        ask(600 + number, 31 + number, bytes([192, 168, 1, number]))


def test_a_circuit_still_counts_against_the_limits_when_it_is_accepted() -> None:
    one = ledger()
    for number in range(60):
        one.reserve(0.0, peer(number), source(number))
    early = announce(one, 100, 1)
    one.limits = replace(one.limits, circuits_max=4)
    one._open = {bytes([number]): replace(early, token=bytes([number]), first=peer(7)) for number in range(2)}
    with refused(BUSY):
        one.accept(0.0, peer(1), early.token)


def test_a_token_opens_a_single_circuit_to_its_target() -> None:
    one = ledger()
    one.reserve(0.0, peer(2), source(2))
    announced = announce(one, 3, 2)
    with refused(UNKNOWN):
        one.accept(0.0, peer(4), announced.token)
    circuit = one.accept(0.0, peer(2), announced.token)
    with refused(UNKNOWN):
        one.accept(0.0, peer(2), announced.token)
    one.closed(circuit)
    assert one.circuits == 0
    with refused(UNKNOWN):
        announce(one, 3, 9)
    with refused(OFF):
        RelayLedger(Limits(), os.urandom).reserve(0.0, peer(1), source(1))


def test_only_bytes_relayed_for_unknown_peers_are_budgeted() -> None:
    one = ledger()
    for number in (2, 3):
        one.reserve(0.0, peer(number), source(number))
    strangers, known = connected(one, 4, 2), connected(one, 1, 3)
    assert one.carried(0.0, known, 2 * STRANGER_BYTES_PER_HOUR)
    assert one.carried(0.0, strangers, STRANGER_BYTES_PER_HOUR - 1)
    assert not one.carried(0.0, strangers, 1)
    with refused(SPENT):
        announce(one, 4, 2)
    announce(one, 1, 2)
    one.reserve(HOUR_SECONDS, peer(2), source(2))
    announce(one, 4, 2, HOUR_SECONDS)


def test_circuits_share_the_rate_that_the_owner_set() -> None:
    pace = SharedPace(1_000_000)
    alone = sum(pace.take(0.0, "a", 10_000) > 0 for _ in range(100))
    assert alone > 0
    pace, now, sent = SharedPace(1_000_000), 0.0, {"a": 0, "b": 0}
    due = {"a": 0.0, "b": 0.0}
    while now < 5.0:
        for who in ("a", "b"):
            if due[who] <= now:
                due[who] = now + pace.take(now, who, 10_000)
                sent[who] += 10_000
        now += 0.001
    assert sum(sent.values()) == pytest.approx(5_000_000, rel=0.1)
    assert sent["a"] == pytest.approx(sent["b"], rel=0.1)


PING_AT_SECONDS = 20.0


class Bulk:
    """A socket that always has more to read."""

    async def recv_into(self, buffer: bytearray, most: int = 0) -> int:
        await trio.lowlevel.checkpoint()
        return most or len(buffer)


class Ping:
    """A socket that has one small message to read."""

    def __init__(self) -> None:
        self._is_read = False

    async def recv_into(self, buffer: bytearray, most: int = 0) -> int:
        assert len(buffer) >= most
        if self._is_read:
            await trio.sleep_forever()
        await trio.sleep(PING_AT_SECONDS)
        self._is_read = True
        return 100


class Sink:
    """A socket that records writes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    async def send(self, data: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        self.times.append(trio.current_time())
        return len(data)


def test_neither_direction_of_a_circuit_stalls_on_a_slow_relay() -> None:
    sinks, answers = [Sink() for _ in range(8)], [Sink() for _ in range(8)]

    async def main() -> None:
        one = RelayLedger(Limits(is_on=True, bytes_per_second=125_000), os.urandom, is_known=lambda _: True)
        server = RelayServer(make_network("r"), RealClock(), one, Counter())
        with trio.move_on_after(30.0):
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    circuit = Announced(bytes([number]), peer(1), peer(2), 0.0, b"", is_strangers=False)
                    for source, target in ((Bulk(), sinks[number]), (Ping(), answers[number])):
                        ends = cast("Any", source), cast("Any", target)
                        nursery.start_soon(server._pump, circuit, *ends, trio.CancelScope())

    simulate(main)
    began = min(sink.times[0] for sink in sinks)
    for sink in sinks:
        assert max(later - earlier for earlier, later in pairwise(sink.times)) < 1.0
    assert max(sink.times[0] - began for sink in answers) < PING_AT_SECONDS + 0.5
