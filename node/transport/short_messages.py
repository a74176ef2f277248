"""Sends messages that would fit a datagram by streams, because datagrams to their receivers do not get
through. Messages to one peer stay in order, and do not delay those to other peers.

Peers that never answered have a few senders of their own. Most of them are unreachable, and anybody can
invent more, so they must not use up the senders of present peers.
"""

from collections import Counter, deque
from collections.abc import Awaitable, Callable

import trio

from crypto.identity import PeerId
from node.containment import note
from node.errors import StreamClosed, Unreachable

SENDERS = 16
"""Number of peers served simultaneously. A peer that is gone holds its sender for SECONDS."""
SECONDS = 5.0
"""Time limit from the first dial to the last byte; a prober has given up by then."""
NEW_SENDERS = 4
"""Number of senders for peers that never answered."""
NEW_PEERS_MAX = 16
"""Maximum number of such peers that may wait. Beyond that, the wait would be longer than a probe lasts."""
PEERS_MAX = 256
MESSAGES_PER_PEER_MAX = 32
"""Maximum number of messages queued for one peer: a second of control traffic. More are dropped, as from a
socket's queue."""


class ShortMessages:
    """The queues. `send` opens a stream and raises Unreachable or StreamClosed. `is_reached` returns whether
    a peer has ever answered. `sent` or `failed` is called with each peer to which sending succeeded or
    failed."""

    def __init__(
        self,
        send: Callable[[PeerId, str, bytes], Awaitable[None]],
        counters: Counter[str],
        *,
        is_reached: Callable[[PeerId], bool],
        sent: Callable[[PeerId], None],
        failed: Callable[[PeerId], None],
    ) -> None:
        self._send = send
        self._counters = counters
        self._is_reached = is_reached
        self._sent = sent
        self._failed = failed
        self._waiting: dict[PeerId, deque[tuple[str, bytes]]] = {}
        self._peers, self._peers_out = trio.open_memory_channel[PeerId](PEERS_MAX)
        self._new, self._new_out = trio.open_memory_channel[PeerId](NEW_PEERS_MAX)

    def put(self, peer: PeerId, protocol: str, message: bytes) -> None:
        """Queue a message, or drop and count it."""
        waiting = self._waiting.get(peer)
        if waiting is None:
            queue = self._peers if self._is_reached(peer) else self._new
            try:
                queue.send_nowait(peer)
            except trio.WouldBlock:
                self._counters["messages_dropped_queue_full"] += 1
                return
            waiting = self._waiting[peer] = deque()
        if len(waiting) >= MESSAGES_PER_PEER_MAX:
            self._counters["messages_dropped_queue_full"] += 1
        else:
            waiting.append((protocol, message))

    async def run(self) -> None:
        """Send queued messages until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(SENDERS):
                nursery.start_soon(self._serve, self._peers_out)
            for _ in range(NEW_SENDERS):
                nursery.start_soon(self._serve, self._new_out)

    async def _serve(self, peers: trio.MemoryReceiveChannel[PeerId]) -> None:
        while True:
            peer = await peers.receive()
            waiting = self._waiting[peer]
            try:
                while waiting:
                    with trio.fail_after(SECONDS):
                        await self._send(peer, *waiting.popleft())
                    self._counters["messages_by_stream"] += 1
                    self._sent(peer)
            except (Unreachable, StreamClosed, trio.TooSlowError):
                self._counters["messages_by_stream_failed"] += 1
                self._failed(peer)
            except Exception as error:
                note(error, "a short message by stream")
            finally:
                del self._waiting[peer]
