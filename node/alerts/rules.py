"""The rules of alerts: they find present problems from events and a few facts about this machine.

Pure. An alert is raised when its rule first applies, and cleared when it no longer does. Each alert has a
kind, one of `KINDS`, and a subject: a run, or nothing. `node.alerts.service` sends alerts.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from node import events
from node.settings_events import RunGoalSet
from node.text import CLOCK_REMEDY, clock_text

KINDS = (
    "clock_off", "disk_nearly_full", "identity_shared", "loss_not_finite", "loss_rising",
    "peer_misbehaves", "replicas_below_wanted", "run_below_goal", "run_failed", "steps_slow",
)  # fmt: skip
RUNS_WATCHED_MAX = 64
LOSSES_AVERAGED = 20
LOSS_RISE = 1.5
"""The loss rises if the mean of its newest values is this many times its lowest mean so far. Less may be
noise."""
STEPS_REMEMBERED = 50
STEPS_OF_GOAL_MAX = 4_096
"""Maximum number of steps from which a run's pace is measured. If the run makes more in the goal's time, only
the newest count."""
SLOW_STEPS = 5
SLOW_FACTOR = 3.0
"""A run is slow after SLOW_STEPS steps in a row that each took over SLOW_FACTOR times the earlier median."""
DEGRADED_SECONDS = 30.0
"""How long a run may be degraded before an alert: refilling a stage takes some seconds."""
DISK_FREE_BYTES_MIN = 1 << 30
DISK_FREE_SHARE_MIN = 0.03
CLOCK_STEP_SECONDS_MAX = 2.0
"""If the wall clock jumps by more than this, compared with the monotonic clock, it was set. Records may then
expire at the wrong time."""
CLOCK_TOLD_SECONDS = 600.0
REFUSED_PER_MINUTE_MAX = 300
IDENTITY_TOLD_SECONDS = 3_600.0
"""How long the alert about another node with this identity lasts. That node has stopped by then, unless it is
started repeatedly."""


@dataclass(frozen=True)
class Alert:
    """A condition that a person should know of. `level` is warn or bad; `about` is a run's id, or empty."""

    kind: str
    about: str
    level: str
    text: str

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.about


@dataclass(frozen=True)
class Facts:
    """Figures of this machine: the seconds of both clocks, the data folder's disk, the refusals so far."""

    monotonic: float
    wall: float
    disk_free_bytes: int
    disk_total_bytes: int
    protocol_errors: int


@dataclass
class _Run:
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_AVERAGED))
    lowest: float = math.inf
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    slow: int = 0
    status: str = ""
    since: float = 0.0
    detail: str = ""
    goal: RunGoalSet | None = None
    trained: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=STEPS_OF_GOAL_MAX))
    """For each step, when it was committed, and its samples. Begins with the step before the goal's time
    span."""
    trains_since: float = math.inf


class AlertRules:
    """Collects the state from events; `look` returns the present problems."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._offset: float | None = None
        self._clock_set_at = -math.inf
        self._clock_text = ""
        self._shared: events.IdentityShared | None = None
        self._skew: events.ClockCompared | None = None
        self._errors: deque[tuple[float, int]] = deque(maxlen=64)

    def take(self, event: events.Event) -> None:
        """Update the state from one event."""
        match event:
            case events.IdentityShared():
                self._shared = event
            case events.StepCommitted():
                self._committed(self._run(event.run), event)
            case events.ClockCompared():
                self._skew = event
            case RunGoalSet():
                self._run(event.run).goal = event if event.samples_per_second else None
            case events.RunChanged():
                run = self._run(event.run)
                if event.state in ("paused", "placing"):
                    run.trains_since = math.inf  # its training time counts from its next step
                if run.status != event.state:
                    run.status, run.since = event.state, event.at
                run.detail = event.reason
            case events.RunEnded():
                run = self._run(event.run)
                run.status, run.since, run.detail = event.outcome, event.at, event.detail
                run.slow = 0

    def look(self, facts: Facts) -> dict[tuple[str, str], Alert]:
        """Return all present problems, by key."""
        found = [alert for name, run in self._runs.items() for alert in _of_run(name, run, facts.wall)]
        found += self._of_clock(facts) + _of_disk(facts) + self._of_peers(facts) + self._of_identity(facts)
        return {alert.key: alert for alert in found}

    def _run(self, name: str) -> _Run:
        run = self._runs.setdefault(name, _Run())
        if len(self._runs) > RUNS_WATCHED_MAX:
            del self._runs[next(iter(self._runs))]
        return run

    def _committed(self, run: _Run, event: events.StepCommitted) -> None:
        if len(run.seconds) >= SLOW_STEPS:
            run.slow = run.slow + 1 if event.seconds > SLOW_FACTOR * median(run.seconds) else 0
        if run.slow == 0:  # otherwise the slow steps would become the usual pace
            run.seconds.append(event.seconds)
        run.trained.append((event.at, event.samples))
        run.trains_since = min(run.trains_since, event.at)
        run.losses.append(event.loss)
        if len(run.losses) == LOSSES_AVERAGED and all(map(math.isfinite, run.losses)):
            run.lowest = min(run.lowest, sum(run.losses) / LOSSES_AVERAGED)

    def _of_clock(self, facts: Facts) -> list[Alert]:
        if self._skew is not None and self._skew.seconds:
            text = clock_text(self._skew.seconds, self._skew.peers)
            return [Alert("clock_off", "", "warn", f"{text}: {CLOCK_REMEDY}")]
        offset = facts.wall - facts.monotonic
        if self._offset is not None and abs(offset - self._offset) > CLOCK_STEP_SECONDS_MAX:
            self._clock_set_at = facts.monotonic
            self._clock_text = f"the clock of this machine jumped by {offset - self._offset:+.1f} s"
        self._offset = offset
        is_recent = facts.monotonic - self._clock_set_at < CLOCK_TOLD_SECONDS
        return [Alert("clock_off", "", "warn", self._clock_text)] if is_recent else []

    def _of_identity(self, facts: Facts) -> list[Alert]:
        if self._shared is None or facts.wall - self._shared.at > IDENTITY_TOLD_SECONDS:
            return []
        where = " or ".join(self._shared.addresses) or "an unknown place"
        text = f"another node has this node's identity, at {where}: a copy of its data folder?"
        return [Alert("identity_shared", "", "bad", text)]

    def _of_peers(self, facts: Facts) -> list[Alert]:
        self._errors.append((facts.monotonic, facts.protocol_errors))
        while len(self._errors) > 2 and facts.monotonic - self._errors[0][0] > 60.0:
            self._errors.popleft()
        more = facts.protocol_errors - self._errors[0][1]
        if more <= REFUSED_PER_MINUTE_MAX:
            return []
        text = f"peers broke the protocol {more} times within a minute; each time it was refused"
        return [Alert("peer_misbehaves", "", "warn", text)]


def _of_run(name: str, run: _Run, wall: float) -> list[Alert]:
    found = []
    short = name[:8]
    if run.status == "failed":
        return [Alert("run_failed", name, "bad", f"run {short} failed: {run.detail}")]
    if run.status in ("done", "stopped"):
        return []
    if run.losses and not math.isfinite(run.losses[-1]):
        found.append(Alert("loss_not_finite", name, "bad", f"the loss of run {short} is not finite"))
    elif len(run.losses) == LOSSES_AVERAGED and all(map(math.isfinite, run.losses)):
        mean = sum(run.losses) / LOSSES_AVERAGED
        if mean > LOSS_RISE * run.lowest > 0 and mean - run.lowest > 0.1:
            text = f"the loss of run {short} rises: {mean:.3g} after {run.lowest:.3g}"
            found.append(Alert("loss_rising", name, "warn", text))
    if run.slow >= SLOW_STEPS:
        usual = median(run.seconds)
        text = f"the last {run.slow} steps of run {short} took {SLOW_FACTOR:g} times the usual {usual:.3g} s"
        found.append(Alert("steps_slow", name, "warn", text))
    found += _below_goal(name, run, wall)
    if run.status in ("degraded", "paused") and wall - run.since > DEGRADED_SECONDS:
        text = f"run {short} has been {run.status} for {wall - run.since:.0f} s: {run.detail}"
        found.append(Alert("replicas_below_wanted", name, "warn", text))
    return found


def _below_goal(name: str, run: _Run, wall: float) -> list[Alert]:
    """Return an alert if a run of this node's own trains less than its goal, over the goal's time span."""
    goal = run.goal
    if (
        goal is None
        or run.status in ("paused", "placing", "ending")
        or wall - run.trains_since < goal.seconds
    ):
        return []
    rows = [(at, samples) for at, samples in run.trained if at > wall - goal.seconds]
    # If the remembered steps do not cover the goal's time span, use the time that they cover.
    seconds = min(goal.seconds, wall - rows[0][0]) if len(rows) == STEPS_OF_GOAL_MAX else goal.seconds
    rate = sum(samples for _, samples in rows) / max(seconds, 1e-3)
    if rate >= goal.samples_per_second:
        return []
    wanted = f"{goal.samples_per_second:g} are wanted"
    text = (
        f"run {name[:8]} trains {rate:.3g} samples/s in the last {goal.seconds} s; {wanted}: more peers help"
    )
    return [Alert("run_below_goal", name, "warn", text)]


def _of_disk(facts: Facts) -> list[Alert]:
    free, total = facts.disk_free_bytes, facts.disk_total_bytes
    if total <= 0 or (free > DISK_FREE_BYTES_MIN and free > DISK_FREE_SHARE_MIN * total):
        return []
    text = f"the disk of the data folder has {free / 1e9:.2f} of {total / 1e9:.0f} GB free"
    return [Alert("disk_nearly_full", "", "warn", text)]
