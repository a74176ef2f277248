"""The parts of a graph while it is being cleaned: steps, and the tensors that their operators take.

A `Step` is one functional operator with its arguments already in the schema's order; `lower` numbers them. A
`Handle` is a tensor as the model's code sees it: something that has a storage, may have views, and can be
changed in place. Changing it makes a step and lets the handle stand for the new value. So handles change and
steps never do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from partition.capture.errors import CaptureRefused
from partition.model.graph import DataType, FormatName, TypeName

DATA_TYPES: Mapping[torch.dtype, DataType] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}

Kind = Literal["input", "parameter", "buffer", "constant", "step"]


@dataclass(frozen=True)
class Leaf:
    """An input by number, or a parameter, buffer or constant by path."""

    kind: Kind
    key: int | str


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """One operator. Tensors among the arguments are references; integers that vary are `Symbolic`."""

    operator: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    results: tuple[Tensor, ...]
    owner: str


@dataclass(frozen=True)
class Made:
    """One result of a step."""

    step: Step
    index: int


@dataclass(frozen=True)
class Symbolic:
    """An integer computed from sizes, as a sympy expression."""

    expression: Any


Reference = Leaf | Made


@dataclass
class TraceStorage:
    """Memory that several handles may share. `writers` are the modules that changed it."""

    kind: Kind
    key: int | str = ""
    handles: list["Handle"] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Handle:
    """A tensor: a reference to its current value, a fake tensor of its type, and its storage.

    `view` says how it was derived from `base`: the operator's name and its further arguments. `stale` names
    the module that changed the memory through a different handle.
    """

    reference: Reference
    fake: Tensor
    needs_gradient: bool
    storage: TraceStorage
    base: "Handle | None" = None
    view: tuple[str, tuple[Any, ...]] | None = None
    stale: str | None = None

    def __post_init__(self) -> None:
        self.storage.handles.append(self)


class Emitter(Protocol):
    """The interface of `partition.capture.fx_pass.Walk` for rewrites; the methods are documented there."""

    owner: str
    has_gradients: bool

    @property
    def trains(self) -> bool: ...

    @property
    def has_loss(self) -> bool: ...

    def emit(self, operator: Any, *arguments: Any, fakes: Any = None, **keywords: Any) -> Any: ...

    def alias(self, handle: Handle, *, copy: bool = False) -> Handle: ...


@dataclass(frozen=True)
class Call:
    """One operator of torch's graph, with handles for tensors. `fakes` are its results' types, if known."""

    walk: Emitter
    operator: Any
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    fakes: Any

    @property
    def name(self) -> str:
        """The full name, such as `aten.add.Tensor`."""
        return name_of(self.operator)

    @property
    def first(self) -> Handle:
        """The first argument, on which most operators work."""
        handle: Handle = self.arguments[0]
        return handle

    def emit(self, operator: Any, *arguments: Any, **keywords: Any) -> Handle:
        """Emit a step with this call's result, which is a single tensor."""
        handle: Handle = self.walk.emit(operator, *arguments, fakes=self.fakes, **keywords)
        return handle


def name_of(operator: Any) -> str:
    """Return the full name, such as `aten.add.Tensor`; for a function that is not an operator of torch, its
    own name."""
    if isinstance(operator, torch._ops.OpOverload):
        return f"{operator._schema.name.replace('::', '.')}.{operator._overloadname}"
    return str(getattr(operator, "__name__", operator))


def made(step: Step, index: int, needs_gradient: bool, base: Handle | None = None) -> Handle:
    """Return the handle of one result, with its own memory or that of its base."""
    fake = step.results[index]
    floats = fake.is_floating_point() or fake.is_complex()
    storage = base.storage if base is not None else TraceStorage("step")
    return Handle(Made(step, index), fake, needs_gradient and floats, storage, base)


def handles_in(value: Any) -> Iterator[Handle]:
    """Yield the handles in an argument, including those in lists."""
    if isinstance(value, Handle):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from handles_in(item)


def replaced(value: Any, function: Any) -> Any:
    """Return an argument with `function` applied to each handle in it."""
    if isinstance(value, Handle):
        return function(value)
    if isinstance(value, list | tuple):
        return [replaced(item, function) for item in value]
    return value


def data_type(dtype: torch.dtype) -> DataType:
    """Return our name for a type. Raises CaptureRefused if a graph cannot have this type."""
    found = DATA_TYPES.get(dtype)
    if found is None:
        raise CaptureRefused(f"tensors of type {dtype} cannot be in a graph")
    return found


def bound(
    operator: torch._ops.OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """Return arguments in the schema's order without trailing defaults, keyword-only ones by name and without
    defaults.

    Devices, layouts and pinning are left out, because the stage chooses those.
    """
    positional: list[Any] = []
    defaults: list[bool] = []
    named: list[tuple[str, Any]] = []
    for index, argument in enumerate(operator._schema.arguments):
        if index < len(arguments):
            value = arguments[index]
        elif argument.name in keywords:
            value = keywords[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise CaptureRefused(f"{name_of(operator)} lacks its argument '{argument.name}'")
        is_default = argument.has_default_value() and _same(value, argument.default_value)
        if argument.kwarg_only:
            if argument.name in ("device", "layout", "pin_memory", "non_blocking") or is_default:
                continue
            if argument.name == "generator":
                raise CaptureRefused(f"{name_of(operator)} is given a generator; leave it out")
            named.append((argument.name, _fitted(value, argument)))
        else:
            positional.append(_fitted(value, argument))
            defaults.append(is_default)
    while defaults and defaults[-1]:
        defaults.pop()
        positional.pop()
    return tuple(positional), tuple(named)


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, Handle | torch.SymInt) or isinstance(default, Tensor):
        return False
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return len(value) == len(default) and all(map(_same, value, default))
    return type(value) is type(default) and bool(value == default)


def _fitted(value: Any, argument: Any) -> Any:
    """Return a number as a list if the schema requires one, an integer as a float if it requires that."""
    kind = str(argument.type)
    if "List[" in kind and value is not None and not isinstance(value, list | tuple):
        return [value]
    if kind in ("float", "Optional[float]") and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def stored(value: Any) -> Any:
    """Return an argument in the form in which a step keeps it: references for handles, our names for types
    and formats."""
    match value:
        case Handle():
            return value.reference
        case torch.SymInt():
            return Symbolic(value.node.expr)
        case torch.SymFloat() | torch.SymBool():
            raise CaptureRefused(f"the number {value} depends on sizes and is not an integer")
        case torch.dtype():
            return TypeName(data_type(value))
        case torch.memory_format():
            # channels_last only affects speed on this machine.
            return FormatName("preserve" if value == torch.preserve_format else "contiguous")
        case list() | tuple():
            return tuple(stored(item) for item in value)
        case None | bool() | int() | float() | str():
            return value
    raise CaptureRefused(f"an argument of type {type(value).__name__} cannot be in a graph")
