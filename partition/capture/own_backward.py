"""The check of a model's own autograd functions: each function's backward against the gradient of its
forward.

A proof compares the gradients of the whole model at one point. A custom backward may be right at that point
and wrong at others, for example where a router is nearly undecided between two experts. So every function
that the model calls is also compared separately: at the values with which it was called, and near them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

CALLS_MAX = 8
"""Maximum number of calls of one function that are compared, because layers are alike."""
TOLERANCE = 1e-4
"""Relative tolerance for each gradient. It allows for constants that a backward has rounded, for example to
eight digits."""
DISTANCES = (0.0, 0.5, 4.0)
"""Distances of the compared points from the values with which the function was called, in units of their
spread."""
_SEED = 11


@contextmanager
def compared(found: list[str]) -> Iterator[None]:
    """Record each autograd function whose own backward is not the gradient of its forward."""
    apply = torch.autograd.Function.__dict__["apply"]
    calls: dict[Any, int] = {}

    def watch(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        bare = apply.__get__(None, cls)
        calls[cls] = calls.get(cls, 0) + 1
        is_own = not cls.__module__.startswith("torch.")
        if is_own and not keywords and calls[cls] <= CALLS_MAX and torch.is_grad_enabled():
            difference = _difference(cls, bare, arguments)
            if difference > TOLERANCE:
                found.append(
                    f"the autograd function {cls.__name__}: its own backward differs from the gradient of "
                    f"its forward by {difference:.1e}"
                )
        return bare(*arguments, **keywords)

    function: Any = torch.autograd.Function
    function.apply = classmethod(watch)
    try:
        yield
    finally:
        function.apply = apply


class _Context:
    """A stand-in for autograd's context with the methods that a forward may call. They do nothing, because
    here autograd differentiates the forward's own operators."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count

    def save_for_backward(self, *_: Any) -> None: ...

    def save_for_forward(self, *_: Any) -> None: ...

    def mark_dirty(self, *_: Any) -> None: ...

    def mark_non_differentiable(self, *_: Any) -> None: ...

    def set_materialize_grads(self, _: bool) -> None: ...


def _difference(cls: Any, bare: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Return the largest relative difference of a gradient; 0 if it cannot be determined."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    if any(type(each) not in (Tensor, nn.Parameter) or each.is_meta for each in tensors):
        return 0.0

    def forward(*given: Any) -> Any:
        if cls.setup_context is not torch.autograd.Function.setup_context:
            return cls.forward(*given)
        return cls.forward(_Context(len(given)), *given)

    worst = 0.0
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        for distance in DISTANCES:
            torch.manual_seed(_SEED)
            point = [_moved(each, distance) if distance else each for each in arguments]
            try:
                own, plain = _gradients(bare, point), _gradients(forward, point)
            except Exception:  # the user's code may fail at a point for which it was not written
                own = plain = []
            worst = max(worst, *map(_distance, own, plain), 0.0)
    return worst


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the relative distance; 0 if either is not finite."""
    scale = max(float(one.norm()), float(other.norm()))
    found = float((one - other).norm()) / (scale or 1.0)
    return found if isfinite(found) else 0.0


def _moved(value: Any, distance: float) -> Any:
    """Return values moved by `distance` times their spread."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    spread = float(value.detach().double().std(correction=0)) if value.numel() else 0.0
    moved = value.detach() + torch.randn_like(value) * distance * (spread or 0.5)
    return moved.requires_grad_(value.requires_grad)


def _gradients(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Tensor]:
    """Return the gradients of a signed sum of the results with respect to those arguments that need
    gradients."""
    leaves, given = [], []
    for each in arguments:
        if isinstance(each, Tensor):
            leaf = each.detach().clone().requires_grad_(each.requires_grad)
            leaves.append(leaf)
            # A function may change the argument in place, which autograd forbids for leaves.
            given.append(leaf.clone() if leaf.requires_grad else leaf)
        else:
            given.append(each)
    torch.manual_seed(_SEED)
    results = function(*given)
    results = results if isinstance(results, list | tuple) else (results,)
    total: Any = 0.0
    for result in results:
        if isinstance(result, Tensor) and result.requires_grad:
            signs = torch.rand(
                result.shape, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64
            )
            total = total + (result * (signs - 0.4).to(result.dtype)).sum()
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not isinstance(total, Tensor) or not total.requires_grad:
        return [torch.zeros_like(leaf) for leaf in wanted]
    made = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(wanted, made, strict=True)]
