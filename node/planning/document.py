"""A plan as the `peerloom/plan/1` document: what `--json` prints, and what screen and picture are made of."""

from typing import Any

from node.planning.planner import PlanReport

SCHEMA = "peerloom/plan/1"
BARS_MAX = 512
"""Passes told of a step's timeline."""


def plan_document(report: PlanReport) -> dict[str, Any]:
    """All of a plan, in seconds and bytes."""
    problem, played = report.problem, report.forecast
    names = [peer.name for peer in problem.peers]
    tokens = report.tokens
    rate = report.samples_per_second
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
        "stages": [
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
        ],
        "left_out": [{"peer": row.name, "reason": row.reason} for row in report.left_out],
        "samples_per_second": rate,
        "tokens_per_second": rate * tokens if tokens else None,
        "step_seconds": played.step_nanoseconds / 1e9,
        "pass_seconds": played.pass_nanoseconds / 1e9,
        "bubble": played.bubble,
        "slowest": {"stage": played.slowest + 1, "waits_for": played.waits_for},
        "utilisation": [
            {"peer": names[place], "share": busy / max(1, played.step_nanoseconds)}
            for place, busy in played.busy
        ],
        "links": [
            {"sender": names[one], "receiver": names[other], "bytes": size}
            for one, other, size in played.link_bytes
        ],
        "joules_per_sample": played.microjoules / 1e6 / max(1, report.microbatch),
        "is_exact": report.split.is_exact,
        "reasons": list(report.reasons),
        "alone": None
        if report.alone is None
        else {"peer": report.alone[0], "samples_per_second": report.alone[1]},
        "help": None if report.help is None else {"change": report.help[0], "gain": report.help[1]},
        "timeline": [
            {
                "peer": names[bar.peer],
                "stage": bar.stage + 1,
                "microbatch": bar.microbatch,
                "direction": bar.kind,
                "start_seconds": bar.start / 1e9,
                "end_seconds": bar.end / 1e9,
            }
            for bar in played.bars[:BARS_MAX]
        ],
    }
