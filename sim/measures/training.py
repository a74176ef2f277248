"""Measures of training: committed steps, speed, stalls, and the number of plans."""

from dataclasses import dataclass, field

from sim.events import PlanAdopted, RunEnded, StepCommitted
from sim.measures.rows import Row, known, quantile
from sim.observers import Observation

_STALL_FACTOR = 5.0
"""A step that takes more than this many times the usual time is a stall, not a slow step."""


@dataclass
class _Run:
    committed: dict[tuple[bytes, int], None] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    microbatches: int = 0
    height: int = -1
    plans: dict[bytes, None] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)


class Training:
    """Metrics, labelled with the run: `step_loss` and `step_committed` (its number) with each commit,
    `plan_height` with each new plan, `microbatches_per_second` of each window."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self._runs: dict[bytes, _Run] = {}
        self._window: dict[bytes, int] = {}
        self._sampled_at = 0.0
        self.handlers = {
            StepCommitted: self._committed,
            PlanAdopted: self._adopted,
            RunEnded: self._ended,
        }

    def sample(self, now: float, rows: list[Row]) -> None:
        """Close the window that began with the previous sample."""
        took, self._sampled_at = now - self._sampled_at, now
        for run, count in self._window.items():
            if took > 0:
                rows.append(Row(now, "microbatches_per_second", run_name(run), count / took))
            self._window[run] = 0

    def summary(self) -> list[dict[str, object]]:
        return [self._of(name, run) for name, run in self._runs.items()]

    def _of(self, name: bytes, run: _Run) -> dict[str, object]:
        gaps = [later - earlier for earlier, later in zip(run.times, run.times[1:], strict=False)]
        usual = quantile(sorted(gaps), 0.5)
        stalls = [gap for gap in gaps if gap > _STALL_FACTOR * usual]
        lasted = run.times[-1] - run.times[0] if len(run.times) > 1 else 0.0
        last_loss = run.steps[max(run.steps)] if run.steps else None
        return {
            "run": run_name(name),
            "steps": len(run.steps),
            "steps_again": len(run.committed) - len(run.steps),
            "loss": known(last_loss) if last_loss is not None else None,
            "microbatches_per_second": known(run.microbatches / lasted) if lasted > 0 else None,
            "step_seconds_p50": known(usual),
            "stalls": len(stalls),
            "stalled_seconds": known(sum(stalls)),
            "plans": len(run.plans),
            "height": run.height,
            "outcomes": dict(sorted(run.outcomes.items())),
        }

    def _run(self, name: bytes) -> _Run:
        if name not in self._runs:
            self._runs[name] = _Run()
            self._window[name] = 0
        return self._runs[name]

    def _committed(self, observed: Observation) -> None:
        event = observed.event
        run = self._run(event.run)
        if (event.plan, event.step) in run.committed:
            return
        run.committed[event.plan, event.step] = None
        run.steps[event.step] = event.loss
        run.times.append(observed.time)
        counted = sum(len(ids) for _, ids in event.counted[0]) if event.counted else 0
        run.microbatches += counted
        self._window[event.run] += counted
        label = run_name(event.run)
        self._rows.append(Row(observed.time, "step_committed", label, event.step))
        self._rows.append(Row(observed.time, "step_loss", label, event.loss))

    def _adopted(self, observed: Observation) -> None:
        event = observed.event
        run = self._run(event.run)
        if event.plan not in run.plans:
            run.plans[event.plan] = None
            run.height = max(run.height, event.height)
            self._rows.append(Row(observed.time, "plan_height", run_name(event.run), event.height))

    def _ended(self, observed: Observation) -> None:
        outcomes = self._run(observed.event.run).outcomes
        outcomes[observed.event.outcome] = outcomes.get(observed.event.outcome, 0) + 1


def run_name(run: bytes) -> str:
    """Return a run's id, shortened like on screens."""
    return run.hex()[:8]
