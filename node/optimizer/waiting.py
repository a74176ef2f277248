"""Reports how long a call waits for others: in `status` immediately, and in the log if it takes long. It also
decides when to give up such a wait.

The training loop blocks in such a call, so only another thread can read `status` meanwhile.
"""

import logging
import time

log = logging.getLogger("peerloom")
LOGGED_SECONDS_MIN = 1.0
"""Shorter waits are shown only in `status`. Steps of a small model take less than a millisecond."""
PAUSE_SECONDS = 10.0
"""Minimum interval between one optimizer's log lines, because it may wait at each step."""
PASSED_SECONDS = 2.0
"""How long an exchange continues after others report its step. Its result may be on its way, and the
alternative, fetching the others' state, is a larger transfer."""


class Waits:
    """The waits of one optimizer."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._logged_at = 0.0

    def said(self, where: str, what: str, seconds: float, end: str, step_seconds: float) -> str:
        """Return the status of a call that waits for `what`, and log it if the wait exceeds a step. `end`
        says what would end the wait."""
        status = f"{where}: waiting for {seconds:.1f} s for {what}; {end}"
        now = time.perf_counter()
        if seconds > max(LOGGED_SECONDS_MIN, step_seconds) and now >= self._logged_at:
            self._logged_at = now + PAUSE_SECONDS
            log.warning("run %r: %s", self._run_id, status)
        return status


class Overtaken:
    """Decides whether a round is given up because the others have already made its step."""

    def __init__(self) -> None:
        self._since: float | None = None

    def ends_round(self, waited: float, is_passed: bool, *, is_looking: bool) -> bool:
        """Return whether to give up the round after this wait. If `is_passed`, the others have made its step.
        Then no peer will join its group, but an exchange may be about to end."""
        if not is_passed:
            self._since = None
            return False
        self._since = waited if self._since is None else self._since
        return is_looking or waited - self._since > PASSED_SECONDS
