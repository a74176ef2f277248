"""The schedule of one member's rounds in local mode: when a round is due, how long it waits, and its weight.

There is one round at a time, in the background of the training. Only the end of a run waits for rounds. Not
here: the group and its arithmetic.
"""

from collections.abc import Callable

from partition.run.local_settings import LocalSettings

WINDOW_SECONDS_MIN, WINDOW_SECONDS_MAX = 1.0, 30.0
WINDOW_ROUNDS = 1.5
"""How long a group waits for its members, as a multiple of the time of the local steps between two rounds."""
SPARING_ROUNDS = 4
"""A member with a low send limit takes part in one of this many rounds, so it sends a quarter of the
bytes."""
LAST_ROUND_SECONDS = 20.0
"""Time limit of the last rounds, which make the result the mean of its members."""
LAST_WINDOW_SECONDS_MAX = LAST_ROUND_SECONDS / 4
"""Maximum wait for the members of such a round. An expected member that does not come must not use up the
whole limit."""


class RoundSchedule:
    """The rounds of one stage. With `needs_all`, a member that missed a round must fetch the others'
    state."""

    def __init__(self, settings: LocalSettings, *, needs_all: bool) -> None:
        self.count = 0
        self.failed_count = 0
        self.needs_all = needs_all
        self.ending_for = -1.0
        """How long the run has been about to end, in seconds; negative if it is not."""
        self.sends_less: Callable[[], bool] = lambda: False
        self.begun_step = 0
        """The step at which the latest round began."""
        self._is_under_way = False
        self._is_unused = False
        """Whether a round is over and its result has not been applied yet."""
        self.life = 0
        """Number of times that the state was taken over from others. A round that began before a takeover is
        not applied."""
        self._settings = settings
        self._begun_samples = 0
        self._begun_at = 0.0
        self._averaged_samples = 0
        """The number of samples in the latest mean. Later samples count in the next mean, even if it comes
        late."""
        self._mean_step, self._means = -1, 0

    def open(self, now: float) -> None:
        """Start to count from this time."""
        self._begun_at = now

    def is_due(self, step: int, *, is_idle: bool) -> bool:
        """Return whether a round is due: enough local steps were made since the latest round began, and that
        round is over. A member that has made all steps (`is_idle`), or whose run is about to end, takes part
        in the others' rounds, because they would wait for it."""
        is_time = (
            is_idle
            or 0 <= self.ending_for < LAST_ROUND_SECONDS
            or step - self.begun_step >= self._settings.local_steps * self._every
        )
        return is_time and not (self._is_under_way or self._is_unused)

    @property
    def _every(self) -> int:
        """The number n if this member takes part in every n-th round. n is 1 if a missed round would force
        the member to fetch the others' state, which costs more than the round."""
        return SPARING_ROUNDS if self.sends_less() and not self.needs_all else 1

    def lacks_mean(self, step: int, others: int, axes: int) -> bool:
        """Return whether a result made now would contain only this member's parameters. A run ends with
        rounds after the last steps, one for each axis of the grid, unless they do not happen within
        LAST_ROUND_SECONDS."""
        means = self._means if self._mean_step == step else 0
        return others > 0 and means < max(1, axes) and self.ending_for < LAST_ROUND_SECONDS

    def skip(self, now: float, step: int, samples: int) -> None:
        """Restart the count of local steps, because no other member is there."""
        self.begun_step, self._begun_samples, self._begun_at = step, samples, now

    def begin(self, now: float, step: int, samples: int) -> float:
        """Begin a round; return how many seconds it waits for expected members."""
        lasted = now - self._begun_at
        self.skip(now, step, samples)
        self._is_under_way = True
        longest = WINDOW_SECONDS_MAX if self.ending_for < 0 else LAST_WINDOW_SECONDS_MAX
        return min(max(WINDOW_SECONDS_MIN, WINDOW_ROUNDS * lasted), longest)

    def damping(self, *, is_idle: bool) -> float:
        """Return the share of a round's result to apply, for a round that begins now: 1 for rounds that make
        the run's result."""
        return 1.0 if is_idle or self.ending_for >= 0 else self._settings.damping

    def weight(self, samples: int, shard: int) -> float:
        """Return the weight of this member's parameters: the number of samples since its latest mean,
        however long it was alone. If data stays with its owners, it is the size of this member's own data,
        `shard`."""
        if self._settings.weighting != "samples":
            return 1.0
        return float(shard if self._settings.is_federated else max(1, samples - self._averaged_samples))

    def ended(self, life: int, *, has_result: bool) -> bool:
        """Note that a round is over; return whether to apply its result. `life` is the number of takeovers
        when the round began."""
        self._is_under_way = False
        self._is_unused = has_result and life == self.life
        return self._is_unused

    def use(self) -> None:
        """Note that the result of a round is being applied."""
        self._is_unused = False

    def averaged(self, *, is_included: bool) -> None:
        """Count a round that had a mean. `is_included`: the mean contains this member's parameters."""
        if is_included:
            self._averaged_samples = self._begun_samples
        self.count += 1
        self._means = self._means + 1 if self._mean_step == self.begun_step else 1
        self._mean_step = self.begun_step

    def failed(self) -> None:
        """Count a failed round."""
        self.failed_count += 1

    def take_over(self, now: float, count: int, step: int, samples: int) -> None:
        """Resume from the state of others, after `count` rounds. The result of a round in progress will not
        be applied."""
        self.count = count
        self.life += 1
        self._mean_step = -1
        self._is_unused = False
        self.skip(now, step, samples)
        self._averaged_samples = samples
