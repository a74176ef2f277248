"""Runs on machines that come and go: which share of their computing is used, and what a death costs.

Whole nodes in virtual time. Six equal machines stay for five minutes on average and are away for one, and
seven of ten departures are crashes. A seventh node requests the run, stays, and takes no stage. One run is in
exact mode: it has one stage, a replica on every machine, and samples of committed steps count once. One run
is in local mode, where samples count once they have entered a mean. `share` is the number of samples per
second relative to the capacity of the machines present, whether they were in the run or not.

Each machine's activity is recorded four times per virtual second: it trains, evaluates, applies a step, joins
(has not worked since its start), is not in the plan, or waits for others. The phase of a death is the
committer's phase, or in local mode that of the dying machine. Almost all deaths fall into the longest phase.
So in exact mode a machine is also killed in each phase, while no other machine comes or goes ("placed"); a
death in the last evaluation stalls the end of the run. Not measured here: the death of the node that feeds
and commits (tests/test_exactness.py), several stages, machines that differ, real networks.

The best results in exact mode are 0.81 in half an hour (seed 1), and about 0.77 in 41 minutes (seed 2). Two
losses remain. In each step of 3.2 s no machine computes for half a second (3.19 s with six machines, 3.73 s
with five; not traced further). Each crash costs 5 s until SWIM declares the machine dead. Next ideas: sum the
first micro-batches while the last are computed, and immediately ask a replica whose frames are overdue.
"""

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from _churn_nodes import LOCAL_MICROBATCHES, Death, Found, Play
from _figures import Goal, arguments, leave, report

from partition.run.local_settings import LocalSettings

SHARE_MIN = 0.8
SECONDS, SECONDS_QUICK = 3_600.0, 300.0
SEEDS, SEEDS_QUICK = (1, 2, 3), (1,)
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "local": {"microbatches": LOCAL_MICROBATCHES, "local": LocalSettings(evaluate_every=5)},
}
PHASES, PLACED_SECONDS_MAX = ("counting", "committing", "applying", "evaluating"), 600.0
PLACED_STEPS = 45
"""Number of steps in the run with placed deaths: all killed machines must return before the last step."""


def main() -> int:
    flags = arguments(__doc__ or "")
    seconds, seeds = (SECONDS_QUICK, SEEDS_QUICK) if flags.quick else (SECONDS, SEEDS)
    rows: list[dict[str, Any]] = []
    goals = []
    for mode, wanted in MODES.items():
        played = [Play(wanted, seconds, seed).play() for seed in seeds]
        rows += [_row(mode, seed, found) for seed, found in zip(seeds, played, strict=True)]
        rows += _deaths(mode, [death for found in played for death in found.deaths])
        worst = min(found.share for found in played)
        goals.append(Goal(f"{mode}: share of the present capacity, worst seed", worst, ">=", SHARE_MIN))
    placed = Play({"steps": PLACED_STEPS, "test_samples": 360}, PLACED_SECONDS_MAX, 1, PHASES).play()
    rows += _deaths("exact, placed", placed.deaths)
    return report("churn_runs", rows, goals, as_json=flags.json)


def _row(mode: str, seed: int, found: Found) -> dict[str, Any]:
    present = found.seconds["present"]
    row: dict[str, Any] = {
        "mode": mode,
        "seed": seed,
        "share": round(found.share, 3),
        "samples": found.samples,
        "machines": round(present / found.lasted_seconds, 2),
        "deaths": len(found.deaths),
        "plans": found.plans,
        "steps_again": found.steps_again,
    }
    row |= {
        kind: round(seconds / present, 3)
        for kind, seconds in sorted(found.seconds.items())
        if kind != "present"
    }
    joined = sorted(found.joined_seconds)
    row["joined_seconds_median"] = round(joined[len(joined) // 2], 1) if joined else None
    return row | ({"ended": found.outcome} if found.outcome else {})


def _deaths(mode: str, deaths: list[Death]) -> list[dict[str, Any]]:
    """Return the cost of deaths by kind and phase."""
    groups: dict[tuple[str, str], list[Death]] = defaultdict(list)
    for death in deaths:
        if death.was_in_plan:
            groups[death.why, death.phase].append(death)
    return [
        {
            "mode": mode,
            "went": why,
            "phase": phase,
            "deaths": len(group),
            "stalled_seconds": round(sum(each.stalled_seconds for each in group) / len(group), 2),
            "lost_samples": round(sum(each.lost_samples for each in group) / len(group)),
        }
        for (why, phase), group in sorted(groups.items())
    ]


if __name__ == "__main__":
    leave(main())
