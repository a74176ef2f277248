"""The state of a run for one member, according to the table of states, and its explanation to display."""

from collections.abc import Sequence
from fractions import Fraction

from crypto.identity import PeerId
from partition.plan.merging import slowest_pace
from partition.plan.plan import Plan
from partition.run.events import Event, StateChanged
from partition.run.pauses import stage_missing, stages_fewer
from partition.run.states import CAUSE_OF, OVER, Cause, State, after, cause_of


class RunStanding:
    """The state of one run. `is_stuck`: no plan can follow, because a stage has no replica. Changes are
    appended to the member's `events`."""

    def __init__(self, events: list[Event]) -> None:
        self.state: State = "submitted"
        self.is_stuck = False
        self._events = events

    def in_force(
        self, plan: Plan, wanted: Sequence[int], first_pace: Fraction, *, branch: str, reason: str
    ) -> None:
        """Note that the run continues, with all its initial replicas or with fewer.

        Each stage had `wanted` replicas at the beginning, and the run had the pace `first_pace`. `branch` is
        the message about this member's branch, or empty.
        """
        self.is_stuck = False
        cause = cause_of(plan, wanted)
        if branch:
            reason = f"{branch}; {reason}" if reason else branch
        usual, began_with = "fewer replicas than it began with", len(wanted)
        if len(plan.stages) < began_with:
            fewer = stages_fewer(len(plan.stages), began_with, slowest_pace(plan) / first_pace)
            reason = f"{reason}; {fewer}" if reason else fewer
        if cause == "plan in force":
            usual = f"running by change of plan {plan.height}" if plan.height else "running as first planned"
        self.change(cause, reason or usual, is_note=bool(branch))

    def stick(self, reason: str, lost: tuple[PeerId, ...], *, is_alone: bool) -> None:
        """Note that no plan can follow, because these peers are lost. `is_alone`: this member would have to
        continue alone."""
        self.is_stuck = True
        reason = stage_missing(reason, lost)
        reason = f"it cannot go on alone: {reason}" if is_alone else reason
        self.change("stage lost", reason, lost, is_note=is_alone)

    def leave(self, reason: str) -> None:
        """Note that the run continues elsewhere."""
        self.state = after(self.state, "quorum lost")
        self._events.append(StateChanged(self.state, reason))

    def end(self, outcome: str) -> None:
        """Note that the run is over here. If this is called again, the first outcome stays."""
        if self.state not in OVER:
            self.state = after(self.state, CAUSE_OF[outcome])

    def note(self, reason: str) -> None:
        """Display a message without changing the state; do nothing if it is empty."""
        if reason:
            self._events.append(StateChanged(self.state, reason, is_note=True))

    def change(
        self, cause: Cause, reason: str, waits_for: tuple[PeerId, ...] = (), *, is_note: bool = False
    ) -> None:
        """Change the state according to the table. A change is reported once, a note always."""
        state = after(self.state, cause)
        if state != self.state or is_note:
            self.state = state
            self._events.append(StateChanged(state, reason, waits_for, is_note))
