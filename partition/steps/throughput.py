"""Measured speed of each replica within a run: for dealing, and for detecting stalls."""

from collections import Counter
from collections.abc import Iterable
from math import floor, log10

from crypto.identity import PeerId
from partition.plan.plan import StagePlan
from partition.steps.messages import Work

EWMA_SHARE = 0.3
"""The weight of the newest step in a replica's seconds per micro-batch: some five steps are remembered."""
STALL_SECONDS_MIN = 2.0
"""A garbage collector, or a disk that wakes up, takes as long."""
STALL_FACTOR = 8
"""A pause this many times longer than usual is not noise."""
UNMEASURED_STALL_SECONDS = 30.0
"""Before its first step is applied: libraries are loaded then, and the time of a micro-batch is unknown."""
_SCALE = 10**9
_DIGITS = 2


class StepPace:
    """Seconds per micro-batch of each replica, by an exponentially weighted moving average."""

    def __init__(self) -> None:
        self._seconds: dict[PeerId, float] = {}
        self._waiting: dict[PeerId, float] = {}
        self._counted: Counter[PeerId] = Counter()

    def heard(self, peer: PeerId) -> None:
        """Note a message of a replica: it is at work."""
        self._waiting.pop(peer, None)

    def forget(self) -> None:
        """Forget all waits: no replica has work at hand."""
        self._waiting.clear()

    def stalled(self, now: float, obliged: Iterable[PeerId]) -> list[PeerId]:
        """Return the replicas with work at hand that have been silent for longer than it ever takes."""
        self._waiting = {peer: self._waiting.get(peer, now) for peer in obliged}
        return [peer for peer, since in self._waiting.items() if now - since >= self.patience_seconds(peer)]

    def measured(self, peer: PeerId, work: Work, microbatches: int) -> None:
        """Note the work of `peer` in a step, in which it counted this many micro-batches."""
        self._counted[peer] += microbatches
        if not work.busy_nanoseconds or not microbatches:
            return
        seconds = work.busy_nanoseconds / 1e9 / microbatches
        before = self._seconds.get(peer, seconds)
        self._seconds[peer] = before + EWMA_SHARE * (seconds - before)

    def take_counted(self) -> Counter[PeerId]:
        """Return how many micro-batches each replica has in the steps applied since the last call."""
        counted, self._counted = self._counted, Counter()
        return counted

    def nanoseconds(self, peer: PeerId) -> int:
        """Return the time per micro-batch, for the next committer; 0 where it is not known."""
        return round(1e9 * self._seconds.get(peer, 0.0))

    def take(self, peer: PeerId, nanoseconds: int) -> None:
        """Take a measurement made under an earlier plan."""
        if nanoseconds:
            self._seconds[peer] = nanoseconds / 1e9

    def patience_seconds(self, peer: PeerId) -> float:
        """Return how long a replica with work at hand may be silent."""
        if peer not in self._seconds:
            return UNMEASURED_STALL_SECONDS
        return max(STALL_SECONDS_MIN, STALL_FACTOR * self._seconds[peer])

    def rates(self, stage: StagePlan) -> list[int]:
        """Return the rate of each replica, in one unit for the stage.

        The plan's rates hold until something is measured; then an unmeasured replica is taken to be as much
        faster or slower than its peers as the plan says. Rates are rounded, so that noise between equal
        machines does not deal unequally.
        """
        planned = [max(1, rate) for rate in stage.rates]
        known = [self._seconds.get(PeerId(peer)) for peer in stage.replicas]
        speeds = [None if seconds is None else 1 / seconds for seconds in known]
        both = [(rate, speed) for rate, speed in zip(planned, speeds, strict=True) if speed is not None]
        unit = sum(speed for _, speed in both) / sum(rate for rate, _ in both) if both else 1.0
        return [
            _rounded(rate * unit if speed is None else speed)
            for rate, speed in zip(planned, speeds, strict=True)
        ]


def _rounded(rate: float) -> int:
    """Round to two digits, in billionths."""
    scaled = max(1, round(rate * _SCALE))
    unit: int = 10 ** max(0, floor(log10(scaled)) + 1 - _DIGITS)
    return round(scaled / unit) * unit
