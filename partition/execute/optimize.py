"""The optimizer step over arenas: torch.optim's own SGD, Adam and AdamW, with our schedules and groups.

Their state is in the arena `moments`, so that the node can checkpoint it. No steps are counted here: the
step's number in the request determines the learning rate (as a `LambdaLR` would) and Adam's bias correction.
So a replica that joined later steps like the others. Frozen parameters and batch statistics are not changed.

On a CPU, a large parameter is stepped in blocks that stay in the cache from the first operator of a step to
the last. The bits are the same as without blocks, because all operators work element by element.

Clipping is `torch.nn.utils.clip_grad_norm_` of the mean gradient, with the norm over all stages.
"""

from collections.abc import Callable, Mapping, Sequence
from math import cos, isfinite, pi, sqrt

import torch

from crypto.errors import RemoteProtocolError
from partition.stage import GroupSettings, OptimizerSettings, Schedule
from partition.stage_layout import Slot

_CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""

BLOCK_ELEMENTS = 1 << 15
"""Number of elements of a block for each thread. torch gives a thread no fewer, and the value, gradient and
moments of this many elements fit its cache. A step of Adam over 25 million parameters took 292 ms, and 481 ms
without blocks."""


def rate_factor(schedule: Schedule, step: int) -> float:
    """Return the factor on the learning rate of a step, counted from 0.

    A warm-up of n steps has the factors 1/n, 2/n, ... A first factor of zero would waste a step.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    done = (step - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps)
    done = min(done, 1.0)
    left = 1 - done if schedule.kind == "linear" else (1 + cos(pi * done)) / 2
    return schedule.floor + (1 - schedule.floor) * left


def clip_factor(settings: OptimizerSettings, squared_norm: float | None, samples: int) -> float:
    """Return the factor on the mean gradient. `squared_norm` is that of the sums of all stages.

    Raises:
        RemoteProtocolError: the settings clip, and the norm is missing or impossible.
    """
    if not settings.clip_norm:
        return 1.0
    if squared_norm is None or not isfinite(squared_norm) or squared_norm < 0:
        raise RemoteProtocolError(
            "these settings clip gradients, so a step needs the squared norm of all stages"
        )
    return min(1.0, settings.clip_norm / (sqrt(squared_norm) / samples + _CLIP_EPSILON))


class Optimizer:
    """Steps the trainable parameters by their `.grad`, which always stays the same tensor.

    `values` are the leaves by row, each in contiguous memory; `moment(number, slot)` is a parameter's part of
    one of the moments.

    Raises:
        RemoteProtocolError: a parameter belongs to a group that the settings do not have.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        slots: Sequence[Slot],
        values: Mapping[int, torch.Tensor],
        moment: Callable[[int, Slot], torch.Tensor],
    ) -> None:
        self._settings = settings
        self._optimizer: torch.optim.Optimizer | None = None
        trained = [slot for slot in slots if slot.parameter.kind == "parameter"]
        by_group: dict[int, list[Slot]] = {}
        for slot in trained:
            by_group.setdefault(slot.parameter.group if settings.groups else 0, []).append(slot)
        if any(number >= max(1, len(settings.groups)) for number in by_group):
            raise RemoteProtocolError(
                "a parameter belongs to a group that the optimizer's settings do not have"
            )
        self._blocks = {slot.row: _blocks(values[slot.row]) for slot in trained}
        groups = settings.groups or (GroupSettings(weight_decay=settings.weight_decay),)
        self._factors = [groups[number].rate_factor for number in by_group]
        if trained:
            self._optimizer = _torch_optimizer(
                settings,
                [
                    {
                        "params": [block for slot in members for block in self._blocks[slot.row]],
                        "weight_decay": groups[number].weight_decay,
                    }
                    for number, members in by_group.items()
                ],
            )
            self._keep_state(self._optimizer, trained, moment)

    def step(self, number: int, factor: float = 1.0) -> None:
        """Step with every parameter's `.grad`. `number` counts the committed steps from 0; `factor`
        multiplies the learning rate."""
        if self._optimizer is None:
            return
        rate = self._settings.learning_rate * rate_factor(self._settings.schedule, number) * factor
        for group, own in zip(self._optimizer.param_groups, self._factors, strict=True):
            group["lr"] = rate * own
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(number)  # the optimizer itself adds one
        self._optimizer.step()

    def _keep_state(
        self,
        optimizer: torch.optim.Optimizer,
        slots: Sequence[Slot],
        moment: Callable[[int, Slot], torch.Tensor],
    ) -> None:
        """Give the optimizer its state as views into the arena."""
        keys = ("momentum_buffer",) if self._settings.kind == "sgd" else ("exp_avg", "exp_avg_sq")
        for slot in slots:
            blocks = self._blocks[slot.row]
            for block in blocks:
                if self._settings.kind != "sgd":
                    optimizer.state[block]["step"] = torch.zeros((), dtype=torch.float64)
            for number, key in enumerate(keys[: self._settings.moments]):
                for block, part in zip(blocks, parts(moment(number, slot)), strict=True):
                    optimizer.state[block][key] = part


def _blocks(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameter in blocks that are stepped separately, each with its part of the gradient."""
    assert value.grad is not None
    blocks = [part.detach() for part in parts(value.detach())]
    for block, gradient in zip(blocks, parts(value.grad), strict=True):
        block.grad = gradient
    return blocks


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the blocks of a tensor that are stepped separately. They are views, flat if there are
    several."""
    if tensor.device.type != "cpu":
        return (tensor,)
    return torch.split(tensor.view(-1), BLOCK_ELEMENTS * torch.get_num_threads())


def _torch_optimizer(settings: OptimizerSettings, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    # The plain loop over tensors, on every device, because it updates the state in place.
    if settings.kind == "sgd":
        return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, foreach=False)
    kind = torch.optim.Adam if settings.kind == "adam" else torch.optim.AdamW
    return kind(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, foreach=False)
