"""The handshake of a stream: connect and shake hands, or answer a peer that has connected. Yields a
`HandshakeResult`.

`crypto.noise.peer_handshake` defines the messages and what is refused; this module has the socket and the
deadline. `accept_queue` holds connections that have not yet begun a handshake; `tcp` takes over the
connection after it.
"""

import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import trio

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.identity import Identity, PeerId
from crypto.noise import (
    HandshakeResult,
    NoCommonSuite,
    PeerHandshake,
    PrivateKey,
    ReplayCache,
    Suite,
    WrongIdentity,
    identity_payload,
    load_private_key,
    preferred,
    static_public_key,
)
from crypto.swarm import Swarm
from node.errors import NotListening, Unreachable, WrongPeer
from node.forks import keep_from_children
from node.transport.settings import TRANSPORT

CONNECT_SECONDS = 5.0
"""How long to wait for a connection. TCP's first retries come after one and three seconds, so two lost
packets are survived."""
FLIGHT_BYTES_MAX = 2**11
"""Maximum number of bytes read in one call; the longest flight has 1,400. The same amount again, and one
message, may be held."""
UNSENT_BYTES_MAX = 2**20
"""Bytes that the kernel queues in addition to those in flight: one write, while the next is encrypted. trio's
default of 16 KiB suits multiplexers. Measured for 64 MiB, that default takes seven times the writes and 1.5
times as long."""
KEEPALIVE_SECONDS = 30
"""Idle seconds before a keepalive probe. The kernel notices a vanished peer after a few times this."""

CPU_FILE = "/proc/cpuinfo"
_CPU_BYTES = 2**14
"""Bytes read from the processor file: more than the entry of the first processor."""


@dataclass(frozen=True)
class Credentials:
    """The keys and the swarm that this node proves in handshakes, the cipher suites that it accepts (best
    first), and the time limit of a handshake.

    `static` is an X25519 private key of 32 bytes.
    """

    identity: Identity
    static: bytes
    swarm: Swarm
    entropy: Callable[[int], bytes]
    suites: tuple[Suite, ...]
    handshake_seconds: float = TRANSPORT.handshake_seconds

    @cached_property
    def _knocks(self) -> ReplayCache:
        return ReplayCache()

    @cached_property
    def _loaded(self) -> PrivateKey:
        return load_private_key(self.static)

    @cached_property
    def _proof(self) -> bytes:
        """The signature, computed once because its content is the same in each handshake."""
        return identity_payload(self.identity, static_public_key(self._loaded))

    def handshake(self, *, initiator: bool, expected: PeerId | None = None) -> PeerHandshake:
        return PeerHandshake(
            initiator=initiator,
            proof=self._proof,
            static=self._loaded,
            swarm=self.swarm,
            suites=self.suites,
            entropy=self.entropy,
            knocks=self._knocks,
            expected=expected,
        )


@dataclass(frozen=True)
class SecuredTransport:
    """A connection whose handshake is complete, before any further message."""

    address: Address
    """The peer's address; for a circuit, the circuit itself."""
    transport: trio.SocketStream
    session: HandshakeResult


def default_suites(cpu_file: str = CPU_FILE) -> tuple[Suite, ...]:
    """Return all suites that work here, the best for this machine first. `cpu_file` lists the processor's
    features."""
    return preferred(has_aes=_has_aes(cpu_file))


def _has_aes(cpu_file: str) -> bool:
    """Return whether the CPU has AES instructions, according to `cpu_file`."""
    try:
        with open(cpu_file) as file:
            text = file.read(_CPU_BYTES)
    except OSError:
        return True  # no such file, so not Linux: probably a desktop of the last ten years
    return re.search(r"\baes\b", text) is not None


async def dial(address: Address, credentials: Credentials) -> tuple[trio.SocketStream, HandshakeResult]:
    """Connect and shake hands. If `address.peer` is set, that peer must answer.

    Raises:
        WrongPeer, Unreachable: with the reason and a sentence for people.
    """
    transport = await _connect(address)
    return transport, await shake_hands(transport, credentials, address.short, expected=address.peer)


async def shake_hands(
    transport: trio.SocketStream,
    credentials: Credentials,
    where: str,
    *,
    expected: PeerId | None,
    is_first: bool = True,
    came: bytes = b"",
    begun: PeerHandshake | None = None,
) -> HandshakeResult:
    """Shake hands on an open connection; close it on failure. `where` names the other peer for people,
    `is_first` is true for exactly one of the two, and `came` has bytes already read. If the handshake has
    `begun`, its first flight was sent by other means.

    Raises:
        WrongPeer, Unreachable: with the reason and a sentence for people.
    """
    session = None
    try:
        with trio.fail_after(credentials.handshake_seconds):
            if begun is None:
                made = credentials.handshake(initiator=is_first, expected=expected if is_first else None)
                session = await _shake_hands(transport, made, made.start(), came)
            else:
                session = await _shake_hands(transport, begun, b"", came)
            if expected not in (None, session.peer):
                session = None
                raise WrongPeer("wrong key", f"{where} is somebody else")
    except trio.TooSlowError:
        seconds = credentials.handshake_seconds
        detail = f"{where} accepted the connection, but did not shake hands in {seconds:g} s"
        raise Unreachable("timeout", detail + _about_key(credentials)) from None
    except WrongIdentity as error:
        raise WrongPeer("wrong key", str(error)) from None
    except NoCommonSuite as error:
        raise Unreachable("refused", f"{where} answers, but {error}") from None
    except (RemoteProtocolError, trio.BrokenResourceError):
        detail = f"{where} answers, but belongs to another swarm or is not a peerloom node"
        raise Unreachable("refused", detail + _about_key(credentials)) from None
    finally:
        if session is None:
            transport.socket.close()
    return session


def answer_flight(handshake: PeerHandshake, flight: bytes) -> bytes:
    """Return a responder's answer to the first flight of a handshake, if that flight did not come on the
    connection itself. Raises RemoteProtocolError if it is not a complete flight."""
    answer = handshake.start()
    while not answer:
        taken, flight = flight[: handshake.wanted], flight[handshake.wanted :]
        if len(taken) < handshake.wanted:
            raise RemoteProtocolError("an incomplete flight")
        answer = handshake.receive(taken)
    if flight:
        raise RemoteProtocolError("more than one flight")
    return answer


async def accept(transport: trio.SocketStream, handshake: PeerHandshake, came: bytes) -> HandshakeResult:
    """Answer a dial (the counterpart of `dial`). The `handshake` has read its first flight, and `came` has
    the bytes after it. The caller cancels this when the time is over.

    Raises:
        RemoteProtocolError, trio.BrokenResourceError: no peer of this swarm is there.
    """
    set_options(transport)
    return await _shake_hands(transport, handshake, b"", came)


def _about_key(credentials: Credentials) -> str:
    """Return a hint for users who cannot get into a private swarm, because the nodes there do not explain
    it."""
    hint = "; a node with a different swarm key does not answer either"
    return hint if credentials.swarm.is_private else ""


async def _shake_hands(
    transport: trio.SocketStream, handshake: PeerHandshake, outgoing: bytes, came: bytes = b""
) -> HandshakeResult:
    while handshake.session is None:
        if outgoing:
            await transport.send_all(outgoing)
        wanted = handshake.wanted
        while len(came) < wanted:
            # Read whole flights at a time, but no byte beyond the last message, because a stream follows.
            more = await transport.receive_some(wanted - len(came) if handshake.is_last else FLIGHT_BYTES_MAX)
            if not more:
                raise RemoteProtocolError("the connection ended inside the handshake")
            came += more
        taken, came = came[:wanted], came[wanted:]
        outgoing = handshake.receive(taken)
    if came:
        raise RemoteProtocolError("bytes that came before the peer's turn")
    if outgoing:
        await transport.send_all(outgoing)
    return handshake.session


async def _connect(address: Address) -> trio.SocketStream:
    if address.is_link_local and "%" not in address.host:
        hint = f"[{address.host}%eth0]:{address.port}"
        raise Unreachable(
            "unknown", f"{address.short} is a link-local address. Add the interface, as in {hint}"
        )
    try:
        with trio.fail_after(CONNECT_SECONDS):
            transport = await trio.open_tcp_stream(address.host, address.port)
    except trio.TooSlowError:
        raise Unreachable("timeout", f"{address.short} did not answer in {CONNECT_SECONDS:g} s") from None
    except socket.gaierror:
        raise Unreachable("unknown", f"no machine is known by the name {address.host}") from None
    except OSError as error:
        raise _no_connection(address, error) from None
    keep_from_children(transport.socket)
    set_options(transport)
    return transport


def _no_connection(address: Address, error: OSError) -> Unreachable:
    """Convert trio's error. It wraps the attempts' errors: a single one as the cause, several as a group in
    the cause."""
    cause = error.__cause__
    causes = cause.exceptions if isinstance(cause, BaseExceptionGroup) else (cause or error,)
    if any(isinstance(each, ConnectionRefusedError) for each in causes):
        return NotListening(f"{address.host} is up, but no node listens on port {address.port}")
    return Unreachable("timeout", f"{address.short} cannot be reached: {error_reason(causes[0])}")


def error_reason(error: BaseException) -> str:
    """Return why the system made no connection, without trio's own text, which repeats the address in Python
    notation."""
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if number else "no way there"


def set_options(transport: trio.SocketStream) -> None:
    """Make the kernel keep little unsent data, and notice when the other machine has vanished."""
    # A connection that has ended refuses options; the next read reports it.
    with suppress(OSError):
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        transport.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
            transport.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS // 3)
