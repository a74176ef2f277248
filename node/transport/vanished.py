"""Ends connections whose other machine is gone without a word: seldom in general, and soon after a path was
lost, since a router that was rebooted forgets all connections at once.

The kernel asks the other machine; only Linux says what it heard.
"""

from collections import Counter
from collections.abc import Callable, Collection

import trio

from node.transport.tcp import Connection

DOUBT_SECONDS = 4.0
"""What the kernel gets to hear something on a connection that is in doubt: four of its questions."""


class VanishedConnections:
    """`standing` are the connections that there are."""

    def __init__(self, standing: Callable[[], Collection[Connection]], counters: Counter[str]) -> None:
        self._standing = standing
        self._counters = counters
        self._is_doubting = False

    def look(self, silent_seconds: float | None = None) -> None:
        """End those on which the kernel has repeated itself and heard nothing for so long."""
        for connection in self._standing():
            if connection.has_vanished(silent_seconds):
                self._counters["connections_vanished"] += 1
                connection.end("the other machine is gone")

    async def doubt(self) -> None:
        """Ask on all that have a socket of their own at once; nothing while that is under way."""
        if self._is_doubting:
            return
        bare = [connection for connection in self._standing() if connection.path is None]
        self._is_doubting = True
        try:
            for connection in bare:
                connection.ask_often(is_doubted=True)
            await trio.sleep(DOUBT_SECONDS)
            self.look(DOUBT_SECONDS)
        finally:
            self._is_doubting = False
            for connection in bare:
                connection.ask_often(is_doubted=False)
