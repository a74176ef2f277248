"""The choice of standbys, idle machines that hold the newest state of a stage. Pure, from a committer's
knowledge.

A stage's cover is the chance that one of its replicas survives when the others die. The stage with the
costliest loss gets the next standby, until all are covered well enough or the run has its maximum of
standbys. A standby takes part in every reduction, so it costs its stage a gradient's bytes each way in every
step. Where no link can carry that, only the newest checkpoint remains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod

from crypto.identity import PeerId
from partition.plan.plan import Plan, StagePlan
from partition.plan.problem import Link
from partition.run.reliability import availability

COVERED = 0.98
"""The cover at which a stage needs no more standbys. One holder and one standby without recent losses have
0.99."""
STEP_SHARE_MAX = 0.1
"""The share of a step's time that following may take on a measured link."""
FILL_SECONDS_MAX = 10.0
"""The longest pause of the run while a standby takes its state from the holder."""
UNMEASURED_BYTES_MAX = 64 << 20
"""The largest state that is sent over an unmeasured link."""
SLOWER_MAX = 1.5
"""Slowdown of steps, relative to those without a standby, that is attributed to it."""
SLOWER_SECONDS_MIN = 0.05
"""A smaller slowdown is noise."""
WATCHED_STEPS = 20
"""Steps that are compared before and after a standby came."""


@dataclass(frozen=True)
class StageSize:
    """The bytes of a stage: its gradient, sent each way in every step, and its state, sent once."""

    gradient_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class Following:
    """A machine that should follow a stage, and the cost of that."""

    stage: int
    peer: PeerId
    step_bytes: int


@dataclass(frozen=True)
class Uncovered:
    """A stage that needs a standby and has none, and why."""

    stage: int
    reason: str


def cover(stage: StagePlan, losses: Callable[[PeerId], int]) -> float:
    """Return the chance that another peer holds a stage's newest state when one of its replicas dies."""
    return 1 - prod(1 - availability(losses(PeerId(peer))) for peer in stage.replicas)


def next_standby(
    plan: Plan,
    sizes: Sequence[StageSize],
    idle: Sequence[PeerId],
    losses: Callable[[PeerId], int],
    link: Callable[[PeerId, PeerId], Link | None],
    *,
    step_seconds: float,
) -> Following | Uncovered | None:
    """Return which of the `idle` machines, the best first, should follow which stage; None if all are
    covered.

    `link` returns the known link from one peer to another.
    """
    covers = [cover(stage, losses) for stage in plan.stages]
    weak = [number for number, chance in enumerate(covers) if chance < COVERED]
    # The cost of a loss: its chance, times the bytes that a newcomer would fetch.
    weak.sort(key=lambda number: (-(1 - covers[number]) * max(1, sizes[number].state_bytes), number))
    uncovered = None
    for number in weak:
        for peer in sorted(idle, key=losses):  # a stable sort: the better of equals first
            reason = _obstacle(plan.stages[number], sizes[number], peer, link, step_seconds)
            if not reason:
                return Following(number, peer, 2 * sizes[number].gradient_bytes)
            uncovered = uncovered or Uncovered(number, reason)
    return uncovered


def _obstacle(
    stage: StagePlan,
    size: StageSize,
    peer: PeerId,
    link: Callable[[PeerId, PeerId], Link | None],
    step_seconds: float,
) -> str:
    """Return why a peer cannot follow a stage, "" if it can."""
    ways = [(link(PeerId(other), peer), link(peer, PeerId(other))) for other in stage.computing]
    known = [each.bytes_per_second for pair in ways for each in pair if each is not None]
    if not known:
        return "its state is too large for a link that nobody has measured" * (
            size.state_bytes > UNMEASURED_BYTES_MAX
        )
    rate = max(1, min(known))
    seconds = size.gradient_bytes / rate
    if seconds > STEP_SHARE_MAX * step_seconds:
        return f"the link to the idle machine would add {seconds:.1f} s to each step"
    fill = size.state_bytes / rate
    return f"its state would take {fill:.0f} s to send" if fill > FILL_SECONDS_MAX else ""


class FollowWatch:
    """Decides from step times whether a standby slows a run down. One member's watch, over all its plans."""

    def __init__(self) -> None:
        self._before = inf
        self._times: list[float] = []
        self._is_following = False

    def begin(self, *, is_following: bool) -> None:
        """Note that another plan is in force, with standbys or without."""
        if is_following and not self._is_following and len(self._times) >= WATCHED_STEPS:
            self._before = _median(self._times)
        elif not is_following:
            self._before = inf
        self._is_following = is_following
        self._times.clear()

    @property
    def seconds(self) -> float | None:
        """The time of a step under this plan; None until it is known."""
        return _median(self._times) if len(self._times) >= WATCHED_STEPS else None

    def stepped(self, seconds: float) -> bool:
        """Note the time of a step; return whether standbys make steps too slow."""
        self._times.append(seconds)
        del self._times[:-WATCHED_STEPS]
        found = self.seconds
        if not self._is_following or found is None:
            return False
        return found > SLOWER_MAX * self._before and found > self._before + SLOWER_SECONDS_MIN


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
