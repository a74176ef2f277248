"""A full XX handshake with py-libp2p's Noise in both roles, if the extra `oracle` is installed.

By default, py-libp2p supports only ChaChaPoly with an empty prologue. So these tests cover the engine and the
identity payload, but not the bytes that precede them on our wire.
"""

from typing import Any

import pytest
import trio
from trio.testing import memory_stream_pair

from crypto.identity import Identity, peer_text
from crypto.noise import Handshake, check_identity_payload, identity_payload, static_public_key

MISSING = "the extra oracle is not installed"
patterns: Any = pytest.importorskip("libp2p.security.noise.patterns", reason=MISSING)
ed25519: Any = pytest.importorskip("libp2p.crypto.ed25519")
x25519: Any = pytest.importorskip("libp2p.crypto.x25519")
peer_id: Any = pytest.importorskip("libp2p.peer.id")

OURS = Identity(b"o" * 32)
OUR_STATIC, THEIR_STATIC = b"s" * 32, b"t" * 32


class RawConnection:
    """An in-memory connection for py-libp2p."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    async def read(self, count: int) -> bytes:
        return bytes(await self._stream.receive_some(count))

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()


class Wire:
    """Our end of the in-memory connection: it frames each message with two bytes of length."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._came = b""

    async def send(self, message: bytes) -> None:
        await self._stream.send_all(len(message).to_bytes(2, "big") + message)

    async def receive(self) -> bytes:
        length = int.from_bytes(await self._exactly(2), "big")
        return await self._exactly(length)

    async def _exactly(self, count: int) -> bytes:
        while len(self._came) < count:
            self._came += await self._stream.receive_some()
        taken, self._came = self._came[:count], self._came[count:]
        return taken


@pytest.mark.parametrize("we_open", [True, False])
async def test_a_handshake_with_py_libp2p_identifies_both_sides(we_open: bool) -> None:
    private = ed25519.Ed25519PrivateKey.from_bytes(b"l" * 32)
    theirs = peer_id.ID.from_pubkey(private.get_public_key())
    pattern = patterns.PatternXX(theirs, private, x25519.X25519PrivateKey.from_bytes(THEIR_STATIC))
    near, far = memory_stream_pair()
    wire, connection = Wire(near), RawConnection(far)
    sessions: list[Any] = []

    async def be_libp2p() -> None:
        if we_open:
            sessions.append(await pattern.handshake_inbound(connection))
        else:
            ours = peer_id.ID.from_base58(peer_text(OURS.peer))
            sessions.append(await pattern.handshake_outbound(connection, ours))

    handshake = Handshake(
        initiator=we_open, static=OUR_STATIC, ephemeral=b"e" * 32, prologue=b"", cipher="ChaChaPoly"
    )
    payload = identity_payload(OURS, static_public_key(OUR_STATIC))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(be_libp2p)
        if we_open:
            await wire.send(handshake.write())
            peer = check_identity_payload(handshake.read(await wire.receive()), handshake.remote_static)
            await wire.send(handshake.write(payload))
        else:
            assert handshake.read(await wire.receive()) == b""
            await wire.send(handshake.write(payload))
            peer = check_identity_payload(handshake.read(await wire.receive()), handshake.remote_static)
    assert peer_text(peer) == str(theirs)
    assert str(sessions[0].remote_peer) == peer_text(OURS.peer)
    sending, receiving = handshake.split()
    await wire.send(sending.encrypt(b"to them"))
    assert await sessions[0].read(7) == b"to them"
    await sessions[0].write(b"to us")
    assert receiving.decrypt(await wire.receive()) == b"to us"
