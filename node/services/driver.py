"""The single driver, which runs any sans-IO core under trio, on real or simulated seams.

All cores have the same interface (see the tree in ARCHITECTURE). The driver gives the core what arrived,
wakes it at its deadline, sends what it returns and publishes what it learnt. `sim.engine` does the same from
a calendar; a test checks that both give the same trace.
"""

from collections.abc import Callable
from typing import Any, Protocol

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.messages import ByStream
from node.containment import note
from node.seams import Clock, Network

FAILED_SECONDS = 1.0
"""How long a core whose `wake` failed is not woken again. Its deadline does not change, so it would fail
continuously."""

BATCH_BYTES_MAX = 16 * 1024
"""After this many bytes of messages other tasks run: some 120 signatures, at 105 us each."""

Sends = list[tuple[PeerId, Any]]


class Core(Protocol):
    """A protocol state machine without I/O. Its driver drains `events`."""

    events: list[Any]

    @property
    def deadline(self) -> float:
        """When to call `wake`, in monotonic seconds; inf for never."""

    def receive(self, now: float, sender: PeerId, message: Any) -> Sends: ...
    def wake(self, now: float) -> Sends: ...


class Driver:
    """Drives one core over one datagram protocol.

    `message_type` is the union of the protocol's structs. `publish` is called with every event, in order,
    *before* the core's messages are sent, so that the network already knows newly learnt addresses.
    """

    def __init__(
        self,
        core: Core,
        protocol: str,
        message_type: Any,
        *,
        message_bytes_max: int,
        network: Network,
        clock: Clock,
        publish: Callable[[Any], None],
        refuse: Callable[[PeerId, RemoteProtocolError], None],
    ) -> None:
        self.core = core
        self.protocol = protocol
        self._message_type = message_type
        self._message_bytes_max = message_bytes_max
        self._network = network
        self._clock = clock
        self._publish = publish
        self._refuse = refuse
        self._inbox = network.inbox(protocol)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Drive until cancelled. If the core fails on a message, the message counts as lost."""
        task_status.started()
        while True:
            arrived = await self._inbox.take(self.core.deadline)
            now, left = self._clock.monotonic(), BATCH_BYTES_MAX
            for sender, data in arrived:
                if left <= 0:
                    await trio.lowlevel.checkpoint()
                    now, left = self._clock.monotonic(), BATCH_BYTES_MAX
                left -= len(data)
                try:
                    self._receive(now, sender, data)
                except Exception as error:
                    note(error, f"core {self.protocol}: a message")
            if self.core.deadline <= now:
                try:
                    self._pass_on(self.core.wake(now))
                except Exception as error:
                    note(error, f"core {self.protocol}: its deadline")
                    await trio.sleep(FAILED_SECONDS)

    def command(self, order: Callable[[float], Sends]) -> None:
        """Let local code act on the core. `order(now)` returns what to send."""
        self._pass_on(order(self._clock.monotonic()))
        self._inbox.notify()

    def _receive(self, now: float, sender: PeerId, data: bytes) -> None:
        try:
            message: Any = decode(data, self._message_type, bytes_max=self._message_bytes_max)
            sends = self.core.receive(now, sender, message)
        except RemoteProtocolError as error:
            self._refuse(sender, error)
            return
        self._pass_on(sends)

    def _pass_on(self, sends: Sends) -> None:
        events = self.core.events[:]
        self.core.events.clear()
        for event in events:
            try:
                self._publish(event)
            except Exception as error:  # the messages and the other events must still be delivered
                note(error, f"core {self.protocol}: an event")
        for peer, message in sends:
            if isinstance(message, ByStream):
                sent, is_answer = encode(message.message), message.is_answer
                self._network.send(peer, self.protocol, sent, by_stream=True, is_answer=is_answer)
            else:
                self._network.send(peer, self.protocol, encode(message))
