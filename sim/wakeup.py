"""An interruptible sleep, for inboxes, streams and queues of the simulation, under trio."""

import math

import trio

from crypto.errors import LocalProtocolError
from sim.network.instants import instant


class SimAlarm:
    """One task sleeps on it; others can bring the end of its sleep forward."""

    def __init__(self) -> None:
        self._scope: trio.CancelScope | None = None
        self._rung = False

    async def sleep_until(self, until: float) -> None:
        """Sleep to the instant `until`, or until rung. Always a checkpoint."""
        if self._scope is not None:
            raise LocalProtocolError("two tasks wait for the same thing")
        if self._rung:
            until = -math.inf
        with trio.CancelScope(deadline=instant(until)) as self._scope:
            try:
                await trio.sleep_forever()
            finally:
                self._scope = None
                self._rung = False

    def no_later_than(self, until: float) -> None:
        """Shorten the sleep of a sleeping task."""
        if self._scope is not None and until < self._scope.deadline:
            self._scope.deadline = until

    def ring(self) -> None:
        """End the sleep now; if nobody sleeps, the next one ends at once."""
        self._rung = True
        if self._scope is not None:
            self._scope.cancel()
