"""An upper bound on the steps that another branch of a run can have committed, from the pace measured before
the split.

Members of another branch state how many steps they have committed, and no member of this branch can check it.
So a claim counts only up to the number of steps that the other branch's machines could compute since this
member last reached all of them.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.plan.learner import Branch
from partition.plan.plan import Plan, plan_hash

PACE_SECONDS = 10.0
"""Minimum length of a measurement. A shorter one would be distorted by the start of the plan."""
FASTER_MAX = 4.0
"""Maximum ratio of the pace per FLOP/s of some of the machines to that of all of them together. Links slow
down the whole, so a part alone may be faster."""
STEPS_SPARE = 2
"""Number of additional steps that may be in progress at the split, or may be committed before this member
notices it."""
SIGHTINGS_MAX = 64
"""Number of plans whose last sighting is kept. Branches of older plans are bounded by the oldest sighting
kept."""


@dataclass(frozen=True)
class Sighting:
    """The last time when all members of a plan were reachable, and the number of steps committed by then."""

    at: float
    step: int


class BranchPace:
    """One member's measurements. `best` is the highest measured pace, in steps per second and per FLOP/s of
    the plan's rates; None before the first measurement."""

    def __init__(self) -> None:
        self.best: float | None = None
        self._sightings: OrderedDict[bytes, Sighting] = OrderedDict()
        self._window: tuple[bytes, float, int] | None = None

    def entered(self, now: float, plan: Plan, step: int) -> None:
        """Note that a plan came into force. Its voters are reachable at that time."""
        self._see(now, plan_hash(plan), step)
        self._window = plan_hash(plan), now, step

    def look(self, now: float, plan: Plan, step: int, live: Collection[PeerId]) -> None:
        """Note the progress of the run and the reachable members."""
        name = plan_hash(plan)
        if all(peer in live for peer in plan.roster):
            self._see(now, name, step)
        if self._window is None or self._window[0] != name or step < self._window[2]:
            self._window = name, now, step
        _, began, first = self._window
        rates = sum(rate for stage in plan.stages for rate in stage.rates)
        if now - began >= PACE_SECONDS and step > first and rates:
            pace = (step - first) / (now - began) / rates
            self.best = pace if self.best is None else max(self.best, pace)
            self._window = name, now, step

    def _see(self, now: float, plan: bytes, step: int) -> None:
        self._sightings[plan] = Sighting(now, step)
        self._sightings.move_to_end(plan)
        if len(self._sightings) > SIGHTINGS_MAX:
            self._sightings.popitem(last=False)

    def since(self, branch: Branch | None) -> Sighting | None:
        """Return the last time at which all members of the branch's last common plan were reachable. If that
        is no longer kept, return the oldest such time kept; None if there is none."""
        oldest = next(iter(self._sightings.values()), None)
        return oldest if branch is None else self._sightings.get(plan_hash(branch.split), oldest)

    def possible(self, now: float, branch: Branch | None, here: Plan) -> int | None:
        """Return the highest number of steps that a branch can have committed; None before the first
        measurement.

        If `branch` is None, because its origin is not known, all machines of the plan `here` are assumed to
        be in it.
        """
        since = self.since(branch)
        if self.best is None or since is None:
            return None
        rates = _rates(here if branch is None else branch.split, None if branch is None else branch.members)
        steps = FASTER_MAX * self.best * rates * (now - since.at)
        return since.step + STEPS_SPARE + int(steps)


def _rates(plan: Plan, members: Collection[bytes] | None) -> int:
    """Return the sum of the rates of `members` under a plan that all agreed to. A branch may name any
    machine, so a machine without a known rate counts as the fastest, and at most as many machines count as
    the plan has."""
    known: dict[bytes, int] = {}
    for stage in plan.stages:
        known |= dict(zip(stage.replicas, stage.rates, strict=True))
    if members is None:
        return sum(known.values())
    fastest = max(known.values(), default=0)
    rates = sorted((known.get(peer, fastest) for peer in members), reverse=True)
    return sum(rates[: len(plan.roster)])
