"""The totals of one step, as replicas report them to the committer: the loss over all micro-batches, and the
norm."""

from collections.abc import Iterable, Mapping
from math import isfinite

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.steps.committer_events import no_number
from partition.steps.messages import RATE_UNIT, Apply, Reduced, Synced


class Losses:
    """The number of samples and the summed loss of each micro-batch that the last stage has counted."""

    def __init__(self) -> None:
        self.rate = RATE_UNIT
        """Factor on the learning rate of an applied step, in millionths."""
        self._rows: dict[int, tuple[int, float]] = {}

    def clear(self) -> None:
        """Begin a new step."""
        self._rows.clear()

    def put(self, number: int, samples: int, loss: float) -> None:
        """Record the samples and the loss of one counted micro-batch."""
        self._rows[number] = (samples, loss)

    def take(self, rows: Iterable[Synced]) -> None:
        """Take over micro-batches that were counted before. If there are two rows for one, the first
        counts."""
        for row in rows:
            for number, samples, loss in zip(row.counted, row.samples, row.losses, strict=True):
                self._rows.setdefault(number, (samples, loss))

    @property
    def samples(self) -> int:
        """The number of samples, at least 1: a step without samples is still a step."""
        return max(1, sum(samples for samples, _ in self._rows.values()))

    @property
    def total(self) -> float:
        """The loss, summed in the order of micro-batches, so that every summation gives the same result."""
        return sum(self._rows[number][1] for number in sorted(self._rows))

    @property
    def is_finite(self) -> bool:
        """Whether the summed loss is finite."""
        return isfinite(self.total)

    def apply(self, plan: bytes, step: int, attempt: int, norm: float | None) -> Apply | str:
        """Return the Apply that ends the step; or, if the squared `norm` or the loss is not finite, a text
        that says which."""
        if norm is not None and not isfinite(norm):
            return no_number(f"step {step}: the gradient's norm")
        if not self.is_finite:
            return no_number(f"step {step}: the loss")
        return Apply(
            plan=plan,
            step=step,
            attempt=attempt,
            samples=self.samples,
            squared_norm=norm,
            loss=self.total,
            rate=self.rate,
        )


def squared_norm(plan: Plan, reduced: Mapping[PeerId, Reduced]) -> float | None:
    """Return the squared norm of all stages' totals, as reported by the first replica of each stage; None if
    no stage reports a norm.

    The norms of equal totals may differ between machines in the last bit. So one value is used for all, and
    all scale by the same number.
    """
    first = [reduced[PeerId(stage.replicas[0])].squared_norm for stage in plan.stages]
    norms = [norm for norm in first if norm is not None]
    return sum(norms) if norms else None
