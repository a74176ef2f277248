"""The stage of a run that one member holds: when to open it, keep it from plan to plan, and close it.

At most one stage is open. It stays open from one plan to the next as long as the plan gives the member the
same layers and no border between stages moves. The stage of a plan that is not in force yet may be opened
early; it is closed again unless that plan is decided.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from crypto.identity import PeerId
from partition.plan.plan import FIRST_VALUES, Plan, plan_hash
from partition.run.settings import RunSettings

NO_ROOM = "another stage is open here"
WENT_ON = "the run went on before its stage was open"


class Held(NamedTuple):
    """A stage, identified by its number and all cuts of the model. If the cuts differ, it is a different
    stage even if its layers are the same, because its inputs or tied weights may differ."""

    number: int
    cuts: tuple[int, ...]


def held_in(plan: Plan, peer: PeerId) -> Held | None:
    """Return the stage that a plan gives to a peer, or None."""
    number = plan.stage_of(peer)
    if number is None:
        return None
    return Held(number, tuple(stage.last_layer for stage in plan.stages))


@dataclass(frozen=True)
class StageWanted:
    """Close the open stage and open this stage of `plan`, then call `opened` or `failed`. `step` is the
    number of steps of the state that is opened; None if the state must be fetched. `is_early`: the plan is
    not in force yet. `number` is the sequence number of this member's openings."""

    plan: Plan
    held: Held
    step: int | None
    is_early: bool
    number: int


@dataclass(frozen=True)
class StageKept:
    """Keep the open stage under this plan."""

    plan: Plan


@dataclass(frozen=True)
class StageEnded:
    """Close the open stage."""


StageAction = StageWanted | StageKept | StageEnded


class Hosting:
    """One member's stage. Most calls return the driver's next action, or None if there is nothing to do."""

    def __init__(self, me: PeerId, settings: RunSettings) -> None:
        self.plan: Plan | None = None
        """The newest plan: either the one in force, or the one whose stage is opened early."""
        self.is_open = False
        self._me = me
        self._settings = settings
        self._held: Held | None = None
        self._opening: StageWanted | None = None
        self._prepared: bytes | None = None
        self._planner: PeerId | None = None
        self._expires_at = inf
        self._is_over = False
        self._openings = 0

    @property
    def is_opening(self) -> bool:
        """Whether a stage is being opened."""
        return self._opening is not None

    @property
    def occupies(self) -> bool:
        """Whether a slot is taken: a stage is open or being opened."""
        return self.is_open or self.is_opening

    def adopt(self, plan: Plan) -> StageAction | None:
        """Handle a plan that came into force: keep the stage that it gives to this member, open it, or close
        the open one."""
        # If the plan starts from initial parameters, a trained stage is opened again, because a new process
        # makes them.
        is_anew = plan.restored == FIRST_VALUES and self._prepared != plan_hash(plan)
        self.plan, self._prepared = plan, None
        held = held_in(plan, self._me)
        if self._is_over:
            return None
        if held == self._held and not is_anew:
            if self.is_open:
                return StageKept(plan)
            if self.is_opening or held is None:
                return None  # once the stage is open, it takes the newest plan
        if held is None:
            self._clear()
            return StageEnded()
        # Only under the first plan do all members begin at step 0; later members have no state yet.
        return self._open(plan, held, None if plan.height else 0)

    def prepare(self, now: float, plan: Plan, planner: PeerId) -> StageWanted | None:
        """Open the stage of a plan that is not in force yet, as `planner` asks. Return None if there is no
        room."""
        held = held_in(plan, self._me)
        if held is None or self.occupies or self._is_over:
            return None
        self.plan, self._prepared, self._planner = plan, plan_hash(plan), planner
        # The planner may die before its plan is decided.
        self._expires_at = now + self._settings.silence_seconds_max
        return self._open(plan, held, None, is_early=True)

    def _open(self, plan: Plan, held: Held, step: int | None, *, is_early: bool = False) -> StageWanted:
        self._openings += 1
        wanted = StageWanted(plan, held, step, is_early, self._openings)
        self.is_open, self._held, self._opening = False, held, wanted
        return wanted

    def wants(self, opening: StageWanted) -> bool:
        """Return whether this opening is still wanted."""
        return self._opening is not None and self._opening.number == opening.number

    def opened(self, opening: StageWanted) -> Plan | None:
        """Note that a stage is open. Return the plan that it belongs to now; None if it is no longer wanted
        and must be closed."""
        if not self.wants(opening):
            return None
        self._opening, self.is_open = None, True
        return self.plan

    def failed(self, opening: StageWanted) -> None:
        """Note that a stage could not be opened. The next plan that gives it to this member tries again."""
        if self.wants(opening):
            self._held = self._opening = None

    def closed(self) -> None:
        """Note that the open stage has ended by itself."""
        self.is_open = False

    def unprepare(self, plan: bytes) -> StageEnded | None:
        """Close the stage that was opened early for the plan with this hash, because it was not decided."""
        if self._prepared != plan:
            return None
        self._clear()
        return StageEnded()

    @property
    def deadline(self) -> float:
        """The time of the next `wake`."""
        return inf if self._prepared is None else self._expires_at

    def wake(self, now: float) -> StageEnded | None:
        """Close the stage that was opened early if its plan was not decided in time."""
        if self._prepared is None or now < self._expires_at:
            return None
        return self.unprepare(self._prepared)

    def planner_lost(self, planner: PeerId) -> StageEnded | None:
        """Close the stage that was opened early for a plan of `planner`, which is gone."""
        if self._prepared is None or planner != self._planner:
            return None
        return self.unprepare(self._prepared)

    def vacate(self) -> StageEnded:
        """Close the stage although the plan still gives it to this member. It may be opened again later."""
        self._clear()
        return StageEnded()

    def end(self) -> StageEnded:
        """Close the stage for good: the run is over."""
        self._is_over = True
        return self.vacate()

    def _clear(self) -> None:
        self.is_open, self._held, self._opening, self._prepared = False, None, None, None
