"""Instants: whole microseconds, written as the nearest float of seconds. No I/O.

So the events of `sim.engine`, and trio's clock under `sim.seams`, have exactly the same instants.
"""

import math

TICKS_PER_SECOND = 1_000_000
_NOISE_TICKS = 1e-6


def instant(seconds: float) -> float:
    """Return the first whole microsecond that is not before `seconds`; inf stays inf.

    The result is never below `seconds`, not even by a rounding error. So a core woken at `instant(deadline)`
    always finds that its deadline has passed.
    """
    if math.isinf(seconds):
        return seconds
    ticks = round(seconds * TICKS_PER_SECOND)
    if ticks / TICKS_PER_SECOND < seconds:
        ticks += 1
    return ticks / TICKS_PER_SECOND


def nearest_instant(seconds: float) -> float:
    """Return the whole microsecond nearest to a clock's reading `seconds`, which may have float noise."""
    return round(seconds * TICKS_PER_SECOND) / TICKS_PER_SECOND


def after(now: float, seconds: float) -> float:
    """Return the instant `seconds` after the instant `now`, at least one microsecond later.

    The sum is computed in whole microseconds, so that 0.1 + 0.2 is 0.3 and coinciding instants are equal.
    """
    return (round(now * TICKS_PER_SECOND) + ticks(seconds)) / TICKS_PER_SECOND


def ticks(seconds: float) -> int:
    """Return a duration in whole microseconds, rounded up and never zero, because a message must not arrive
    at the instant at which it is sent."""
    return max(1, math.ceil(seconds * TICKS_PER_SECOND - _NOISE_TICKS))
