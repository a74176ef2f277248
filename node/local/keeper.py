"""Saves a member's state periodically, in the background (`node.local.saved`)."""

from collections.abc import Awaitable
from contextlib import suppress
from functools import partial

import trio

from crypto.identity import PeerId
from node.averaging.signature import run_key
from node.averaging.snapshot import Snapshot
from node.averaging.transfer import fetch_state
from node.errors import Unreachable
from node.local.context import LocalRunsService
from node.local.saved import (
    MEMBERS_MAX,
    SavedRun,
    forget,
    load_state,
    save_run,
    save_state,
    state_bytes,
    state_name,
)
from node.local.stages import roster_of, stage_count
from node.protocols.manifest import Run
from node.storage.blobs import NoRoom
from partition.run.admission import Admission
from partition.run.local.keeping import CopySchedule, StageCopy


class Keeper:
    """Saves checkpoints of one run on this node, every `every` steps; 0 for never."""

    def __init__(
        self,
        service: LocalRunsService,
        run: Run,
        admission: Admission,
        stage: int,
        *,
        copy_of: int | None = None,
        first: int | None = None,
    ) -> None:
        """`stage` is this member's own. If `copy_of` is given, the states are copies of that stage. `first`
        is the step of the first copy; if it is not given, that is `every`."""
        self.error = ""
        """Why the latest state was not saved; empty if it was."""
        self._service = service
        self.now = service.seams.clock.monotonic
        self._run = run
        self._admission = admission
        self._stage = stage
        self._copy_of = copy_of
        self.schedule = CopySchedule(run.manifest.save_every, first=first)

    def keep(self, snapshot: Snapshot, nursery: trio.Nursery) -> None:
        """Save the state of a training member in the background, together with the members that it knows."""
        nursery.start_soon(self.remember, self.part(is_training=True))
        nursery.start_soon(self.save, snapshot)

    def part(self, *, is_training: bool) -> SavedRun:
        """Return the record with which this node can become a member again after a restart."""
        admission = self._admission
        peers, revoked = tuple(admission.admitted)[-MEMBERS_MAX:], admission.revocations.facts
        return SavedRun(self._run.fact, admission.chain, is_training, peers, self._stage, revoked)

    async def remember(self, saved: SavedRun) -> None:
        """Save the record with which this node can become a member again. If that fails, for example because
        the disk is full, a restarted node is no longer a member."""
        with suppress(OSError):
            storage = self._service.seams.storage
            await self._service.seams.executor.run(partial(save_run, storage, self._run, saved))

    async def save(self, snapshot: Snapshot) -> None:
        """Save a state in place of the previous one."""
        service, run = self._service, self._run
        self.schedule.begin()
        begun = self.now()
        try:
            if run.requester != service.signer.peer:
                label, size = _label(run, self._copy_of), state_bytes(snapshot)
                names = [state_name(run.text, self._copy_of)]
                await service.seams.executor.run(partial(service.guests.admit, label, names, size))
            save = partial(save_state, service.seams.storage, run.text, snapshot, self._copy_of)
            await service.seams.executor.run(save)
            self.error = ""
        except NoRoom as error:
            self.error = str(error)
        except OSError as error:
            self.error = str(error.strerror or error)
        finally:
            self.schedule.ended(self.now(), begun)

    async def copy(self, fetched: Awaitable[Snapshot]) -> StageCopy | None:
        """Save a state that is `fetched` from other members; None if no member hands it over."""
        try:
            found = await fetched
        except Unreachable:
            return None
        await self.save(found)
        return StageCopy(found.table.step, not self.error)

    async def copy_from(self, holder: PeerId, bytes_max: int) -> StageCopy | None:
        """Fetch and save a copy of the other member's stage from its only holder."""
        assert self._copy_of is not None, "this keeper saves copies"
        seams, (name, signature) = self._service.seams, roster_of(self._run, self._copy_of)
        fetched = fetch_state(
            seams.network, seams.executor, [holder], run_key(name), signature, 0, bytes_max=bytes_max,
            refuse=self._service.refuse, step_max=self._run.manifest.steps, rng=seams.rng,
        )  # fmt: skip
        return await self.copy(fetched)

    async def load(self, bytes_max: int) -> Snapshot | None:
        """Return the latest saved state; None if there is none."""
        work, storage = self._service.seams.executor.run, self._service.seams.storage
        return await work(partial(load_state, storage, self._run.text, bytes_max, self._copy_of))


def release(service: LocalRunsService, run: Run) -> None:
    """Delete everything that was saved for a run that is over for this node."""
    forget(service.seams.storage, run.text)
    for stage in (None, *range(stage_count(run))):
        service.guests.release(_label(run, stage))


def _label(run: Run, copy_of: int | None) -> str:
    return f"{run.text}.state" + ("" if copy_of is None else f".{copy_of}")
