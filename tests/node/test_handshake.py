"""The handshake of a stream on sockets: deadlines, outsiders, suites; where time matters it is virtual."""

import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from crypto.contact import make_address
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import Identity
from crypto.noise import SUITES, preferred
from crypto.swarm import Swarm
from node.errors import Unreachable
from node.transport import handshake
from node.transport.doorway import Doorway, source_of
from node.transport.handshake import (
    HANDSHAKE_SECONDS,
    IGNORED_BYTES_MAX,
    Credentials,
    Outsider,
    accept,
    default_suites,
    dial,
)
from tests.node.nets import BULK, acquaint, echo, make_network, raw_address, running, until

KEY, OTHER_KEY = b"1" * 32, b"2" * 32
PRIVATE = Swarm("test", (KEY,))


def credentials(letter: str, swarm: Swarm = PRIVATE, **changes: Any) -> Credentials:
    arguments: dict[str, Any] = {
        "identity": Identity(letter.encode() * 32),
        "static": os.urandom(32),
        "swarm": swarm,
        "entropy": os.urandom,
        "suites": SUITES[:2],
    }
    return Credentials(**arguments | changes)


async def connected() -> tuple[trio.SocketStream, trio.SocketStream]:
    """Both ends of a connection that carries at once what is sent, so that virtual time is exact."""
    one, other = trio.socket.socketpair()
    return trio.SocketStream(one), trio.SocketStream(other)


async def say_nothing(stream: trio.SocketStream) -> None:
    pass


async def say_garbage(stream: trio.SocketStream) -> None:
    await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")


async def say_it_late(stream: trio.SocketStream) -> None:
    await trio.sleep(HANDSHAKE_SECONDS / 2)
    await stream.send_all(b"\x03\x01\x01" + (32).to_bytes(2, "big") + bytes(64))


async def say_too_much(stream: trio.SocketStream) -> None:
    with trio.move_on_after(HANDSHAKE_SECONDS / 2):
        await stream.send_all(bytes(IGNORED_BYTES_MAX))


def knock_of(swarm: Swarm) -> Callable[[trio.SocketStream], Awaitable[None]]:
    async def knock(stream: trio.SocketStream) -> None:
        await stream.send_all(credentials("o", swarm).handshake(initiator=True).start())

    return knock


@pytest.mark.parametrize(
    "says",
    [
        say_nothing,
        say_garbage,
        say_it_late,
        say_too_much,
        knock_of(Swarm("test")),
        knock_of(Swarm("test", (OTHER_KEY,))),
        knock_of(Swarm("other", (KEY,))),
    ],
    ids=["nothing", "garbage", "late", "much", "open", "another key", "another name"],
)
def test_an_outsider_gets_no_byte_and_the_end_of_one_who_says_nothing(
    says: Callable[[trio.SocketStream], Awaitable[None]],
) -> None:
    async def scenario() -> None:
        theirs, ours = await connected()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(says, theirs)
            with pytest.raises(Outsider):
                await accept(ours, credentials("b"))
            ours.socket.close()
        assert trio.current_time() == HANDSHAKE_SECONDS
        # An end, not a reset: that would tell of unread bytes.
        assert await theirs.receive_some() == b""
        theirs.socket.close()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("initiator", [True, False])
@pytest.mark.parametrize("swarm", [Swarm("test"), PRIVATE], ids=["open", "private"])
def test_who_drips_a_right_handshake_byte_by_byte_is_given_up_at_the_deadline(
    swarm: Swarm, initiator: bool
) -> None:
    async def drip(stream: trio.SocketStream, data: bytes) -> None:
        for byte in data:
            await stream.send_all(bytes((byte,)))
            await trio.sleep(0.4)

    async def answer_slowly(stream: trio.SocketStream) -> None:
        side = credentials("b", swarm).handshake(initiator=False)
        side.start()
        answer = b""
        while not answer:
            answer = side.receive(await stream.receive_some(side.wanted))
        await drip(stream, answer)

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            if initiator:
                listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
                nursery.start_soon(trio.serve_listeners, answer_slowly, listeners)
                address = make_address(*listeners[0].socket.getsockname())
                with pytest.raises(Unreachable, match="did not shake hands"):
                    await dial(address, credentials("a", swarm))
            else:
                theirs, ours = await connected()
                nursery.start_soon(drip, theirs, credentials("a", swarm).handshake(initiator=True).start())
                with pytest.raises(Outsider if swarm.is_private else trio.TooSlowError):
                    await accept(ours, credentials("b", swarm))
                theirs.socket.close()
                ours.socket.close()
            assert trio.current_time() == pytest.approx(HANDSHAKE_SECONDS)
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


async def test_bytes_behind_an_answer_that_were_not_asked_for_are_refused() -> None:
    async def answer_and_go_on(stream: trio.SocketStream) -> None:
        side = credentials("b", Swarm("test")).handshake(initiator=False)
        side.start()
        answer = b""
        while not answer:
            answer = side.receive(await stream.receive_some(side.wanted))
        await stream.send_all(answer + b"and more")

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer_and_go_on, listeners)
        address = make_address(*listeners[0].socket.getsockname())
        with pytest.raises(Unreachable) as refusal:
            await dial(address, credentials("a", Swarm("test")))
        assert "before it is their turn" in str(refusal.value.__context__)
        nursery.cancel_scope.cancel()


def test_in_an_open_swarm_garbage_is_refused_at_once() -> None:
    async def scenario() -> None:
        theirs, ours = await connected()
        await say_garbage(theirs)
        with pytest.raises(RemoteProtocolError, match="begin as ours"):
            await accept(ours, credentials("b", Swarm("test")))
        assert trio.current_time() == 0
        theirs.socket.close()
        ours.socket.close()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


# --- on real networks ------------------------------------------------------------------------------


async def test_members_of_a_private_swarm_meet_through_a_rotation() -> None:
    old, both, new = (
        make_network(letter, keys=keys)
        for letter, keys in (("a", [KEY]), ("b", [OTHER_KEY, KEY]), ("c", [OTHER_KEY]))
    )
    both.handle(BULK, echo)
    async with running(old, both, new):
        acquaint(old, both, new)
        for member in (old, new):
            stream = await member.open(both.peer, BULK)
            await stream.send(b"of one swarm")
            assert await stream.receive() == b"of one swarm"


async def test_outsiders_are_counted_and_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.2)
    member = make_network("b", keys=[KEY])
    async with running(member):
        for outsider in make_network("o", keys=[OTHER_KEY]), make_network("p", swarm="other", keys=[KEY]):
            with pytest.raises(Unreachable, match="another swarm key is as silent"):
                await outsider.identify(member.addresses[0])
        with pytest.raises(Unreachable):
            await make_network("q").identify(member.addresses[0])
        await until(lambda: member.counters["handshakes_by_outsiders"] == 3)


async def test_peers_without_a_common_suite_say_so() -> None:
    alice, bob = make_network("a", suites=["AESGCM"]), make_network("b", suites=["ChaChaPoly"])
    async with running(bob):
        with pytest.raises(Unreachable, match="it takes only ChaChaPoly") as refusal:
            await alice.identify(bob.addresses[0])
        assert refusal.value.reason == "refused"
        await until(lambda: bob.counters["handshakes_refused"] == 1)


async def test_after_a_wrong_guess_a_stream_works_as_after_a_right_one() -> None:
    alice, bob = make_network("a"), make_network("b", suites=["ChaChaPoly"])
    bob.handle(BULK, echo)
    async with running(alice, bob):
        acquaint(alice, bob)
        stream = await alice.open(bob.peer, BULK)
        await stream.send(b"all is well")
        assert await stream.receive() == b"all is well"


def test_a_suite_that_is_none_is_our_own_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="no suite"):
        make_network("a", suites=["ROT13"])


def test_a_handshake_uses_fresh_ephemeral_keys_each_time() -> None:
    ours = credentials("a", suites=preferred(has_aes=True))
    first, second = (ours.handshake(initiator=True).start() for _ in range(2))
    # Neither the X25519 key nor, where there is one, the ML-KEM key behind it.
    assert first[-64:-32] != second[-64:-32]
    assert first[8:40] != second[8:40]


@pytest.mark.parametrize(
    ("text", "first"), [("flags\t: fpu aes sse\n", "AESGCM"), ("flags : fpu vaes paes\n", "ChaChaPoly")]
)
def test_the_cpu_says_which_cipher_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, text: str, first: str
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(handshake, "_CPU_FILE", str(tmp_path / "cpuinfo"))
    assert default_suites()[0].cipher == first
    monkeypatch.setattr(handshake, "_CPU_FILE", str(tmp_path / "none"))
    assert default_suites()[0].cipher == "AESGCM"


# --- who stands in the doorway -----------------------------------------------------------------------


async def test_strangers_who_fill_the_doorway_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 30.0)
    alice, bob = make_network("a"), make_network("b")
    bob._connections._doorway = Doorway(places_max=2)
    async with running(alice, bob):
        idle = [await trio.open_tcp_stream(*raw_address(bob)) for _ in range(2)]
        await until(lambda: len(bob._connections._doorway) == 2)
        assert await alice.identify(bob.addresses[0]) == bob.peer
        # Who has stood there longest had to go.
        assert await idle[0].receive_some() == b""
        assert bob.counters["handshakes_displaced"] == 1
        assert len(bob._connections._doorway) == 1
        for connection in idle:
            await connection.aclose()


@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["open", "private"])
async def test_an_honest_peer_is_answered_amid_strangers_of_every_kind(keys: tuple[bytes, ...]) -> None:
    alice, bob = make_network("a", keys=keys), make_network("b", keys=keys)
    bob._connections._doorway = Doorway(places_max=32)
    kinds = [
        say_nothing,
        say_garbage,
        say_too_much,
        knock_of(Swarm("test")),
        knock_of(Swarm("other", (KEY,))),
    ]

    async def be_strange(says: Callable[[trio.SocketStream], Awaitable[None]]) -> None:
        while True:
            with suppress(trio.BrokenResourceError, OSError):
                async with await trio.open_tcp_stream(*raw_address(bob)) as stream:
                    await says(stream)
                    await stream.receive_some()
            await trio.sleep(0.1)  # some hundred strangers a second

    async with running(alice, bob), trio.open_nursery() as nursery:
        for says in [*kinds * 6, *[say_nothing] * 40]:
            nursery.start_soon(be_strange, says)
        await until(lambda: bob.counters["handshakes_displaced"] > 0)
        for _ in range(20):
            assert await alice.identify(bob.addresses[0]) == bob.peer
            assert len(bob._connections._doorway) <= 32
        nursery.cancel_scope.cancel()
    assert bob.counters["handshakes_by_outsiders" if keys else "handshakes_refused"] > 0
    assert len(bob._connections._doorway) == 0


HOSTS = ["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "::ffff:10.0.0.1", "fe80::1%eth0"]


@given(st.lists(st.tuples(st.sampled_from(HOSTS), st.integers(0, 5))))
def test_the_source_that_crowds_the_doorway_makes_room_with_its_oldest(steps: list[tuple[str, int]]) -> None:
    doorway, away = Doorway(places_max=4), list[int]()
    standing: list[tuple[int, bytes, ExitStack]] = []
    for number, (host, leaving) in enumerate(steps):
        place, source = ExitStack(), source_of(host)
        crowds = Counter(source for _, source, _ in standing)
        place.enter_context(doorway.place(host, partial(away.append, number)))
        if len(standing) == 4:
            gone = next(entry for entry in standing if entry[0] == away[-1])
            assert crowds[gone[1]] == max(crowds.values())
            assert gone == next(entry for entry in standing if entry[1] == gone[1])
            standing.remove(gone)
            gone[2].close()
        standing.append((number, source, place))
        if leaving < len(standing):
            standing.pop(leaving)[2].close()
        assert len(doorway) == len(standing) <= 4
    assert len(set(away)) == len(away)


def test_addresses_of_one_household_are_one_source() -> None:
    sources = [source_of(host) for host in HOSTS]
    assert [sources.index(source) for source in sources] == [0, 1, 2, 2, 0, 5]
