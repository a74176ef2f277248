"""Closes connections to machines that vanished without closing them.

It usually checks rarely. After a path was lost it checks within seconds, because a router that reboots
forgets all its connections. The kernel probes the other machine; only Linux reports the answers.
"""

from collections import Counter
from collections.abc import Callable, Collection

import trio

from node.transport.tcp import Connection

DOUBT_SECONDS = 4.0
"""How long the kernel may wait for an answer on a connection in doubt: four of its probes, a second apart."""


class VanishedConnections:
    """Checks on open connections, which `standing` returns. A connection without an answer for
    `silent_seconds` is ended."""

    def __init__(
        self, standing: Callable[[], Collection[Connection]], counters: Counter[str], silent_seconds: float
    ) -> None:
        self._standing = standing
        self._counters = counters
        self._silent_seconds = silent_seconds
        self._is_doubting = False

    def look(self, silent_seconds: float | None = None) -> None:
        """End connections on which the kernel has retransmitted for this long without an answer; by default
        for the usual time."""
        least_seconds = self._silent_seconds if silent_seconds is None else silent_seconds
        for connection in self._standing():
            if connection.kernel.has_vanished(least_seconds):
                self._counters["connections_vanished"] += 1
                connection.end("the other machine is gone")

    async def doubt(self) -> None:
        """Probe all connections that have their own socket now; do nothing if that is already going on."""
        if self._is_doubting:
            return
        bare = [connection for connection in self._standing() if connection.path is None]
        self._is_doubting = True
        try:
            for connection in bare:
                connection.kernel.ask_often(is_doubted=True)
            await trio.sleep(DOUBT_SECONDS)
            self.look(DOUBT_SECONDS)
        finally:
            self._is_doubting = False
            for connection in bare:
                connection.kernel.ask_often(is_doubted=False)
