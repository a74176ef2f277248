"""The position of a run's other members according to the evidence, and the choice of a state to take over.

Members' claims alone are no evidence (`gossip.claims`). A peer without a state joins at the median position
of the members. A peer that has made steps gives up its own state only for a state that two members confirm.
If there is only one other member, its state suffices, provided that the run can have come that far given its
pace and time.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gossip.claims import (
    SLACK_STEPS,
    VOICES_MIN,
    CountEvidence,
    LikelySteps,
    beginning,
    common_lineage,
    lower_median,
    newcomer_steps,
    rejoined_step,
)
from gossip.roster import Report

YOUNG_ROUNDS = 2
"""With local steps, a peer that has not averaged yet and has made at most the steps of this many rounds may
have begun together with the others. It then takes their initial state."""


DISAGREED_MAX = 3
"""Number of attempts in which a newcomer asks for a state that two members hold, before it accepts one from a
single member. If steps take minutes, two copies may never be of the same step."""
UNDELIVERED_MAX = 64
"""Maximum number of initial states that are remembered as not delivered: more than the scripts that start in
one second."""


class RunPosition:
    """One peer's view of the others' progress. It uses wall-clock times, because these advance while a laptop
    sleeps."""

    def __init__(self, local_steps: int | None) -> None:
        """`local_steps` is set for a run that averages tensors, and None if members step together."""
        self._local_steps = local_steps
        self._steps, self._rounds = CountEvidence(time.time()), CountEvidence(time.time())
        self._has_met = False
        self._is_young = True
        self._failed = 0
        self._undelivered: dict[bytes, None] = {}
        """Lineages of step 0 whose holders did not deliver their state."""
        self.is_joined = False
        self.lacks_state = False
        """Whether others are further, but have not delivered their state."""

    def others(self, reports: Iterable[Report]) -> list[Report]:
        """Return the reports of the members that have a state."""
        found = [report for report in reports if report.has_state]
        self._has_met = self._has_met or bool(found)
        return found

    def has_progress(self, step: int) -> bool:
        """Return whether this peer, at `step`, would lose progress if it took another peer's state."""
        return self.is_joined and not self.lacks_state and step > 0

    # What happens here

    def made_step(self, step: int, *, is_common: bool) -> None:
        """Record a step of this peer. `is_common` means that it was made with others. The step also counts as
        the run's position if this peer has never met any others."""
        if self._local_steps is None:
            self.lacks_state = False
        elif step > YOUNG_ROUNDS * self._local_steps:
            self._is_young = False
        self._steps.made(time.time(), step, is_known=is_common or not self._has_met)

    def made_round(self, step: int, rounds: int) -> None:
        """Record that this peer has averaged with others."""
        self._rounds.made(time.time(), rounds, is_known=True)
        if self._local_steps is not None:
            self._steps.accept(time.time(), step)
            self._is_young = self.lacks_state = False

    def missed(self, likely: LikelySteps) -> None:
        """Record that a peer without progress could not get this state. If it is an initial state, any other
        initial state is as good, including this peer's own."""
        if likely.lineage is not None:
            self._undelivered[likely.lineage] = None
            if len(self._undelivered) > UNDELIVERED_MAX:
                del self._undelivered[next(iter(self._undelivered))]
            return
        self.lacks_state = True
        self._failed += 1

    def awaits(self, likely: LikelySteps) -> None:
        """Record that another peer's state is being requested."""
        self.lacks_state = self.lacks_state or likely.lineage is None

    def moved(self, step: int, rounds: int) -> None:
        """Record that this peer has taken over a state with this step and number of rounds."""
        self._steps.accept(time.time(), step)
        self._rounds.accept(time.time(), rounds)
        self._is_young = self.lacks_state = False

    # What others say

    def is_alone(self, others: Iterable[Report]) -> bool:
        """Return whether none of the others can be at this peer's position."""
        beyond = self._steps.count_max(time.time()) + 1
        return all(report.step.reaches(beyond) for report in others)

    def is_passed(self, step: int, others: Iterable[Report]) -> bool:
        """Return whether the others have made this global step."""
        return self._steps.furthest(time.time(), step, [report.step for report in others]) > step

    def has_missed_round(self, rounds: int, others: Iterable[Report]) -> bool:
        """Return whether others have held more than this many rounds."""
        return self._rounds.furthest(time.time(), rounds, [report.rounds for report in others]) > rounds

    def rounds_of(self, claimed: int, others: Iterable[Report]) -> int:
        """Return the number of rounds of a state for which a peer claims `claimed`."""
        return min(claimed, lower_median([report.rounds for report in others]) + SLACK_STEPS)

    def state_to_take(
        self, step: int, lineage: bytes, others: Sequence[Report], voices: Sequence[Report]
    ) -> LikelySteps | None:
        """Return the state that a peer at `step` should take over, or None if its own is right. If it has
        progress, only the `voices` among `others`, which may average with it, determine the run's
        position."""
        if not others:
            return None
        steps = [report.step for report in others]
        is_further, is_apart = lower_median(steps) > step, self._is_apart(step, lineage, others)
        if self._local_steps is not None:
            is_new = not self.is_joined or self.lacks_state
            if self._is_beginning(others):
                return self._first_state(lineage, others)
            return self.local_state(others) if is_apart or (is_new and is_further) else None
        if step == 0 and self._is_beginning(others):
            return self._first_state(lineage, others)
        if not self.has_progress(step):
            likely = newcomer_steps(steps, SLACK_STEPS, are_equal=True)
            if self._failed >= DISAGREED_MAX:
                likely = replace(likely, holders_min=1)
            return likely if is_further or is_apart else None
        alone = rejoined_step(step, [(report.step, report.lineage) for report in others])
        if alone is not None:
            return LikelySteps(max(0, alone - SLACK_STEPS), alone + SLACK_STEPS, VOICES_MIN, VOICES_MIN)
        behind = sum(not report.step.reaches(step - SLACK_STEPS) for report in voices)
        if behind < VOICES_MIN:  # a peer that paused long ago does not know the others' position
            voices = [report for report in voices if report.step.reaches(step - SLACK_STEPS)]
        if not voices:
            return None
        if self._is_apart(step, lineage, voices) or self.is_passed(step, voices):
            return self._steps.likely_steps(time.time(), step, [report.step for report in voices])
        return None

    def local_state(self, others: Sequence[Report]) -> LikelySteps:
        """Return the state that a peer should take over if each peer makes its own steps."""
        slack = SLACK_STEPS * (self._local_steps or 1)
        return newcomer_steps([report.step for report in others], slack, are_equal=False)

    def _is_beginning(self, others: Sequence[Report]) -> bool:
        """Return whether the run still has only initial states: with a target batch no peer has made a step,
        with local steps no peer has averaged."""
        if self._local_steps is None:
            return lower_median([report.step for report in others]) == 0
        beyond = YOUNG_ROUNDS * self._local_steps + 1
        return self._is_young and not any(
            report.rounds.reaches(1) or report.step.reaches(beyond) for report in others
        )

    def _first_state(self, lineage: bytes, others: Sequence[Report]) -> LikelySteps | None:
        """Return the initial state of a run, or None if it is this peer's own. Its holders made a copy when
        they joined, so it is available immediately."""
        near = [report for report in others if self._local_steps is not None or report.step.equals(0)]
        found = [report.lineage for report in near if report.lineage not in self._undelivered]
        if not found:
            return None
        chosen = beginning(lineage if self.is_joined else None, found)
        if chosen == lineage:
            return None
        last = 0 if self._local_steps is None else YOUNG_ROUNDS * self._local_steps
        return LikelySteps(0, last, lineage=chosen)

    def _is_apart(self, step: int, lineage: bytes, others: Sequence[Report]) -> bool:
        """Return whether others reached their position by other steps, so this peer should join them."""
        if not self.is_joined or self.lacks_state:
            return any(report.lineage != lineage for report in others)
        voices = min(VOICES_MIN, len(others))
        if self._local_steps is None:
            near = [report for report in others if report.step.equals(step)]
        elif self._is_young:
            # Others' local steps may differ, but the initial state must be the same.
            beyond = self._steps.count_max(time.time()) + 1
            near = [report for report in others if not report.step.reaches(beyond)]
        else:
            return False
        return common_lineage(lineage, [report.lineage for report in near], voices) != lineage
