"""The disk budget for temporary files of a node's stages: one total for all.

Frames of open steps that do not fit in memory (`node.storage.spill`) and the files of stages' processes
(`node.stages.scratch`) count together. A stage that exceeds the budget fails with the reason; the node and
the other stages continue. A process's part is returned when the process is gone. A killed node leaves nothing
that counts: its frames were unnamed, and its folders are removed at the next start.
"""

import errno
import shutil
from pathlib import Path
from threading import RLock

from node.quantities import Memory

DISK_FREE_BYTES_MIN = 256 << 20
"""Reserved for the node itself, whatever stages use, since its promises, votes and results must reach the
disk."""


class ScratchBudget:
    """The budget of one node; may be called in any thread."""

    def __init__(self, limit: Memory, folder: Path, free_bytes_min: int = DISK_FREE_BYTES_MIN) -> None:
        """`limit` is relative to the disk of `folder`, which must exist before anything is taken."""
        self._free_bytes_min = free_bytes_min
        self.held_bytes = 0
        self._limit = limit
        self._folder = folder
        # A file may be freed at any time, even while this thread holds the lock.
        self._lock = RLock()

    def limit(self, limit: Memory) -> None:
        """Set the limit; bytes already held stay until they are returned."""
        self._limit = limit

    def of_disk(self, amount: Memory) -> int:
        """Return an amount of the same disk in bytes."""
        if amount.bytes:
            return amount.bytes
        return amount.of(shutil.disk_usage(self._folder).total)

    @property
    def bytes_max(self) -> int:
        """Maximum number of bytes that stages may hold together."""
        return self._limit.of(shutil.disk_usage(self._folder).total)

    def take(self, count: int) -> None:
        """Count `count` more bytes. Raises OSError, without counting them, if they exceed the limit."""
        usage = shutil.disk_usage(self._folder)
        bytes_max = self._limit.of(usage.total)
        with self._lock:
            if self.held_bytes + count > bytes_max:
                raise OSError(
                    errno.EDQUOT,
                    (
                        f"stages hold {_mebibytes(self.held_bytes)} of the "
                        f"{_mebibytes(bytes_max)} allowed by [resources] scratch"
                    ),
                )
            if usage.free - count < self._free_bytes_min:
                raise OSError(
                    errno.ENOSPC,
                    (f"{_mebibytes(usage.free)} free, part of which is reserved for the node itself"),
                )
            self.held_bytes += count

    def give(self, count: int) -> None:
        """Release `count` held bytes."""
        with self._lock:
            self.held_bytes -= count


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
