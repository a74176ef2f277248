"""Single messages that are too long for a datagram. Each goes over a connection, and like a datagram it is
sent without waiting for the outcome.

Not here: short messages to peers that no datagram reaches (`short_messages`).
"""

from collections import Counter
from collections.abc import Awaitable, Callable

import trio

from crypto.identity import PeerId
from node.containment import note
from node.errors import StreamClosed, Unreachable
from node.transport.router import ONE_SHOT_SECONDS

SENDERS = 8
QUEUE_MAX = 256
QUEUE_BYTES_MAX = 32 * 2**20


class OneShots:
    """The queued messages of one node, and those being sent. `send(peer, protocol, message)` delivers one
    over a connection."""

    def __init__(self, send: Callable[[PeerId, str, bytes], Awaitable[None]], counters: Counter[str]) -> None:
        self._send = send
        self._counters = counters
        self._put, self._waiting = trio.open_memory_channel[tuple[PeerId, str, bytes]](QUEUE_MAX)
        self._bytes = 0

    def put(self, peer: PeerId, protocol: str, message: bytes) -> None:
        """Queue a message, or drop it if there is no room."""
        if self._bytes + len(message) > QUEUE_BYTES_MAX:
            self._counters["messages_dropped_queue_full"] += 1
            return
        try:
            self._put.send_nowait((peer, protocol, message))
        except trio.WouldBlock:
            self._counters["messages_dropped_queue_full"] += 1
            return
        self._bytes += len(message)

    async def run(self) -> None:
        """Send queued messages until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(SENDERS):
                nursery.start_soon(self._send_forever)

    async def _send_forever(self) -> None:
        while True:
            peer, protocol, message = await self._waiting.receive()
            try:
                with trio.fail_after(ONE_SHOT_SECONDS):
                    await self._send(peer, protocol, message)
                self._counters["messages_by_stream"] += 1
            except (Unreachable, StreamClosed, trio.TooSlowError):
                self._counters["messages_by_stream_failed"] += 1
            except Exception as error:
                note(error, "a message by stream")
            finally:
                self._bytes -= len(message)
