"""A peer's stage of a run in a world of cores: drives a member's `partition.run.hosting.Hosting`.

Opening takes time; an open stage is a `sim.worlds.sim_stage.Hosted`.
"""

from collections.abc import Callable

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.run import hosting
from partition.run.hosting import NO_ROOM, WENT_ON, StageAction, StageEnded, StageKept, StageWanted
from partition.run.member import Member
from sim.worlds.sim_stage import Hosted

OPEN_SECONDS = 0.5
"""Time to start the process of a stage, with its model."""


class SimStageHost:
    """Holds at most one stage. `make(plan, step)` makes the stage to open."""

    def __init__(
        self,
        member: Callable[[], Member],
        make: Callable[[Plan, int | None], Hosted],
        later: Callable[[float, Callable[[], None]], None],
        now: Callable[[], float],
    ) -> None:
        self.hosted: Hosted | None = None
        self._member = member
        self._make = make
        self._later = later
        self._now = now

    @property
    def core(self) -> hosting.Hosting:
        """Return the member's hosting."""
        return self._member().hosting

    def act(self, wanted: StageAction | None) -> None:
        """Keep the stage under a plan in force, open it, or close the open one."""
        match wanted:
            case StageKept(plan) if self.hosted is not None:
                self.hosted.adopt(plan)
            case StageWanted():
                self._open(wanted)
            case StageEnded():
                self.hosted = None

    def prepare(self, plan: Plan, planner: PeerId, opened: Callable[[str], None]) -> None:
        """Open the stage of a plan that is not in force yet, at the request of `planner`. `opened` is called
        with "" on success, or with the reason of a failure."""
        wanted = self.core.prepare(self._now(), plan, planner)
        if wanted is None:
            opened(NO_ROOM)
        else:
            self._open(wanted, opened)

    def unprepare(self, plan: bytes) -> None:
        """Close the stage that was opened early for this plan, because the plan was not decided."""
        self._close_if(self.core.unprepare(plan))

    def planner_lost(self, planner: PeerId) -> None:
        """Close the stage that was opened early for a plan of `planner`, which is gone."""
        self._close_if(self.core.planner_lost(planner))

    def failed(self, hosted: Hosted) -> None:
        """Record that a stage has failed."""
        if self.hosted is hosted:
            self.core.closed()

    def abandon(self) -> None:
        """Close the stage that was opened early for a plan, because the plan was not decided in time."""
        self.hosted = None

    def _close_if(self, ended: StageEnded | None) -> None:
        if ended is not None:
            self.hosted = None

    def _open(self, wanted: StageWanted, opened: Callable[[str], None] | None = None) -> None:
        self.hosted, core = None, self.core

        def done() -> None:
            plan = core.opened(wanted)
            if plan is not None:
                self.hosted = self._make(plan, wanted.step)
            if opened is not None:
                opened("" if plan is not None else WENT_ON)

        self._later(OPEN_SECONDS, done)

    def close(self) -> None:
        """Forget the stage."""
        self.core.vacate()
        self.hosted = None
