"""An arena as torch sees it: a flat tensor over the shared memory, or its twin on a device."""

import torch

from partition.execute.device_limits import MISSING
from partition.stage import Slot


class Vector:
    """A flat tensor on the device: the arena itself on the CPU, else a copy of it."""

    def __init__(self, arena: memoryview, dtype: torch.dtype, device: torch.device) -> None:
        # torch refuses an empty buffer; a stage without parameters has one.
        self.shared = torch.frombuffer(arena, dtype=dtype) if arena.nbytes else torch.empty(0, dtype=dtype)
        self.tensor = self.shared if device.type == "cpu" else self.shared.to(device)

    def take(self) -> None:
        """Read what the node wrote into the arena."""
        if self.tensor is not self.shared:
            self.tensor.copy_(self.shared)

    def give(self) -> None:
        """Let the node see what was computed."""
        if self.tensor is not self.shared:
            self.shared.copy_(self.tensor)

    def exact_view(self, slot: Slot) -> torch.Tensor:
        """As `view`, where float64 can be computed with: as the node sees it, on a device that has none."""
        if torch.float64 not in MISSING.get(self.tensor.device.type, ()):
            return self.view(slot)
        return self.shared[slot.offset : slot.offset + slot.size].view(slot.shape)

    def view(self, slot: Slot, start: int = 0) -> torch.Tensor:
        """The part of one parameter, in its shape; `start` is where the vector begins, in elements."""
        offset = start + slot.offset
        return self.tensor[offset : offset + slot.size].view(slot.shape)
