"""Arguments of operators: torch's own schema of every overload, and limits on what an unknown peer may write.

A node's arguments are checked against the overload's real `FunctionSchema`: their number and kinds, and the
number of results. There are additional limits by the argument's name, for two reasons. A native kernel trusts
some integers (a stride of zero divides by zero in C++, which kills the process instead of raising an
exception), and some operators loop in Python as often as an argument says. Such arguments must be plain
integers within limits, and never sizes, which could be different for the next micro-batch.

No argument can be a generator, a device or a layout; the stage chooses these.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isnan
from types import MappingProxyType
from typing import Any

import torch

from crypto.errors import RemoteProtocolError
from partition.execute.attention import ATTEND as ATTEND_CALL
from partition.model.graph import (
    DIMENSIONS_MAX,
    INTEGER_MAX,
    ITEMS_MAX,
    NODES_MAX,
    Argument,
    ConstantValue,
    FormatName,
    GraphNode,
    Item,
    Items,
    ParameterValue,
    Size,
    StateValue,
    TypeName,
    Value,
)
from partition.model.operators import ATTEND, OPERATORS, WHOLE_WINDOW

SIDE_MAX = 2**40
"""Maximum side of a tensor, as in `TensorType`."""
KERNEL_MAX = 2**16
"""Maximum of strides, windows, dilations, groups, paddings. A spectrogram's window is a few thousand."""
EXTENT_MAX = 2**31
ORDER_MAX = 4
"""Maximum order of `diff`, which calls itself that many times."""
DECIMALS_MAX = 15
SCALE_MIN, SCALE_MAX = 1e-4, 1e4
"""Limits for the scale of an interpolation, because its kernels convert quotients by the scale to
integers."""
VALUE_MAX = 2**53

_TENSORS = (Value, ParameterValue, ConstantValue, StateValue)

_DIMENSION = (-DIMENSIONS_MAX - 1, DIMENSIONS_MAX)
_ENUMERATION = (0, 2)
_POSITIVE = (1, KERNEL_MAX)

# Plain integers only: they shape a kernel, or determine how often something loops.
_FIXED: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "stride": _POSITIVE,
        "dilation": _POSITIVE,
        "groups": _POSITIVE,
        "num_groups": _POSITIVE,
        "upscale_factor": _POSITIVE,
        "downscale_factor": _POSITIVE,
        "divisor_override": (1, EXTENT_MAX),
        "padding": (0, KERNEL_MAX),
        "output_padding": (0, KERNEL_MAX),
        "chunks": (1, ITEMS_MAX),
        "step": (1, SIDE_MAX),
        "num_classes": (1, EXTENT_MAX),
        "decimals": (-DECIMALS_MAX, DECIMALS_MAX),
        "dim": _DIMENSION,
        "dim0": _DIMENSION,
        "dim1": _DIMENSION,
        "dim2": _DIMENSION,
        "dims": _DIMENSION,
        "axis0": _DIMENSION,
        "axis1": _DIMENSION,
        "dimension": _DIMENSION,
        "start_dim": _DIMENSION,
        "end_dim": _DIMENSION,
        "source": _DIMENSION,
        "destination": _DIMENSION,
        "layer": (0, NODES_MAX),
        "window": (WHOLE_WINDOW, EXTENT_MAX),
        "reduction": _ENUMERATION,
        "compute_mode": _ENUMERATION,
        "interpolation_mode": _ENUMERATION,
        "padding_mode": _ENUMERATION,
    }
)
# Integers that may depend on sizes.
_VARYING: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "kernel_size": _POSITIVE,
        "size": (-1, SIDE_MAX),
        "shape": (-1, SIDE_MAX),
        "sizes": (-1, SIDE_MAX),
        "normalized_shape": (1, SIDE_MAX),
        "output_size": (1, EXTENT_MAX),
        "repeats": (0, EXTENT_MAX),
        "split_size": (0, SIDE_MAX),
        "split_sizes": (0, SIDE_MAX),
        "length": (0, SIDE_MAX),
        "index": (-SIDE_MAX, SIDE_MAX),
        "padding_idx": (-1, SIDE_MAX),
        "pad": (-EXTENT_MAX, EXTENT_MAX),
        "shifts": (-EXTENT_MAX, EXTENT_MAX),
        "offset": (-EXTENT_MAX, EXTENT_MAX),
        "diagonal": (-EXTENT_MAX, EXTENT_MAX),
        "n": (0, EXTENT_MAX),
        "s": (1, EXTENT_MAX),
        "m": (0, EXTENT_MAX),
        "row": (0, EXTENT_MAX),
        "col": (0, EXTENT_MAX),
        "k": (0, SIDE_MAX),
        "steps": (0, SIDE_MAX),
        "low": (-VALUE_MAX, VALUE_MAX),
        "high": (-VALUE_MAX, VALUE_MAX),
    }
)
_OF_OPERATORS: Mapping[tuple[str, str], tuple[int, int]] = MappingProxyType(
    {
        ("aten.diff.default", "n"): (1, ORDER_MAX),
        ("aten.split.Tensor", "split_size"): (1, SIDE_MAX),
        ("aten.embedding_bag.padding_idx", "mode"): _ENUMERATION,
        ("aten.im2col.default", "kernel_size"): _POSITIVE,
        ("aten.randperm.default", "n"): (1, EXTENT_MAX),
    }
)
_FLOATS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "dropout_p": (0.0, 1.0),
        "momentum": (0.0, 1.0),
        "label_smoothing": (0.0, 1.0),
        "softcap": (0.0, 1e300),
        "eps": (0.0, 1e300),
        "scales": (SCALE_MIN, SCALE_MAX),
        "scales_d": (SCALE_MIN, SCALE_MAX),
        "scales_h": (SCALE_MIN, SCALE_MAX),
        "scales_w": (SCALE_MIN, SCALE_MAX),
        "scale_factors": (SCALE_MIN, SCALE_MAX),
    }
)
_PROBABILITY = ("dropout", "feature_dropout", "alpha_dropout", "bernoulli")
_TEXTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "approximate": ("none", "tanh"),
        "indexing": ("ij", "xy"),
        # For scatter_reduce; the gradient of "prod" is not reliable enough for a step.
        "reduce": ("sum", "mean", "amax", "amin"),
        "mode": ("constant", "reflect", "replicate", "circular"),
        "padding": ("same", "valid"),
        "rounding_mode": ("floor", "trunc"),
        "side": ("left", "right"),
        "norm": ("forward", "backward", "ortho"),
    }
)
_EQUATION = re.compile(r"[a-zA-Z.]{0,11}(,[a-zA-Z.]{0,11}){0,7}(->[a-zA-Z.]{0,11})?\Z")
# Sparse gradients do not fit into an arena; `_softmax`'s flag is for accelerators.
_NEVER_TRUE = ("sparse", "scale_grad_by_freq", "half_to_float", "pin_memory")
_NEVER_GIVEN = ("path", "sorter", "generator", "device", "layout")


@dataclass(frozen=True)
class Rule:
    """One argument of an overload: its kind without Optional, and its limits.

    `length` is that of a list whose length torch fixes. `fixed`: never computed from sizes.
    """

    name: str
    kind: str
    is_optional: bool
    is_required: bool
    length: int | None
    bounds: tuple[float, float] | None
    fixed: bool


@dataclass(frozen=True)
class Signature:
    """An overload: the arguments by position, the keyword-only ones by name, and how many tensors it returns.

    `results` is None if it returns a list whose length depends on the arguments.
    """

    name: str
    call: Callable[..., Any]
    positional: tuple[Rule, ...]
    keywords: Mapping[str, Rule]
    results: int | None


@cache
def signature(name: str) -> Signature:
    """Return the signature of an allow-listed operator. Raises RemoteProtocolError if it is not on the
    list."""
    if name not in OPERATORS:
        raise RemoteProtocolError(f"the operator {name} is not allowed")
    _, operator, overload = name.split(".")
    call = ATTEND_CALL if name == ATTEND else getattr(getattr(torch.ops.aten, operator), overload)
    rules = [(_rule(name, argument), argument.kwarg_only) for argument in call._schema.arguments]
    returns = [str(result.type) for result in call._schema.returns]
    return Signature(
        name,
        call,
        tuple(rule for rule, is_keyword in rules if not is_keyword),
        MappingProxyType({rule.name: rule for rule, is_keyword in rules if is_keyword}),
        None if "List[Tensor]" in returns else len(returns),
    )


def _rule(operator: str, argument: Any) -> Rule:
    kind = str(argument.real_type)
    is_optional = kind.startswith("Optional[")
    if is_optional:
        kind = kind.removeprefix("Optional[").removesuffix("]")
    name = argument.name
    bounds: tuple[float, float] | None = _OF_OPERATORS.get((operator, name))
    if kind in ("int", "List[int]"):
        bounds = bounds or _FIXED.get(name) or _VARYING.get(name)
    elif kind in ("float", "List[float]"):
        is_probability = name == "p" and operator.split(".")[1] in _PROBABILITY
        bounds = (0.0, 1.0) if is_probability else _FLOATS.get(name)
    return Rule(
        name,
        kind,
        is_optional,
        not argument.has_default_value(),
        argument.N,
        bounds,
        name in _FIXED,
    )


def check_node(node: GraphNode, name: str, sizes: Sequence[int]) -> Signature:
    """Return the signature of a node, after checking the kinds and limits of its arguments.

    `sizes` is the evaluated table of expressions. Raises RemoteProtocolError with the argument's name.
    """
    wanted = signature(name)
    if len(node.arguments) > len(wanted.positional):
        raise RemoteProtocolError(f"{len(node.arguments)} arguments, at most {len(wanted.positional)}")
    for rule, argument in zip(wanted.positional, node.arguments, strict=False):
        _check(rule, argument, sizes, is_first=rule is wanted.positional[0])
    for rule in wanted.positional[len(node.arguments) :]:
        if rule.is_required:
            raise RemoteProtocolError(f"argument '{rule.name}' is missing")
    given = dict(node.keywords)
    if len(given) != len(node.keywords):
        raise RemoteProtocolError("a keyword is given twice")
    for key, argument in node.keywords:
        if key not in wanted.keywords:
            raise RemoteProtocolError(f"no keyword '{key}'")
        _check(wanted.keywords[key], argument, sizes, is_first=False)
    for key, rule in wanted.keywords.items():
        if rule.is_required and key not in given:
            raise RemoteProtocolError(f"keyword '{key}' is missing")
    if wanted.results is not None and len(node.outputs) != wanted.results:
        raise RemoteProtocolError(f"{len(node.outputs)} results where {wanted.results} come")
    _check_flips(node, wanted)
    return wanted


def _check_flips(node: GraphNode, wanted: Signature) -> None:
    """Check that the arguments that evaluation replaces are present."""
    for index, _ in OPERATORS[wanted.name].evaluate:
        missing = wanted.positional[len(node.arguments) : index]
        if any(rule.is_required for rule in missing):
            raise RemoteProtocolError(f"argument '{wanted.positional[index].name}' is missing")


def _check(rule: Rule, argument: Argument, sizes: Sequence[int], *, is_first: bool) -> None:
    if argument is None:
        if not rule.is_optional:
            raise RemoteProtocolError(f"argument '{rule.name}' is None")
        return
    if rule.name in _NEVER_GIVEN or (rule.name in _NEVER_TRUE and argument is not False):
        raise RemoteProtocolError(f"argument '{rule.name}' is chosen by the stage")
    if not _fits(rule, argument, sizes, is_first):
        raise RemoteProtocolError(f"argument '{rule.name}' is not an allowed {rule.kind}: {_shown(argument)}")


def _fits(rule: Rule, argument: Argument, sizes: Sequence[int], is_first: bool) -> bool:
    match rule.kind:
        case "Tensor":
            # torch converts a number to a tensor: `x * 2` is mul.Tensor. Only the first argument must be a
            # tensor.
            return isinstance(argument, _TENSORS) or (
                not is_first and not isinstance(argument, Items) and _is_number(argument, sizes)
            )
        case "int":
            return not isinstance(argument, Items) and _is_integer(rule, argument, sizes)
        case "float":
            return not isinstance(argument, Items) and _is_float(rule, argument)
        case "number":
            return not isinstance(argument, Items) and _is_number(argument, sizes)
        case "bool":
            return isinstance(argument, bool)
        case "str":
            return isinstance(argument, str) and _is_text(rule, argument)
        case "ScalarType":
            return isinstance(argument, TypeName)
        case "MemoryFormat":
            return isinstance(argument, FormatName)
    return _fits_list(rule, argument, sizes)


def _fits_list(rule: Rule, argument: Argument, sizes: Sequence[int]) -> bool:
    if not isinstance(argument, Items):
        # torch repeats a single integer if the length of the list is fixed.
        return rule.kind == "List[int]" and rule.length is not None and _is_integer(rule, argument, sizes)
    items = argument.items
    match rule.kind:
        case "List[Tensor]":
            return bool(items) and all(isinstance(item, _TENSORS) for item in items)
        case "List[Optional[Tensor]]":
            return len(items) <= DIMENSIONS_MAX and all(
                item is None or isinstance(item, _TENSORS) for item in items
            )
        case "List[int]":
            return _is_length(rule, len(items)) and all(_is_integer(rule, item, sizes) for item in items)
        case "List[float]":
            return len(items) <= DIMENSIONS_MAX and all(_is_float(rule, item) for item in items)
    return False


def _is_length(rule: Rule, length: int) -> bool:
    """Return whether a list of integers may have this length. `split_with_sizes` has one integer for each
    piece; a pool's stride may be empty, in which case it equals the window."""
    if rule.name in ("split_size", "split_sizes"):
        return 1 <= length <= ITEMS_MAX
    if rule.length is None or rule.length == 1:
        return length <= 2 * DIMENSIONS_MAX
    return length in (1, rule.length) or (length == 0 and rule.name == "stride")


def _is_integer(rule: Rule, item: Item, sizes: Sequence[int]) -> bool:
    if isinstance(item, Size):
        if rule.fixed or item.row >= len(sizes):
            return False
        item = sizes[item.row]
    if not isinstance(item, int) or isinstance(item, bool):
        return False
    low, high = rule.bounds or (-INTEGER_MAX, INTEGER_MAX)
    return low <= item <= high


def _is_float(rule: Rule, item: Item) -> bool:
    if not isinstance(item, int | float) or isinstance(item, bool) or isnan(item):
        return False
    return rule.bounds is None or rule.bounds[0] <= item <= rule.bounds[1]


def _is_number(item: Item, sizes: Sequence[int]) -> bool:
    if isinstance(item, Size):
        return item.row < len(sizes)
    return isinstance(item, bool | int) or (isinstance(item, float) and not isnan(item))


def _is_text(rule: Rule, text: str) -> bool:
    if rule.name == "equation":
        return bool(_EQUATION.match(text))
    return text in _TEXTS.get(rule.name, ())


def _shown(argument: Argument) -> str:
    """Return an argument for an error message, shortened, because an unknown peer wrote it."""
    text = ascii(argument) if not isinstance(argument, Items) else ascii(argument.items[:8])
    return text if len(text) <= 80 else text[:80] + "..."
