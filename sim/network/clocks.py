"""Wrong clocks, with an offset and a drift, and a core that runs on such a clock. No I/O.

A core's deadlines are in the time of its own clock. Conversion rounds up. So a core that is woken at the
instant of its deadline always finds, by its own clock, that the deadline has passed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crypto.identity import PeerId
from node.services.driver import Core, Sends
from sim.network.instants import TICKS_PER_SECOND, instant
from sim.trace import TracedCore


@dataclass(frozen=True, slots=True)
class LocalClock:
    """A clock that is `offset_seconds` ahead at the instant 0, and gains `drift` seconds each second."""

    offset_seconds: float = 0.0
    drift: float = 0.0

    def local(self, time: float) -> float:
        """Return the clock's reading at `time`."""
        return time + (self.offset_seconds + self.drift * time)

    def instant(self, local: float) -> float:
        """Return the first instant at which the clock shows `local` or more; inf for never."""
        if math.isinf(local):
            return local
        time = instant((local - self.offset_seconds) / (1.0 + self.drift))
        # Because of rounding, the time may be slightly early; one or two steps correct that.
        while self.local(time) < local:
            time = (round(time * TICKS_PER_SECOND) + 1) / TICKS_PER_SECOND
        return time


class SkewedCore:
    """A wrapper of `core` that converts the driver's time by `clock`."""

    def __init__(self, core: Core, clock: LocalClock) -> None:
        self.core = core
        self._clock = clock
        self._local_deadline = self._deadline = math.inf

    @property
    def events(self) -> list[Any]:
        return self.core.events

    @events.setter
    def events(self, events: list[Any]) -> None:
        self.core.events = events

    @property
    def deadline(self) -> float:
        """The core's deadline in the driver's time."""
        local = self.core.deadline
        if local != self._local_deadline:
            self._local_deadline, self._deadline = local, self._clock.instant(local)
        return self._deadline

    def receive(self, now: float, sender: PeerId, message: Any) -> Sends:
        return self.core.receive(self._clock.local(now), sender, message)

    def wake(self, now: float) -> Sends:
        return self.core.wake(self._clock.local(now))

    def call(self, now: float, order: Callable[[Any, float], Sends]) -> Sends:
        """Let local code act on the core, in the core's own time."""
        return act(self.core, self._clock.local(now), order)


def act(core: Any, now: float, order: Callable[[Any, float], Sends]) -> Sends:
    """Let local code act on a core, or on the core inside a wrapper."""
    return core.call(now, order) if isinstance(core, TracedCore | SkewedCore) else order(core, now)
