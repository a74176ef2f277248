"""The held-out micro-batches of a run, as its committer knows them: those in progress, and their results.

Micro-batches for validation come first, those for the test after them. A few are open at the same time, and
more are opened as results arrive. Not here: the replicas that compute them (the ledger), and messages.
"""

from crypto.errors import RemoteProtocolError
from partition.steps.committer_events import BestWanted, TrainingEvaluated, Validated
from partition.steps.messages import EVALUATIONS_IN_FLIGHT_MAX, SAMPLES_MAX, Evaluated
from partition.steps.validation import Series, ValidationSchedule, ValidationSettings


class Evaluation:
    """One evaluation of the micro-batches `all`, each with a loss and `metrics` further values, with the
    parameters after `step` steps."""

    def __init__(self, all_numbers: range, metrics: int, step: int) -> None:
        self.all = all_numbers
        self._metrics = metrics
        self._step = step
        self._rows: dict[int, Evaluated] = {}
        self._first = all_numbers.start

    def is_known(self, message: Evaluated, numbers: range) -> bool:
        """Return whether a result is a repetition or belongs to an earlier evaluation. `numbers` are the open
        micro-batches.

        Raises RemoteProtocolError for a result that was not requested or is impossible.
        """
        if message.microbatch >= numbers.stop or message.step > self._step:
            raise RemoteProtocolError("an evaluation was not asked for")
        if len(message.metrics) != self._metrics or message.samples > SAMPLES_MAX:
            raise RemoteProtocolError("an evaluation has impossible values")
        return message.step != self._step or message.microbatch in self._rows

    def take(self, message: Evaluated) -> None:
        """Record the result of one micro-batch."""
        self._rows[message.microbatch] = message
        while self._first in self._rows:
            self._first += 1

    @property
    def numbers(self) -> range:
        """The micro-batches that should be open now."""
        return range(self._first, min(self.all.stop, self._first + EVALUATIONS_IN_FLIGHT_MAX))

    def wants_more(self, numbers: range) -> bool:
        """Return whether enough of the open `numbers` are done to make a new Open worthwhile."""
        return numbers.stop < self.all.stop and self._first - numbers.start >= EVALUATIONS_IN_FLIGHT_MAX // 2

    def result(self) -> TrainingEvaluated | None:
        """Return the sums once all micro-batches are done, otherwise None."""
        if len(self._rows) < len(self.all):
            return None
        rows = [self._rows[number] for number in sorted(self._rows)]
        return TrainingEvaluated(
            sum(row.samples for row in rows),
            sum(row.loss for row in rows),
            tuple(sum(row.metrics[place] for row in rows) for place in range(self._metrics)),
        )


class HeldOut:
    """The schedule of held-out micro-batches under one plan. `evaluation` is the newest.

    `takes_last`: the run ends with the present state, even if an earlier state had a better validation.
    """

    def __init__(
        self,
        validations: int,
        tests: int,
        metrics: int,
        settings: ValidationSettings | None,
        series: Series | None,
        is_final: bool,
    ) -> None:
        """`is_final`: the plan has restored the state that is the result."""
        self.takes_last = self._is_final = is_final
        self._to_validate = range(validations)
        self._to_test = range(validations, validations + tests)
        self._metrics = metrics
        self._schedule = ValidationSchedule(settings, series)
        self.evaluation = Evaluation(self._to_test, metrics, 0)

    @property
    def series(self) -> Series | None:
        """The validations so far."""
        return self._schedule.series

    def learn(self, series: Series | None) -> None:
        """Take over the series in an Apply, if it is newer."""
        self._schedule.learn(series)

    def is_over(self, step: int, steps: int) -> bool:
        """Return whether no step follows after `step` steps. The run has at most `steps`."""
        return step >= steps or self._is_final or self._schedule.has_converged

    def next(self, step: int, *, is_over: bool) -> "Evaluation | BestWanted | None":
        """Return what to do before step `step` is opened, or instead of it; None if there is nothing."""
        if self._schedule.is_due(step, is_over=is_over) and not self._is_final:
            return self._begin(self._to_validate, step)
        if not is_over:
            return None
        best = None if self.takes_last else self._schedule.wanted_back(step)
        return self._begin(self._to_test, step) if best is None else BestWanted(best)

    def _begin(self, numbers: range, step: int) -> Evaluation:
        self.evaluation = Evaluation(numbers, self._metrics, step)
        return self.evaluation

    def take(self, step: int, sums: TrainingEvaluated) -> Validated | None:
        """Record the sums of the newest evaluation; return None if it was the test."""
        if self.evaluation.all == self._to_test:
            return None
        series = self._schedule.take(step, sums.samples, sums.loss, sums.metrics)
        is_kept = self._schedule.keeps_best and series.best_step == step
        return Validated(step, sums, series, self._schedule.has_converged, is_kept)
