"""Catching up with a run: an optimizer's attempts to take the state of others, with pauses in between."""

import time
from collections.abc import Callable

from gossip.claims import LikelySteps
from node.averaging.snapshot import Snapshot
from node.optimizer.position import RunPosition
from node.optimizer.session import TrainingSession
from node.optimizer.takeover import Takeover

STATE_WAIT_SECONDS = 1.0
"""How long one call waits for a state of others, or for its first bytes when the optimizer is made; the next
call waits on. A state takes as long as its holders' steps, whose duration this peer does not know."""
CATCH_UP_PAUSES = 2.0
"""The training time before a third attempt to catch up, as a multiple of the duration of the failed ones. The
second follows at once, and asks known peers (`Expectations.missed_state`)."""
CATCH_UP_PAUSES_NEW = 0.5
"""The same for a member without progress: beside peers that never answer it has to train too."""

Say = Callable[[str, float, str], None]
"""Called with the reason of a wait, its seconds, and what ends it."""


class CatchUpAttempts:
    """The attempts of one optimizer; `takeover` makes them, `position` has its progress."""

    def __init__(self, position: RunPosition, takeover: Takeover, local_steps: int | None) -> None:
        self._position = position
        self._takeover = takeover
        self._has_local_steps = local_steps is not None
        self._paused_until = 0.0
        self._failed = 0

    @property
    def is_paused(self) -> bool:
        """Whether no attempt was made yet."""
        return time.perf_counter() < self._paused_until

    def attempt(
        self, session: TrainingSession, likely: LikelySteps, step: int, say: Say
    ) -> Snapshot | str | None:
        """Put a state of a likely step in place of the own one, of `step`, and return it; or return why there
        is none. None: it is still on its way, and the next call may return it."""
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
        """Note a round: the others train again. Where they fail once more the pause stays."""
        if self._failed == 1:
            self._paused_until = 0.0

    def _may_wait(self, session: TrainingSession, call_seconds: float, seconds: float, say: Say) -> bool:
        """Report what a call waits for; return whether it may wait on. With local steps a member trains
        meanwhile."""
        what, end = "the state of the run to arrive", "training with it begins then"
        if not session.is_receiving:
            what = f"the state of the run, from {session.view.peers} peers"
            end = "it comes once a peer that has it makes its next step"
        say(what, seconds, end)
        if not self._position.is_joined:
            return session.is_receiving or call_seconds < STATE_WAIT_SECONDS
        return not self._has_local_steps and call_seconds < STATE_WAIT_SECONDS
