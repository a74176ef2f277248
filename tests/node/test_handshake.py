"""The handshake of a stream on sockets: deadlines, outsiders and cipher suites. Tests of deadlines use
virtual time."""

import os
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from crypto.contact import make_address
from crypto.errors import LocalProtocolError
from crypto.identity import Identity
from crypto.noise import SUITES, preferred
from crypto.swarm import Swarm
from node.errors import Unreachable
from node.transport.handshake import (
    Credentials,
    default_suites,
    dial,
)
from node.transport.settings import TRANSPORT, TransportSettings
from tests.node.nets import BULK, acquaint, echo, make_network, running, until

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


async def answer_of(credentials: Credentials, stream: trio.SocketStream) -> bytes:
    """Return a responder's answer to the first flight on the stream."""
    side = credentials.handshake(initiator=False)
    side.start()
    answer = b""
    while not answer:
        answer = side.receive(await stream.receive_some(side.wanted) if side.wanted else b"")
    return bytes(answer)


@pytest.mark.parametrize("swarm", [Swarm("test"), PRIVATE], ids=["open", "private"])
def test_an_answer_sent_byte_by_byte_is_abandoned_at_the_deadline(swarm: Swarm) -> None:
    async def answer_slowly(stream: trio.SocketStream) -> None:
        for byte in await answer_of(credentials("b", swarm), stream):
            await stream.send_all(bytes((byte,)))
            await trio.sleep(0.4)

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, answer_slowly, listeners)
            address = make_address(*listeners[0].socket.getsockname())
            with pytest.raises(Unreachable, match="did not shake hands"):
                await dial(address, credentials("a", swarm))
            assert trio.current_time() == pytest.approx(TRANSPORT.handshake_seconds)
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


async def test_bytes_sent_too_early_after_an_answer_are_refused() -> None:
    async def answer_and_go_on(stream: trio.SocketStream) -> None:
        answer = await answer_of(credentials("b", Swarm("test")), stream)
        await stream.send_all(answer + b"and more")

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer_and_go_on, listeners)
        address = make_address(*listeners[0].socket.getsockname())
        with pytest.raises(Unreachable) as refusal:
            await dial(address, credentials("a", Swarm("test")))
        assert "before the peer's turn" in str(refusal.value.__context__)
        nursery.cancel_scope.cancel()


# --- on real networks ------------------------------------------------------------------------------


async def test_members_of_a_private_swarm_connect_while_its_key_rotates() -> None:
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


async def test_outsiders_are_counted_and_get_no_answer() -> None:
    make = partial(make_network, settings=TransportSettings(handshake_seconds=0.2))
    member = make("b", keys=[KEY])
    async with running(member):
        for outsider in make("o", keys=[OTHER_KEY]), make("p", swarm="other", keys=[KEY]):
            with pytest.raises(Unreachable, match="different swarm key does not answer"):
                await outsider.identify(member.addresses[0])
        with pytest.raises(Unreachable):
            await make("q").identify(member.addresses[0])
        await until(lambda: member.counters["handshakes_by_outsiders"] == 3)


async def test_peers_without_a_common_cipher_suite_report_it() -> None:
    alice, bob = make_network("a", suites=["AESGCM"]), make_network("b", suites=["ChaChaPoly"])
    async with running(bob):
        with pytest.raises(Unreachable, match="it takes only ChaChaPoly") as refusal:
            await alice.identify(bob.addresses[0])
        assert refusal.value.reason == "refused"
        await until(lambda: bob.counters["handshakes_refused"] == 1)


async def test_a_wrongly_guessed_cipher_suite_still_yields_a_stream() -> None:
    alice, bob = make_network("a"), make_network("b", suites=["ChaChaPoly"])
    bob.handle(BULK, echo)
    async with running(alice, bob):
        acquaint(alice, bob)
        stream = await alice.open(bob.peer, BULK)
        await stream.send(b"all is well")
        assert await stream.receive() == b"all is well"


def test_an_unknown_cipher_suite_is_a_local_error() -> None:
    with pytest.raises(LocalProtocolError, match="does not exist"):
        make_network("a", suites=["ROT13"])


def test_each_handshake_uses_fresh_ephemeral_keys() -> None:
    ours = credentials("a", suites=preferred(has_aes=True))
    first, second = (ours.handshake(initiator=True).start() for _ in range(2))
    # The X25519 keys differ, and so do the ML-KEM keys that follow them, if there are any.
    assert first[-64:-32] != second[-64:-32]
    assert first[8:40] != second[8:40]


@pytest.mark.parametrize(
    ("text", "first"), [("flags\t: fpu aes sse\n", "AESGCM"), ("flags : fpu vaes paes\n", "ChaChaPoly")]
)
def test_the_cpu_decides_which_cipher_suite_is_preferred(tmp_path: Any, text: str, first: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert default_suites(str(tmp_path / "cpuinfo"))[0].cipher == first
    assert default_suites(str(tmp_path / "none"))[0].cipher == "AESGCM"
