"""This node's slots for stages: the driver of a `partition.run.slots.Slots`.

Each slot has a fixed share of the machine, so that measured rates stay true while other slots compute. A
promise is stored before it is given, so that a restarted node does not promise the same slot twice.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.placement.admission import Machine
from node.seams import Seams
from partition.run import slots as core
from partition.run.slots import Promise

SLOT_NAME = "slot"
SLOTS_MAX = 64
_PROMISE_BYTES_MAX = 1_024


_Promises = Annotated[tuple[Promise, ...], msgspec.Meta(max_length=SLOTS_MAX)]


class LeaseSlots:
    """At most `count` leases, each of which expires unless its stage is opened in time. `hosted` returns the
    runs whose stages are open. Times are wall times, because they must be valid after a restart."""

    def __init__(self, seams: Seams, count: int, hosted: Callable[[], Collection[bytes]]) -> None:
        self._seams = seams
        self._writing = trio.Lock()
        self._wall_offset = seams.clock.wall() - seams.clock.monotonic()
        promises: tuple[Promise, ...] = ()
        if (data := seams.storage.read(SLOT_NAME)) is not None:
            try:
                promises = decode(data, _Promises, bytes_max=SLOTS_MAX * _PROMISE_BYTES_MAX)
            except RemoteProtocolError:
                promises = ()  # damaged, or written by a different version, so they cannot be honoured
        self.core = core.Slots(count, hosted, promises)

    @property
    def now(self) -> float:
        """The wall time by which promises expire: the wall time at the start plus the time that has passed
        since. If the clock is set meanwhile, promises must neither end early nor last forever."""
        return self._seams.clock.monotonic() + self._wall_offset

    @property
    def count(self) -> int:
        """The number of slots; an owner may change it."""
        return self.core.count

    @count.setter
    def count(self, count: int) -> None:
        self.core.count = count

    @property
    def free(self) -> int:
        """The number of slots that are neither promised nor taken."""
        return self.core.free(self.now)

    def is_free_for(self, run: bytes) -> bool:
        """Return whether a stage of this run may be placed here."""
        return self.core.is_free_for(self.now, run)

    def taken(self) -> set[bytes]:
        """Return the runs that have a slot, or the promise of one."""
        return self.core.taken(self.now)

    def lapsing(self) -> dict[bytes, float]:
        """Return the runs whose promise is about to expire without a stage, and after how many seconds."""
        return self.core.lapsing(self.now)

    async def promise(self, promise: Promise) -> None:
        """Store a promise of a slot; only a free slot is promised. Raises OSError if it cannot be stored."""
        self.core.promise(self.now, promise)
        try:
            async with self._writing:
                write = partial(self._seams.storage.write, SLOT_NAME, encode(self.core.promises))
                await self._seams.executor.run(write)
        except OSError:
            self.core.take_back(promise)
            raise

    def release_run(self, run: bytes) -> None:
        """Drop all promises for plans of this run."""
        self.note(self.core.release_run(run))

    def release_all(self, planner: PeerId) -> None:
        """Drop the promises to a peer that is gone (those for a first plan after a short time); promises to
        others stay."""
        self.note(self.core.release_all(self.now, planner))

    def note(self, has_changed: bool) -> None:
        """Store the remaining promises. The write is not synced, because a promise that a crash brings back
        only holds longer."""
        if has_changed and self.core.promises:
            self._seams.storage.write_soon(SLOT_NAME, encode(self.core.promises))
        elif has_changed:
            self._seams.storage.delete(SLOT_NAME)


def share(machine: Machine, slots: int) -> Machine:
    """Return one slot's share of a machine's cores and memory."""
    return replace(
        machine,
        threads=max(1, machine.threads // slots),
        memory_bytes=machine.memory_bytes // slots,
    )
