"""The operators that initialise a tensor, as steps of a recipe: data for `partition.capture.skeleton`.

Makers return a new tensor with values, fills set all values of an existing one, changes combine its values
with constants, copies take another tensor's values. Any other operator cannot be a step of a recipe.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from partition.model.graph import RECIPE_STEPS_MAX, FillStep

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Maker = Callable[[Any, Arguments, Keywords], FillStep | None]

_aten = torch.ops.aten
_LARGEST = sys.float_info.max
"""Stands for a side on which nothing is clamped."""


@dataclass
class StorageHistory:
    """The history of one storage so far. `reason` says why it has no recipe; None if it has one."""

    shape: tuple[int, ...]
    steps: tuple[FillStep, ...] = ()
    reason: str | None = "it was never initialised"
    parameters: list[nn.Parameter] = field(default_factory=list)
    """The meta parameters that stand for this storage."""

    def fill(self, step: FillStep) -> None:
        """Replace the history by a fill."""
        self.steps, self.reason = (step,), None

    def change(self, *steps: FillStep) -> None:
        if self.reason is None:
            self.steps = (*self.steps, *steps)
        if len(self.steps) > RECIPE_STEPS_MAX:
            self.spoil(f"it is initialised in more than {RECIPE_STEPS_MAX} steps")

    def spoil(self, reason: str) -> None:
        """Mark the storage as having no recipe until the next fill."""
        self.steps, self.reason = (), reason

    def copied(self, shape: tuple[int, ...]) -> "StorageHistory":
        """Return the same history for a second storage."""
        return StorageHistory(shape, self.steps, self.reason)

    @property
    def constant(self) -> float | None:
        """Return the number that every element equals, if known."""
        is_constant = self.reason is None and len(self.steps) == 1 and self.steps[0].kind == "constant"
        return self.steps[0].first if is_constant else None


def truncated_normal(
    tensor: torch.Tensor,
    mean: float,
    std: float,
    a: float,
    b: float,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """`nn.init.trunc_normal_` computed by the inverse of the distribution, because torch's own looks at
    values to reject them.

    The distribution is the same.
    """
    low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
    with torch.no_grad():
        tensor.uniform_(low, high, generator=generator).erfinv_()
        return tensor.mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)


def number(value: Any) -> float | None:
    """Return a finite number, or a tensor with a single one, as a float; None for anything else."""
    is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"
    if not (is_scalar or isinstance(value, bool | int | float)):
        return None
    return float(value) if math.isfinite(value) else None


def mutated(func: Any, args: Arguments, kwargs: Keywords) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the arguments to which an operator writes, elements of lists one by one."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        for each in given if isinstance(given, list | tuple) else (given,):
            if isinstance(each, torch.Tensor):
                yield argument.name, each


def covers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers all of its storage, in any order."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def row_of(tensor: torch.Tensor, shape: tuple[int, ...]) -> int | None:
    """Return which row of a tensor of `shape` this view is; None if it is anything else."""
    size = math.prod(shape[1:])
    if not shape or not size or tensor.numel() != size or not tensor.is_contiguous():
        return None
    row, rest = divmod(int(tensor.storage_offset()), size)
    return row if rest == 0 else None


def changes(func: Any, args: Arguments, kwargs: Keywords) -> tuple[FillStep, ...] | None:
    """Return the recipe steps that an operator applies to its first argument; None if it is not one of these.

    The caller knows whether the operator is in place.
    """
    kind = _CHANGES.get(func.overloadpacket)
    if kind is None or kwargs.get("rounding_mode") is not None:
        return None
    if kind == "clamp":
        bounds = [_argument(func, args, kwargs, side) for side in ("min", "max")]
        low, high = (given if given is None else number(given) for given in bounds)
        if any(side is None and given is not None for side, given in zip((low, high), bounds, strict=True)):
            return None
        return (FillStep("clamp", -_LARGEST if low is None else low, _LARGEST if high is None else high),)
    operand = 0.0 if len(args) < 2 else number(args[1])
    alpha = number(kwargs.get("alpha", 1))
    if operand is None or alpha is None:
        return None
    match kind:
        case "multiply":
            return (FillStep("multiply", operand),)
        case "divide":
            return (FillStep("multiply", 1 / operand),) if operand else None
        case "add":
            return (FillStep("add", operand * alpha),)
        case "subtract":
            return (FillStep("add", -operand * alpha),)
        case "negate":
            return (FillStep("multiply", -1.0),)
        case _:
            return (FillStep("erfinv"),)


def _argument(func: Any, args: Arguments, kwargs: Keywords, name: str) -> Any:
    """Return the value of a named argument, or its default."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


def _step(kind: Any, *numbers: float) -> Maker:
    """Return a function that always makes the same step."""
    return lambda func, args, kwargs: FillStep(kind, *numbers)  # noqa: ARG005 - the form of all makers


def _given(kind: Any, *names: str) -> Maker:
    """Return a function that makes a step from the operator's arguments with these names."""

    def make(func: Any, args: Arguments, kwargs: Keywords) -> FillStep | None:
        found = [number(_argument(func, args, kwargs, name)) for name in names]
        known = [each for each in found if each is not None]
        return FillStep(kind, *known) if len(known) == len(found) else None

    return make


def _nothing(func: Any, args: Arguments, kwargs: Keywords) -> FillStep | None:  # noqa: ARG001
    return None


MAKERS: dict[Any, Maker] = {
    _aten.empty: _nothing,
    _aten.empty_like: _nothing,
    _aten.empty_strided: _nothing,
    _aten.new_empty: _nothing,
    _aten.new_empty_strided: _nothing,
    _aten.zeros: _step("constant", 0.0),
    _aten.zeros_like: _step("constant", 0.0),
    _aten.new_zeros: _step("constant", 0.0),
    _aten.ones: _step("constant", 1.0),
    _aten.ones_like: _step("constant", 1.0),
    _aten.new_ones: _step("constant", 1.0),
    _aten.full: _given("constant", "fill_value"),
    _aten.full_like: _given("constant", "fill_value"),
    _aten.new_full: _given("constant", "fill_value"),
    _aten.scalar_tensor: _given("constant", "s"),
    _aten.rand: _step("uniform", 0.0, 1.0),
    _aten.rand_like: _step("uniform", 0.0, 1.0),
    _aten.randn: _step("normal", 0.0, 1.0),
    _aten.randn_like: _step("normal", 0.0, 1.0),
    _aten.normal: _given("normal", "mean", "std"),
}
FILLS: dict[Any, Maker] = {
    _aten.uniform_: _given("uniform", "from", "to"),
    _aten.normal_: _given("normal", "mean", "std"),
    _aten.zero_: _step("constant", 0.0),
    _aten.fill_: _given("constant", "value"),
}
COPIES = frozenset((_aten.clone, _aten._to_copy, _aten.lift_fresh, _aten.lift_fresh_copy))
_CHANGES: dict[Any, str] = {
    _aten.mul: "multiply",
    _aten.mul_: "multiply",
    _aten.div: "divide",
    _aten.div_: "divide",
    _aten.add: "add",
    _aten.add_: "add",
    _aten.sub: "subtract",
    _aten.sub_: "subtract",
    _aten.neg: "negate",
    _aten.neg_: "negate",
    _aten.erfinv: "erfinv",
    _aten.erfinv_: "erfinv",
    _aten.clamp: "clamp",
    _aten.clamp_: "clamp",
}
