"""A plan with its reasons, and its forms: the `peerloom/plan/1` document, a screen, a picture. No torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from node.planning.picture import plan_svg
from node.planning.screen import plan_lines
from partition.plan.forecast import Forecast
from partition.plan.problem import Constraints, Objective, Pipeline, Problem, Split

FRAME_BYTES_MAX = 63 << 26
SCHEMA = "peerloom/plan/1"
BARS_MAX = 512
"""Maximum number of passes in the timeline of a step."""


@dataclass(frozen=True)
class PlanWish:
    """A person's request. With a `microbatch` of 0, or `recompute` None, the planner chooses."""

    batch: int = 64
    objective: Objective = "throughput"
    microbatch: int = 0
    recompute: bool | None = None
    pipeline: Pipeline = "1f1b"
    optimizer_moments: int = 2
    optimizer: str = "adam"
    constraints: Constraints = field(default_factory=lambda: Constraints(frame_bytes_max=FRAME_BYTES_MAX))
    sizes: tuple[int, ...] = ()
    """The values of the graph's symbols after the batch; empty: as the graph was captured."""
    frames: Literal["exact", "auto"] = "exact"
    mode: Literal["exact", "auto"] = "exact"
    local_steps: int = 20
    goal: float = 0.0
    """Samples per second with which the plan is compared; 0: no goal."""


@dataclass(frozen=True)
class LeftOut:
    """A peer without a stage, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Predicted:
    """The prediction for a plan. `samples_per_second` is for training, or for consecutive passes if the
    objective is latency. `tokens_per_second` is None if samples have no tokens. `memory_bytes` is per
    stage."""

    samples_per_second: float
    tokens_per_second: float | None
    step_seconds: float
    pass_seconds: float
    bubble: float
    joules_per_sample: float
    memory_bytes: tuple[int, ...]


@dataclass(frozen=True)
class PlanReport:
    """A plan with all findings. `tokens` is the number of tokens in a sample, 0 for other data. `frames` and
    `mode` are those chosen, if they were left open. `what_if` are the changes to the peers, and `without` is
    the prediction without these changes; None if no plan fits without them."""

    model: str
    problem: Problem
    split: Split
    forecast: Forecast
    wanted: PlanWish
    microbatch: int
    tokens: int
    left_out: tuple[LeftOut, ...]
    reasons: tuple[str, ...]
    alone: tuple[str, float] | None
    help: tuple[str, float] | None
    frames: Literal["exact", "bfloat16"] = "exact"
    mode: Literal["exact", "local"] = "exact"
    what_if: tuple[str, ...] = ()
    without: Predicted | None = None

    @property
    def predicted(self) -> Predicted:
        """The predicted throughput, times, memory and energy."""
        rate, played = self.samples_per_second, self.forecast
        return Predicted(
            samples_per_second=rate,
            tokens_per_second=rate * self.tokens if self.tokens else None,
            step_seconds=played.step_nanoseconds / 1e9,
            pass_seconds=played.pass_nanoseconds / 1e9,
            bubble=played.bubble,
            joules_per_sample=played.microjoules / 1e6 / max(1, self.microbatch),
            memory_bytes=tuple(row.memory_bytes for row in played.stages),
        )

    @property
    def what_if_gain(self) -> float | None:
        """The gain of `what_if` in samples per second, as a share; None without `what_if`, or if no plan fits
        without it."""
        if self.without is None:
            return None
        return self.samples_per_second / max(1e-12, self.without.samples_per_second) - 1

    @property
    def samples_per_second(self) -> float:
        """The predicted samples per second."""
        if self.problem.objective == "latency":
            return self.microbatch * 1e9 / max(1, self.forecast.pass_nanoseconds)
        samples = self.microbatch * self.problem.microbatches
        return samples * 1e9 / max(1, self.forecast.step_nanoseconds)

    def peers_of(self, stage: int) -> tuple[str, ...]:
        """Return the names of a stage's peers."""
        return tuple(self.problem.peers[place].name for place in self.split.groups[stage])

    def explain(self) -> str:
        """Return the screen of `peerloom plan --explain`: a table of stages, the prediction, the reasons."""
        return "\n".join(plan_lines(plan_document(self), explain=True))

    def to_json(self) -> str:
        """Return the `peerloom/plan/1` document of `peerloom plan --json`."""
        return json.dumps(plan_document(self))

    def to_svg(self) -> str:
        """Return the picture of `peerloom plan --svg`."""
        return plan_svg(plan_document(self))


def goal_document(report: PlanReport) -> dict[str, Any] | None:
    """Return `goal` of a plan's document: the wanted rate, and whether the plan is predicted to reach it."""
    if not (goal := report.wanted.goal):
        return None
    predicted = report.samples_per_second
    return {"samples_per_second": goal, "is_met": predicted >= goal, "share": predicted / goal}


def plan_document(report: PlanReport) -> dict[str, Any]:
    """Return the whole plan as a document, in seconds and bytes."""
    problem, played = report.problem, report.forecast
    names = [peer.name for peer in problem.peers]
    predicted = report.predicted
    busy = dict(played.busy)
    return {
        "schema": SCHEMA,
        "model": report.model,
        "objective": problem.objective,
        "batch": report.microbatch * problem.microbatches,
        "microbatch": report.microbatch,
        "microbatches": problem.microbatches,
        "recompute": problem.recompute,
        "frames": report.frames,
        "mode": report.mode,
        "pipeline": problem.pipeline,
        "optimizer": report.wanted.optimizer,
        "stages": _stage_documents(played, names),
        "left_out": [{"peer": row.name, "reason": row.reason} for row in report.left_out],
        "samples_per_second": predicted.samples_per_second,
        "tokens_per_second": predicted.tokens_per_second,
        "step_seconds": predicted.step_seconds,
        "pass_seconds": predicted.pass_seconds,
        "bubble": predicted.bubble,
        "slowest": {"stage": played.slowest + 1, "waits_for": played.waits_for},
        "utilisation": [
            {"peer": names[place], "share": busy[place] / max(1, played.step_nanoseconds)}
            for row in played.stages
            for place in row.peers
        ],
        "links": [
            {"sender": names[one], "receiver": names[other], "bytes": size}
            for one, other, size in played.link_bytes
        ],
        "joules_per_sample": predicted.joules_per_sample,
        "is_exact": report.split.is_exact,
        "reasons": list(report.reasons),
        "alone": None
        if report.alone is None
        else {"peer": report.alone[0], "samples_per_second": report.alone[1]},
        "help": None if report.help is None else {"change": report.help[0], "gain": report.help[1]},
        "goal": goal_document(report),
        "what_if": ",".join(report.what_if) or None,
        "what_if_gain": report.what_if_gain,
        "timeline": _timeline(played, names),
    }


def _stage_documents(played: Forecast, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "stage": number + 1,
            "first_layer": row.first_layer,
            "last_layer": row.last_layer - 1,
            "peers": [names[place] for place in row.peers],
            "seconds": row.nanoseconds / 1e9,
            "memory_bytes": row.memory_bytes,
            "memory_offered_bytes": row.memory_offered,
            "sent_bytes": row.sent_bytes,
            "sent_seconds": row.sent_nanoseconds / 1e9,
            "reduce_seconds": row.reduce_nanoseconds / 1e9,
        }
        for number, row in enumerate(played.stages)
    ]


def _timeline(played: Forecast, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the passes of one step, at most the first `BARS_MAX`."""
    return [
        {
            "peer": names[bar.peer],
            "stage": bar.stage + 1,
            "microbatch": bar.microbatch,
            "direction": bar.kind,
            "start_seconds": bar.start / 1e9,
            "end_seconds": bar.end / 1e9,
        }
        for bar in played.bars[:BARS_MAX]
    ]
