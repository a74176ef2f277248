"""The measurements of a run as one row per step, for a program, a table or a CSV file.

The rows come from events and from the view of the run. Recent events have every figure; for older steps only
the loss is known.
"""

from collections.abc import Callable, Iterable
from typing import Any

from node.events import Event, RunEvaluated, StepCommitted
from node.state import RunView

Joules = Callable[[float, float], float | None]
"""Returns the energy that this machine used between two wall times; None if it is not known."""


def metric_rows(
    view: RunView, events: Iterable[Event], joules: Joules = lambda _begin, _end: None
) -> list[dict[str, Any]]:
    """Return one row for each known step with its measurements. `step` is the number of steps done by then.
    An evaluation after a step is in that step's row; a validation's figures have names such as
    `validation_loss`. `joules` are those of this machine alone during the step, if its hardware counts them.
    In local mode, which reports few steps, they cover all steps since the previous row and the time between
    them."""
    rows: dict[int, dict[str, Any]] = {}
    before: StepCommitted | None = None
    for event in events:
        if getattr(event, "run", None) != view.run:
            continue
        if isinstance(event, StepCommitted):
            rows[event.step + 1] = _step_row(event)
            skips = before is not None and event.step > before.step + 1
            used = joules(before.at if before and skips else event.at - event.seconds, event.at)
            rows[event.step + 1] |= {} if used is None else {"joules": used}
            before = event
        elif isinstance(event, RunEvaluated) and event.step is not None:
            rows.setdefault(event.step, {"step": event.step}).update(_validated(view, event))
        elif isinstance(event, RunEvaluated):
            step = max(rows, default=view.step)
            rows.setdefault(step, {"step": step}).update(_evaluated(view, event))
    first = min(rows, default=view.step + 1)
    earlier = view.losses[: len(view.losses) - sum("loss" in row for row in rows.values())]
    for number, loss in enumerate(reversed(earlier), 1):
        if first - number > 0:
            rows[first - number] = {"step": first - number, "loss": loss}
    return [rows[step] for step in sorted(rows)]


def _step_row(event: StepCommitted) -> dict[str, Any]:
    row: dict[str, Any] = {"step": event.step + 1, "seconds": event.seconds, "replicas": event.replicas}
    if event.diverged:
        return row | {"diverged": event.diverged}
    seconds = max(1e-9, event.seconds)
    row |= {"loss": event.loss, "samples_per_second": event.samples / seconds}
    # If the loss counts tokens, a sample has several.
    return row | ({"tokens_per_second": event.counted / seconds} if event.counted > event.samples else {})


def _validated(view: RunView, event: RunEvaluated) -> dict[str, Any]:
    return {
        f"validation_{name.removesuffix('_held_out')}": value
        for name, value in _evaluated(view, event).items()
    }


def _evaluated(view: RunView, event: RunEvaluated) -> dict[str, Any]:
    named = zip(view.metrics, event.metrics, strict=False)
    row: dict[str, Any] = {name: value / max(1, event.samples) for name, value in named}
    row["loss_held_out"] = event.loss
    return row if event.accuracy is None else row | {"accuracy": event.accuracy}
