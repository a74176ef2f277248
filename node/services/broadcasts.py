"""Delivers broadcasts of users to programs of this process. `gossip.broadcasts` spreads them among members.

The contents of messages are not events: they go only to listeners, and to no log, screen or metric.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import trio

from crypto.identity import peer_text
from gossip.member import BroadcastHeard

HEARD_MAX = 1_024
"""Maximum number of broadcasts that wait for one listener. If it reads nothing, new ones are lost."""


@dataclass(frozen=True)
class Broadcast:
    """A node's message to all members under a topic. A higher `sequence` of the same peer and topic
    supersedes lower ones."""

    peer: str
    topic: str
    data: bytes
    sequence: int


class BroadcastListeners:
    """The listeners in this process."""

    def __init__(self) -> None:
        self._open: list[trio.MemorySendChannel[Broadcast]] = []
        self._is_closed = False

    @contextmanager
    def listen(self) -> Iterator[trio.MemoryReceiveChannel[Broadcast]]:
        """Yield the broadcasts heard from now on. The channel ends when the node leaves."""
        send, receive = trio.open_memory_channel[Broadcast](HEARD_MAX)
        if self._is_closed:
            send.close()
        else:
            self._open.append(send)
        try:
            yield receive
        finally:
            send.close()
            receive.close()
            if send in self._open:
                self._open.remove(send)

    def hear(self, event: BroadcastHeard) -> None:
        """Deliver a broadcast to the listeners that have room for it."""
        topic = event.topic.decode("utf-8", "replace")
        told = Broadcast(peer_text(event.author), topic, event.data, event.sequence)
        for channel in self._open:
            with suppress(trio.WouldBlock):
                channel.send_nowait(told)

    def close(self) -> None:
        """End all listeners."""
        self._is_closed = True
        for channel in self._open:
            channel.close()
        self._open.clear()
