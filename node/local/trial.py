"""A state of others, tried by a member on its own held-out samples before it goes on from there.

Where a run has one stage: a member of a column has no loss of its own.
"""

from dataclasses import dataclass

import numpy as np

from gossip.averaging.robust.reduction import Vector
from node.averaging.loss_bound import apart_loss_max, is_within, loss_max
from node.local.trainer import LocalTrainer

MICROBATCHES_MAX = 16
"""Micro-batches that a state is tried on: passes of a few steps, however many samples are held out."""


@dataclass(frozen=True)
class TrainerPlace:
    """The place of a member: its numbers, steps and samples."""

    numbers: Vector
    step: int
    samples: int


async def place_of(trainer: LocalTrainer) -> TrainerPlace:
    """Return where this member is now, as a copy."""
    return TrainerPlace(await trainer.copy_out(moments=True), trainer.step, trainer.samples)


async def go_back(trainer: LocalTrainer, place: TrainerPlace) -> None:
    """Go back to where this member was. Raises StageFailed."""
    trainer.step, trainer.samples = place.step, place.samples
    await trainer.copy_in(place.numbers)


class Trial:
    """The trial of states by one member. Make it by `open`, with the values that all begin with."""

    def __init__(self, trainer: LocalTrainer, first: float, *, is_apart: bool) -> None:
        self._trainer = trainer
        self._first = first
        self._is_apart = is_apart

    @classmethod
    async def open(cls, trainer: LocalTrainer, first: float, *, is_apart: bool) -> "Trial":
        """`first` is the loss over all held-out samples. `is_apart`: members have data of their own, which
        may be of another kind than that of others."""
        if trainer.held_out_microbatches > MICROBATCHES_MAX:
            first = await trainer.held_out_loss(MICROBATCHES_MAX)
        return cls(trainer, first, is_apart=is_apart)

    async def loss_max(self) -> float:
        """Return the highest loss of a state that is as good as the present one, about."""
        if self._is_apart:
            return apart_loss_max(self._first)
        is_first = self._trainer.step == 0
        own = self._first if is_first else await self._trainer.held_out_loss(MICROBATCHES_MAX)
        return loss_max(self._first, own)

    async def fault(self, own: TrainerPlace, limit: float) -> str:
        """Return why the numbers that are here now are not gone on from; empty where they are, or are no
        others than before (`own`). One training step is made and taken back, for moments of the optimizer
        that would ruin them. Raises StageFailed."""
        trainer = self._trainer
        if np.array_equal(await trainer.copy_out(moments=True), own.numbers):
            return ""  # members that begin together
        loss = await trainer.held_out_loss(MICROBATCHES_MAX)
        if not is_within(loss, limit):
            return f"the state of others has a held-out loss of {loss:.4g} here, above {limit:.4g}"
        if trainer.is_idle:
            return ""
        place = await place_of(trainer)
        await trainer.train_step()
        loss = await trainer.held_out_loss(MICROBATCHES_MAX)
        await go_back(trainer, place)
        if not is_within(loss, limit):
            return (
                f"one step from the state of others the held-out loss is {loss:.4g} here, above {limit:.4g}"
            )
        return ""
