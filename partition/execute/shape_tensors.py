"""Shape tensors (ghosts): tensors with a type, a shape and a device, but no memory, for metering a graph.

Torch has fake tensors for this purpose. Here fake tensors compute the result of an operator only once for
each kind of call, and it is cached, because a network calls few operators in few ways, but often. A ghost
costs a tenth of a fake tensor, which makes an admission several times faster, with the same results.

Memory is counted by storage: a view shares its argument's storage, and a storage is released with its last
tensor. So the live storages are those that torch would hold.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from crypto.errors import RemoteProtocolError

Key = tuple[Any, ...]


class GhostStorage:
    """The bytes that some ghosts share; `release` is called when the last of these ghosts is gone."""

    __slots__ = ("_release", "size_bytes")

    def __init__(self, size_bytes: int, release: Callable[[int], None] | None) -> None:
        self.size_bytes = size_bytes
        self._release = release

    def __del__(self) -> None:
        if self._release is not None:
            self._release(self.size_bytes)


class ShapeTensor(torch.Tensor):
    """A tensor without memory. Only a dispatch mode (`partition.execute.memory_meter`) can compute with
    it."""

    storage_held: GhostStorage

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the class
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise RemoteProtocolError(f"{func} outside a dry run")


def ghost(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, storage: GhostStorage
) -> ShapeTensor:
    """Return a ghost in C order over `storage`."""
    made = torch.Tensor._make_wrapper_subclass(ShapeTensor, shape, dtype=dtype, device=device)
    assert isinstance(made, ShapeTensor)
    made.storage_held = storage
    return made


class ShapeInference:
    """Infers the results of operators on ghosts. `hold` is called for each new storage, and returns its
    release function."""

    def __init__(self, hold: Callable[[int], Callable[[int], None]]) -> None:
        self._hold = hold
        self._known: dict[Key, Any] = {}
        self._fakes = FakeTensorMode(allow_fallback_kernels=False)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the results, which are ghosts too. Raises torch's own exceptions for the arguments."""
        tensors: list[torch.Tensor] = []
        key = (func, _key(args, tensors), _key(tuple(kwargs.items()), tensors) if kwargs else None)
        answer = self._known.get(key)
        if answer is None:
            answer = self._known[key] = self._ask(func, args, kwargs, tensors)
        return self._realise(answer, tensors)

    def _realise(self, answer: Any, tensors: list[torch.Tensor]) -> Any:
        if isinstance(answer, _Made):
            if answer.same is not None:
                return tensors[answer.same]
            if answer.alias is not None:
                base = tensors[answer.alias]
                storage = base.storage_held if isinstance(base, ShapeTensor) else GhostStorage(0, None)
            else:
                storage = GhostStorage(answer.size_bytes, self._hold(answer.size_bytes))
            made = torch.Tensor._make_wrapper_subclass(
                ShapeTensor,
                answer.shape,
                strides=answer.stride,
                storage_offset=answer.offset,
                dtype=answer.dtype,
                device=answer.device,
            )
            assert isinstance(made, ShapeTensor)
            made.storage_held = storage
            return made
        if isinstance(answer, list | tuple):
            return type(answer)(self._realise(part, tensors) for part in answer)
        return answer

    def _ask(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        if func._schema.is_mutable and torch.Tag.pointwise in func.tags:
            _check_written(func, tensors)
        # One fake for each tensor: passing the same tensor twice matters to an operator that writes.
        by_id = {id(tensor): self._fake(tensor) for tensor in tensors}
        given = {key: _replaced(value, by_id) for key, value in kwargs.items()}
        with self._fakes:
            made = func(*_replaced(args, by_id), **given)
        fakes = [by_id[id(tensor)] for tensor in tensors]
        return _described(made, fakes, is_written=func._schema.is_mutable)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, ShapeTensor):
            return tensor  # a number that torch has converted to a tensor
        shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        if offset:
            extent = 1 + sum((side - 1) * step for side, step in zip(shape, stride, strict=True))
            base = torch.empty(offset + max(extent, 0), dtype=tensor.dtype, device="meta")
            meta = torch.as_strided(base, shape, stride, offset)
        else:
            meta = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
        return FakeTensor(self._fakes, meta, tensor.device)


class _Made:
    """One result: a new tensor, a view of the argument numbered `alias`, or the argument `same` itself."""

    __slots__ = ("alias", "device", "dtype", "offset", "same", "shape", "size_bytes", "stride")

    def __init__(self, tensor: torch.Tensor, fakes: list[torch.Tensor], *, is_written: bool) -> None:
        self.shape = tuple(tensor.shape)
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype
        self.device = tensor.device
        storage = tensor.untyped_storage()
        self.size_bytes = storage.nbytes()
        shared = [
            place for place, fake in enumerate(fakes) if fake.untyped_storage()._cdata == storage._cdata
        ]
        self.alias = shared[0] if shared else None
        self.same = self.alias if is_written else None


def _described(made: Any, fakes: list[torch.Tensor], *, is_written: bool) -> Any:
    if isinstance(made, torch.Tensor):
        if made.layout != torch.strided:
            raise RemoteProtocolError(f"a result of layout {made.layout}")
        return _Made(made, fakes, is_written=is_written)
    if isinstance(made, list | tuple):
        return type(made)(_described(part, fakes, is_written=is_written) for part in made)
    return made


def _key(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a key that is equal for calls to which torch gives equal results. Collect the tensors in
    order."""
    if isinstance(value, ShapeTensor):
        tensors.append(value)
        return (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device)
    if isinstance(value, tuple | list):
        return tuple([_key(item, tensors) for item in value])
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return (value.shape, value.dtype, float(value))
    # 1, 1.0 and True are equal in Python, but not to torch.
    return (type(value), value)


def _check_written(func: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse a gradient with more dimensions than its sum: fake tensors accept it, but real tensors do
    not."""
    shapes = [tensor.shape for tensor in tensors]
    wide = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]  # torch left it without types
    if shapes and wide != shapes[0]:
        raise RemoteProtocolError(f"{func} of shapes {', '.join(str(list(shape)) for shape in shapes)}")


def _replaced(value: Any, by_id: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return by_id[id(value)]
    if isinstance(value, tuple | list):
        return type(value)(_replaced(item, by_id) for item in value)
    return value
