"""The stage of a run that a peer in a world of cores holds: the driver of a `partition.run.hosting.Hosting`.

Opening takes a while; what is open is a `sim.worlds.sim_stage.Hosted`.
"""

from collections.abc import Callable

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.run import hosting as core
from partition.run.settings import RunSettings
from sim.worlds.sim_stage import Hosted

OPEN_SECONDS = 0.5
"""Until the process of a stage is there, with the model in it."""


class Hosting:
    """At most one stage. `make(plan, step)` is what opens."""

    def __init__(
        self,
        me: PeerId,
        settings: RunSettings,
        make: Callable[[Plan, int | None], Hosted],
        later: Callable[[float, Callable[[], None]], None],
        now: Callable[[], float],
    ) -> None:
        self.core = core.Hosting(me, settings)
        self.hosted: Hosted | None = None
        self._make = make
        self._later = later
        self._now = now

    def adopt(self, plan: Plan) -> None:
        """A plan is in force: keep the stage it gives to this peer, open it, or close what was open."""
        if self.hosted is not None and self.hosted.is_failed:
            self.core.closed()
        match self.core.adopt(plan):
            case core.StageKept() if self.hosted is not None:
                self.hosted.adopt(plan)
            case core.StageWanted() as wanted:
                self._open(wanted)
            case core.StageEnded():
                self.hosted = None

    def prepare(self, plan: Plan, planner: PeerId, opened: Callable[[str], None]) -> None:
        """Open the stage of a plan that is not in force yet, as `planner` asks. `opened` takes why it is not
        open, or nothing."""
        wanted = self.core.prepare(self._now(), plan, planner)
        if wanted is None:
            opened(core.NO_ROOM)
        else:
            due = self.core.deadline
            self._open(wanted, opened)
            self._later(due - self._now(), lambda: self._close_if(self.core.wake(max(due, self._now()))))

    def unprepare(self, plan: bytes) -> None:
        """Close what was opened for this plan, which did not come about."""
        self._close_if(self.core.unprepare(plan))

    def planner_lost(self, planner: PeerId) -> None:
        """Close what was opened for a plan that `planner` would have had decided; the peer is gone."""
        self._close_if(self.core.planner_lost(planner))

    def _close_if(self, ended: core.StageEnded | None) -> None:
        if ended is not None:
            self.hosted = None

    def _open(self, wanted: core.StageWanted, opened: Callable[[str], None] | None = None) -> None:
        self.hosted = None

        def done() -> None:
            plan = self.core.opened(wanted)
            if plan is not None:
                self.hosted = self._make(plan, wanted.step)
            if opened is not None:
                opened("" if plan is not None else core.WENT_ON)

        self._later(OPEN_SECONDS, done)

    def close(self) -> None:
        """Nothing is held any more."""
        self.core.vacate()
        self.hosted = None
