"""The texts of a run's goal (`[goal]`) on its requester's screens."""

from collections.abc import Mapping
from typing import Any

_OVER = ("done", "failed", "stopped")


def goal_text(goal: Mapping[str, Any]) -> str:
    """Return `goal 100 samples/s over 60 s`."""
    return f"goal {goal['samples_per_second']:g} samples/s over {goal['seconds']} s"


def goal_lines(run: Mapping[str, Any]) -> list[str]:
    """Return the line of `peerloom runs show` with the goal of a run and the speed of its latest step."""
    if (goal := run.get("goal")) is None:
        return []
    return [f"  goal          {goal_text(goal).removeprefix('goal ')}{pace_text(run)}"]


def pace_text(run: Mapping[str, Any]) -> str:
    """Return how fast the latest step of a run was; empty if the run is over."""
    last = run.get("last_step")
    if not (last and last["seconds"]) or run["status"] in _OVER:
        return ""
    return f"; the latest step had {last['samples'] / last['seconds']:.3g}"
