"""The averaging rounds of one member in local mode. They run one at a time, in parallel with the training,
which never waits for them.

A round averages a copy of the values that is made when the round begins. Its result is added to the changes
made since then (`gossip.averaging.strategies.Delayed`). Not here: when a round is due, and its weight
(`partition.run.local.round_schedule`).
"""

from collections.abc import Callable
from functools import partial

import trio

from crypto.identity import PeerId
from gossip.averaging.catalogue import EVERY_ROUND, OUTER, group_size, make_strategy
from gossip.averaging.robust.reduction import Vector
from gossip.averaging.strategies import Delayed, Mean
from node.averaging.participation import Participation
from node.averaging.rounds import Round, RoundWish
from node.local.trainer import LocalTrainer
from partition.run.local.round_schedule import RoundSchedule
from partition.run.local_settings import LocalSettings

PATIENCE_SECONDS = 60.0


class Rounds:
    """The rounds of one stage. Call `open` once the stage has its first state."""

    def __init__(
        self,
        me: PeerId,
        settings: LocalSettings,
        trainer: LocalTrainer,
        part: Participation,
        now: Callable[[], float],
    ) -> None:
        self.schedule = RoundSchedule(settings, needs_all=settings.strategy in EVERY_ROUND)
        self.error = ""
        self._me = me
        self._settings = settings
        self._trainer = trainer
        self._part = part
        self._now = now
        # Average moments only with the mean. A rule that clips values one by one may combine a large mean
        # with a small mean of squares, a pair that no optimizer produces, and the next step would be much too
        # large.
        self._moments = settings.strategy not in OUTER and part.aggregate == "mean"
        self._made: Round | None = None

    async def open(self) -> None:
        """Prepare the strategy for the model's initial values."""
        theta = await self._trainer.copy_out(moments=self._moments)
        self._strategy = make_strategy(
            self._settings.strategy, theta, self._settings.local_steps, self._settings.codec
        )
        self._delayed = Delayed(self._strategy)
        self.schedule.open(self._now())

    @property
    def outer(self) -> dict[str, Vector]:
        """The state that a late joiner needs in addition to parameters and moments."""
        return dict(self._strategy.state())

    @property
    def axes(self) -> int:
        """The number of rounds after which all members are averaged: one for each axis of their grid."""
        return len(self._part.walk.axes)

    async def begin(self, nursery: trio.Nursery) -> None:
        """Copy the values to average, and look for a group in the background."""
        trainer, schedule = self._trainer, self.schedule
        weight = schedule.weight(trainer.samples, len(trainer.shard.rows))
        theta = await trainer.copy_out(moments=self._moments)
        damping = schedule.damping(is_idle=trainer.is_idle)
        offered = await self._part.compute(partial(self._delayed.offer, theta, damping))
        # Begin the round only here: the caller may be cancelled above, and a round without an owner would
        # never end.
        window = schedule.begin(self._now(), trainer.step, trainer.samples)
        wanted = RoundWish(
            codec=self._strategy.codec,
            mode=self._strategy.mode,
            window_seconds=window,
            patience_seconds=PATIENCE_SECONDS,
            size_max=group_size(self._strategy.grouping),
        )
        nursery.start_soon(self._hold, offered, weight, wanted)

    async def _hold(self, offered: Vector, weight: float, wanted: RoundWish) -> None:
        life, made = self.schedule.life, None
        try:
            made = await self._part.average(offered, weight, wanted)
        finally:
            if self.schedule.ended(life, has_result=made is not None):
                self._made = made

    async def use(self) -> Round | None:
        """Apply the result of a finished round. Return the round, or None if none is finished. Raises
        StageFailed."""
        made, self._made = self._made, None
        if made is None:
            return None
        self.schedule.use()
        mean = None
        if made.vector is not None:
            stale = self._trainer.step - self.schedule.begun_step
            mean = Mean(made.vector, is_included=self._me in made.shares, stale_steps=stale)
        theta = await self._trainer.copy_out(moments=self._moments)
        taken = await self._part.compute(partial(self._delayed.take, theta, mean))
        if mean is None:
            self.schedule.failed()
            self.error = made.error
        else:
            await self._trainer.copy_in(taken)
            self.schedule.averaged(is_included=mean.is_included)
            self.error = ""
        return made

    def take_over(self, count: int, outer: dict[str, Vector]) -> None:
        """Continue from another member's state, which has seen this number of rounds. A round in progress is
        not used any more.

        Raises ValueError, without any change, if the state does not fit this run's strategy."""
        if outer.keys() != self._strategy.state().keys():
            raise ValueError("the state of others belongs to a different strategy")
        self._made = None
        self._strategy.load(outer)
        self._delayed = Delayed(self._strategy)
        self.schedule.take_over(self._now(), count, self._trainer.step, self._trainer.samples)
