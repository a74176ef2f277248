"""The stage of a run that a peer in a world of cores holds: opened, kept under plan after plan, closed.

As `node.runs.stage`, where opening takes a while; what is open is a `sim.worlds.sim_stage.Hosted`.
"""

from collections.abc import Callable

from crypto.identity import PeerId
from partition.plan.plan import Plan, plan_hash
from sim.worlds.sim_stage import Hosted

OPEN_SECONDS = 0.5
"""Until the process of a stage is there, with the model in it."""


class Hosting:
    """At most one stage. `make(plan, step)` is what opens."""

    def __init__(
        self,
        me: PeerId,
        make: Callable[[Plan, int | None], Hosted],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.hosted: Hosted | None = None
        self._me = me
        self._make = make
        self._later = later
        self._plan: Plan | None = None
        self._held: tuple[int, tuple[int, ...]] | None = None
        self._prepared: bytes | None = None
        self._openings = 0
        self._is_opening = False

    @property
    def is_opening(self) -> bool:
        """Whether a stage is on its way."""
        return self._is_opening

    def adopt(self, plan: Plan) -> None:
        """A plan is in force: keep the stage it gives to this peer, open it, or close what was open."""
        self._plan, self._prepared = plan, None
        held = _held_in(plan, self._me)
        if held == self._held:
            if self.hosted is not None and not self.hosted.is_failed:
                self.hosted.adopt(plan)
                return
            if self._is_opening or held is None:
                return  # once open it takes the newest plan
        self.close()
        self._held = held
        if held is not None:
            # Only the first plan finds everybody at the beginning; whoever comes later has nothing yet.
            self._open(None if plan.height else 0)

    def prepare(self, plan: Plan, opened: Callable[[bool], None]) -> None:
        """Open the stage of a plan that is not in force yet."""
        held = _held_in(plan, self._me)
        if self.hosted is not None or self._is_opening or held is None:
            opened(False)
            return
        self._prepared, self._held, self._plan = plan_hash(plan), held, plan
        self._open(None, opened)

    def unprepare(self, plan: bytes) -> bool:
        """Close what was opened for this plan, which did not come about. Whether that was so."""
        if self._prepared != plan:
            return False
        self.close()
        return True

    def _open(self, step: int | None, opened: Callable[[bool], None] | None = None) -> None:
        self._is_opening = True
        self._openings += 1
        number = self._openings

        def done() -> None:
            if number != self._openings or self._plan is None:
                is_open = False
            else:
                is_open, self._is_opening = True, False
                self.hosted = self._make(self._plan, step)
            if opened is not None:
                opened(is_open)

        self._later(OPEN_SECONDS, done)

    def close(self) -> None:
        """Nothing is held any more."""
        self._openings += 1
        self._is_opening = False
        self.hosted = self._held = self._prepared = None


def _held_in(plan: Plan, peer: PeerId) -> tuple[int, tuple[int, ...]] | None:
    """Return a peer's stage and where the model is cut: elsewhere it is another stage."""
    number = plan.stage_of(peer)
    return None if number is None else (number, tuple(stage.last_layer for stage in plan.stages))
