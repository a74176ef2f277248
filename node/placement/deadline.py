"""Warns a run's requester if the run cannot meet its deadline or goal.

A deadline takes no slot from other requesters (`node.placement.turns`): it orders the requester's own runs,
and the requester is warned if it cannot be met. The requester is also warned about a goal, which the alert
`run_below_goal` watches later.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from node.placement.leases import about
from node.protocols.manifest import Manifest
from partition.model.graph import Graph
from partition.plan.layer_costs import layer_costs
from partition.plan.plan import Plan

BACKWARD = 3
"""Cost of a forward and backward pass relative to the forward pass."""
PLANNED = "according to its peers' speed"
PACE_STEPS_MIN = 3
"""Number of steps after which a run's pace is trusted; its first step loads what later steps reuse."""


def least_seconds(manifest: Manifest, graph: Graph, plan: Plan, rates: Mapping[bytes, float]) -> float:
    """Return a lower bound for the time of a plan's steps, assuming that its slowest stage computes all the
    time, at its replicas' offered rates (FLOP/s). 0 if a rate is unknown. Cutting the graph and counting
    FLOPs takes time, so do not call this on the event loop."""
    costs = [row.forward_flops for row in layer_costs(graph, manifest.sizes_max)]
    longest = 0.0
    for stage in plan.stages:
        rate = sum(rates.get(peer, 0.0) for peer in stage.replicas)
        if rate <= 0 or any(not rates.get(peer) for peer in stage.replicas):
            return 0.0
        flops = BACKWARD * sum(costs[stage.first_layer : stage.last_layer]) * manifest.microbatches
        longest = max(longest, flops / rate)
    return longest * manifest.steps


def late_text(seconds_left: float, needed_seconds: float, *, by: str) -> str:
    """Return a warning if a run needs more than the remaining time; else "". `by` names the evidence for the
    estimate."""
    late = needed_seconds - seconds_left
    if late <= 0:
        return ""
    return (
        f"its deadline cannot be met: {by} it takes about {about(needed_seconds)} more, "
        f"{about(late)} too long; fewer steps (`peerloom runs revise RUN --steps N`) or more peers help"
    )


def plan_warnings(
    manifest: Manifest, least: float, seconds_left: float | None, goal: tuple[float, int] | None
) -> Iterator[str]:
    """Yield warnings about a plan whose steps take at least `least` seconds (0: unknown): that it cannot
    reach the deadline, or the goal in samples per second."""
    if seconds_left is not None and (late := late_text(seconds_left, least, by=PLANNED)):
        yield late
    if goal is not None and least:
        most = manifest.steps * manifest.microbatch * manifest.microbatches / least
        if most < goal[0]:
            yield (
                f"its goal of {goal[0]:g} samples/s cannot be reached: {PLANNED} it trains {most:.3g} "
                "at most; more peers help"
            )


@dataclass
class DeadlineWatch:
    """Watches one run's pace through the steps that its requester sees committed. It reports each change
    once."""

    _first: tuple[int, float] | None = None
    _is_late: bool = field(default=False)

    def moved(self, now: float, step: int, steps: int, seconds_left: float) -> str | None:
        """Record a committed step at monotonic time `now`. Return a warning, "" if the deadline can be met
        again, or None if nothing has changed."""
        if self._first is None or step < self._first[0]:
            self._first = step, now
        done = step - self._first[0]
        if done < PACE_STEPS_MIN:
            return None
        needed = (now - self._first[1]) / done * max(0, steps - step - 1)
        said = late_text(seconds_left, needed, by="at the pace of its steps")
        if bool(said) == self._is_late:
            return None
        self._is_late = bool(said)
        return said
