"""The parts of training scripts, each listed once: torch's schedulers and optimizers, and more."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler, swa_utils

Make = Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True)
class OfSchedule:
    """One scheduler of torch, and whether its rate is a function of the step."""

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
"""Each optimizer class of torch, with its options or with the reason why it is refused."""


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    """One of torch's optimizers that the wrapper accepts."""
    options = OPTIMIZERS[name]
    assert isinstance(options, dict)
    made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=0.01, **options)
    return made


TESTS = "tests/node/optimizer/"
MORE: tuple[tuple[str, str, str], ...] = (
    (
        "GradScaler",
        "works; a batch that it skips does not count",
        "test_samples.py::test_a_skipped_batch_does_not_count_toward_the_step",
    ),
    (
        "gradient accumulation",
        "works; each batch counts",
        "test_samples.py::test_each_batch_of_an_accumulated_gradient_counts",
    ),
    (
        "NaN guards, `continue`",
        "work; a batch without a step does not count",
        "test_samples.py::test_a_skipped_batch_does_not_count_toward_the_step",
    ),
    (
        "`clip_grad_norm_`, `clip_grad_value_`",
        "work on this peer's gradient; `clip_grad_norm=` clips the mean",
        "test_scripts.py::test_clipping_before_a_step_clips_only_this_peers_gradient",
    ),
    (
        "a closure",
        "works; it is called once",
        "test_scripts.py::test_a_closure_is_called_once_and_its_loss_returned",
    ),
    (
        "EMA, `AveragedModel`",
        "works",
        "test_scripts.py::test_an_average_of_weights_follows_the_models_weights",
    ),
    (
        "`torch.compile` of the model",
        "works",
        "test_samples.py::test_samples_of_a_compiled_model_are_counted",
    ),
    (
        "`torch.compile` of model and loss in one",
        "works with `batch_size=`; the first step asks for it",
        "test_scripts.py::test_a_fully_compiled_loss_needs_the_batch_size",
    ),
    (
        "checkpoint and resume",
        "work; `state_dict` loads with `weights_only=True`, and into the plain optimizer",
        "test_scripts.py::test_a_script_resumes_from_its_checkpoint",
    ),
    (
        "`torch.save(model)`, `copy.deepcopy(model)`",
        "work; nothing of ours is in them",
        "test_samples.py::test_a_saved_model_loads_without_this_package",
    ),
    (
        "parameters thawed, frozen or added later",
        "work; with those that train the same",
        "test_changes.py::test_parameters_unfrozen_later_are_averaged_too",
    ),
    (
        "a dict as input, `model.eval()`, no module",
        "work",
        "test_samples.py::test_samples_are_counted_whatever_module_uses_the_parameters",
    ),
    (
        "DistributedDataParallel (gloo, one process)",
        "works",
        "test_scripts.py::test_a_model_in_torchs_own_ddp_trains",
    ),
    (
        "accelerate 1.15",
        "works, its accumulation too",
        "test_frameworks.py::test_accelerate_prepares_the_wrapper",
    ),
    (
        "Lightning 2.6, automatic and manual",
        "works",
        "test_frameworks.py::test_lightning_trains_with_the_wrapper",
    ),
    (
        "the Trainer of transformers 5.23",
        "works, with `optimizers=(optimizer, scheduler)`",
        "test_frameworks.py::test_the_trainer_of_transformers_accepts_the_wrapper",
    ),
)
"""Other parts of scripts: how each behaves, and the test that proves it."""
