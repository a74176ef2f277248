"""An interruptible sleep under trio, for inboxes, streams and queues of the simulation."""

import math

import trio

from crypto.errors import LocalProtocolError
from sim.network.instants import instant


class SimAlarm:
    """An alarm on which one task sleeps, and which other tasks can move to an earlier time."""

    def __init__(self) -> None:
        self._scope: trio.CancelScope | None = None
        self._rung = False

    async def sleep_until(self, until: float) -> None:
        """Sleep until the instant `until`, or until `ring`. Always a checkpoint."""
        if self._scope is not None:
            raise LocalProtocolError("two tasks sleep on the same alarm")
        if self._rung:
            until = -math.inf
        with trio.CancelScope(deadline=instant(until)) as self._scope:
            try:
                await trio.sleep_forever()
            finally:
                self._scope = None
                self._rung = False

    def no_later_than(self, until: float) -> None:
        """Make a sleeping task wake at `until` at the latest."""
        if self._scope is not None and until < self._scope.deadline:
            self._scope.deadline = until

    def ring(self) -> None:
        """End the sleep now; if no task sleeps, the next sleep ends immediately."""
        self._rung = True
        if self._scope is not None:
            self._scope.cancel()
