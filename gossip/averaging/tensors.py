"""The layout of named tensors in one flat vector, and the hash by which two peers check that they average the
same tensors.

Floating-point tensors are placed one after another, sorted by name, so the order in which a caller passes
them has no effect. bfloat16 has no numpy type: it is represented as uint16 with the same bits, and declared
by name. Integer and boolean tensors (a counter of batches, a mask) are in the signature but are never
averaged: each peer keeps its own. Their mean has no general meaning, and a codec would corrupt them.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from crypto.encoding import encode
from gossip.averaging.robust.reduction import Vector

TENSORS_MAX = 65_536
NAME_LENGTH_MAX = 256

Kind = Literal["parameter", "moment", "buffer", "gradient"]
Array = NDArray[Any]
FLOATING = ("float32", "float64", "bfloat16", "float16")
WHOLE = ("int64", "int32", "int16", "int8", "uint8", "bool")


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """The name, shape and type of one tensor. `dtype` is one of `FLOATING` or `WHOLE`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "parameter"

    @property
    def items(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_averaged(self) -> bool:
        return self.dtype in FLOATING


class TensorLayout:
    """The positions of named tensors in one vector.

    The vector is float64 if any tensor is, otherwise float32. Raises ValueError for names, types or shapes
    that cannot be averaged.
    """

    def __init__(self, specs: tuple[TensorSpec, ...]) -> None:
        if len({spec.name for spec in specs}) != len(specs) or not 0 < len(specs) <= TENSORS_MAX:
            raise ValueError(f"want 1-{TENSORS_MAX} tensors with different names")
        for spec in specs:
            if spec.dtype not in (*FLOATING, *WHOLE):
                raise ValueError(f"{spec.name}: {spec.dtype} is not averaged")
            if not spec.name or len(spec.name) > NAME_LENGTH_MAX:
                raise ValueError(f"a tensor's name has 1-{NAME_LENGTH_MAX} characters: {spec.name[:40]!r}")
        self.specs = tuple(sorted(specs, key=lambda spec: spec.name))
        self.averaged = tuple(spec for spec in self.specs if spec.is_averaged)
        self.items = sum(spec.items for spec in self.averaged)
        if not self.items:
            raise ValueError("no tensor has a floating-point type, so there is nothing to average")
        self.dtype = "float64" if any(spec.dtype == "float64" for spec in self.averaged) else "float32"
        self.signature = blake3(encode(self.specs)).digest()

    def flatten(self, tensors: Mapping[str, Array]) -> Vector:
        """Return a new vector of all averaged tensors. Raises ValueError if they differ from the
        declaration."""
        vector: Vector = np.empty(self.items, self.dtype)
        at = 0
        for spec in self.averaged:
            tensor = self._checked(spec, tensors)
            if spec.dtype == "bfloat16":
                tensor = (tensor.astype(np.uint32) << 16).view(np.float32)
            vector[at : at + spec.items] = tensor.reshape(-1)
            at += spec.items
        return vector

    def unflatten(self, vector: Vector, tensors: Mapping[str, Array]) -> None:
        """Write a vector back into the tensors, in place. Integer and boolean tensors stay unchanged."""
        at = 0
        for spec in self.averaged:
            tensor = self._checked(spec, tensors)
            values = vector[at : at + spec.items]
            if spec.dtype == "bfloat16":
                bits = values.astype(np.float32).view(np.uint32)
                values = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
            with np.errstate(over="ignore", under="ignore"):
                tensor[...] = values.reshape(spec.shape)
            at += spec.items

    def _checked(self, spec: TensorSpec, tensors: Mapping[str, Array]) -> Array:
        tensor = tensors.get(spec.name)
        if tensor is None:
            raise ValueError(f"tensor {spec.name!r} is missing")
        stored = "uint16" if spec.dtype == "bfloat16" else spec.dtype
        if tensor.shape != spec.shape or tensor.dtype != stored:
            raise ValueError(
                f"tensor {spec.name!r} is {tensor.dtype} {tensor.shape}, not {stored} {spec.shape}"
            )
        return tensor


def layout_of(tensors: Mapping[str, Array], kind: Kind = "parameter") -> TensorLayout:
    """Return the layout of numpy arrays by name. A uint16 array counts as bfloat16."""
    return TensorLayout(
        tuple(
            TensorSpec(
                name,
                tuple(tensor.shape),
                "bfloat16" if tensor.dtype == np.uint16 else str(tensor.dtype),
                kind,
            )
            for name, tensor in tensors.items()
        )
    )
