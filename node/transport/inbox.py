"""Messages that have arrived and wait to be taken. Each protocol has one `QueueInbox`, bounded in number and
bytes. One alarm ends the waits of all inboxes of a node in time."""

from collections import Counter
from math import inf

import trio

from crypto.identity import PeerId

INBOX_MESSAGES_MAX = 1_024
"""Maximum number of waiting messages: a second of control traffic at the rate that one core can handle. Older
messages are worthless."""
INBOX_BYTES_MAX = 16 * 2**20
"""Maximum size of the waiting messages. A number alone is no bound, because messages that come by stream may
be large."""


class Alarm:
    """One sleeping task for all waits of a node, disturbed only by a wait that ends before all others. A
    cancel scope for each wait would be a third of the cost of a datagram."""

    def __init__(self) -> None:
        self._inboxes: list[QueueInbox] = []
        self._sleep = trio.CancelScope()
        self._rings_at = inf
        self.is_running = False

    def watch(self, inbox: "QueueInbox") -> None:
        """Add an inbox to those that are watched."""
        self._inboxes.append(inbox)

    def hurry(self, at: float) -> None:
        """Ring at `at` at the latest."""
        if at < self._rings_at:
            self._rings_at = self._sleep.deadline = at

    async def run(self) -> None:
        """Run until cancelled. On cancellation, all waits with a deadline end early."""
        self.is_running = True
        try:
            while True:
                self._rings_at = min((inbox.until for inbox in self._inboxes), default=inf)
                with trio.CancelScope(deadline=self._rings_at) as self._sleep:
                    await trio.sleep_forever()
                self._ring(trio.current_time())
        finally:
            self.is_running = False
            self._ring(inf)

    def _ring(self, now: float) -> None:
        for inbox in self._inboxes:
            if inbox.until <= now and inbox.until < inf:
                inbox.until = inf
                inbox.notify()


class QueueInbox:
    """An implementation of `node.seams.Inbox`: messages leave oldest first, and new ones are dropped when it
    is full. One task takes messages. `until` is the deadline of its current wait, if that wait uses the
    alarm."""

    def __init__(
        self,
        counters: Counter[str],
        alarm: Alarm,
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
        self._alarm = alarm
        self.until = inf
        alarm.watch(self)

    def put(self, sender: PeerId, message: bytes) -> None:
        """Add a message, or drop and count it."""
        if len(self._messages) >= self._messages_max or self._bytes + len(message) > self._bytes_max:
            self._counters["inbox_full"] += 1
            return
        self._messages.append((sender, message))
        self._bytes += len(message)
        self._stirred.set()

    async def take(self, until: float) -> list[tuple[PeerId, bytes]]:
        """Return all messages that have come; wait for the first until the monotonic time `until`, or until
        `notify`."""
        if self._stirred.is_set():
            await trio.lowlevel.checkpoint()
        elif self._alarm.is_running:
            self.until = until
            self._alarm.hurry(until)
            try:
                await self._stirred.wait()
            finally:
                self.until = inf
        else:
            with trio.move_on_at(until):
                await self._stirred.wait()
        # Make a new event instead of clearing the old one: a notice that comes between two takes ends the
        # second take immediately.
        self._stirred = trio.Event()
        messages, self._messages, self._bytes = self._messages, [], 0
        return messages

    def notify(self) -> None:
        self._stirred.set()
