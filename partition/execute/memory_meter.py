"""Meters a run on shape tensors, which have no memory: peak memory, operations, and calls.

A dispatch mode sees every operator below autograd, including those of the backward pass, after composite
operators have been decomposed. Memory is the total size of the distinct storages that are alive; a storage is
released when torch releases it, so the peak is what torch would hold. Scratch memory inside kernels is not
seen. Therefore the limits of the process are needed in addition to admission.

Whatever grows is limited while it grows: the first operator that exceeds the offer ends the run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from crypto.errors import RemoteProtocolError
from partition.execute.attention import ATTEND, attend_bytes, attend_flops
from partition.execute.device_limits import check_operator, check_type
from partition.execute.shape_tensors import GhostStorage, ShapeInference, ShapeTensor, ghost
from partition.model.graph import DIMENSIONS_MAX

CALLS_MAX = 200_000
"""Maximum number of operators of one run. A stage of 100 transformer blocks calls 10,000, and each takes
about 0.1 ms here."""

_WITHIN = 8
"""Number of dimensions by which tensors inside a composite operator (a group norm, an einsum) may exceed the
limit."""


def shown_bytes(count: int) -> str:
    """Return a size for people, such as 5.1 GB."""
    amount, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB", "EB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.1f} {unit}" if unit != "bytes" else f"{count} bytes"


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Refuses a run that needs more than `memory_bytes_max` at any time, or more than `work_max` operations.

    `live_bytes` are currently held, `peak_bytes` is their maximum. `flops` counts like torch: products,
    convolutions and attention, a multiplication and its addition as two. `work` adds one for each element
    that any operator reads or makes, so that many cheap operators cost something too. `base_bytes` are held
    in addition, and only used in the text of a refusal. Operations that this kind of device lacks are refused
    too. `context` is the length of the longest session for attention over pages.
    """

    def __init__(
        self,
        memory_bytes_max: int,
        work_max: int,
        base_bytes: int,
        device_kind: str = "cpu",
        context: int = 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.live_bytes = self.peak_bytes = self.flops = self.work = self.calls = 0
        self._memory_bytes_max = memory_bytes_max
        self._work_max = work_max
        self._base_bytes = base_bytes
        self._device_kind = device_kind
        self._context = context
        self._oracle = ShapeInference(self.hold)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> ShapeTensor:
        """Return a tensor that comes from outside, and count it from now on."""
        self._check_shape(shape)
        check_type(self._device_kind, dtype)
        size = prod(shape) * dtype.itemsize
        return ghost(shape, dtype, device, GhostStorage(size, self.hold(size)))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.calls += 1
        if self.calls > CALLS_MAX:
            raise RemoteProtocolError(f"more than {CALLS_MAX} operators")
        kwargs = kwargs or {}
        check_operator(self._device_kind, func, args, kwargs)
        made = self.compute(func, args, kwargs)
        if func is ATTEND:
            self._attend(args)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            flops = count(*args, **kwargs, out_val=made)
            self.flops += flops
            self.work += flops
        for tensor in _tensors(args):
            self.work += tensor.numel()
        for tensor in _tensors((made,)):
            self._check_shape(tensor.shape)
            check_type(self._device_kind, tensor.dtype)
            self.work += tensor.numel() * _window(func, args)
        if self._work_max and self.work > self._work_max:
            raise RemoteProtocolError(f"needs more than the {self._work_max:.3g} operations offered")
        return made

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of `func` on the arguments."""
        return self._oracle.call(func, args, kwargs)

    def hold(self, size_bytes: int) -> Callable[[int], None]:
        """Count a storage. Return the function to call when it is released. Raises RemoteProtocolError if it
        is too much."""
        self.live_bytes += size_bytes
        if self.live_bytes > self._memory_bytes_max:
            needed, offered = self._base_bytes + self.live_bytes, self._base_bytes + self._memory_bytes_max
            self.live_bytes -= size_bytes
            raise RemoteProtocolError(
                f"needs {shown_bytes(needed)} of memory, but {shown_bytes(offered)} is offered"
            )
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return self._release

    def _attend(self, args: tuple[Any, ...]) -> None:
        """Count attention over pages separately, because no shape shows the length of a session."""
        q, k, v = args[:3]
        flops = attend_flops(q.shape, v.shape, self._context)
        self.flops += flops
        self.work += flops
        item_bytes = max(q.element_size(), torch.float32.itemsize)
        scratch = attend_bytes(q.shape, k.shape, v.shape, self._context, item_bytes)
        self.hold(scratch)(scratch)

    def _release(self, size_bytes: int) -> None:
        self.live_bytes -= size_bytes

    def _check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) > DIMENSIONS_MAX + _WITHIN:
            raise RemoteProtocolError(f"a tensor of {len(shape)} dimensions")
        # If one side is zero, the storage is empty, but a kernel's loops still run over the other sides.
        if 0 in shape and prod(max(side, 1) for side in shape) > self._memory_bytes_max:
            raise RemoteProtocolError(f"an empty tensor of shape {tuple(shape)}")


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _window(func: Any, args: tuple[Any, ...]) -> int:
    """Return how many elements a pool reads for each one that it makes."""
    if "pool" not in func.__name__ or len(args) < 2 or not isinstance(args[1], list | tuple):
        return 1
    return prod(max(int(side), 1) for side in args[1]) if "adaptive" not in func.__name__ else 1
