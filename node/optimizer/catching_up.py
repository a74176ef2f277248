"""Catching up with a run: an optimizer's attempts to take over another peer's state, with pauses in
between."""

import time
from collections.abc import Callable

from gossip.claims import LikelySteps
from node.averaging.snapshot import Snapshot
from node.optimizer.position import RunPosition
from node.optimizer.session import TrainingSession
from node.optimizer.takeover import Takeover

STATE_WAIT_SECONDS = 1.0
"""How long one call waits for another peer's state, or, when the optimizer is made, for its first bytes. The
next call continues to wait. A state arrives when its holder makes a step, and this peer does not know how
long their steps take."""
CATCH_UP_PAUSES = 2.0
"""The training time before a third attempt to catch up, as a multiple of the duration of the failed attempts.
The second attempt follows immediately, and asks known peers (`Expectations.missed_state`)."""
CATCH_UP_PAUSES_NEW = 0.5
"""The same for a member without progress. It must be able to train even among peers that never answer."""

Say = Callable[[str, float, str], None]
"""Called with the reason for a wait, its duration in seconds, and what ends it."""


class CatchUpAttempts:
    """The attempts of one optimizer. `takeover` makes them, and `position` knows the optimizer's progress."""

    def __init__(self, position: RunPosition, takeover: Takeover, local_steps: int | None) -> None:
        self._position = position
        self._takeover = takeover
        self._has_local_steps = local_steps is not None
        self._paused_until = 0.0
        self._failed = 0

    @property
    def is_paused(self) -> bool:
        """Return whether the next attempt must still wait for a pause to end."""
        return time.perf_counter() < self._paused_until

    def attempt(
        self, session: TrainingSession, likely: LikelySteps, step: int, say: Say
    ) -> Snapshot | str | None:
        """Replace the own state, of `step`, by a state of a likely step, and return it; or return why there
        is none. Return None if the state is still on its way; a later call may return it."""
        has_progress = self._position.has_progress(step)

        def may_wait(call_seconds: float, seconds: float) -> bool:
            return self._may_wait(session, call_seconds, seconds, say)

        found = self._takeover.take(session, likely, may_wait)
        if found is None:
            if not has_progress:
                self._position.awaits(likely)
        elif isinstance(found, str):
            pauses = CATCH_UP_PAUSES if self._failed else 0.0
            if not has_progress:
                self._position.missed(likely)
                pauses = CATCH_UP_PAUSES_NEW
            self._paused_until = time.perf_counter() + pauses * self._takeover.lasted_seconds
            self._failed += 1
        else:
            self._failed = 0
        return found

    def averaged(self) -> None:
        """Record a successful round, which shows that the others train again. If only one attempt has failed
        so far, the next one may follow immediately."""
        if self._failed == 1:
            self._paused_until = 0.0

    def _may_wait(self, session: TrainingSession, call_seconds: float, seconds: float, say: Say) -> bool:
        """Report what a call waits for; return whether it may continue to wait. With local steps, a member
        trains meanwhile."""
        what, end = "the state of the run to arrive", "training with it begins then"
        if not session.is_receiving:
            what = f"the state of the run, from {session.view.peers} peers"
            end = "it comes once a peer that has it makes its next step"
        say(what, seconds, end)
        if not self._position.is_joined:
            return session.is_receiving or call_seconds < STATE_WAIT_SECONDS
        return not self._has_local_steps and call_seconds < STATE_WAIT_SECONDS
