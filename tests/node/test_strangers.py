"""Connections from unknown peers before their handshake: refused, delayed or passed on. Tests of deadlines
use virtual time."""

import gc
import os
import resource
import selectors
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from crypto.identity import PeerId
from crypto.swarm import Swarm
from crypto.token_buckets import prefix_of
from node.errors import Unreachable
from node.transport.accept_queue import (
    GATHER_SECONDS,
    READ_BYTES_MAX,
    TURNS_BURST,
    PendingConnection,
    PendingConnections,
)
from node.transport.half_open import HalfOpenQueue
from node.transport.handshake_limits import SOURCE_BURST, SOURCE_RATE
from node.transport.network import RealNetwork
from node.transport.settings import TRANSPORT, TransportSettings
from tests.node.nets import LOOPBACK, make_network, raw_address, running, until
from tests.node.test_handshake import KEY, OTHER_KEY, PRIVATE, credentials

OPEN = Swarm("test")
HERE = "127.0.0.1"
HANDSHAKE_SECONDS = TRANSPORT.handshake_seconds


class Room:
    """The queue of unauthenticated connections, without listening sockets. Connections that are passed on end
    immediately and prove nothing."""

    def __init__(self, swarm: Swarm) -> None:
        self.counters: Counter[str] = Counter()
        self.doorway = HalfOpenQueue[PendingConnection]()
        self.handed_on: list[PendingConnection] = []
        self.strangers = PendingConnections(
            credentials("b", swarm), self.doorway, self.counters, lambda source: True, self._hand_on
        )

    def _hand_on(self, stranger: PendingConnection) -> None:
        self.handed_on.append(stranger)
        self.strangers.leave(stranger, is_peer=False)
        stranger.socket.close()

    async def enter(self, host: str = HERE) -> trio.SocketStream:
        """The unknown peer's end of a connection that delivers immediately, so that virtual time is exact."""
        theirs, ours = socket.socketpair()
        self.strangers.enter(ours, host)
        return trio.SocketStream(trio.socket.from_stdlib_socket(theirs))


@asynccontextmanager
async def room(swarm: Swarm) -> AsyncIterator[Room]:
    made = Room(swarm)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.strangers.run, [])
        yield made
        nursery.cancel_scope.cancel()
    assert len(made.doorway) == 0


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def first_flight(swarm: Swarm) -> bytes:
    return credentials("o", swarm).handshake(initiator=True).start()


async def say_nothing(stream: trio.SocketStream) -> None:
    pass


async def say_garbage(stream: trio.SocketStream) -> None:
    await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")


async def say_it_late(stream: trio.SocketStream) -> None:
    await trio.sleep(HANDSHAKE_SECONDS / 2)
    await stream.send_all(b"\x03\x01\x01" + (32).to_bytes(2, "big") + bytes(64))


async def say_too_much(stream: trio.SocketStream) -> None:
    with trio.move_on_after(HANDSHAKE_SECONDS / 2):
        await stream.send_all(bytes(READ_BYTES_MAX))


async def drip_a_right_flight(stream: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError):
        for byte in first_flight(PRIVATE):
            await stream.send_all(bytes((byte,)))
            await trio.sleep(0.4)


def knock_of(swarm: Swarm) -> Callable[[trio.SocketStream], Awaitable[None]]:
    async def knock(stream: trio.SocketStream) -> None:
        await stream.send_all(first_flight(swarm))

    return knock


@pytest.mark.parametrize(
    "says",
    [
        say_nothing,
        say_garbage,
        say_it_late,
        say_too_much,
        drip_a_right_flight,
        knock_of(OPEN),
        knock_of(Swarm("test", (OTHER_KEY,))),
        knock_of(Swarm("other", (KEY,))),
    ],
    ids=["nothing", "garbage", "late", "much", "drips", "open", "another key", "another name"],
)
def test_an_outsider_gets_no_byte_and_the_same_time_out_as_silence(
    says: Callable[[trio.SocketStream], Awaitable[None]],
) -> None:
    async def scenario() -> None:
        async with room(PRIVATE) as entered, trio.open_nursery() as nursery:
            theirs = await entered.enter()
            nursery.start_soon(says, theirs)
            # The connection must not end by a reset, which would reveal that bytes were left unread.
            assert await theirs.receive_some() == b""
            assert trio.current_time() == HANDSHAKE_SECONDS
            assert entered.counters == {"handshakes_by_outsiders": 1}
            nursery.cancel_scope.cancel()
        await theirs.aclose()

    play(scenario)


@pytest.mark.parametrize(
    "begins",
    [b"", first_flight(OPEN)[:7], first_flight(Swarm("test", (OTHER_KEY,)))],
    ids=["", "head", "flight"],
)
def test_bytes_read_from_an_outsider_are_limited(begins: bytes) -> None:
    async def scenario() -> None:
        async with room(PRIVATE) as entered:
            theirs = await entered.enter()
            if begins:
                await theirs.send_all(begins)
            for _ in range(80):
                await theirs.send_all(bytes(1_000))
                await trio.sleep(0.05)
            (stranger,) = entered.strangers._standing
            assert stranger.read_bytes == READ_BYTES_MAX
            assert not stranger.is_heard
        await theirs.aclose()

    play(scenario)


def test_a_replayed_first_flight_is_treated_like_an_outsiders() -> None:
    async def scenario() -> None:
        async with room(PRIVATE) as entered:
            flight = first_flight(PRIVATE)
            for _ in range(2):
                theirs = await entered.enter()
                await theirs.send_all(flight)
                await theirs.receive_some()
                await theirs.aclose()
            assert len(entered.handed_on) == 1
            assert entered.counters == {"handshakes_by_outsiders": 1}
            assert trio.current_time() == HANDSHAKE_SECONDS

    play(scenario)


def test_a_flight_sent_byte_by_byte_is_abandoned_at_the_deadline() -> None:
    async def scenario() -> None:
        async with room(OPEN) as entered, trio.open_nursery() as nursery:
            theirs = await entered.enter()
            nursery.start_soon(drip_a_right_flight, theirs)
            assert await theirs.receive_some() == b""
            assert trio.current_time() == HANDSHAKE_SECONDS
            assert entered.counters == {"handshakes_timed_out": 1}
            nursery.cancel_scope.cancel()
        await theirs.aclose()

    play(scenario)


@pytest.mark.parametrize(
    ("words", "counter"), [(b"GET / HTTP/1.1\r\n\r\n", "handshakes_refused"), (b"", "handshakes_refused")]
)
def test_malformed_flights_in_an_open_swarm_end_at_once(words: bytes, counter: str) -> None:
    async def scenario() -> None:
        async with room(OPEN) as entered:
            theirs = await entered.enter()
            if words:
                await theirs.send_all(words)
            else:
                await theirs.send_eof()
            assert await theirs.receive_some() == b""
            assert trio.current_time() == 0
            assert entered.counters == {counter: 1}
            await theirs.aclose()

    play(scenario)


def test_a_reset_connection_is_discarded_at_once() -> None:
    async def scenario() -> None:
        async with room(PRIVATE) as entered:
            with socket.create_server((HERE, 0)) as server:
                theirs = socket.create_connection(server.getsockname())
                ours, _ = server.accept()
            entered.strangers.enter(ours, HERE)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            theirs.close()
            await until(lambda: len(entered.doorway) == 0)
            assert entered.counters == {"handshakes_broken": 1}

    trio.run(scenario)


@pytest.mark.parametrize("swarm", [OPEN, PRIVATE], ids=["open", "private"])
def test_sources_that_crowd_the_queue_get_few_turns_and_no_extra_time(swarm: Swarm) -> None:
    async def scenario() -> None:
        async with room(swarm) as entered:
            crowd = []
            for _ in range(int(3 * TURNS_BURST)):
                crowd.append(await entered.enter())
                await trio.sleep(GATHER_SECONDS / 2)
            for number, theirs in enumerate(crowd):
                assert await theirs.receive_some() == b""
                due_at = number * GATHER_SECONDS / 2 + HANDSHAKE_SECONDS
                assert due_at - 1e-6 <= trio.current_time() <= due_at + 1.5 * GATHER_SECONDS
                await theirs.aclose()
            assert sum(entered.counters.values()) == len(crowd)

    play(scenario)


# --- first flights -----------------------------------------------------------------------------------


@given(cuts=st.lists(st.integers(1, 200), max_size=6), more=st.binary(max_size=40), private=st.booleans())
def test_a_first_flight_is_read_the_same_in_any_pieces(cuts: list[int], more: bytes, private: bool) -> None:
    swarm = PRIVATE if private else OPEN
    flight, ours = first_flight(swarm), credentials("b", swarm)
    one, other = socket.socketpair()
    with closing(one), closing(other):
        stranger, rest = PendingConnection(one, b"source", 0.0), flight
        for cut in cuts:
            if cut < len(rest):
                assert not stranger.hear(rest[:cut], ours)
                rest = rest[cut:]
        assert stranger.hear(rest + more, ours)
    # Nothing was computed yet, and the bytes after the flight are kept.
    assert stranger.came == more
    assert stranger.handshake is not None
    assert stranger.handshake.receive(b"") != b""


async def test_slow_senders_do_not_wake_the_loop_for_each_byte() -> None:
    made = Room(OPEN)
    with closing(socket.create_server((HERE, 0))) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    flight = first_flight(OPEN)
    with closing(theirs):
        made.strangers.enter(ours, HERE)
        (stranger,) = made.strangers._standing
        woken = []
        for number, piece in enumerate((*(bytes((byte,)) for byte in flight[:10]), flight[10:-1]), 1):
            theirs.sendall(piece)
            if made.strangers._selector.select(0):
                woken.append(number)
            made.strangers._take_turn()
        # The flight's head, its offer, and the length of the rest.
        assert woken == [2, 4, 6]
        assert stranger.gathers
        theirs.sendall(flight[-1:])
        made.strangers._take_turn()
        assert made.handed_on == [stranger]
        assert not stranger.gathers


@pytest.mark.parametrize("words_bytes", [0, 1, 5, 20])
async def test_unread_bytes_cause_no_reset_of_an_outsiders_connection(words_bytes: int) -> None:
    made = Room(PRIVATE)
    with closing(socket.create_server((HERE, 0))) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    with closing(theirs):
        made.strangers.enter(ours, HERE)
        (stranger,) = made.strangers._standing
        theirs.sendall(first_flight(PRIVATE)[:words_bytes])
        made.strangers._take_turn()
        theirs.sendall(b"." * bool(words_bytes))
        made.strangers._send_away(stranger, "over")
        assert theirs.recv(1) == b""


def test_a_source_with_too_many_first_flights_delays_only_itself() -> None:
    async def scenario() -> None:
        async with room(OPEN) as entered:
            flight, crowd = first_flight(OPEN), []

            async def knock(host: str) -> None:
                crowd.append(await entered.enter(host))
                await crowd[-1].send_all(flight)

            more = 60
            for number in range(int(SOURCE_BURST) + more):
                await knock("10.0.0.1")
                if number % 40 == 0:
                    await trio.sleep(2 * GATHER_SECONDS)
            before = len(entered.handed_on)
            assert SOURCE_BURST <= before <= SOURCE_BURST + trio.current_time() * SOURCE_RATE
            await knock("10.0.0.2")
            await trio.sleep(2 * GATHER_SECONDS)
            assert prefix_of("10.0.0.2") in {each.source for each in entered.handed_on[before:]}
            await trio.sleep(more / SOURCE_RATE + GATHER_SECONDS)
            assert len(entered.handed_on) == int(SOURCE_BURST) + more + 1
            assert entered.counters == {}
            for theirs in crowd:
                await theirs.aclose()

    play(scenario)


async def test_an_honest_peer_connects_during_a_flood_of_half_handshakes() -> None:
    alice, bob = make_network("a"), make_network("b", listen=("0.0.0.0", 0))
    flight = first_flight(OPEN)
    crowd: list[socket.socket] = []

    def knock() -> None:
        crowd.append(socket.socket())
        crowd[-1].bind(("127.0.0.2", 0))
        crowd[-1].connect(raw_address(bob))
        crowd[-1].sendall(flight)

    async def keep_knocking() -> None:
        while True:
            knock()
            await trio.sleep(0.2 / SOURCE_RATE)

    async with running(alice, bob), trio.open_nursery() as nursery:
        for _ in range(int(1.2 * SOURCE_BURST)):
            knock()
        nursery.start_soon(keep_knocking)
        await until(lambda: bob.counters["handshakes_displaced"] > 0)
        for _ in range(5):
            with trio.fail_after(HANDSHAKE_SECONDS):
                assert await alice.identify(bob.addresses[0]) == bob.peer
        nursery.cancel_scope.cancel()
    for each in crowd:
        each.close()


# --- bounded slots before the handshake ------------------------------------------------------------


async def test_unknown_peers_that_fill_all_slots_keep_no_peer_out() -> None:
    settings = TransportSettings(handshake_seconds=30.0, half_open_max=2)
    alice, bob = make_network("a", settings=settings), make_network("b", settings=settings)
    async with running(alice, bob):
        idle = [await trio.open_tcp_stream(*raw_address(bob)) for _ in range(2)]
        await until(lambda: len(bob._connections.arrivals._doorway) == 2)
        assert await alice.identify(bob.addresses[0]) == bob.peer
        # The oldest connection lost its slot.
        assert await idle[0].receive_some() == b""
        assert bob.counters["handshakes_displaced"] == 1
        assert len(bob._connections.arrivals._doorway) == 1
        for connection in idle:
            await connection.aclose()


async def test_a_peer_can_lose_its_slot_during_its_handshake() -> None:
    alice, bob = make_network("a"), make_network("b", settings=TransportSettings(half_open_max=1))
    async with running(alice, bob):
        half = await trio.open_tcp_stream(*raw_address(bob))
        await half.send_all(first_flight(OPEN))
        assert await half.receive_some() != b""
        assert await alice.identify(bob.addresses[0]) == bob.peer
        while await half.receive_some():
            pass
        assert bob.counters["handshakes_displaced"] == 1
        assert len(bob._connections.arrivals._doorway) == 0
        await half.aclose()


async def identify_in_a_crowd(asks: RealNetwork, asked: RealNetwork) -> PeerId:
    """Dial and retry as nodes do. After a pause of this process, more connections may arrive at once than the
    queue has slots. Then a peer that was about to be answered loses its own slot.
    """
    for _ in range(4):
        with suppress(Unreachable):
            return await asks.identify(asked.addresses[0])
    return await asks.identify(asked.addresses[0])


@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["open", "private"])
async def test_an_honest_peer_is_answered_among_hostile_peers_of_every_kind(keys: tuple[bytes, ...]) -> None:
    alice, bob = make_network("a", keys=keys), make_network("b", keys=keys)
    bob._connections.arrivals._doorway = HalfOpenQueue(places_max=32)
    kinds = [
        say_nothing,
        say_garbage,
        say_too_much,
        knock_of(OPEN),
        knock_of(Swarm("other", (KEY,))),
    ]

    async def be_strange(says: Callable[[trio.SocketStream], Awaitable[None]]) -> None:
        while True:
            with suppress(trio.BrokenResourceError, OSError):
                async with await trio.open_tcp_stream(*raw_address(bob)) as stream:
                    await says(stream)
                    await stream.receive_some()
            await trio.sleep(0.1)  # some hundred connections a second

    async with running(alice, bob), trio.open_nursery() as nursery:
        for says in [*kinds * 6, *[say_nothing] * 40]:
            nursery.start_soon(be_strange, says)
        await until(lambda: bob.counters["handshakes_displaced"] > 0)
        for _ in range(20):
            assert await identify_in_a_crowd(alice, bob) == bob.peer
            assert len(bob._connections.arrivals._doorway) <= 32
        nursery.cancel_scope.cancel()
    # On a busy machine, later connections may evict each earlier one before it is refused.
    async with running(alice, bob), trio.open_nursery() as nursery:
        for says in kinds:
            nursery.start_soon(be_strange, says)
        await until(lambda: bob.counters["handshakes_by_outsiders" if keys else "handshakes_refused"] > 0)
        nursery.cancel_scope.cancel()
    assert len(bob._connections.arrivals._doorway) == 0


# --- the machine's own limits ------------------------------------------------------------------------


async def test_connections_wait_in_the_kernel_if_file_descriptors_run_out() -> None:
    alice, bob = make_network("a"), make_network("b")
    async with running(alice, bob):
        waiting = trio.socket.socket()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        gc.collect()  # descriptors that other tests left open must not be freed meanwhile
        lowest_free = os.dup(waiting.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            await waiting.connect(raw_address(bob))
            begun_at = trio.current_time()
            await until(lambda: bob.counters["connections_not_taken"] > TURNS_BURST + 3)
            # The loop retries at intervals, not continuously.
            assert trio.current_time() - begun_at > GATHER_SECONDS
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert await alice.identify(bob.addresses[0]) == bob.peer
        assert len(bob._connections.arrivals._doorway) == 1
        waiting.close()


@pytest.mark.parametrize("kind", ["SelectSelector", "PollSelector"])
async def test_a_node_accepts_connections_if_its_selector_has_no_file(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(selectors, "DefaultSelector", getattr(selectors, kind))
    alice, bob = make_network("a"), make_network("b")
    async with running(alice, bob):
        for _ in range(3):
            assert await alice.identify(bob.addresses[0]) == bob.peer


async def test_ipv4_and_ipv6_connections_are_accepted_in_turn() -> None:
    alice, bob = make_network("a"), make_network("b", listen=[LOOPBACK, ("::1", 0)])
    async with running(alice, bob):
        for address in bob.addresses:
            assert await alice.identify(address) == bob.peer


async def test_a_node_that_leaves_closes_unauthenticated_connections() -> None:
    bob = make_network("b")
    async with running(bob):
        silent = await trio.open_tcp_stream(*raw_address(bob))
        await until(lambda: len(bob._connections.arrivals._doorway) == 1)
    assert await silent.receive_some() == b""
    assert len(bob._connections.arrivals._doorway) == 0
    assert bob.counters["handshakes_cut_short"] == 1
    await silent.aclose()
