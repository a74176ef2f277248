"""What the stages of a node may put on its disk besides what is kept: one total for all of them.

Frames of open steps that memory has no room for (`node.storage.spill`) and the files of their processes
(`node.stages.scratch`) are counted together. A stage that asks for more fails with the reason; the node and
the other stages go on. What a process held is given back when it is gone, and a node that is killed leaves
nothing that counts: its frames had no name, and its folders go at the next start.
"""

import errno
import shutil
from pathlib import Path
from threading import RLock

from node.quantities import Memory

DISK_FREE_BYTES_MIN = 256 << 20
"""Left to the node itself, whatever stages may take: its promises, votes and results must reach the disk."""


class ScratchBudget:
    """One node's. Called in any thread."""

    def __init__(self, limit: Memory, folder: Path) -> None:
        """`limit` is of the disk of `folder`, which must be there before anything is taken."""
        self.held_bytes = 0
        self._limit = limit
        self._folder = folder
        # What frees a file may run in the middle of anything, in the same thread too.
        self._lock = RLock()

    def limit(self, limit: Memory) -> None:
        """Allow so much from now on; what is held already stays until it is given back."""
        self._limit = limit

    def of_disk(self, amount: Memory) -> int:
        """Return an amount in bytes, of the same disk."""
        if amount.bytes:
            return amount.bytes
        return amount.of(shutil.disk_usage(self._folder).total)

    @property
    def bytes_max(self) -> int:
        """The most that stages may hold together."""
        return self._limit.of(shutil.disk_usage(self._folder).total)

    def take(self, count: int) -> None:
        """Count so many bytes more. Raises OSError: they would be too many, and nothing is counted."""
        usage = shutil.disk_usage(self._folder)
        bytes_max = self._limit.of(usage.total)
        with self._lock:
            if self.held_bytes + count > bytes_max:
                raise OSError(
                    errno.EDQUOT,
                    f"stages hold {_mebibytes(self.held_bytes)} of {_mebibytes(bytes_max)} that they may:"
                    " [resources] scratch",
                )
            if usage.free - count < DISK_FREE_BYTES_MIN:
                raise OSError(errno.ENOSPC, f"{_mebibytes(usage.free)} free, some of it for the node itself")
            self.held_bytes += count

    def give(self, count: int) -> None:
        """Release `count` held bytes."""
        with self._lock:
            self.held_bytes -= count


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
