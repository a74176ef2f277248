"""The held-out micro-batches of a run as its committer knows them: which are under way, what came of each.

A few are open at once, and more as those before them come in. Not here: who computes them (the ledger), and
what is said to whom.
"""

from crypto.errors import RemoteProtocolError
from partition.steps.committer_events import TrainingEvaluated
from partition.steps.messages import EVALUATIONS_IN_FLIGHT_MAX, SAMPLES_MAX, Evaluated


class Evaluation:
    """Of `count` micro-batches, each with `metrics` numbers beside its loss."""

    def __init__(self, count: int, metrics: int) -> None:
        self.count = count
        self._metrics = metrics
        self._rows: dict[int, Evaluated] = {}
        self._first = 0

    def check(self, message: Evaluated, numbers: range) -> None:
        """Whether it is of the open `numbers`, or of those before; else RemoteProtocolError."""
        if message.microbatch >= numbers.stop:
            raise RemoteProtocolError("an evaluation that was not asked for")
        if len(message.metrics) != self._metrics or message.samples > SAMPLES_MAX:
            raise RemoteProtocolError("an evaluation with impossible numbers")

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def take(self, message: Evaluated) -> None:
        """One is done."""
        self._rows[message.microbatch] = message
        while self._first in self._rows:
            self._first += 1

    @property
    def numbers(self) -> range:
        """Those to be under way now."""
        return range(self._first, min(self.count, self._first + EVALUATIONS_IN_FLIGHT_MAX))

    def wants_more(self, numbers: range) -> bool:
        """Return whether so many of the open `numbers` are done that more are worth an Open."""
        return numbers.stop < self.count and self._first - numbers.start >= EVALUATIONS_IN_FLIGHT_MAX // 2

    def result(self) -> TrainingEvaluated | None:
        """Once all are done."""
        if len(self._rows) < self.count:
            return None
        rows = [self._rows[number] for number in sorted(self._rows)]
        return TrainingEvaluated(
            sum(row.samples for row in rows),
            sum(row.loss for row in rows),
            tuple(sum(row.metrics[place] for row in rows) for place in range(self._metrics)),
        )
