"""Bytes that need not stay in memory: in unnamed, mapped files that are freed with their last view.

The system may write them to the disk at any time, frees their memory when it is needed, and reads them again
on access. Bytes freed before they were written never reach the disk. Not for durable data: the system frees
such a file when the process ends for any reason. The node's budget limits their size (`node.storage.budget`).
"""

import mmap
import os
import tempfile
import weakref
from pathlib import Path
from threading import Lock

from crypto.noise import Data
from node.storage.budget import ScratchBudget

FILE_BYTES = 1 << 30
"""Size of one file, most of which is a hole until used. A file for each piece would need a descriptor for
each."""


class Spill:
    """The spilled bytes in one folder. Methods may be called in several executor threads at once; they run
    one at a time, as the disk would require anyway."""

    def __init__(self, folder: Path, budget: ScratchBudget, file_bytes: int = FILE_BYTES) -> None:
        """Prepare files of `file_bytes` in this folder."""
        self._file_bytes = file_bytes
        self._folder = folder
        self._budget = budget
        self._lock = Lock()
        self._latest: weakref.ref[mmap.mmap] | None = None
        self._descriptor = -1
        self._used = 0
        self._counted = _Counted(budget)

    def put(self, data: Data) -> memoryview:
        """Return a read-only view of the same bytes. Raises OSError if the disk is full or the budget is used
        up."""
        view = memoryview(data).cast("B")
        pages_bytes = -(-len(view) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            mapping = self._with_room(len(view))
            self._counted.add(pages_bytes)
            begin = self._used
            # Not through the map: on a full disk that would kill the process, while pwrite raises an error.
            written = 0
            while written < len(view):
                written += os.pwrite(self._descriptor, view[written:], begin + written)
            self._used += pages_bytes
        return memoryview(mapping)[begin : begin + len(view)]

    def _with_room(self, length: int) -> mmap.mmap:
        mapping = self._latest() if self._latest is not None else None
        if mapping is not None and self._used + length <= len(mapping):
            return mapping
        # Unnamed from the beginning if the system supports that, otherwise unlinked right after creation.
        file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - closed with its map
        try:
            file.truncate(max(self._file_bytes, length))
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except BaseException:
            file.close()
            raise
        # Every view of the file refers to its map. With the last view the map is freed, and so is the file.
        weakref.finalize(mapping, file.close)
        self._counted = _Counted(self._budget)
        weakref.finalize(mapping, self._counted.give_back)
        self._latest, self._descriptor, self._used = weakref.ref(mapping), file.fileno(), 0
        return mapping


class _Counted:
    """The part of the budget that one file uses: all bytes ever put into it, until the file is freed."""

    def __init__(self, budget: ScratchBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def add(self, count: int) -> None:
        self._budget.take(count)
        self._bytes += count

    def give_back(self) -> None:
        self._budget.give(self._bytes)
        self._bytes = 0
