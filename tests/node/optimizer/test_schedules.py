"""Every scheduler of torch either becomes a function of the run's step or is refused when it is made."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

from node.optimizer.schedule import CHAINED_MAX, Schedules
from tests.node.optimizer.compatibility import SCHEDULERS, Make

STEPS = 60
FAR = CHAINED_MAX + 37


def sgd() -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(2, requires_grad=True)], "lr": rate} for rate in (0.1, 0.02)]
    return torch.optim.SGD(groups, 0.1, 0.9)


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def by_torch(make: Make, steps: int) -> list[dict[str, Any]]:
    """Return the parameter groups as torch's own scheduler sets them, stepped once for each step."""
    optimizer = sgd()
    scheduler: Any = make(optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return hyperparameters(optimizer)


def test_the_table_lists_every_scheduler_of_torch() -> None:
    of_torch = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, LRScheduler) and name not in ("LRScheduler", "_LRScheduler")
    }
    assert of_torch == SCHEDULERS.keys()


@pytest.mark.parametrize("name", [name for name, made in SCHEDULERS.items() if made.is_function])
def test_a_scheduler_depends_on_the_step_alone(name: str) -> None:
    make, optimizer = SCHEDULERS[name].make, sgd()
    schedules = Schedules([optimizer])
    schedules.add(make, {})
    expected = {step: by_torch(make, step) for step in (0, 1, 7, 30, 41, STEPS)}
    for step in (1, 30, 7, STEPS, 0, 41, 41):  # back and forth, as when a peer adopts the states of others
        schedules.move_to(step)
        assert hyperparameters(optimizer) == expected[step], step
    late = sgd()
    of_late = Schedules([late])
    of_late.move_to(41)
    of_late.add(make, {})
    assert hyperparameters(late) == expected[41], "a scheduler made during the run has different rates"


@pytest.mark.parametrize("name", [name for name, made in SCHEDULERS.items() if not made.is_function])
def test_a_scheduler_that_needs_a_metric_is_refused_with_a_remedy(name: str) -> None:
    optimizer = sgd()
    before = hyperparameters(optimizer)
    with pytest.raises(TypeError, match=f"{name}.step takes metrics, .* step it yourself"):
        Schedules([optimizer]).add(SCHEDULERS[name].make, {})
    assert hyperparameters(optimizer) == before


def test_a_sequence_of_schedulers_jumps_to_a_far_step() -> None:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        first = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
        then = lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * FAR)
        return lr_scheduler.SequentialLR(optimizer, [first, then], [10])

    optimizer = sgd()
    schedules = Schedules([optimizer])
    scheduler = schedules.add(make, {})
    schedules.move_to(FAR)
    assert scheduler.last_epoch == FAR
    expected = 0.1 * (1 + math.cos(math.pi * (FAR - 10) / (2 * FAR))) / 2
    assert scheduler.get_last_lr()[0] == pytest.approx(expected)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def failing(step: int) -> float:
    if step > 3:
        raise KeyError("no such step")
    return 0.5


@pytest.mark.parametrize(
    ("make", "last"),
    [
        (partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=4), 4),
        (partial(lr_scheduler.LambdaLR, lr_lambda=failing), 3),
    ],
)
def test_a_schedule_that_ends_keeps_its_last_learning_rate(
    make: Callable[..., LRScheduler], last: int, capfd: pytest.CaptureFixture[str]
) -> None:
    optimizer = sgd()
    schedules = Schedules([optimizer])
    schedules.add(make, {})
    schedules.move_to(last)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(last, last + 5):
        schedules.move_to(step)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert capfd.readouterr().err.count("goes no further, its last learning rate stays") == 1


def test_two_schedulers_of_one_optimizer_multiply() -> None:
    optimizer = sgd()
    schedules = Schedules([optimizer])
    schedules.add(lr_scheduler.ExponentialLR, {"gamma": 0.9})
    schedules.add(lr_scheduler.ConstantLR, {"factor": 0.5, "total_iters": 10})
    schedules.move_to(3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**3 * 0.5)


def test_a_schedule_resumes_from_a_checkpoint() -> None:
    optimizer = sgd()
    schedules = Schedules([optimizer])
    schedules.add(lr_scheduler.CosineAnnealingLR, {"T_max": 50})
    schedules.move_to(20)
    saved = optimizer.state_dict()
    again = sgd()
    again.load_state_dict(saved)
    resumed = Schedules([again])
    resumed.move_to(20)
    resumed.add(lr_scheduler.CosineAnnealingLR, {"T_max": 50})
    assert hyperparameters(again) == hyperparameters(optimizer)
    schedules.move_to(21)
    optimizer.load_state_dict(saved)
    schedules.move_to(21)
    resumed.move_to(21)
    assert hyperparameters(again) == hyperparameters(optimizer)


def test_learning_rates_held_in_tensors_keep_their_tensors() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.zeros(2, requires_grad=True)], lr=rate)
    kept = optimizer.param_groups[0]["lr"]
    schedules = Schedules([optimizer])
    schedules.add(lr_scheduler.ExponentialLR, {"gamma": 0.5})
    schedules.move_to(2)
    assert optimizer.param_groups[0]["lr"] is kept
    assert float(kept) == pytest.approx(0.025)
