"""The ends of a circuit: a connection to a relay that leads to another peer from then on.

The two ends shake hands over it as over any connection, so the relay sees that they talk, when, and how much,
and nothing of what they say.
"""

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, short_peer
from crypto.noise import Session
from node.errors import StreamClosed, Unreachable
from node.transport.handshake import Credentials, shake_hands
from node.transport.relay_messages import (
    MESSAGE_BYTES_MAX,
    REASONS,
    AskCircuit,
    CircuitReady,
    RelayRefused,
    Reply,
    Request,
    TakeCircuit,
)
from node.transport.streams import SecureStream


async def ask_circuit(
    stream: SecureStream, credentials: Credentials, peer: PeerId
) -> tuple[trio.SocketStream, Session]:
    """Have the relay at the other end of a bare stream connect this node with `peer`. Raises Unreachable."""
    return await _through(stream, credentials, AskCircuit(peer), peer)


async def answer_circuit(
    stream: SecureStream, credentials: Credentials, token: bytes, peer: PeerId
) -> tuple[trio.SocketStream, Session]:
    """Take the circuit that a relay has announced with this token. Raises Unreachable."""
    return await _through(stream, credentials, TakeCircuit(token), peer)


async def _through(
    stream: SecureStream, credentials: Credentials, request: Request, peer: PeerId
) -> tuple[trio.SocketStream, Session]:
    relay = short_peer(stream.peer)
    try:
        await stream.send(encode(request))
        reply: Reply = decode(await stream.receive(), Reply, bytes_max=MESSAGE_BYTES_MAX)
        if isinstance(reply, RelayRefused):
            raise Unreachable("refused", f"{short_peer(peer)} through {relay}: it {REASONS[reply.code]}")
        if not isinstance(reply, CircuitReady):
            raise RemoteProtocolError("no answer to what was asked")
        opened, rest = stream.connection.detach()
    except RemoteProtocolError:
        stream.connection.end("a relay that breaks the protocol")
        raise Unreachable("refused", f"the relay {relay} breaks the protocol") from None
    except StreamClosed:
        raise Unreachable("refused", f"the relay {relay} hung up") from None
    finally:
        stream.close()
    transport = trio.SocketStream(trio.socket.from_stdlib_socket(opened))
    is_first = isinstance(request, AskCircuit)
    where = f"{short_peer(peer)} through {relay}"
    session = await shake_hands(transport, credentials, where, expected=peer, is_first=is_first, came=rest)
    return transport, session
