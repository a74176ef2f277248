"""A learning rate scheduler as a function of the run's global step, whoever made that step."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

CATCH_UP_MAX = 10_000_000
"""Steps that a late joiner's scheduler is moved on by at once: a longer run is none of this kind."""


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
        """Bring the learning rates to a global step; backwards is where they stay."""
        with warnings.catch_warnings():
            # The step before may have been made by others: torch would miss this process's own.
            warnings.simplefilter("ignore", UserWarning)
            for scheduler in self._schedulers:
                for _ in range(min(step - scheduler.last_epoch, CATCH_UP_MAX)):
                    scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: of all schedulers."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        for scheduler, each in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(each)
