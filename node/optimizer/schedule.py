"""Learning rate schedulers as functions of the run's global step, whichever peer made that step.

Torch's schedulers remember the previous step, and some the present learning rate. So they run on stand-ins of
the optimizers, which have the same groups but no parameters, and the results are written to the real groups.
If the step goes back (when a peer takes over an earlier state), they begin again on new stand-ins.
"""

import inspect
import logging
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

log = logging.getLogger("peerloom")
CHAINED_MAX = 20_000
"""Maximum number of steps, times parameter groups, that a scheduler advances in one call: some 0.1 s. For
more steps, it jumps if its learning rate has a closed form. Otherwise it advances by this many at each step
until it has caught up."""
CLOSED = (LambdaLR, OneCycleLR, CyclicLR, CosineAnnealingWarmRestarts)
"""Torch's schedulers that compute a learning rate from the step number alone, but do not declare it."""


class GlobalScheduler:
    """One scheduler that follows the run's global step. Calling `step` is not needed, and does nothing."""

    def __init__(self, make: Any, options: dict[str, Any]) -> None:
        self._make = make
        self._options = options
        self._schedulers: list[Any] = []
        self._is_over = False
        self._steps: list[int] = []
        self.name = str(getattr(make, "__name__", type(make).__name__))

    @property
    def last_epoch(self) -> int:
        """Return the step that the learning rates belong to."""
        return self._steps[0]

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of all parameter groups."""
        return [float(rate) for scheduler in self._schedulers for rate in scheduler.get_last_lr()]

    def step(self, epoch: int | None = None) -> None:
        """Do nothing: the optimizer moves its schedulers when the run makes a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all schedulers, for a checkpoint."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: everything follows from the step in the optimizer's state."""

    def begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Make the schedulers for these optimizers, at step 0. Raises TypeError for a scheduler that does not
        depend on the step alone."""
        self._is_over = False
        self._schedulers, self._steps = [], [0] * len(optimizers)
        for optimizer in optimizers:
            made = self._make(optimizer, **self._options)
            self.name = type(made).__name__
            _refuse_metrics(made)
            self._schedulers.append(made)

    def advance(self, step: int) -> None:
        """Advance to a step. A scheduler that fails stays at its step, and this is logged."""
        if self._is_over:
            return
        for number, scheduler in enumerate(self._schedulers):
            most = max(1, CHAINED_MAX // len(scheduler.optimizer.param_groups))
            try:
                if step - self._steps[number] > most and _jump(scheduler, step):
                    self._steps[number] = step
                for _ in range(min(step - self._steps[number], most)):
                    scheduler.step()
                    self._steps[number] += 1
            # torch's, such as beyond the steps of OneCycleLR, or a user's lambda's
            except Exception as error:
                self._is_over = True
                text = "run's step %d: %s goes no further, its last learning rate stays: %s: %s"
                log.warning(text, step, self.name, type(error).__name__, error)
                return


class Schedules:
    """All schedulers of one wrapped optimizer."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._schedulers: list[GlobalScheduler] = []
        self._first: list[list[dict[str, Any]]] = []
        self._doubles: list[torch.optim.Optimizer] = []
        self._followed: set[str] = set()
        """Keys that schedulers have changed: learning rates, and momentum if a scheduler cycles it."""
        self._step = 0

    def add(self, make: Any, options: dict[str, Any]) -> GlobalScheduler:
        """Return `make(optimizer, **options)` as a function of the step. Raises TypeError or ValueError if
        that is impossible, and any error of `make`."""
        if not self._schedulers:
            self._first = [[_values(group) for group in each.param_groups] for each in self._optimizers]
        added = GlobalScheduler(make, options)
        with _without_warnings():
            tried = GlobalScheduler(make, options)
            tried.begin(self._stand_ins())
            for scheduler in tried._schedulers:
                try:
                    scheduler.step()
                except Exception as error:  # a user's own scheduler may raise anything
                    raise ValueError(f"{tried.name} does not follow the run's step: {error}") from error
        self._schedulers.append(added)
        self._begin()
        self.move_to(self._step)
        return added

    def move_to(self, step: int) -> None:
        """Set the learning rates for a global step. A step that is far away does not take longer."""
        if not self._schedulers:
            self._step = step
            return
        with _without_warnings():
            if step < self._step:
                self._begin()
            self._step = step
            for scheduler in self._schedulers:
                scheduler.advance(step)
        self._write()

    def _stand_ins(self) -> list[torch.optim.Optimizer]:
        """Return optimizers with the groups of the wrapped ones, as they were before any scheduler."""
        return [
            torch.optim.Optimizer(
                [{**_values(group), "params": [torch.zeros(1)]} for group in groups], dict(each.defaults)
            )
            for each, groups in zip(self._optimizers, self._first, strict=True)
        ]

    def _begin(self) -> None:
        self._doubles = self._stand_ins()
        with _without_warnings():
            for scheduler in self._schedulers:
                scheduler.begin(self._doubles)

    def _write(self) -> None:
        """Copy the changes that the schedulers made to the stand-ins into the real groups."""
        for optimizer, double, firsts in zip(self._optimizers, self._doubles, self._first, strict=True):
            # A group that was added later has no schedule.
            for group, made, first in zip(optimizer.param_groups, double.param_groups, firsts, strict=False):
                for key, value in made.items():
                    if key == "lr" or key not in first or not _equal(value, first[key]):
                        self._followed.add(key)
                    if key == "params" or key not in self._followed or _equal(group.get(key), value):
                        continue
                    if isinstance(group.get(key), torch.Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = value


def _values(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters, with the learning rate that it had before any schedule."""
    values = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
    if "initial_lr" in values:
        first = values.pop("initial_lr")
        values["lr"] = first.clone() if isinstance(first, torch.Tensor) else first
    return values


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is not None and other is not None and bool(torch.as_tensor(one == other).all())
    return bool(one == other)


def _refuse_metrics(scheduler: Any) -> None:
    """Raise TypeError for a scheduler whose `step` needs more than the step number."""
    name = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"{name} is no scheduler of torch")
    needed = [
        parameter.name
        for parameter in inspect.signature(scheduler.step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise TypeError(
            f"{name}.step takes {', '.join(needed)}, so it is no function of the run's step, and peers would "
            "train by different learning rates. Use a schedule of the step, such as CosineAnnealingLR; or, "
            f"with local_steps=, where each may have its own, make {name}(optimizer) and step it yourself"
        )


def _jump(scheduler: Any, step: int) -> bool:
    """Move a scheduler with a closed form directly to a step; return whether it has one."""
    if type(scheduler) is SequentialLR:
        at = bisect_right(scheduler._milestones, step)
        part, begun = scheduler._schedulers[at], scheduler._milestones[at - 1] if at else 0
        if _is_closed(part):
            part.step(step - begun)
            scheduler.last_epoch, scheduler._last_lr = step, part.get_last_lr()
        return _is_closed(part)
    if _is_closed(scheduler):
        scheduler.step(step)
    return _is_closed(scheduler)


def _is_closed(scheduler: Any) -> bool:
    return hasattr(scheduler, "_get_closed_form_lr") or isinstance(scheduler, CLOSED)


def _without_warnings() -> "warnings.catch_warnings[None]":
    """Suppress torch's warning about a missing step: other peers may have made the previous step."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
