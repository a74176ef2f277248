"""The frames of an open step, kept until it is applied: in memory up to a limit, else on the disk.

A replica keeps the bytes of every frame that it has sent, to repeat them for the successor of a dead
neighbour. It also keeps every frame that it has received, to remove micro-batches that another replica counts
from its sums. Most are never read again, so frames beyond the limit are put into memory that the system can
move to disk (`node.storage.spill`); views of them work like any other. There is no explicit release: a frame
is freed with its last view. Views are held by the replica's core, which drops all views of a step once it is
applied, and by links that still have to send the frame. `held_bytes` counts the frames in memory. A frame in
memory is not copied; a frame on the disk is copied once, in a thread.
"""

import weakref
from threading import RLock

import numpy as np
from msgspec.structs import replace

from node.errors import StageFailed
from node.seams import Executor, Storage
from partition.codecs.codec import Payload

FRAMES_BYTES_MAX = 512 * 2**20
"""Maximum bytes of one stage's frames in memory: thirty-two frames of 16 MiB, more than wait between its two
passes at a time. Only a death makes older frames necessary."""


class FrameStore:
    """The frame store of one stage."""

    def __init__(self, storage: Storage, executor: Executor, bytes_max: int = FRAMES_BYTES_MAX) -> None:
        self._storage = storage
        self._executor = executor
        self._bytes_max = bytes_max
        # The last view of a frame may be dropped in any thread.
        self._lock = RLock()
        self.held_bytes = 0

    async def keep(self, payload: Payload) -> Payload:
        """Return the same payload in memory that it may stay in. Waits only if the disk is needed.

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
        """Return a view of the same bytes that is counted until the last view of it is gone."""
        # Every view of a view refers to the object that the first was made from, which is `owner`.
        owner = np.frombuffer(data, np.uint8)
        self._count(len(data))
        weakref.finalize(owner, self._count, -len(data)).atexit = False
        return owner.data.toreadonly()

    def _count(self, difference: int) -> None:
        with self._lock:
            self.held_bytes += difference
