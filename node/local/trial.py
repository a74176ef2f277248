"""Tests another member's state on a member's own held-out samples, before the member continues from it.

This is only for runs of one stage, because a member of a column has no loss of its own.
"""

from dataclasses import dataclass

import numpy as np

from gossip.averaging.robust.reduction import Vector
from node.averaging.loss_bound import apart_loss_max, is_within, loss_max
from node.local.trainer import LocalTrainer

MICROBATCHES_MAX = 16
"""Number of micro-batches that test a state: as much work as a few steps, however many samples are held
out."""


@dataclass(frozen=True)
class TrainerPlace:
    """A member's position in the training: its parameters, steps and samples."""

    numbers: Vector
    step: int
    samples: int


async def place_of(trainer: LocalTrainer) -> TrainerPlace:
    """Return a copy of this member's position."""
    return TrainerPlace(await trainer.copy_out(moments=True), trainer.step, trainer.samples)


async def go_back(trainer: LocalTrainer, place: TrainerPlace) -> None:
    """Return to an earlier position. Raises StageFailed."""
    trainer.step, trainer.samples = place.step, place.samples
    await trainer.copy_in(place.numbers)


class Trial:
    """The test of states by one member. Make it with `open`, while the member has the common initial
    values."""

    def __init__(self, trainer: LocalTrainer, first: float, *, is_apart: bool) -> None:
        self._trainer = trainer
        self._first = first
        self._is_apart = is_apart

    @classmethod
    async def open(cls, trainer: LocalTrainer, first: float, *, is_apart: bool) -> "Trial":
        """Make the test. `first` is the loss over all held-out samples. `is_apart` means that members have
        their own data, which may differ in kind."""
        if trainer.held_out_microbatches > MICROBATCHES_MAX:
            first = await trainer.held_out_loss(MICROBATCHES_MAX)
        return cls(trainer, first, is_apart=is_apart)

    async def loss_max(self) -> float:
        """Return the highest loss of a state that is about as good as the present one."""
        if self._is_apart:
            return apart_loss_max(self._first)
        is_first = self._trainer.step == 0
        own = self._first if is_first else await self._trainer.held_out_loss(MICROBATCHES_MAX)
        return loss_max(self._first, own)

    async def fault(self, own: TrainerPlace, limit: float) -> str:
        """Return why the present values are refused; empty if they are accepted, or equal the previous values
        `own`. One training step is made and undone, to detect harmful moments of the optimizer. Raises
        StageFailed."""
        trainer = self._trainer
        if np.array_equal(await trainer.copy_out(moments=True), own.numbers):
            return ""  # as for members that begin together
        loss = await trainer.held_out_loss(MICROBATCHES_MAX)
        if not is_within(loss, limit):
            return f"the state of others has a held-out loss of {loss:.4g} here, which is above {limit:.4g}"
        if trainer.is_idle:
            return ""
        place = await place_of(trainer)
        await trainer.train_step()
        loss = await trainer.held_out_loss(MICROBATCHES_MAX)
        await go_back(trainer, place)
        if not is_within(loss, limit):
            return (
                f"one step after the state of others, the held-out loss is {loss:.4g} "
                f"here, which is above {limit:.4g}"
            )
        return ""
