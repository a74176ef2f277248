"""How long a peer is not asked to serve a stage, after it failed to load the stage or the stage's process
kept ending there. Only bookkeeping: no I/O, and the caller passes the time.

A load that fails costs a process and the traffic of its weights. A stage that ends soon after it began to
answer takes its sessions with it each time. In both cases the peer is left alone for a while, and for longer
after each failure. If a stage had answered for a long time before it ended, its earlier failures are
forgotten. The first FORGIVEN_ENDS early ends cause no wait, because a process may be killed by chance.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key")

REST_SECONDS_MIN, REST_SECONDS_MAX = 5.0, 120.0
"""The first wait and the maximum wait in seconds. Each wait is twice as long as the previous one."""
SOUND_SECONDS = 60.0
"""How long a stage must have answered to count as sound, whatever happened before. A stage without enough
memory, or one that the same prompt kills whenever it is sent again, ends sooner."""
FORGIVEN_ENDS = 2
"""Number of successive early ends without a wait."""


class StageBackoff(Generic[Key]):
    """The waits of at most `count_max` pairs of a stage and its holder. The oldest are evicted."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._rests: dict[Key, tuple[float, float, int]] = {}
        """By pair: when the wait ends, how long it is, and the number of successive ends."""

    def resting(self, now: float) -> Iterator[Key]:
        """Iterate over the pairs that wait now."""
        return (key for key, (until, _, _) in self._rests.items() if now < until)

    def rest_left(self, now: float, key: Key) -> float:
        """Return the remaining wait of a pair, 0 if there is none."""
        return max(0.0, self._rests.get(key, (now, 0.0, 0))[0] - now)

    def note_sound(self, now: float, key: Key, ready_since: float | None) -> None:
        """Forget earlier failures of a stage that had answered for a long time. Call this whenever a stage
        ends, for whatever reason."""
        if ready_since is not None and now - ready_since >= SOUND_SECONDS:
            self._rests.pop(key, None)

    def note_end(self, now: float, key: Key, ready_since: float | None) -> None:
        """Note that a stage has ended. It had answered since `ready_since`, None if it never did."""
        until, rest, ends = self._rests.pop(key, (now, 0.0, 0))
        if ready_since is not None and now - ready_since >= SOUND_SECONDS:
            return
        if ready_since is not None:
            ends += 1
        if ready_since is None or ends > FORGIVEN_ENDS:
            rest = min(REST_SECONDS_MAX, max(REST_SECONDS_MIN, 2 * rest))
            self._rests[key] = now + rest, rest, ends
        else:
            self._rests[key] = max(until, now), rest, ends
        while len(self._rests) > self._count_max:
            del self._rests[next(iter(self._rests))]
