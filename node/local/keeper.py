"""Saves a member's state periodically, in the background (`node.local.saved`)."""

from contextlib import suppress
from functools import partial

import trio

from node.averaging.snapshot import Snapshot
from node.local.context import LocalRunsService
from node.local.rounds import Rounds
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
from node.local.stages import stage_count
from node.local.trainer import LocalTrainer
from node.protocols.manifest import Run
from node.storage.blobs import NoRoom
from partition.run.admission import Admission
from partition.run.local.keeping import CopySchedule


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
    ) -> None:
        """`stage` is this member's own. If `copy_of` is given, the states are copies of that stage of another
        member."""
        self.error = ""
        """Why the latest state was not saved; empty if it was."""
        self._service = service
        self.now = service.seams.clock.monotonic
        self._run = run
        self._admission = admission
        self._stage = stage
        self._copy_of = copy_of
        self._schedule = CopySchedule(run.manifest.save_every)

    def is_due(self, step: int) -> bool:
        """Return whether a state is due at this step."""
        return self._schedule.is_due(self.now(), step)

    def begin(self, step: int) -> None:
        """Note that a state of this step is being saved, or has been saved."""
        self._schedule.step = step

    async def keep(self, trainer: LocalTrainer, rounds: Rounds, nursery: trio.Nursery) -> None:
        """Save the state of a training member in the background, if a save is due, together with the members
        that it knows."""
        if not self.is_due(trainer.step):
            return
        self.begin(trainer.step)
        saved = self.part(is_training=True)
        snapshot = await trainer.snapshot(rounds.schedule.count, self._run.id, rounds.outer)
        nursery.start_soon(self.remember, saved)
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
        self._schedule.begin()
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
            self._schedule.ended(self.now(), begun)

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
