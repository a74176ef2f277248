"""Backoff before a peer is asked again for a stage that it could not load, or that keeps ending there. A pure
table.

A load that fails costs a process and the traffic of its weights; a stage that ends again and again soon after
it answered takes its sessions with it each time. Both rest for a growing time. A stage that answered for long
before it ended starts without a history, and the first ends are ignored: a process may be killed by chance.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key")

REST_SECONDS_MIN, REST_SECONDS_MAX = 5.0, 120.0
"""The first rest, and the longest: each is twice as long as the one before."""
SOUND_SECONDS = 60.0
"""A stage that answered for so long counts as sound, whatever was before: one whose memory does not suffice,
or that a prompt kills each time it is sent again, ends sooner."""
FORGIVEN_ENDS = 2
"""The number of such early ends in a row without a rest."""


class StageBackoff(Generic[Key]):
    """The pauses of at most `count_max` pairs of a stage and its holder; the oldest are evicted."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._rests: dict[Key, tuple[float, float, int]] = {}
        """Until when each rests, how long that is, and how often it has ended in a row."""

    def resting(self, now: float) -> Iterator[Key]:
        """Iterate over the pairs that pause now."""
        return (key for key, (until, _, _) in self._rests.items() if now < until)

    def rest_left(self, now: float, key: Key) -> float:
        """Return the remaining pause of a pair, 0 if there is none."""
        return max(0.0, self._rests.get(key, (now, 0.0, 0))[0] - now)

    def note_sound(self, now: float, key: Key, ready_since: float | None) -> None:
        """Forget earlier failures of a stage that has answered for long, however it is lost."""
        if ready_since is not None and now - ready_since >= SOUND_SECONDS:
            self._rests.pop(key, None)

    def note_end(self, now: float, key: Key, ready_since: float | None) -> None:
        """Note that a stage has ended that had answered since the given time; None if it never did."""
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
