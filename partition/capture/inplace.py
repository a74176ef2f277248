"""In-place operators as functional ones: the new value, and the handles that may still read the changed
memory.

After a write to a tensor, its handle stands for the new value. If the tensor is a slice or a row of another
tensor (`x[:, 0] = 1`), that tensor gets a new value too. All other handles on the same memory become stale:
using one later is refused, because in torch it would have the change, and in a graph it would not.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from partition.capture.errors import CaptureRefused
from partition.capture.steps import Call, Emitter, Handle, handles_in, name_of

_aten = torch.ops.aten
Value = Callable[[Call], Handle]

_SLICE, _SELECT, _ALIAS = "aten.slice.Tensor", "aten.select.int", "aten.alias.default"
_POWER_ITERATION = ("_u", "_v", "weight_u", "weight_v")
# These change the shape of a tensor, not its content.
_SHAPES = ("unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "detach_")


def write(call: Call) -> Handle:
    """Apply an operator in place. Return the changed handle.

    Raises:
        CaptureRefused: the operator changes an input, a parameter, a buffer in training, or more than its
            first argument.
    """
    walk, schema = call.walk, call.operator._schema
    short = schema.name.removeprefix("aten::")
    written = [index for index, argument in enumerate(schema.arguments) if argument.is_write]
    if written != [0] or not isinstance(call.arguments[0], Handle):
        for handle in handles_in(list(call.keywords.values())):
            if handle.storage.kind == "buffer" and walk.trains:
                raise CaptureRefused(_moving(call.name, str(handle.storage.key)))
        raise CaptureRefused(
            f"{call.name} writes to tensors other than its first. Use its form that is not in place"
        )
    target = call.first
    if short == "detach_" and not target.needs_gradient:
        return target
    if short in _SHAPES:
        _look_differently(call, target)
        return target
    _check_writable(walk, target, call.name)
    special = IN_PLACE.get(call.name)
    if special is not None:
        value = special(call)
    else:
        value = walk.emit(functional(call.operator), *call.arguments, **call.keywords)
    if value.fake.dtype != target.fake.dtype:
        value = walk.emit(_aten.to.dtype, value, target.fake.dtype)
    _assign(walk, target, value)
    return target


def functional(operator: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Return the operator that makes a new tensor instead. Raises CaptureRefused if there is none."""
    short = operator._schema.name.removeprefix("aten::")
    plain = f"__{short[3:]}" if short.startswith("__i") and short.endswith("__") else short.removesuffix("_")
    packet = getattr(_aten, plain, None)
    found = getattr(packet, operator._overloadname, None) if packet is not None and plain != short else None
    if not isinstance(found, torch._ops.OpOverload):
        raise CaptureRefused(f"{name_of(operator)} has no form that makes a new tensor")
    return found


def _check_writable(walk: Emitter, target: Handle, name: str) -> None:
    storage = target.storage
    match storage.kind:
        case "input":
            raise CaptureRefused(f"{name} changes an input in place; clone it first")
        case "parameter":
            raise CaptureRefused(
                f"{name} changes the parameter '{storage.key}' in place, which only a "
                "step may do; keep a teacher or an average of weights outside the model, "
                "and change it between runs"
            )
        case "constant":
            raise CaptureRefused(
                f"{name} changes a tensor in place that the model holds; register it as a buffer"
            )
        case "buffer" if walk.trains:
            raise CaptureRefused(_moving(name, str(storage.key)))
    if not walk.has_gradients and any(handle.needs_gradient for handle in storage.handles):
        # Autograd would ignore this change, which no functional operator can express.
        raise CaptureRefused(f"{name} changes a tensor that has a gradient in a region without gradients")


def _moving(name: str, path: str) -> str:
    """Return the message about a buffer that changes in training and is not a statistic of a batch norm."""
    owner, _, leaf = path.rpartition(".")
    if leaf in _POWER_ITERATION:
        what = f"call model.get_submodule('{owner}').eval()" if owner else "call its eval()"
        return (
            f"spectral norm updates '{path}' in every step, but stages keep no "
            f"statistics except batch norm's; {what} before the capture, which keeps "
            "the current estimate, or use weight_norm"
        )
    return (
        f"{name} changes the buffer '{path}' in place while training, but stages keep "
        "no statistics except batch norm's; change it outside forward, or put its "
        "module in evaluation (eval()) first"
    )


def _look_differently(call: Call, target: Handle) -> None:
    operator = functional(call.operator)
    seen = call.walk.emit(operator, *call.arguments, **call.keywords)
    target.reference, target.fake = seen.reference, seen.fake
    target.needs_gradient = target.needs_gradient and operator is not _aten.detach.default
    # Its path from its base no longer shows where a write would go.
    target.view = None


def _assign(walk: Emitter, target: Handle, value: Handle) -> None:
    """Let `target`, and the tensors of which it is a part, stand for their new values."""
    fresh = [target]
    target.reference, target.needs_gradient = value.reference, value.needs_gradient
    part = target
    while part.base is not None and part.view is not None:
        whole, (name, arguments) = part.base, part.view
        if whole.stale is not None:
            break
        if name == _ALIAS:
            merged = part
        elif name == _SLICE:
            merged = walk.emit(_aten.slice_scatter.default, whole, part, *arguments)
        elif name == _SELECT:
            merged = walk.emit(_aten.select_scatter.default, whole, part, *arguments)
        else:
            break
        whole.reference, whole.needs_gradient = merged.reference, merged.needs_gradient
        fresh.append(whole)
        part = whole
    target.storage.writers.append(walk.owner)
    for handle in target.storage.handles:
        if handle not in fresh:
            handle.stale = f"module '{walk.owner}'" if walk.owner else "the model itself"


def _zero(call: Call) -> Handle:
    return _one(call.walk.emit(_aten.zeros_like.default, call.first))


def _one(handle: Any) -> Handle:
    """Return the result of an operator with one result."""
    assert isinstance(handle, Handle)
    return handle


def _fill(call: Call) -> Handle:
    if isinstance(call.arguments[1], Handle):
        return _copy(call)
    return _one(call.walk.emit(_aten.full_like.default, call.first, call.arguments[1]))


def _copy(call: Call) -> Handle:
    walk, target = call.walk, call.first
    source: Handle = call.arguments[1]
    if target.storage.kind == "buffer":
        return _one(walk.emit(_aten.copy.default, target, source))
    if source.fake.dtype != target.fake.dtype:
        source = walk.emit(_aten.to.dtype, source, target.fake.dtype)
    if source.fake.shape != target.fake.shape:
        return _one(walk.emit(_aten.expand.default, source, list(target.fake.shape)))
    return walk.alias(source, copy=True)


def _uniform(call: Call) -> Handle:
    low, high = _two(call, ("from", "to"), (0.0, 1.0))
    return _scaled(call, _aten.rand_like.default, high - low, low)


def _normal(call: Call) -> Handle:
    mean, deviation = _two(call, ("mean", "std"), (0.0, 1.0))
    return _scaled(call, _aten.randn_like.default, deviation, mean)


def _two(call: Call, names: tuple[str, str], defaults: tuple[float, float]) -> tuple[float, float]:
    if call.keywords.get("generator") is not None:
        raise CaptureRefused(f"{call.name} is given a generator; leave it out")
    given = call.arguments[1:]
    first, second = (
        given[index] if index < len(given) else call.keywords.get(name, default)
        for index, (name, default) in enumerate(zip(names, defaults, strict=True))
    )
    return first, second


def _scaled(call: Call, operator: Any, factor: float, offset: float) -> Handle:
    drawn = call.walk.emit(operator, call.first)
    if factor != 1:
        drawn = call.walk.emit(_aten.mul.Tensor, drawn, factor)
    return _one(call.walk.emit(_aten.add.Tensor, drawn, offset) if offset != 0 else drawn)


def _exponential(call: Call) -> Handle:
    rate = call.arguments[1] if len(call.arguments) > 1 else call.keywords.get("lambd", 1.0)
    return _one(call.walk.emit(_aten.exponential.default, call.first, rate))


def _bernoulli(call: Call) -> Handle:
    probability = call.arguments[1] if len(call.arguments) > 1 else call.keywords.get("p", 0.5)
    return _one(call.walk.emit(_aten.bernoulli.p, call.first, probability))


IN_PLACE: Mapping[str, Value] = MappingProxyType(
    {
        "aten.zero_.default": _zero,
        "aten.fill_.Scalar": _fill,
        "aten.fill_.Tensor": _fill,
        "aten.copy_.default": _copy,
        "aten.uniform_.default": _uniform,
        "aten.normal_.default": _normal,
        "aten.bernoulli_.float": _bernoulli,
        "aten.exponential_.default": _exponential,
    }
)
"""In-place operators whose functional form has a different name or different arguments."""
