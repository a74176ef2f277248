"""The frames of an open step, kept until it is applied: in memory up to a bound, else on the disk.

A replica keeps the bytes of every frame it has sent, to repeat them for the successor of a dead neighbour,
and of every frame it has received, to remove micro-batches that another replica counts from its sums. Most
are never read again, so frames beyond the bound are put where the system may take their memory
(`node.storage.spill`); views of them work like any other. There is no explicit release: a frame is freed with
its last view, held by the replica's core, which drops all of a step once it is applied, or by a link that
still has to send it. `held_bytes` counts these. A frame in memory is not copied; one on the disk is copied
once, in a thread.
"""

import weakref
from threading import RLock

import numpy as np
from msgspec.structs import replace

from node.errors import StageFailed
from node.seams import Executor, Storage
from partition.codecs.codec import Payload

FRAMES_BYTES_MAX = 512 * 2**20
"""Frames of one stage in memory: thirty-two of 16 MiB, more than are between two passes of it. Beyond are
those that only a death would ask for."""


class FrameStore:
    """One stage's."""

    def __init__(self, storage: Storage, executor: Executor, bytes_max: int = FRAMES_BYTES_MAX) -> None:
        self._storage = storage
        self._executor = executor
        self._bytes_max = bytes_max
        # The last view may go in any thread.
        self._lock = RLock()
        self.held_bytes = 0

    async def keep(self, payload: Payload) -> Payload:
        """Return the same payload in memory where it may stay. Waits only if the disk is needed.

        Raises:
            StageFailed: there is no room in memory or on the disk.
        """
        data = payload.data
        if not data:
            return payload
        if self.held_bytes + len(data) <= self._bytes_max:
            return replace(payload, data=self._counted(data))
        try:
            spilled = await self._executor.run(lambda: self._storage.spill(data))
        except OSError as error:
            raise StageFailed(
                f"a step's frames take more than {self._bytes_max >> 20} MiB, and the disk of the data folder"
                f" has no room for the rest ({error.strerror or error}): make some, or ask for fewer"
                " micro-batches in a step"
            ) from None
        return replace(payload, data=spilled)

    def _counted(self, data: memoryview) -> memoryview:
        """A view of the same bytes that is counted until the last view of it is gone."""
        # Every view of a view refers to the object it was first made of, which is this one.
        owner = np.frombuffer(data, np.uint8)
        self._count(len(data))
        weakref.finalize(owner, self._count, -len(data)).atexit = False
        return owner.data.toreadonly()

    def _count(self, difference: int) -> None:
        with self._lock:
            self.held_bytes += difference
