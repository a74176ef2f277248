"""The schedule of one member's rounds in local mode: when one is due, how long it waits, what it counts.

One round at a time, beside the training, never waited for but at the end of a run. Not here: the group and
its arithmetic.
"""

from collections.abc import Callable

from partition.run.local_settings import LocalSettings

WINDOW_SECONDS_MIN, WINDOW_SECONDS_MAX = 1.0, 30.0
WINDOW_ROUNDS = 1.5
"""How long a group waits for those that are expected, in durations of the steps between two rounds here."""
SPARING_ROUNDS = 4
"""A member that wants to send less holds one in so many rounds: it sends a quarter of the bytes."""
LAST_ROUND_SECONDS = 20.0
"""How long the end of a run waits for the rounds that make its result the mean of its members."""
LAST_WINDOW_SECONDS_MAX = LAST_ROUND_SECONDS / 4
"""The window of such a round: a member that is expected and does not come must not use up all of that
time."""


class RoundSchedule:
    """The rounds of one stage. With `needs_all` a missed round has to be made up for by fetching the others'
    state."""

    def __init__(self, settings: LocalSettings, *, needs_all: bool) -> None:
        self.count = 0
        self.failed_count = 0
        self.needs_all = needs_all
        self.ending_for = -1.0
        """For how long the run has been about to end, in seconds; below 0: it is not."""
        self.sends_less: Callable[[], bool] = lambda: False
        self.begun_step = 0
        """The step at which the last round began."""
        self._is_under_way = False
        self._is_unused = False
        """Whether a round is over, and its result not used yet."""
        self.life = 0
        """Counts the states that were taken over: a round of an earlier one is not used."""
        self._settings = settings
        self._begun_samples = 0
        self._begun_at = 0.0
        self._averaged_samples = 0
        """Those that a mean has: what was learnt since counts in the next one, also where that comes late."""
        self._mean_step, self._means = -1, 0

    def open(self, now: float) -> None:
        """Begin to count."""
        self._begun_at = now

    def is_due(self, step: int, *, is_idle: bool) -> bool:
        """Return whether enough local steps have been made since the last round began, which is over. A
        member that has made all (`is_idle`) takes part in the rounds of the others, which would wait for it,
        and so does one whose run is about to end."""
        is_time = (
            is_idle
            or 0 <= self.ending_for < LAST_ROUND_SECONDS
            or step - self.begun_step >= self._settings.local_steps * self._every
        )
        return is_time and not (self._is_under_way or self._is_unused)

    @property
    def _every(self) -> int:
        """In which of the run's rounds this member takes part: a round that it missed must not cost it the
        state of others, which is more than the round."""
        return SPARING_ROUNDS if self.sends_less() and not self.needs_all else 1

    def lacks_mean(self, step: int, others: int, axes: int) -> bool:
        """Return whether a result made now would be this member's numbers alone: a run ends with what its
        members averaged after their last steps, a round for each axis of their grid, unless they do not
        within LAST_ROUND_SECONDS."""
        means = self._means if self._mean_step == step else 0
        return others > 0 and means < max(1, axes) and self.ending_for < LAST_ROUND_SECONDS

    def skip(self, now: float, step: int, samples: int) -> None:
        """Count anew: nobody else is there."""
        self.begun_step, self._begun_samples, self._begun_at = step, samples, now

    def begin(self, now: float, step: int, samples: int) -> float:
        """Begin a round; return how long it waits for those that are expected."""
        lasted = now - self._begun_at
        self.skip(now, step, samples)
        self._is_under_way = True
        longest = WINDOW_SECONDS_MAX if self.ending_for < 0 else LAST_WINDOW_SECONDS_MAX
        return min(max(WINDOW_SECONDS_MIN, WINDOW_ROUNDS * lasted), longest)

    def damping(self, *, is_idle: bool) -> float:
        """Return which share of a round begun now is taken: all of those that make the run's result."""
        return 1.0 if is_idle or self.ending_for >= 0 else self._settings.damping

    def weight(self, samples: int, shard: int) -> float:
        """Return the weight of this member's numbers: the samples it has trained on since its last mean,
        however long it was alone, or where data stays with its owners, the size of its own data, `shard`."""
        if self._settings.weighting != "samples":
            return 1.0
        return float(shard if self._settings.is_federated else max(1, samples - self._averaged_samples))

    def ended(self, life: int, *, has_result: bool) -> bool:
        """Note that a round is over which was begun in this `life`; return whether its result is to be
        used."""
        self._is_under_way = False
        self._is_unused = has_result and life == self.life
        return self._is_unused

    def use(self) -> None:
        """Note that the result of a round is being used."""
        self._is_unused = False

    def averaged(self, *, is_included: bool) -> None:
        """Count a round whose mean is here; `is_included`: this member's numbers are in it."""
        if is_included:
            self._averaged_samples = self._begun_samples
        self.count += 1
        self._means = self._means + 1 if self._mean_step == self.begun_step else 1
        self._mean_step = self.begun_step

    def failed(self) -> None:
        """Count a round that came to nothing."""
        self.failed_count += 1

    def take_over(self, now: float, count: int, step: int, samples: int) -> None:
        """Go on from the state of others, after so many rounds. A round under way is not used any more."""
        self.count = count
        self.life += 1
        self._mean_step = -1
        self._is_unused = False
        self.skip(now, step, samples)
        self._averaged_samples = samples
