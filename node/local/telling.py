"""Events of a member of a run in local mode, for screens: its steps, evaluations, and the state of the
run."""

from collections.abc import Callable

from node.events import RunChanged, RunEvaluated, StepCommitted
from node.local.trainer import Stepped
from node.protocols.manifest import CORRECT, Run
from node.runs.progress import ShownSteps
from node.seams import Clock
from partition.run.messages import REASON_LENGTH_MAX

TOLD_STEPS = 10
"""Number of steps for each event, which is a line on a screen."""


class Teller:
    """Publishes the events of one run. `shown` is the newest of them."""

    def __init__(self, run: Run, clock: Clock, publish: Callable[..., None]) -> None:
        self.shown = ShownSteps()
        self._run = run
        self._clock = clock
        self._publish = publish

    def running(self, reason: str = "") -> None:
        """Announce that the run continues. `reason` is the present problem, if any."""
        event = RunChanged(
            at=self._clock.wall(), run=self._run.text, state="running", reason=reason[:REASON_LENGTH_MAX]
        )
        self._publish(event)

    def evaluated(self, samples: int, loss: float, metrics: tuple[float, ...]) -> None:
        """Announce an evaluation by this member or another."""
        named = dict(zip(self._run.manifest.metrics, metrics, strict=True))
        accuracy = named[CORRECT] / samples if CORRECT in named and samples else None
        event = RunEvaluated(
            at=self._clock.wall(),
            run=self._run.text,
            accuracy=accuracy,
            loss=loss,
            samples=samples,
            metrics=metrics,
        )
        self.shown.evaluated = event
        self._publish(event)

    def stepped(self, step: int, stepped: Stepped, seconds: float, replicas: int) -> None:
        """Announce a step made here. `step` is the number of steps, including this one."""
        event = StepCommitted(
            at=self._clock.wall(),
            run=self._run.text,
            step=step - 1,
            loss=stepped.loss,
            samples=stepped.samples,
            seconds=seconds,
            replicas=replicas,
            diverged=stepped.diverged[:REASON_LENGTH_MAX],
        )
        self.shown.committed = event
        if step % TOLD_STEPS == 1 or stepped.diverged or step == self._run.manifest.steps:
            self._publish(event)
