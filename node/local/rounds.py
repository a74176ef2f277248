"""The rounds of one member in local mode: one at a time, beside the training, never waited for.

What is averaged is copied out when a round begins; what came of it is added to what has been learnt since
(`gossip.averaging.strategies.Delayed`).
"""

from collections.abc import Callable
from functools import partial

import trio

from crypto.identity import PeerId
from gossip.averaging.catalogue import EVERY_ROUND, OUTER, group_size, make_strategy
from gossip.averaging.robust.reduction import Vector
from gossip.averaging.strategies import Delayed, Mean
from node.averaging.participation import Participation
from node.averaging.rounds import Round, Wanted
from node.local.trainer import LocalTrainer
from partition.run.local_settings import LocalSettings

WINDOW_SECONDS_MIN, WINDOW_SECONDS_MAX = 1.0, 30.0
WINDOW_ROUNDS = 1.5
"""A group waits for those that are expected as long as so many rounds' worth of steps take here."""
PATIENCE_SECONDS = 60.0
SPARING_ROUNDS = 4
"""A member that wants to send less holds one in so many rounds: it sends a quarter of the bytes."""
LAST_ROUND_SECONDS = 20.0
"""How long the end of a run waits for the rounds that make its result the mean of its members."""
LAST_WINDOW_SECONDS_MAX = LAST_ROUND_SECONDS / 4
"""The window of such a round: whoever is expected and does not come must not use up all of that time."""


class Rounds:
    """Those of one member. `make` it once the stage is open and its first state is there."""

    def __init__(
        self, me: PeerId, settings: LocalSettings, trainer: LocalTrainer, part: Participation
    ) -> None:
        self.count = 0
        self.failed_count = 0
        self.error = ""
        self.ending_for = -1.0
        """For how long the run has been about to end, in seconds; below 0: it is not."""
        self.sends_less: Callable[[], bool] = lambda: False
        self._me = me
        self._settings = settings
        self._trainer = trainer
        self._part = part
        # A rule that cuts numbers one by one may keep a large mean beside a small mean of squares, which no
        # optimizer has seen together: its next step would be a leap.
        self._moments = settings.strategy not in OUTER and part.aggregate == "mean"
        self._begun_step = self._begun_samples = 0
        self._averaged_samples = 0
        """Those that a mean has: what was learnt since counts in the next one, also where that comes late."""
        self._mean_step, self._means = -1, 0
        self._begun_at = 0.0
        self._is_under_way = False
        self._made: Round | None = None
        self._life = 0

    async def open(self) -> None:
        """Prepare the strategy for the numbers that the model begins with."""
        theta = await self._trainer.copy_out(moments=self._moments)
        self._strategy = make_strategy(
            self._settings.strategy, theta, self._settings.local_steps, self._settings.codec
        )
        self._delayed = Delayed(self._strategy)
        self._begun_at = trio.current_time()

    @property
    def outer(self) -> dict[str, Vector]:
        """Return the state that a late joiner needs beside parameters and moments."""
        return dict(self._strategy.state())

    @property
    def needs_all(self) -> bool:
        """Return whether a missed round has to be made up for by fetching the others' state."""
        return self._settings.strategy in EVERY_ROUND

    @property
    def is_due(self) -> bool:
        """Whether enough local steps have been made since the last round began, which is over. A member that
        has made all takes part in the rounds of the others, which would wait for it, and so does one whose
        run is about to end."""
        is_time = (
            self._trainer.is_idle
            or 0 <= self.ending_for < LAST_ROUND_SECONDS
            or self._trainer.step - self._begun_step >= self._settings.local_steps * self._every
        )
        return is_time and not self._is_under_way and self._made is None

    @property
    def _every(self) -> int:
        """In which of the run's rounds this member takes part: a round that it missed must not cost it the
        state of others, which is more than the round."""
        return SPARING_ROUNDS if self.sends_less() and not self.needs_all else 1

    def lacks_mean(self, others: int) -> bool:
        """Return whether a result made now would be this member's numbers alone: a run ends with what its
        members averaged after their last steps, a round for each axis of their grid, unless they do not
        within LAST_ROUND_SECONDS."""
        means = self._means if self._mean_step == self._trainer.step else 0
        is_mean = means >= max(1, len(self._part.walk.axes))
        return others > 0 and not is_mean and self.ending_for < LAST_ROUND_SECONDS

    def skip(self) -> None:
        """Nobody else is there: count anew."""
        self._restart()

    def _restart(self) -> None:
        self._begun_step, self._begun_samples = self._trainer.step, self._trainer.samples
        self._begun_at = trio.current_time()

    async def begin(self, nursery: trio.Nursery) -> None:
        """Copy out what is averaged, and look for a group in the background."""
        weight = float(self._samples) if self._settings.weighting == "samples" else 1.0
        lasted = trio.current_time() - self._begun_at
        self._restart()
        longest = WINDOW_SECONDS_MAX if self.ending_for < 0 else LAST_WINDOW_SECONDS_MAX
        theta = await self._trainer.copy_out(moments=self._moments)
        offered = await self._part.compute(partial(self._delayed.offer, theta, self._damping))
        wanted = Wanted(
            codec=self._strategy.codec,
            mode=self._strategy.mode,
            window_seconds=min(max(WINDOW_SECONDS_MIN, WINDOW_ROUNDS * lasted), longest),
            patience_seconds=PATIENCE_SECONDS,
            size_max=group_size(self._strategy.grouping),
        )
        self._is_under_way = True
        nursery.start_soon(self._hold, offered, weight, wanted)

    @property
    def _damping(self) -> float:
        """Which share of a round begun now is taken: all of those that make the run's result."""
        is_last = self._trainer.is_idle or self.ending_for >= 0
        return 1.0 if is_last else self._settings.damping

    @property
    def _samples(self) -> int:
        """Return the weight of this member's numbers in samples: those it has trained on since its last mean,
        however long it was alone, or where data stays with its owners, the size of its own data."""
        if self._settings.is_federated:
            return len(self._trainer.shard.rows)
        return max(1, self._trainer.samples - self._averaged_samples)

    async def _hold(self, offered: Vector, weight: float, wanted: Wanted) -> None:
        life = self._life
        try:
            made = await self._part.average(offered, weight, wanted)
            if life == self._life:
                self._made = made
        finally:
            self._is_under_way = False

    async def use(self) -> Round | None:
        """Apply the result of a finished round; return the round, None where none is finished. Raises
        StageFailed."""
        made, self._made = self._made, None
        if made is None:
            return None
        mean = None
        if made.vector is not None:
            stale = self._trainer.step - self._begun_step
            mean = Mean(made.vector, is_included=self._me in made.shares, stale_steps=stale)
        theta = await self._trainer.copy_out(moments=self._moments)
        taken = await self._part.compute(partial(self._delayed.take, theta, mean))
        if mean is None:
            self.failed_count, self.error = self.failed_count + 1, made.error
        else:
            await self._trainer.copy_in(taken)
            if mean.is_included:
                self._averaged_samples = self._begun_samples
            self.count, self.error = self.count + 1, ""
            self._means = self._means + 1 if self._mean_step == self._begun_step else 1
            self._mean_step = self._begun_step
        return made

    def take_over(self, count: int, outer: dict[str, Vector]) -> None:
        """Go on from the state of others, after so many rounds. A round under way is not used any more.

        Raises ValueError: it is not of this run's strategy, and nothing has changed."""
        if outer.keys() != self._strategy.state().keys():
            raise ValueError("the state of others is of another strategy")
        self.count = count
        self._life += 1
        self._mean_step = -1
        self._made = None
        self._strategy.load(outer)
        self._delayed = Delayed(self._strategy)
        self._restart()
        self._averaged_samples = self._trainer.samples
