"""The schedule of arrivals and departures: one lazy stream of changes in order of time. Pure, but for
reading a trace file.

Each peer has its own chain of lives, drawn by (seed, its number, the number of the life) and nothing else.
Another peer or a longer experiment therefore changes nobody's sessions.

At time 0 the swarm is in its steady state: a peer is up with the probability mean session / (mean session +
mean absence), and its session or absence is already under way (`rest_seconds`). Where a session or an absence
is forever there is no steady state: all peers begin a session. A wave takes full effect within a session's
length.

Not here: how a swarm starts up (`sim.scenario.SwarmStart`) and its events (`sim.churn.disturbances`).
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from node.errors import UsageError
from sim.churn.distributions import mean_seconds, quantile_seconds, rest_seconds
from sim.churn.model import Churn, Distribution
from sim.churn.profiles import lab_days, sessions_and_absences, wave_clock, when_wave_shows
from sim.churn.traces import load_trace
from sim.network.instants import nearest_instant
from sim.seeds import draw_share, seeded_rng

STAY_SECONDS_MIN = 0.001
"""Lower bound of each session and absence. It also keeps a start from coinciding with the stop before it."""
ABSENT = "absent"


class PopulationChange(NamedTuple):
    """An arrival or a departure of the peer `number` at `time` (virtual seconds, whole microseconds).

    `why` is crash (without a word) or leave (with a goodbye) for a departure; return for an arrival; absent,
    at time 0 before anything else, for a peer that is down at the beginning. `remembers`: whether it returns
    with its disk.
    """

    time: float
    number: int
    up: bool
    why: str
    remembers: bool


def changes(churn: Churn, nodes: int, seconds: float, seed: int) -> Iterator[PopulationChange]:
    """Yield all changes among `nodes` peers before the instant `seconds`, by time, then by number.

    Raises:
        UsageError: the trace file cannot be read, or has more peers than there is room for.
    """
    numbers = range(min(churn.permanent, nodes), nodes)
    if churn.trace:
        trace = load_trace(Path(churn.trace))
        if len(trace.names) > len(numbers):
            raise UsageError(
                f"{churn.trace}: {len(trace.names)} peers, but only {len(numbers)} of {nodes} may come and go"
            )
        lives = [_traced(own) for own in trace.changes]
    elif churn.profile == "lab":
        lives = [_timetable(number, seed) for number in numbers]
    else:
        sessions, absences = sessions_and_absences(churn)
        if math.isinf(mean_seconds(sessions)):
            return iter(())
        lives = [_renewed(churn, sessions, absences, number, seed) for number in numbers]
    chains = [
        _explained(churn, number, seed, seconds, life) for number, life in zip(numbers, lives, strict=False)
    ]
    # Instants may coincide; a named tuple is then ordered by its number.
    return heapq.merge(*chains)


Life = Iterator[tuple[float, bool]]
"""Pairs (when, whether up) in the profile's own time. Pairs at 0 or before give the initial state."""


def _explained(
    churn: Churn, number: int, seed: int, seconds: float, life: Life
) -> Iterator[PopulationChange]:
    """Yield the changes of one peer, in the experiment's time."""
    up = True
    last = 0.0
    for index, (moment, goes_up) in enumerate(life):
        if moment <= 0:
            up = goes_up
            continue
        if last == 0.0 and not up:
            yield PopulationChange(0.0, number, False, ABSENT, churn.remembers)
        last = max(nearest_instant(moment / churn.speedup), nearest_instant(last + STAY_SECONDS_MIN))
        if last >= seconds:
            return
        up = goes_up
        yield PopulationChange(last, number, up, _why(churn, number, seed, index, up), churn.remembers)
    if last == 0.0 and not up:
        yield PopulationChange(0.0, number, False, ABSENT, churn.remembers)


def _why(churn: Churn, number: int, seed: int, index: int, up: bool) -> str:
    if up:
        return "return"
    return "crash" if draw_share(seed, "why", number, index) < churn.crash_share else "leave"


def _renewed(churn: Churn, sessions: Distribution, absences: Distribution, number: int, seed: int) -> Life:
    """Yield sessions and absences in turn."""
    depth, period = churn.wave_depth, churn.wave_seconds
    up, rest = _steady(sessions, absences, number, seed)
    yield 0.0, up
    now = when_wave_shows(rest, -depth if up else depth, period)
    life = 0
    while now < math.inf:
        up = not up
        yield now, up
        if up:
            life += 1
        share = draw_share(seed, "life", number, life, int(up))
        lasts = quantile_seconds(sessions if up else absences, share)
        swing = -depth if up else depth
        now = when_wave_shows(wave_clock(now, swing, period) + lasts, swing, period)


def _steady(sessions: Distribution, absences: Distribution, number: int, seed: int) -> tuple[bool, float]:
    """Return whether a peer is up at time 0, and how long it stays in that state."""
    here, away = mean_seconds(sessions), mean_seconds(absences)
    if math.isinf(away):
        return True, quantile_seconds(sessions, draw_share(seed, "life", number, 0, 1))
    rng = seeded_rng(seed, "steady", number)
    up = rng.random() * (here + away) < here
    return up, rest_seconds(sessions if up else absences, rng)


def _timetable(number: int, seed: int) -> Life:
    yield 0.0, False
    for begin, end in lab_days(seed, number):
        yield begin, True
        yield end, False


def _traced(own: Sequence[tuple[float, bool]]) -> Life:
    yield 0.0, not own[0][1]
    yield from own
