"""The places for stages that this node has, and to whom they are promised.

A run has one of them at most. What a slot offers is its share of the machine, so that measured rates stay
true while its neighbours compute. A promise is on disk before it is given, so that a node that restarts does
not promise the same slot twice.
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
from node.protocols.runs import LeaseBody
from node.seams import Seams
from partition.plan.plan import Peer

SLOT_NAME = "slot"
SLOTS_MAX = 64
_PROMISE_BYTES_MAX = 1_024


class _Promise(msgspec.Struct, frozen=True, array_like=True):
    """`until` is a wall time in whole seconds: it must mean something after a restart."""

    body: LeaseBody
    planner: Peer
    until: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


_Promises = Annotated[tuple[_Promise, ...], msgspec.Meta(max_length=SLOTS_MAX)]


class Slots:
    """`count` leases at most, each of which ends by itself unless its stage is opened in time; `hosted` are
    the runs whose stages are open."""

    def __init__(self, seams: Seams, count: int, hosted: Callable[[], Collection[bytes]]) -> None:
        self._seams = seams
        self.count = count
        self._hosted = hosted
        self._writing = trio.Lock()
        self._promises: tuple[_Promise, ...] = ()
        if (data := seams.storage.read(SLOT_NAME)) is not None:
            try:
                self._promises = decode(data, _Promises, bytes_max=SLOTS_MAX * _PROMISE_BYTES_MAX)
            except RemoteProtocolError:
                self._promises = ()  # of another version, or damaged: they cannot be kept

    @property
    def free(self) -> int:
        """How many slots are neither promised nor taken."""
        return max(0, self.count - len(self.taken()))

    def is_free_for(self, run: bytes) -> bool:
        """Return whether a stage of this run may be placed here."""
        return run not in self.taken() and self.free > 0

    def taken(self) -> set[bytes]:
        """Return the runs that have a slot, or the promise of one."""
        return {promise.body.run for promise in self._live()} | set(self._hosted())

    async def promise(self, body: LeaseBody, planner: PeerId) -> None:
        """Hold a slot for `planner`'s plan; only a free one is promised. Raises OSError: it cannot be
        kept."""
        until = int(self._seams.clock.wall()) + body.silence_seconds_max
        promise = _Promise(body, planner, until)
        self._promises = (*self._live(), promise)
        try:
            async with self._writing:
                write = partial(self._seams.storage.write, SLOT_NAME, encode(self._promises))
                await self._seams.executor.run(write)
        except OSError:
            self._promises = tuple(row for row in self._promises if row is not promise)
            raise

    def holds(self, run: bytes, plan: bytes, stage: int) -> bool:
        """Return whether a slot is promised to exactly this stage."""
        wanted = run, plan, stage
        return any((row.body.run, row.body.plan, row.body.stage) == wanted for row in self._live())

    def release(self, plan: bytes, planner: PeerId) -> None:
        """Forget what was promised to `planner` for `plan`."""
        self._keep(lambda row: row.body.plan != plan or row.planner != planner)

    def release_run(self, run: bytes) -> None:
        """Forget what was promised for any plan of this run."""
        self._keep(lambda row: row.body.run != run)

    def release_all(self, planner: PeerId) -> None:
        """Forget what was promised to a peer that is gone; others' promises stand."""
        self._keep(lambda row: row.planner != planner)

    def _keep(self, keeps: Callable[[_Promise], bool]) -> None:
        kept = tuple(row for row in self._promises if keeps(row))
        if kept == self._promises:
            return
        # Not synced: what comes back after a crash holds the slot a little longer.
        self._promises = kept
        if kept:
            self._seams.storage.write_soon(SLOT_NAME, encode(kept))
        else:
            self._seams.storage.delete(SLOT_NAME)

    def _live(self) -> tuple[_Promise, ...]:
        now = self._seams.clock.wall()
        return tuple(row for row in self._promises if now < row.until)


def share(machine: Machine, slots: int) -> Machine:
    """Return what one of so many slots has of a machine: its part of cores and memory."""
    return replace(
        machine,
        threads=max(1, machine.threads // slots),
        memory_bytes=machine.memory_bytes // slots,
    )
