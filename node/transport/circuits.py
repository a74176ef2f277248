"""The ends of a circuit: each end is a connection to a relay that carries bytes to another peer from then on.

The two ends shake hands over the circuit as over any connection, so the relay learns only that they talk,
when, and how much. The first two flights of that handshake travel in the messages to the relay.
"""

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, short_peer
from crypto.noise import HandshakeResult, PeerHandshake
from node.errors import StreamClosed, Unreachable
from node.transport.handshake import Credentials, answer_flight, shake_hands
from node.transport.relay_messages import (
    MESSAGE_BYTES_MAX,
    REASONS,
    AskCircuit,
    CircuitReady,
    RelayRefused,
    Reply,
    TakeCircuit,
)
from node.transport.streams import SecureStream


class CircuitEnd:
    """One end of a circuit. `request` is the message to send to the relay; `connect` continues after it was
    sent."""

    def __init__(
        self,
        credentials: Credentials,
        peer: PeerId,
        handshake: PeerHandshake,
        request: bytes,
        *,
        is_first: bool,
    ) -> None:
        self._credentials = credentials
        self._peer = peer
        self._handshake = handshake
        self._is_first = is_first
        self.request = request

    @classmethod
    def asking(cls, credentials: Credentials, peer: PeerId) -> "CircuitEnd":
        """Return the end for a node that wants to reach `peer`."""
        handshake = credentials.handshake(initiator=True, expected=peer)
        request = encode(AskCircuit(peer, handshake.start()))
        return cls(credentials, peer, handshake, request, is_first=True)

    @classmethod
    def taking(cls, credentials: Credentials, peer: PeerId, token: bytes, flight: bytes) -> "CircuitEnd":
        """Return this node's end of a circuit by which `peer` wants to reach it, as a relay announced with
        this token. Raises RemoteProtocolError if the flight does not come from a peer of this swarm."""
        handshake = credentials.handshake(initiator=False)
        try:
            request = encode(TakeCircuit(token, answer_flight(handshake, flight)))
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{short_peer(peer)} came through a relay with {error}") from None
        return cls(credentials, peer, handshake, request, is_first=False)

    async def connect(self, stream: SecureStream) -> tuple[trio.SocketStream, HandshakeResult]:
        """Wait for the relay to connect the two ends, then finish the handshake. `stream` is a bare stream to
        the relay on which `request` was sent. Raises Unreachable."""
        relay = short_peer(stream.peer)
        where = f"{short_peer(self._peer)} through {relay}"
        try:
            reply: Reply = decode(await stream.receive(), Reply, bytes_max=MESSAGE_BYTES_MAX)
            if isinstance(reply, RelayRefused):
                raise Unreachable("refused", f"{where}: it {REASONS[reply.code]}")
            if not isinstance(reply, CircuitReady) or bool(reply.flight) != self._is_first:
                raise RemoteProtocolError("the relay's reply does not match the request")
            opened, rest = stream.connection.detach()
        except RemoteProtocolError:
            stream.connection.end("a relay that breaks the protocol")
            raise Unreachable("refused", f"the relay {relay} breaks the protocol") from None
        except StreamClosed:
            raise Unreachable("refused", f"the relay {relay} hung up") from None
        finally:
            stream.close()
        transport = trio.SocketStream(trio.socket.from_stdlib_socket(opened))
        session = await shake_hands(
            transport,
            self._credentials,
            where,
            expected=self._peer,
            is_first=self._is_first,
            came=reply.flight + rest,
            begun=self._handshake,
        )
        return transport, session
