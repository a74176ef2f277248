"""The budget of disk for temporary files of a node's stages: one total for all.

Frames of open steps that do not fit in memory (`node.storage.spill`) and the files of stages' processes
(`node.stages.scratch`) count together. A stage that exceeds it fails with the reason; the node and the other
stages go on. A process's share is returned when it is gone, and a killed node leaves nothing that counts: its
frames had no name, and its folders go at the next start.
"""

import errno
import shutil
from pathlib import Path
from threading import RLock

from node.quantities import Memory

DISK_FREE_BYTES_MIN = 256 << 20
"""Reserved for the node itself, whatever stages take: its promises, votes and results must reach the disk."""


class ScratchBudget:
    """The budget of one node; called in any thread."""

    def __init__(self, limit: Memory, folder: Path, free_bytes_min: int = DISK_FREE_BYTES_MIN) -> None:
        """`limit` is of the disk of `folder`, which must exist before anything is taken."""
        self._free_bytes_min = free_bytes_min
        self.held_bytes = 0
        self._limit = limit
        self._folder = folder
        # A file may be freed in the middle of anything, in the same thread too.
        self._lock = RLock()

    def limit(self, limit: Memory) -> None:
        """Set the limit; bytes already held stay until they are returned."""
        self._limit = limit

    def of_disk(self, amount: Memory) -> int:
        """Return an amount in bytes of the same disk."""
        if amount.bytes:
            return amount.bytes
        return amount.of(shutil.disk_usage(self._folder).total)

    @property
    def bytes_max(self) -> int:
        """Return the most bytes that stages may hold together."""
        return self._limit.of(shutil.disk_usage(self._folder).total)

    def take(self, count: int) -> None:
        """Count `count` more bytes. Raises OSError if they exceed the limit; then nothing is counted."""
        usage = shutil.disk_usage(self._folder)
        bytes_max = self._limit.of(usage.total)
        with self._lock:
            if self.held_bytes + count > bytes_max:
                raise OSError(
                    errno.EDQUOT,
                    f"stages hold {_mebibytes(self.held_bytes)} of {_mebibytes(bytes_max)} that they may:"
                    " [resources] scratch",
                )
            if usage.free - count < self._free_bytes_min:
                raise OSError(errno.ENOSPC, f"{_mebibytes(usage.free)} free, some of it for the node itself")
            self.held_bytes += count

    def give(self, count: int) -> None:
        """Release `count` held bytes."""
        with self._lock:
            self.held_bytes -= count


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
