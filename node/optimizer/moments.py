"""Moments of torch optimizers, as tensors that are averaged with the parameters.

A moment is a floating-point tensor with its parameter's shape, in an optimizer's state. The first step
creates it. Parameters without a gradient so far have none, and zeros are used instead.
"""

from collections.abc import Sequence

import torch

from node.optimizer.layout import FLOATING, Layout

SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf"})
"""Moments that must not be negative, even after rounding and late steps."""


def moments_of(
    parameters: Layout, optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[str, torch.Tensor]]:
    """Return the moments of all parameters in their order, by name; missing ones are zeros."""
    keys: dict[str, torch.dtype] = {}
    states = {id(parameter): state for inner in optimizers for parameter, state in inner.state.items()}
    for slot in parameters.slots:
        for key, value in states.get(id(slot.tensor), {}).items():
            if (
                isinstance(value, torch.Tensor)
                and value.dtype in FLOATING
                and value.shape == slot.tensor.shape
                and value.dim()
            ):
                keys[key] = value.dtype
    found: list[tuple[str, torch.Tensor]] = []
    for key in sorted(keys):
        for slot in parameters.slots:
            value = states.get(id(slot.tensor), {}).get(key)
            if value is None or value.shape != slot.tensor.shape:
                value = torch.zeros_like(slot.tensor, dtype=keys[key])
            found.append((f"{slot.name}/{key}", value))
    return found


def keep_above_zero(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Set negative values to zero in moments that are squares."""
    with torch.no_grad():
        for name, tensor in named:
            if name.rpartition("/")[2] in SQUARES:
                tensor.clamp_(min=0)
