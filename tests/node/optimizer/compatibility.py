"""What a training script may be made of, each once: schedulers and optimizers of torch, and more."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler, swa_utils

Make = Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True)
class OfSchedule:
    """One scheduler of torch, and whether it is a function of the step."""

    make: Make
    is_function: bool = True


def in_sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    first = lr_scheduler.ConstantLR(optimizer, 0.1, 10)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.9)], [10])


def chained(optimizer: torch.optim.Optimizer) -> lr_scheduler.ChainedScheduler:
    first = lr_scheduler.ConstantLR(optimizer, 0.1, 10)
    return lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(optimizer, 0.9)])


SCHEDULERS: dict[str, OfSchedule] = {
    "LambdaLR": OfSchedule(partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.95**step)),
    "MultiplicativeLR": OfSchedule(partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda _: 0.95)),
    "StepLR": OfSchedule(partial(lr_scheduler.StepLR, step_size=10)),
    "MultiStepLR": OfSchedule(partial(lr_scheduler.MultiStepLR, milestones=[5, 20])),
    "ConstantLR": OfSchedule(lr_scheduler.ConstantLR),
    "LinearLR": OfSchedule(partial(lr_scheduler.LinearLR, total_iters=20)),
    "ExponentialLR": OfSchedule(partial(lr_scheduler.ExponentialLR, gamma=0.9)),
    "PolynomialLR": OfSchedule(partial(lr_scheduler.PolynomialLR, total_iters=40, power=2.0)),
    "CosineAnnealingLR": OfSchedule(partial(lr_scheduler.CosineAnnealingLR, T_max=50)),
    "CosineAnnealingWarmRestarts": OfSchedule(partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=9)),
    "CyclicLR": OfSchedule(partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=8)),
    "OneCycleLR": OfSchedule(partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=100)),
    "SequentialLR": OfSchedule(in_sequence),
    "ChainedScheduler": OfSchedule(chained),
    "SWALR": OfSchedule(partial(swa_utils.SWALR, swa_lr=0.01)),
    "ReduceLROnPlateau": OfSchedule(lr_scheduler.ReduceLROnPlateau, is_function=False),
}


OPTIMIZERS: dict[str, dict[str, Any] | str] = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "LBFGS": "it computes the loss anew within a step",
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
    "SparseAdam": "its gradients are sparse, which cannot be averaged; Adam can",
}
"""Each optimizer class of torch with its options, or why it is refused."""


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    """One of torch's optimizers that is not refused."""
    options = OPTIMIZERS[name]
    assert isinstance(options, dict)
    made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=0.01, **options)
    return made
