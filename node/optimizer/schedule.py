"""A learning rate scheduler as a function of the run's global step, whoever made that step."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, LRScheduler, OneCycleLR

CHAINED_MAX = 10_000
"""Steps times parameter groups that a scheduler is moved on by at once, one after the other: some 50 ms.
Beyond that it jumps, if its learning rate is known in closed form; else it is moved on by so many at each
step, until it is there."""
CLOSED = (LambdaLR, OneCycleLR, CyclicLR, CosineAnnealingWarmRestarts)
"""Schedulers of torch that compute a learning rate from the number of the step alone, without saying so."""


class GlobalScheduler:
    """Moves schedulers of torch to the global step. Calling `step` is not needed, and does nothing."""

    def __init__(
        self, make: Any, optimizers: Sequence[torch.optim.Optimizer], options: dict[str, Any]
    ) -> None:
        self._schedulers: list[LRScheduler] = [make(optimizer, **options) for optimizer in optimizers]

    @property
    def last_epoch(self) -> int:
        """The step that the learning rates belong to."""
        return int(self._schedulers[0].last_epoch)

    def get_last_lr(self) -> list[float]:
        """The learning rates of all parameter groups."""
        return [float(rate) for scheduler in self._schedulers for rate in scheduler.get_last_lr()]

    def step(self) -> None:
        """Do nothing: the optimizer moves its schedulers when the run makes a step."""

    def move_to(self, step: int) -> None:
        """Bring the learning rates to a global step; backwards is where they stay. Takes no longer for a step
        that is far away."""
        with warnings.catch_warnings():
            # The step before may have been made by others: torch would miss this process's own.
            warnings.simplefilter("ignore", UserWarning)
            for scheduler in self._schedulers:
                most = max(1, CHAINED_MAX // len(scheduler.optimizer.param_groups))
                is_closed = hasattr(scheduler, "_get_closed_form_lr") or isinstance(scheduler, CLOSED)
                if is_closed and step - scheduler.last_epoch > most:
                    scheduler.step(step)
                for _ in range(min(step - scheduler.last_epoch, most)):
                    scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: of all schedulers."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        for scheduler, each in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(each)
