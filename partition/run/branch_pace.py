"""The most steps that another branch of a run can have made, by measurements while all of its members were
together.

Members of a branch claim the steps they have committed. Nobody here saw them, so a claim counts only as far
as its machines could have come since this member last had all of them in reach.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.plan.learner import Branch
from partition.plan.plan import Plan, plan_hash

PACE_SECONDS = 10.0
"""A pace is measured over at least this time: a shorter one includes the plan's beginning."""
FASTER_MAX = 4.0
"""Some machines alone may be faster for their rates than all together, whose links set the pace."""
STEPS_SPARE = 2
"""A step is open at the split, and another while this member notices."""
SIGHTINGS_MAX = 64
"""Plans whose members were last seen together; branches from older ones are compared by the oldest kept."""


@dataclass(frozen=True)
class Sighting:
    """When the members of a plan were last in reach, all of them, and how many steps were committed then."""

    at: float
    step: int


class BranchPace:
    """One member's measurements. `best` is the most steps a second for each FLOP/s of the plan's rates, None
    until there was one."""

    def __init__(self) -> None:
        self.best: float | None = None
        self._sightings: OrderedDict[bytes, Sighting] = OrderedDict()
        self._window: tuple[bytes, float, int] | None = None

    def entered(self, now: float, plan: Plan, step: int) -> None:
        """Note that a plan is in force: the members that agreed to it were in reach."""
        self._see(now, plan_hash(plan), step)
        self._window = plan_hash(plan), now, step

    def look(self, now: float, plan: Plan, step: int, live: Collection[PeerId]) -> None:
        """Note how far the run is, and which members are in reach."""
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
        """Return when the members of a branch, and all others, were last together; None for never."""
        oldest = next(iter(self._sightings.values()), None)
        return oldest if branch is None else self._sightings.get(plan_hash(branch.split), oldest)

    def possible(self, now: float, branch: Branch | None, here: Plan) -> int | None:
        """Return the most steps that a branch can have committed; None where no pace was measured yet.

        For a branch that cannot show where it began, all machines of the plan `here` count.
        """
        since = self.since(branch)
        if self.best is None or since is None:
            return None
        rates = _rates(here if branch is None else branch.split, None if branch is None else branch.members)
        steps = FASTER_MAX * self.best * rates * (now - since.at)
        return since.step + STEPS_SPARE + int(steps)


def _rates(plan: Plan, members: Collection[bytes] | None) -> int:
    """Return the rates of `members` by a plan that all agreed to. A machine that has no rate there counts as
    the fastest that has one, and no more machines count than the plan has: a branch may name any."""
    known: dict[bytes, int] = {}
    for stage in plan.stages:
        known |= dict(zip(stage.replicas, stage.rates, strict=True))
    if members is None:
        return sum(known.values())
    fastest = max(known.values(), default=0)
    rates = sorted((known.get(peer, fastest) for peer in members), reverse=True)
    return sum(rates[: len(plan.roster)])
