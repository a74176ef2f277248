"""What users tell all members, as a program hears it. Who hears what, and how often: `gossip.broadcasts`.

Contents of messages are no events: they go to those that listen, and to no log, screen or metric.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import trio

from crypto.identity import peer_text
from gossip.member import BroadcastHeard

HEARD_MAX = 1_024
"""Broadcasts that wait for one listener; one that reads nothing loses the newest."""


@dataclass(frozen=True)
class Broadcast:
    """What a node tells all members under a topic. Of two of one peer and topic the one with the higher
    `sequence` is the newer, and the other is no longer true."""

    peer: str
    topic: str
    data: bytes
    sequence: int


class BroadcastListeners:
    """Those in this process that listen."""

    def __init__(self) -> None:
        self._open: list[trio.MemorySendChannel[Broadcast]] = []
        self._is_closed = False

    @contextmanager
    def listen(self) -> Iterator[trio.MemoryReceiveChannel[Broadcast]]:
        """Those heard from now on; it ends when the node leaves."""
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
        """Hand one on to those that have room for it."""
        topic = event.topic.decode("utf-8", "replace")
        told = Broadcast(peer_text(event.author), topic, event.data, event.sequence)
        for channel in self._open:
            with suppress(trio.WouldBlock):
                channel.send_nowait(told)

    def close(self) -> None:
        """Nothing comes any more."""
        self._is_closed = True
        for channel in self._open:
            channel.close()
        self._open.clear()
