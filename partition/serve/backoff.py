"""Backoff before a peer is asked again for a stage that it could not load, or whose process keeps ending
there. A pure table.

A load that fails costs a process and the traffic of its weights. A stage that ends soon after it began to
answer takes its sessions with it each time. In both cases the peer is not asked for a time that grows. A
stage that answered for long before it ended starts without a history. The first ends are ignored, because a
process may be killed by chance.
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
        """Forget earlier failures of a stage that has answered for long. Call this however the stage is
        lost."""
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
