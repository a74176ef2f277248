"""Messages that have arrived and wait to be taken, one `QueueInbox` per protocol, bounded twice."""

from collections import Counter

import trio

from crypto.identity import PeerId

INBOX_MESSAGES_MAX = 1_024
"""A second of control traffic at the rate one core can handle; older news than that is worthless."""
INBOX_BYTES_MAX = 16 * 2**20
"""Messages that came by stream may be large, so their number alone bounds nothing."""


class QueueInbox:
    """`node.seams.Inbox`: oldest first; the newest are dropped when it is full. One task takes."""

    def __init__(
        self,
        counters: Counter[str],
        *,
        messages_max: int = INBOX_MESSAGES_MAX,
        bytes_max: int = INBOX_BYTES_MAX,
    ) -> None:
        self._counters = counters
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._messages: list[tuple[PeerId, bytes]] = []
        self._bytes = 0
        self._stirred = trio.Event()

    def put(self, sender: PeerId, message: bytes) -> None:
        """Add what has come, or drop and count it."""
        if len(self._messages) >= self._messages_max or self._bytes + len(message) > self._bytes_max:
            self._counters["inbox_full"] += 1
            return
        self._messages.append((sender, message))
        self._bytes += len(message)
        self._stirred.set()

    async def take(self, until: float) -> list[tuple[PeerId, bytes]]:
        """All that has come; waits for the first until the monotonic time `until`, or until `wake`."""
        if self._stirred.is_set():
            await trio.lowlevel.checkpoint()
        else:
            with trio.move_on_at(until):
                await self._stirred.wait()
        # A new event and not a cleared one: a wake that comes between two takes ends the second at once.
        self._stirred = trio.Event()
        messages, self._messages, self._bytes = self._messages, [], 0
        return messages

    def wake(self) -> None:
        self._stirred.set()
