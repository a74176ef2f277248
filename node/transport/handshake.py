"""The handshake of a stream: connect and shake hands, or answer who did. Ends in a `Session`.

On the wire: the initiator begins with two bytes (version, cipher), then the Noise messages of
`crypto.noise`, each behind two bytes of length. The initiator names the cipher; the name is part of
what Noise hashes, so nobody can change it on the way. What follows on the connection is `tcp.py`'s.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import trio

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.identity import Identity, PeerId
from crypto.noise import KEY_BYTES, PeerHandshake, Session, WrongIdentity
from node.errors import Unreachable, WrongPeer

CONNECT_SECONDS = 5.0
"""TCP's first retries are after one and three seconds: two lost packets are survived."""
HANDSHAKE_SECONDS = 5.0
HANDSHAKE_BYTES_MAX = 1_536
"""The longest handshake message has 200 bytes; the rest is room for what later versions add."""
UNSENT_BYTES_MAX = 2**20
"""What the kernel takes beyond what the network does: one write, while the next is encrypted. trio's own
16 KiB is for who multiplexes; measured for 64 MiB, it makes seven times the writes and half the time more."""
KEEPALIVE_SECONDS = 30
"""A peer that vanished is noticed by the kernel, after a few times this."""

_VERSION = 2
_CIPHERS = {1: "AESGCM", 2: "ChaChaPoly"}
_LENGTH_BYTES = 2


@dataclass(frozen=True)
class Credentials:
    """What this node proves in handshakes. `static` is an X25519 private key of 32 bytes."""

    identity: Identity
    static: bytes
    swarm: str
    entropy: Callable[[int], bytes]
    cipher: str = "AESGCM"

    def handshake(self, *, initiator: bool, cipher: str, expected: PeerId | None = None) -> PeerHandshake:
        return PeerHandshake(
            initiator=initiator,
            identity=self.identity,
            static=self.static,
            ephemeral=self.entropy(KEY_BYTES),
            swarm=self.swarm,
            cipher=cipher,
            expected=expected,
        )


async def dial(address: Address, credentials: Credentials) -> tuple[trio.SocketStream, Session]:
    """Connect and shake hands; `address.peer`, if set, must be who answers.

    Raises:
        WrongPeer, Unreachable: with the reason and a sentence for a person.
    """
    transport = await _connect(address)
    session = None
    try:
        with trio.fail_after(HANDSHAKE_SECONDS):
            session = await _initiate(transport, credentials, address.peer)
    except trio.TooSlowError:
        detail = f"{address.short} took the connection, but did not shake hands in {HANDSHAKE_SECONDS:g} s"
        raise Unreachable("timeout", detail) from None
    except WrongIdentity as error:
        raise WrongPeer("wrong key", str(error)) from None
    except (RemoteProtocolError, trio.BrokenResourceError):
        raise Unreachable(
            "refused", f"{address.short} answers, but is of another swarm or not a peerloom node"
        ) from None
    finally:
        if session is None:
            transport.socket.close()
    return transport, session


async def accept(transport: trio.SocketStream, credentials: Credentials) -> Session:
    """The other side of `dial`, for a connection that came in; the caller sets the deadline.

    Raises:
        RemoteProtocolError, trio.BrokenResourceError: no peer of this swarm is there.
    """
    _set_options(transport)
    version, cipher = await _receive_exactly(transport, 2)
    if version != _VERSION or cipher not in _CIPHERS:
        raise RemoteProtocolError("a connection that does not begin as ours do")
    handshake = credentials.handshake(initiator=False, cipher=_CIPHERS[cipher])
    first = await _receive_framed(transport)
    await transport.send_all(_framed(handshake.receive(first)))
    handshake.receive(await _receive_framed(transport))
    assert handshake.session is not None
    return handshake.session


async def _initiate(
    transport: trio.SocketStream, credentials: Credentials, expected: PeerId | None
) -> Session:
    cipher = next(number for number, name in _CIPHERS.items() if name == credentials.cipher)
    handshake = credentials.handshake(initiator=True, cipher=credentials.cipher, expected=expected)
    await transport.send_all(bytes((_VERSION, cipher)) + _framed(handshake.start()))
    last = handshake.receive(await _receive_framed(transport))
    await transport.send_all(_framed(last))
    assert handshake.session is not None
    return handshake.session


async def _connect(address: Address) -> trio.SocketStream:
    try:
        with trio.fail_after(CONNECT_SECONDS):
            transport = await trio.open_tcp_stream(address.host, address.port)
    except trio.TooSlowError:
        raise Unreachable("timeout", f"{address.short} did not answer in {CONNECT_SECONDS:g} s") from None
    except socket.gaierror:
        raise Unreachable("unknown", f"no machine is known by the name {address.host}") from None
    except OSError as error:
        raise _no_connection(address, error) from None
    _set_options(transport)
    return transport


def _no_connection(address: Address, error: OSError) -> Unreachable:
    """trio wraps what the attempts raised: one error as the cause, several as a group in the cause."""
    cause = error.__cause__
    causes = cause.exceptions if isinstance(cause, BaseExceptionGroup) else (cause or error,)
    if any(isinstance(each, ConnectionRefusedError) for each in causes):
        return Unreachable("refused", f"{address.host} is up, but no node listens on port {address.port}")
    reason = getattr(causes[0], "strerror", None) or "no way there"
    return Unreachable("timeout", f"{address.short} cannot be reached: {reason}")


def _set_options(transport: trio.SocketStream) -> None:
    # A connection that is gone already refuses options; the next read will tell.
    with suppress(OSError):
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        transport.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
            transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS // 3)


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


async def _receive_framed(transport: trio.SocketStream) -> bytes:
    length = int.from_bytes(await _receive_exactly(transport, _LENGTH_BYTES), "big")
    if length > HANDSHAKE_BYTES_MAX:
        raise RemoteProtocolError(f"a handshake message of {length} bytes")
    return await _receive_exactly(transport, length)


async def _receive_exactly(transport: trio.SocketStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await transport.receive_some(count - len(data))
        if not more:
            raise RemoteProtocolError("the connection ended inside the handshake")
        data += more
    return data
