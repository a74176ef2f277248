"""Parameters and buffers of a model by their state-dict names: ties, and sources of first values."""

from dataclasses import dataclass
from math import prod

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from partition.capture.errors import CaptureRefused
from partition.capture.skeleton import recipe_of
from partition.model.graph import FillStep, Recipe, StoredValues

Key = tuple[int, ...]


@dataclass(frozen=True)
class Contents:
    """Parameters and buffers by path, and for each of them all paths under which it is known."""

    tensors: dict[str, Tensor]
    keys: dict[str, Key]
    names: dict[Key, tuple[str, ...]]
    parameters: tuple[str, ...]
    kept: tuple[str, ...]
    """Names in the state dict."""

    def key(self, path: str) -> Key:
        """Return a key that is equal for tied tensors."""
        return self.keys[path]

    def names_of(self, path: str) -> tuple[str, ...]:
        return self.names[self.keys[path]]


def contents_of(model: nn.Module) -> Contents:
    """Return the contents of a model, before any tensor is swapped for a fake one. Raises CaptureRefused if a
    parameter has no shape yet."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for path, tensor in parameters.items():
        if isinstance(tensor, UninitializedParameter):
            raise CaptureRefused(f"'{path}' has no shape yet: run the model once before it is captured")
    tensors = parameters | dict(model.named_buffers(remove_duplicate=False))
    keys = {path: _key(tensor) for path, tensor in tensors.items()}
    kept = tuple(path for path in model.state_dict(keep_vars=True) if path in tensors)
    names: dict[Key, list[str]] = {}
    for path, key in keys.items():
        names.setdefault(key, []).append(path)
    return Contents(
        tensors, keys, {key: tuple(paths) for key, paths in names.items()}, tuple(parameters), kept
    )


def _key(tensor: Tensor) -> Key:
    """Return a tensor's identity: its memory and shape, or on meta the object itself."""
    if tensor.is_meta or tensor.numel() == 0 or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return (id(tensor),)
    return (0, tensor.data_ptr(), *tensor.shape, -1, *tensor.stride())


_TRAINED = (torch.float32, torch.float64)
_SERVED = (*_TRAINED, torch.bfloat16, torch.float16)


def check_parameter(path: str, tensor: Tensor, *, is_trained: bool = True) -> None:
    """Check a parameter. Raises CaptureRefused if no stage can hold its type, or train it."""
    if tensor.dtype in (_TRAINED if is_trained else _SERVED):
        return
    does, remedy = "trains", "use model.float()"
    if tensor.is_complex():
        remedy = "keep it as real numbers with a last side of 2, and use torch.view_as_complex in forward"
    if not is_trained:
        does = "holds float16, bfloat16,"
    raise CaptureRefused(
        f"the parameter '{path}' is {tensor.dtype}: a stage {does} float32 or float64; {remedy}"
    )


class StateDictStore:
    """Assigns positions in the data section of the accompanying file, in order and without gaps."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        self._offset = 0

    def source(self, name: str, tensor: Tensor) -> Recipe | StoredValues:
        """Return the source of one parameter's first values.

        Raises:
            CaptureRefused: it has neither values nor a recipe.
        """
        recipe = recipe_of(tensor)
        if recipe is not None:
            return recipe
        if tensor.is_meta:
            raise CaptureRefused(
                f"'{name}' has neither values nor a recipe: build the model in partition.capture.skeleton()"
            )
        # Constants need no stored values: running means begin at 0 and variances at 1, and so do many biases.
        flat = tensor.detach().reshape(-1)
        if tensor.dim() == 1 and bool((flat == flat[0]).all()):
            return Recipe((FillStep("constant", float(flat[0])),))
        length = prod(tensor.shape) * tensor.element_size()
        stored = StoredValues(self._offset, length, blake3(bytes_of(tensor)).digest())
        self.tensors.append((name, tensor.detach()))
        self._offset += length
        return stored


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor, little-endian and in C order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
