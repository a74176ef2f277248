"""The streams between nodes that serve: messages of sessions in both directions, and tensors, from partners
only.

All messages between two nodes use one stream in each direction (`node.pipeline.links`). When that stream
ends, the peer counts as lost until it opens another.
"""

from collections import Counter
from collections.abc import Callable

import trio
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import StreamClosed, StreamEnded
from node.pipeline.links import FormerVersion, Links
from node.seams import Seams, Stream, StreamLimits
from node.serving.tensors import tensor_bytes, tensor_headers
from partition.serve.messages import (
    MESSAGE_BYTES_MAX,
    SERVE_PROTOCOL,
    SERVE_PROTOCOL_FORMER,
    Answer,
    Carried,
    Message,
    Sends,
    UnitWork,
    in_former_version,
)

STREAMS = StreamLimits(message_bytes_max=MESSAGE_BYTES_MAX, streams_per_peer_max=4)
"""Limits of streams: one in each direction, and further ones while a broken stream has not been noticed
yet."""
PAYLOAD_BYTES_MAX = 64 << 20
"""Maximum size of a payload. The largest unit is 512 tokens of 32,768 float32 values each. Messages without a
session have no payload."""
QUEUE_BYTES_MAX = 128 << 20
"""Maximum number of bytes queued for one peer: two of the largest units, or a hundred usual ones. A peer that
does not read them is lost, with its sessions. Otherwise a peer that sends requests and never reads would fill
this machine's memory."""
PARTNER_SECONDS = 60.0
"""How long a peer may still send tensors after its last session here ended, because some are still on their
way."""
IDLE_SECONDS_MAX = 120.0
"""A stream that is silent for this long is closed. Members and doors send something every second."""
NO_PAYLOAD = memoryview(b"")


class ServingStreams:
    """This node's serving streams. `run` owns them."""

    def __init__(
        self,
        seams: Seams,
        *,
        receive: Callable[[float, PeerId, Message, memoryview], None],
        lost: Callable[[PeerId], None],
        is_working_with: Callable[[PeerId], bool],
        note_former: Callable[[PeerId], None],
        refuse: Callable[[PeerId, RemoteProtocolError], None],
    ) -> None:
        """`receive` is called with each message, its arrival time and its payload, and may raise
        RemoteProtocolError. `lost` is called with a peer whose stream ended, or cannot be opened. A peer is a
        partner while this node `is_working_with` it, in a session or for a service. `note_former` is called
        with a peer that uses the previous version of the protocol."""
        self._seams = seams
        self._receive = receive
        self._told_lost = lost
        self._is_working_with = is_working_with
        self._refuse = refuse
        self._links = Links(
            seams.network,
            SERVE_PROTOCOL,
            seams.clock,
            deliver=self._deliver,
            on_reconnected=lambda _peer: None,
            on_stuck=self._lost,
            on_broken=self._lost,
            on_unopened=self._lost,
            queue_bytes_max=QUEUE_BYTES_MAX,
            former=FormerVersion(SERVE_PROTOCOL_FORMER, _as_former, note_former),
        )
        self._open: Counter[PeerId] = Counter()
        """The number of streams being read from each peer."""
        self._partners: dict[PeerId, float] = {}
        """The time until which each peer may send tensors."""

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Maintain the streams until cancelled."""
        self._seams.network.handle(SERVE_PROTOCOL, self._serve, STREAMS)
        self._seams.network.handle(SERVE_PROTOCOL_FORMER, self._serve, STREAMS)
        await self._links.run(task_status)

    def send(self, sends: Sends) -> None:
        """Queue messages for sending."""
        for peer, message in sends:
            if isinstance(message, Carried):
                told = replace(message.message, tensors=tensor_headers(message.arrays))
                self._links.send(peer, encode(told), *tensor_bytes(message.arrays))
            else:
                self._links.send(peer, encode(message))

    async def _serve(self, stream: Stream) -> None:
        """Receive from a peer until its stream ends. The peer is then lost until it opens another stream. If
        a stream moves to a better path, its successor is already open by then."""
        self._open[stream.peer] += 1
        is_moved = False
        try:
            while True:
                received = None
                with trio.move_on_after(IDLE_SECONDS_MAX):
                    allowed = PAYLOAD_BYTES_MAX if self._is_partner(stream.peer) else 0
                    received = await stream.receive_with_payload(allowed)
                if received is None:
                    return
                await self._deliver(stream.peer, *received)
        except StreamEnded:
            is_moved = self._open[stream.peer] > 1
        except StreamClosed:
            pass
        finally:
            self._open[stream.peer] -= 1
            self._open += Counter()  # removes peers without streams
            if not is_moved:
                self._lost(stream.peer)

    def _is_partner(self, peer: PeerId) -> bool:
        """Return whether a peer may send tensors, because it works with this node or did so a moment ago."""
        now = self._seams.clock.monotonic()
        if self._is_working_with(peer):
            self._partners = {each: until for each, until in self._partners.items() if until > now}
            self._partners[peer] = now + PARTNER_SECONDS
        return self._partners.get(peer, now) > now

    async def _deliver(self, sender: PeerId, data: bytes, payload: memoryview = NO_PAYLOAD) -> None:
        """Deliver one message. An invalid message is counted against its sender."""
        try:
            message: Message = decode(data, Message, bytes_max=MESSAGE_BYTES_MAX)
            if payload and not isinstance(message, UnitWork | Answer):
                raise RemoteProtocolError(f"{len(payload)} bytes after a message that has no payload")
            self._receive(self._seams.clock.monotonic(), sender, message, payload)
        except RemoteProtocolError as error:
            self._refuse(sender, error)
        await trio.lowlevel.checkpoint()

    def _lost(self, peer: PeerId) -> None:
        self._links.forget(peer)
        self._told_lost(peer)


def _as_former(data: bytes) -> bytes:
    """Return an encoded message in the form of the previous version."""
    message: Message = decode(data, Message, bytes_max=MESSAGE_BYTES_MAX)
    return encode(in_former_version(message))
