"""The round of a target batch. A call of `step` waits for it, up to a reasonable limit."""

import time
from collections.abc import Callable

from node.averaging.rounds import Round
from node.optimizer.session import Pending
from node.optimizer.waiting import Overtaken

POLL_SECONDS = 0.02


def await_round(
    pending: Pending[Round],
    seconds_max: float,
    *,
    look_seconds: Callable[[], float | None],
    say: Callable[[float, str], None],
    share: Callable[[], None],
    is_passed: Callable[[], bool],
) -> Round | str:
    """Return the round once it is complete, or why it was given up: it took longer than `seconds_max`, or the
    others have already made its step.

    `look_seconds` returns how long the round may still search for a group, or None if it does not search now.
    `say` is called with the seconds waited and what ends the wait. `share` hands out this peer's state, which
    others may need to join the round. `is_passed` returns whether others have a state to take over instead.
    """
    begun = time.perf_counter()
    overtaken = Overtaken()
    while not pending.wait(POLL_SECONDS):
        waited, look = time.perf_counter() - begun, look_seconds()
        limit = seconds_max if look is None else min(look, seconds_max)
        say(waited, f"after {limit:.0f} s at most it goes on without those that are missing")
        share()
        if waited > seconds_max:
            pending.cancel()
            return f"the round was not over after {waited:.0f} s"
        if overtaken.ends_round(waited, is_passed(), is_looking=look is not None):
            pending.cancel()
            return "the others have made this step already, or began with another state"
    return pending.outcome()
