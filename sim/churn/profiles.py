"""Measured churn: the sessions and absences that each profile fills in. No I/O.

kad: Steiner, En-Najjary and Biersack 2009, a year of eMule's DHT. They fitted first sessions by a Weibull
distribution of shape 0.545 and scale 357.7 minutes, later sessions by 0.615 and 169.5, and absences by 0.476
and 413.7. The peers of a scenario come back again and again, so all their sessions are drawn as later ones.
In the steady state a fifth of the peers is up.

bittorrent: sessions have a Weibull distribution of shape 0.63 and scale 287.9 minutes. That study has no
absences; the profile uses those of KAD.

spot: preemptible machines, with the bathtub and its hard stop at 24 hours. Absences were not measured; here a
new machine takes over after an exponential time with a mean of 10 minutes.

lab: a timetable without measured data. On weekdays each peer comes about 9:00 and leaves about 18:00, at a
different minute each day, and stays away one day in ten. Time begins on a Monday at noon.
"""

import math
from collections.abc import Iterator

from sim.churn.model import Churn, Distribution, Profile
from sim.seeds import draw_share

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_FOREVER = Distribution("forever")
_KAD_ABSENCES = Distribution("weibull", 413.7 * _MINUTE, 0.476)

PROFILES: dict[Profile, tuple[Distribution, Distribution]] = {
    "none": (_FOREVER, _FOREVER),
    "kad": (Distribution("weibull", 169.5 * _MINUTE, 0.615), _KAD_ABSENCES),
    "bittorrent": (Distribution("weibull", 287.9 * _MINUTE, 0.63), _KAD_ABSENCES),
    "spot": (Distribution("bathtub", 24 * _HOUR), Distribution("exponential", 10 * _MINUTE)),
}
"""The sessions and absences of each profile that defines them."""

_LAB_FROM, _LAB_UNTIL = 9 * _HOUR, 18 * _HOUR
_LAB_SPREAD_SECONDS = 1 * _HOUR
_LAB_MISSED = 0.1
_LAB_BEGINS = 12 * _HOUR
_WORKDAYS, _WEEK = 5, 7


def sessions_and_absences(churn: Churn) -> tuple[Distribution, Distribution]:
    """Return the given distributions; those of the profile replace missing ones. Not for `lab`."""
    sessions, absences = PROFILES[churn.profile]
    return churn.sessions or sessions, churn.absences or absences


def lab_days(seed: int, number: int) -> Iterator[tuple[float, float]]:
    """Yield (from, until) for each day on which this peer works, in seconds since the start; the first day
    may have begun before it."""
    day = 0
    while True:
        came = draw_share(seed, "lab came", number, day)
        went = draw_share(seed, "lab went", number, day)
        if day % _WEEK < _WORKDAYS and draw_share(seed, "lab missed", number, day) >= _LAB_MISSED:
            midnight = day * _DAY - _LAB_BEGINS
            begin = midnight + _LAB_FROM + (2 * came - 1) * _LAB_SPREAD_SECONDS
            yield begin, midnight + _LAB_UNTIL + (2 * went - 1) * _LAB_SPREAD_SECONDS
        day += 1


def wave_clock(now: float, depth: float, period_seconds: float) -> float:
    """Return how much time has passed for absent peers. Their clock runs fast at noon and slow at midnight
    (it stops there if `depth` is 1); over a whole day it is right."""
    if not depth:
        return now
    turn = math.tau / period_seconds
    return now + depth * math.sin(turn * now) / turn


def when_wave_shows(reading: float, depth: float, period_seconds: float) -> float:
    """Return the time at which `wave_clock` shows `reading`."""
    if not depth or math.isinf(reading):
        return reading
    swing = abs(depth) * period_seconds / math.tau
    low, high = reading - swing, reading + swing
    while high - low > 1e-9 * max(1.0, abs(high)):
        middle = (low + high) / 2
        if wave_clock(middle, depth, period_seconds) < reading:
            low = middle
        else:
            high = middle
    return high
