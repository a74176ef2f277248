"""A model without its values: parameters on the meta device, and how they would have been initialised.

    with skeleton():
        model = LlamaForCausalLM(config)      # 8B parameters, no memory

Every parameter registered inside has a shape but no values. Its initialisation (`nn.init`,
`reset_parameters`, `_init_weights`, `weight.data.normal_()`) is recorded as a Recipe, so that each stage
draws its own parameters (`partition.execute.values`) and no machine ever holds them all. Buffers keep their
values: a rotary table or a mask is part of the model.

Recorded are operators that fill or change a whole tensor with numbers, and the zeroing of one row. Anything
else that writes to a parameter (weights read from a file, `orthogonal_`, a part of a bias) makes it
*unrecorded*: `recipe_of` is None, `unrecorded` says why, and the model must be built with real values.

A dispatch mode observes all operators, keyed by storage, so neither the order of initialisation and
registration nor the function used matters.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from partition.capture.initialisers import (
    COPIES,
    FILLS,
    MAKERS,
    Arguments,
    Keywords,
    StorageHistory,
    changes,
    covers,
    mutated,
    number,
    row_of,
    truncated_normal,
)
from partition.model.graph import FillStep, Recipe

_RECORD = "_first_values"
"""The attribute of a parameter that holds its record."""

_SILENT_ON_META = (nn.init.orthogonal_.__code__, nn.init.sparse_.__code__)
"""Functions that return silently if their tensor is on meta, so that no operator reveals them."""
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a descriptor of the C class
_EMPTY = torch.ops.aten.empty.memory_format
_EMPTY_ELEMENTS_MAX = 1 << 28
"""Minimum size for which `torch.empty` is immediately on meta. A smaller tensor is real until it is
registered, because it may become a buffer. Untouched memory costs nothing, but the system does not promise an
unlimited amount of it."""
_UNIFORM_ELEMENTS_MAX = 1 << 24
"""Maximum size of a tensor of unknown origin that is read to check whether all its elements are equal."""


def recipe_of(parameter: torch.Tensor) -> Recipe | None:
    """Return the initialisation of a parameter made in `skeleton()`; None if it is unrecorded or was made
    outside.

    Ask the parameter itself, because a deep copy made after the skeleton has lost the information.
    """
    record: StorageHistory | None = getattr(parameter, _RECORD, None)
    return Recipe(record.steps) if record is not None and record.reason is None else None


def unrecorded(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return (name, reason) for each parameter on meta whose first values are not known by a recipe."""
    found = []
    for name, parameter in model.named_parameters():
        record: StorageHistory | None = getattr(parameter, _RECORD, None)
        if parameter.is_meta and record is None:
            found.append((name, "it was put on meta outside skeleton()"))
        elif parameter.is_meta and record is not None and record.reason is not None:
            found.append((name, record.reason))
    return tuple(found)


_lock = threading.Lock()
_local = threading.local()


@contextmanager
def skeleton() -> Iterator[None]:
    """Make the parameters of every module built inside on meta, and record their initialisation.

    Only one skeleton at a time per process: a second thread waits. If nested, the inner one does nothing. A
    constructor that computes with its parameters' values raises its own error here; build such a model with
    real values.
    """
    if getattr(_local, "inside", False):
        yield
        return
    recorder = _Recorder()
    deterministic: Any = torch.utils.deterministic
    with _lock:
        _local.inside = True
        filled = deterministic.fill_uninitialized_memory
        try:
            # Otherwise torch.empty would touch the memory that is about to be released.
            deterministic.fill_uninitialized_memory = False
            with _patched(recorder), _NoticeSilent(recorder), recorder:
                yield
        finally:
            deterministic.fill_uninitialized_memory = filled
            _local.inside = False
            recorder.settle()


@contextmanager
def _patched(recorder: "_Recorder") -> Iterator[None]:
    """Make modules register the meta parameters that the recorder makes; always undone at the end.

    Other threads are not affected.
    """
    module_class, parameter_class, init = _patchable()
    register, deepcopy = module_class.register_parameter, parameter_class.__deepcopy__
    truncated = init._no_grad_trunc_normal_
    thread = threading.get_ident()

    def register_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if threading.get_ident() == thread and type(param) is nn.Parameter:
            param = recorder.adopt(param)
        register(module, name, param)

    def deepcopy_recorded(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        # `nn.Transformer` copies its layers, and copied parameters are not registered.
        made: nn.Parameter = deepcopy(parameter, memo)
        if threading.get_ident() == thread:
            recorder.note_parameter(made)
        return made

    def truncated_recorded(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        made: torch.Tensor = (truncated_normal if threading.get_ident() == thread else truncated)(
            tensor, *arguments, **keywords
        )
        return made

    try:
        module_class.register_parameter = register_meta
        parameter_class.__deepcopy__ = deepcopy_recorded
        init._no_grad_trunc_normal_ = truncated_recorded
        yield
    finally:
        module_class.register_parameter = register
        parameter_class.__deepcopy__ = deepcopy
        init._no_grad_trunc_normal_ = truncated


def _patchable() -> tuple[Any, Any, Any]:
    """Return the patched functions, without the types that forbid patching."""
    return nn.Module, nn.Parameter, nn.init


class _NoticeSilent(TorchFunctionMode):
    """Detects a function that checks `is_meta` and then returns without doing anything."""

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        if func == _IS_META:  # a new object each time it is looked up
            caller = sys._getframe(1).f_code
            if caller in _SILENT_ON_META and args[0].is_meta:
                self._recorder.spoil(args[0], f"{caller.co_name} cannot be recorded")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Observes every operator that runs inside, after it has run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        # Weak references keep an address from being reused while it is a key here.
        self._records: dict[int, tuple[StorageWeakRef, StorageHistory]] = {}
        self._parameters: list[nn.Parameter] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _EMPTY and prod(args[0]) >= _EMPTY_ELEMENTS_MAX:
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._written(func, args, kwargs)
        elif isinstance(result, torch.Tensor) and result.is_floating_point():
            self._made(func, args, kwargs, result)
        return result

    # Parameters

    def adopt(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the meta parameter that stands for this one: the same each time, so that tied parameters
        stay tied."""
        if not parameter.is_floating_point():
            return parameter
        if parameter.is_meta:
            self.note_parameter(parameter)
            return parameter
        record = self._record(parameter) or self._unknown(parameter)
        for known in record.parameters:
            if known.shape == parameter.shape and known.dtype == parameter.dtype:
                return known
        record.shape = tuple(parameter.shape)
        made = nn.Parameter(
            torch.empty_like(parameter, device="meta", requires_grad=False), parameter.requires_grad
        )
        made.__dict__.update(parameter.__dict__)
        self._keep(made, record)
        record.parameters.append(made)
        self.note_parameter(made)
        return made

    def note_parameter(self, parameter: nn.Parameter) -> None:
        """Give a parameter on meta its record, now and at the end."""
        if parameter.is_meta:
            self._parameters.append(parameter)
            self._settle(parameter)

    def settle(self) -> None:
        """Give every parameter its record again, because `.data` may have been replaced since."""
        for parameter in self._parameters:
            self._settle(parameter)
        for _, record in self._records.values():
            record.parameters.clear()

    def spoil(self, tensor: torch.Tensor, reason: str) -> None:
        """Mark the record of a tensor as wrong."""
        record = self._record(tensor)
        if record is not None:
            record.spoil(reason)

    def _settle(self, parameter: nn.Parameter) -> None:
        record = self._record(parameter)
        if record is not None:
            setattr(parameter, _RECORD, record)

    def _unknown(self, tensor: torch.Tensor) -> StorageHistory:
        """Return the record of real values of unknown origin: a constant, if they are all equal."""
        record = StorageHistory(
            tuple(tensor.shape), (), "its values were made by other means than an initialiser"
        )
        values = tensor.detach()
        if 0 < values.numel() <= _UNIFORM_ELEMENTS_MAX and bool((values == values.flatten()[0]).all()):
            record.fill(FillStep("constant", float(values.flatten()[0])))
        self._keep(tensor, record)
        return record

    def _record(self, tensor: torch.Tensor) -> StorageHistory | None:
        entry = self._records.get(tensor.untyped_storage()._cdata)
        return entry[1] if entry else None

    def _keep(self, tensor: torch.Tensor, record: StorageHistory) -> None:
        storage = tensor.untyped_storage()
        self._records[storage._cdata] = (StorageWeakRef(storage), record)  # type: ignore[no-untyped-call]  # torch's

    # Records of operators

    def _made(self, func: Any, args: Arguments, kwargs: Keywords, result: torch.Tensor) -> None:
        if self._record(result) is not None:
            return  # a view, which has the same storage
        maker = MAKERS.get(func.overloadpacket)
        if maker is not None:
            record = StorageHistory(tuple(result.shape))
            step = maker(func, args, kwargs)
            if step is not None:
                record.fill(step)
            self._keep(result, record)
            return
        source = self._record(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if source is None or not covers(args[0]) or args[0].shape != result.shape:
            return
        steps = () if func.overloadpacket in COPIES else changes(func, args, kwargs)
        if steps is not None:
            record = source.copied(tuple(result.shape))
            record.change(*steps)
            self._keep(result, record)

    def _written(self, func: Any, args: Arguments, kwargs: Keywords) -> None:
        for name, tensor in mutated(func, args, kwargs):
            if not tensor.is_floating_point():
                continue
            record = self._record(tensor)
            if record is None and name == "self" and func.overloadpacket in FILLS and covers(tensor):
                record = StorageHistory(tuple(tensor.shape))
                self._keep(tensor, record)
            if record is not None:
                if name == "self" and args and args[0] is tensor:
                    self._write(record, func, args, kwargs)
                else:
                    record.spoil(f"{func.overloadpacket.__name__} cannot be recorded")

    def _write(self, record: StorageHistory, func: Any, args: Arguments, kwargs: Keywords) -> None:
        target, what = args[0], func.overloadpacket.__name__
        maker = FILLS.get(func.overloadpacket)
        step = maker(func, args, kwargs) if maker else None
        if what == "copy_":
            value = self._constant(args[1])
            step = None if value is None else FillStep("constant", value)
        if not covers(target):
            row = row_of(target, record.shape)
            if row is None or step != FillStep("constant", 0.0):
                record.spoil(f"{what} writes to only a part of it")
            else:
                record.change(FillStep("zero_row", float(row)))
        elif step is not None:
            record.fill(step)
        elif what == "copy_":
            source = self._record(args[1])
            if source is None or not covers(args[1]) or target.shape != args[1].shape:
                record.spoil("it is copied from values that no initialiser made")
            else:
                record.steps, record.reason = source.steps, source.reason
        else:
            steps = changes(func, args, kwargs)
            if steps is None:
                record.spoil(f"{what} cannot be recorded")
            else:
                record.change(*steps)

    def _constant(self, tensor: torch.Tensor) -> float | None:
        """Return the number that every element of a tensor equals, if known: `weight[3] = 0` copies one."""
        record = self._record(tensor)
        return record.constant if record is not None else number(tensor)
