"""The choice of standbys: idle machines that hold the newest state of a stage. Pure functions of a
committer's knowledge.

A stage's *cover* is the probability that another replica survives when one of its replicas dies. The stage
whose loss would cost most gets the next standby, until all stages are covered well enough or the run has its
maximum number of standbys. A standby takes part in every reduction, so in every step its stage sends a
gradient's bytes each way. If no link can carry them, only the newest checkpoint protects the stage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod

from crypto.identity import PeerId
from partition.plan.plan import Plan, StagePlan
from partition.plan.problem import Link
from partition.run.reliability import availability

COVERED = 0.98
"""Cover at which a stage needs no more standbys. One holder and one standby without recent losses have
0.99."""
STEP_SHARE_MAX = 0.1
"""Maximum share of a step's time that sending gradients to a standby may take on a measured link."""
FILL_SECONDS_MAX = 10.0
"""Maximum pause of the run while a standby fetches its state from the holder."""
UNMEASURED_BYTES_MAX = 64 << 20
"""Maximum size of a state that may be sent over an unmeasured link."""
SLOWER_MAX = 1.5
"""Factor by which steps must slow down with standbys, compared with before, to blame the standbys."""
SLOWER_SECONDS_MIN = 0.05
"""Minimum slowdown that counts. A smaller one is noise."""
WATCHED_STEPS = 20
"""Number of steps that are compared before and after a standby joined."""


@dataclass(frozen=True)
class StageSize:
    """The sizes of a stage in bytes: its gradient, sent each way in every step, and its state, sent once."""

    gradient_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class Following:
    """An idle machine that should become a standby of a stage, and the bytes that this costs in each step."""

    stage: int
    peer: PeerId
    step_bytes: int


@dataclass(frozen=True)
class Uncovered:
    """A stage that needs a standby but can get none, and the reason."""

    stage: int
    reason: str


def cover(stage: StagePlan, losses: Callable[[PeerId], int]) -> float:
    """Return the probability that another peer still holds a stage's newest state after one of its replicas
    dies."""
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
    """Return which of the `idle` machines, given in order of preference, should become a standby of which
    stage. Return `Uncovered` if a stage needs a standby and no machine can be one, None if all stages are
    covered.

    `link` returns the known link from one peer to another.
    """
    covers = [cover(stage, losses) for stage in plan.stages]
    weak = [number for number, chance in enumerate(covers) if chance < COVERED]
    # The cost of a loss: its probability, times the bytes that a newcomer would have to fetch.
    weak.sort(key=lambda number: (-(1 - covers[number]) * max(1, sizes[number].state_bytes), number))
    uncovered = None
    for number in weak:
        # the sort is stable: the order of preference stays among equals
        for peer in sorted(idle, key=losses):
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
    """Return the reason why a peer cannot be a standby of a stage, "" if it can."""
    ways = [(link(PeerId(other), peer), link(peer, PeerId(other))) for other in stage.computing]
    known = [each.bytes_per_second for pair in ways for each in pair if each is not None]
    if not known:
        return "its state is too large for an unmeasured link" * (size.state_bytes > UNMEASURED_BYTES_MAX)
    rate = max(1, min(known))
    seconds = size.gradient_bytes / rate
    if seconds > STEP_SHARE_MAX * step_seconds:
        return f"the link to the idle machine would add {seconds:.1f} s to each step"
    fill = size.state_bytes / rate
    return f"its state would take {fill:.0f} s to send" if fill > FILL_SECONDS_MAX else ""


class FollowWatch:
    """A check, from step times, of whether standbys slow a run down. One member's, over all plans of the
    run."""

    def __init__(self) -> None:
        self._before = inf
        self._times: list[float] = []
        self._is_following = False

    def begin(self, *, is_following: bool) -> None:
        """Note that a new plan is in force, with or without standbys."""
        if is_following and not self._is_following and len(self._times) >= WATCHED_STEPS:
            self._before = _median(self._times)
        elif not is_following:
            self._before = inf
        self._is_following = is_following
        self._times.clear()

    @property
    def seconds(self) -> float | None:
        """The median time of a step under this plan; None before enough steps."""
        return _median(self._times) if len(self._times) >= WATCHED_STEPS else None

    def stepped(self, seconds: float) -> bool:
        """Note the time of a step; return whether the standbys make steps too slow."""
        self._times.append(seconds)
        del self._times[:-WATCHED_STEPS]
        found = self.seconds
        if not self._is_following or found is None:
            return False
        return found > SLOWER_MAX * self._before and found > self._before + SLOWER_SECONDS_MIN


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
