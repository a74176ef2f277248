"""Measured speed of each replica within a run, used to deal micro-batches and to detect stalls."""

from collections import Counter
from collections.abc import Iterable
from math import floor, log10

from crypto.identity import PeerId
from partition.plan.plan import StagePlan
from partition.steps.messages import Work

EWMA_SHARE = 0.3
"""Weight of the newest step in a replica's average seconds per micro-batch. About five steps are
remembered."""
STALL_SECONDS_MIN = 2.0
"""Minimum silence that counts as a stall. A garbage collection, or a disk that wakes up, may take up to this
long."""
STALL_FACTOR = 8
"""Multiple of a replica's usual time after which its silence is a stall. A longer silence is not noise."""
UNMEASURED_STALL_SECONDS = 30.0
"""Silence that counts as a stall before a replica's first step is applied. Libraries are loaded then, and the
time of a micro-batch is unknown."""
_SCALE = 10**9
_DIGITS = 2


class StepPace:
    """Seconds per micro-batch of each replica, as an exponentially weighted moving average."""

    def __init__(self) -> None:
        self._seconds: dict[PeerId, float] = {}
        self._waiting: dict[PeerId, float] = {}
        self._counted: Counter[PeerId] = Counter()

    def heard(self, peer: PeerId) -> None:
        """Note a message of a replica, which shows that it is working."""
        self._waiting.pop(peer, None)

    def forget(self) -> None:
        """Forget all waits, because no replica has work to do."""
        self._waiting.clear()

    def stalled(self, now: float, obliged: Iterable[PeerId]) -> list[PeerId]:
        """Return the replicas with work to do that have been silent for longer than their work can take."""
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
        """Return the number of micro-batches of each replica in the steps applied since the previous call."""
        counted, self._counted = self._counted, Counter()
        return counted

    def nanoseconds(self, peer: PeerId) -> int:
        """Return the time per micro-batch, for the next committer; 0 if unknown."""
        return round(1e9 * self._seconds.get(peer, 0.0))

    def take(self, peer: PeerId, nanoseconds: int) -> None:
        """Take over a measurement made under an earlier plan."""
        if nanoseconds:
            self._seconds[peer] = nanoseconds / 1e9

    def patience_seconds(self, peer: PeerId) -> float:
        """Return how long a replica with work to do may be silent."""
        if peer not in self._seconds:
            return UNMEASURED_STALL_SECONDS
        return max(STALL_SECONDS_MIN, STALL_FACTOR * self._seconds[peer])

    def rates(self, stage: StagePlan) -> list[int]:
        """Return the rate of each replica, in a unit that is common to the stage.

        The plan's rates count until something is measured. After that, an unmeasured replica is assumed to be
        faster or slower than its peers in the ratio that the plan states. Rates are rounded, so that noise
        between equal machines does not lead to unequal shares.
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
    """Return the rate in billionths, rounded to two digits."""
    scaled = max(1, round(rate * _SCALE))
    unit: int = 10 ** max(0, floor(log10(scaled)) + 1 - _DIGITS)
    return round(scaled / unit) * unit
