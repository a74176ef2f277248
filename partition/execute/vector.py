"""An arena as torch sees it: a flat tensor over the shared memory, or its twin on a device."""

import mmap
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from partition.execute.device_limits import MISSING
from partition.execute.interpret import DTYPES
from partition.stage_layout import Slot


class Vector:
    """A flat tensor on the device: on the CPU the arena itself, otherwise a copy of it."""

    def __init__(self, arena: memoryview, dtype: torch.dtype, device: torch.device) -> None:
        # torch refuses an empty buffer, which a stage without parameters has.
        self.shared = torch.frombuffer(arena, dtype=dtype) if arena.nbytes else torch.empty(0, dtype=dtype)
        self.tensor = self.shared if device.type == "cpu" else self.shared.to(device)

    def take(self) -> None:
        """Read the values that the node wrote into the arena."""
        if self.tensor is not self.shared:
            self.tensor.copy_(self.shared)

    def give(self) -> None:
        """Write the computed values to the arena for the node."""
        if self.tensor is not self.shared:
            self.shared.copy_(self.tensor)

    def exact_view(self, slot: Slot) -> torch.Tensor:
        """Return a view like `view`, but in memory in which float64 can be computed: if the device has no
        float64, the node's own memory."""
        if torch.float64 not in MISSING.get(self.tensor.device.type, ()):
            return self.view(slot)
        return self.shared[slot.offset : slot.offset + slot.size].view(slot.shape)

    def view(self, slot: Slot, start: int = 0) -> torch.Tensor:
        """Return the part of one parameter, in its shape. `start` is the position at which the vector begins,
        in elements."""
        offset = start + slot.offset
        return self.tensor[offset : offset + slot.size].view(slot.shape)


class ParameterVector(Vector):
    """The arena `parameters`, whose values may have different types."""

    def __init__(self, arena: memoryview, slots: Sequence[Slot], device: torch.device) -> None:
        super().__init__(arena, torch.uint8, device)
        self._slots = slots
        self._memory = arena.obj

    def view(self, slot: Slot, start: int = 0) -> torch.Tensor:
        assert not start  # there is only one vector of parameters
        return self.tensor[slot.begin_bytes : slot.end_bytes].view(DTYPES[slot.dtype]).view(slot.shape)

    def release(self, slot: Slot) -> bool:
        """Return the whole pages of a value that is kept elsewhere to the system; the value is lost. Return
        False if the system cannot do this."""
        memory, way = self._memory, getattr(mmap, "MADV_REMOVE", None)
        if not isinstance(memory, mmap.mmap) or way is None or self.tensor is not self.shared:
            return False
        begin = -(-slot.begin_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        length = slot.end_bytes // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if length <= 0:
            return False
        try:
            memory.madvise(way, begin, length)
        except OSError:
            return False
        return True

    def runs(self) -> Iterator[torch.Tensor]:
        """Yield the contents of the shared memory, one flat tensor for each type."""
        for dtype, group in groupby(self._slots, key=lambda slot: slot.dtype):
            members = list(group)
            yield self.shared[members[0].begin_bytes : members[-1].end_bytes].view(DTYPES[dtype])
