"""Tensors as one flat vector, and back: parameters, their gradients and floating-point buffers, in a fixed
order.

The vector is float32, or float64 if any tensor is; it represents bfloat16 and float16 exactly. It contains
only trained tensors: a parameter that was frozen when the layout was made is neither sent nor stored.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3

from gossip.averaging.robust.reduction import Vector

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TensorSlot:
    """The position of a tensor in the vector: items from `begin` to `end`."""

    name: str
    tensor: torch.Tensor
    begin: int
    end: int


class Layout:
    """The order of some tensors in a flat vector."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises TypeError for a tensor that does not fit into a vector: sparse, complex, integer."""
        slots: list[TensorSlot] = []
        at = 0
        for name, tensor in named:
            if tensor.layout is not torch.strided or tensor.dtype not in FLOATING:
                kind = f"{tensor.dtype}".removeprefix("torch.")
                raise TypeError(f"{name}: a {tensor.layout} tensor of {kind} cannot be averaged; exclude it")
            slots.append(TensorSlot(name, tensor, at, at + tensor.numel()))
            at += tensor.numel()
        self.slots = tuple(slots)
        self.items = at
        is_double = any(slot.tensor.dtype == torch.float64 for slot in slots)
        self.dtype = "float64" if is_double else "float32"

    @property
    def rows(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return name, shape and type of each tensor, from which a signature is made."""
        return tuple(
            (slot.name, tuple(slot.tensor.shape), str(slot.tensor.dtype).removeprefix("torch."))
            for slot in self.slots
        )

    def empty(self) -> Vector:
        """Return a vector of the right size, with undefined contents."""
        vector: Vector = np.empty(self.items, self.dtype)
        return vector

    def digest(self) -> bytes:
        """Return the hash of the values. It is equal for two scripts that began with the same seed."""
        vector = self.empty()
        self.copy_out(vector)
        return blake3(vector.data.cast("B")).digest()

    def copy_out(self, out: Vector, tensors: Sequence[torch.Tensor | None] | None = None) -> None:
        """Write the tensors, or the given ones of the same shapes (None: zeros), into `out`."""
        flat = torch.from_numpy(out)
        with torch.no_grad():
            for place, slot in enumerate(self.slots):
                source = slot.tensor if tensors is None else tensors[place]
                target = flat[slot.begin : slot.end].view(slot.tensor.shape)
                if source is None:
                    target.zero_()
                else:
                    target.copy_(source)

    def copy_in(self, vector: Vector) -> None:
        """Write the vector into the tensors, rounded to their types."""
        flat = _readable(vector)
        with torch.no_grad():
            for slot in self.slots:
                slot.tensor.copy_(flat[slot.begin : slot.end].view(slot.tensor.shape))

    def add(self, difference: Vector) -> None:
        """Add a vector to the tensors."""
        flat = _readable(difference)
        with torch.no_grad():
            for slot in self.slots:
                part = flat[slot.begin : slot.end].view(slot.tensor.shape)
                slot.tensor.add_(part.to(slot.tensor.device, slot.tensor.dtype))

    def add_scaled(self, out: Vector, tensors: Sequence[torch.Tensor | None], scale: float) -> None:
        """Add `scale` times these tensors of the same shapes (None: nothing) to `out`."""
        flat = torch.from_numpy(out)
        with torch.no_grad():
            for place, slot in enumerate(self.slots):
                source = tensors[place]
                if source is not None:
                    target = flat[slot.begin : slot.end].view(slot.tensor.shape)
                    target.add_(source.to(flat.device, flat.dtype), alpha=scale)

    def views(self, vector: Vector) -> list[torch.Tensor]:
        """Return each tensor's part of the vector, in the tensor's type and on its device."""
        flat = _readable(vector)
        return [
            flat[slot.begin : slot.end].view(slot.tensor.shape).to(slot.tensor.device, slot.tensor.dtype)
            for slot in self.slots
        ]


def _readable(vector: Vector) -> torch.Tensor:
    """Return a tensor over the vector's memory, or over a copy if the vector is read-only, because torch
    warns about read-only memory."""
    return torch.from_numpy(vector if vector.flags.writeable else vector.copy())
