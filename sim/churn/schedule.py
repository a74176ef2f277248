"""The schedule of arrivals and departures: one lazy stream of changes, ordered by time. Pure, except for
reading a trace file.

Each peer has its own chain of sessions, drawn only from (seed, its number, the number of the session). So
adding a peer or extending the experiment changes no other peer's sessions.

At time 0 the swarm is in its steady state: a peer is up with the probability mean session / (mean session +
mean absence), and its session or absence is already in progress (`rest_seconds`). If sessions or absences
last forever there is no steady state, and all peers begin a session. A wave takes full effect after about the
length of a session.

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
"""Minimum length of a session and an absence. It also keeps a start from coinciding with the previous
stop."""
ABSENT = "absent"


class PopulationChange(NamedTuple):
    """An arrival or a departure of the peer `number` at `time` (virtual seconds, whole microseconds).

    For a departure, `why` is crash (without a goodbye) or leave (with a goodbye). For an arrival it is
    return. For a peer that is down at the start, `why` is absent; this change comes at time 0, before all
    others. `remembers`: whether the peer returns with its disk.
    """

    time: float
    number: int
    up: bool
    why: str
    remembers: bool


def changes(churn: Churn, nodes: int, seconds: float, seed: int) -> Iterator[PopulationChange]:
    """Yield all changes among `nodes` peers before the instant `seconds`, ordered by time, then by number.

    Raises:
        UsageError: the trace file cannot be read, or has more peers than may come and go.
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
    # Instants may coincide; named tuples are then ordered by number.
    return heapq.merge(*chains)


Life = Iterator[tuple[float, bool]]
"""Pairs (time, whether up) in the profile's own time. Pairs at or before 0 give the initial state."""


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
    """Yield alternating sessions and absences."""
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
