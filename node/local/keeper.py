"""The keeper of a member's state: it is put away now and then, beside the training (`node.local.saved`)."""

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
    """Keeps checkpoints of one run on this node. `every` steps, 0 for never."""

    def __init__(
        self,
        service: LocalRunsService,
        run: Run,
        admission: Admission,
        stage: int,
        *,
        copy_of: int | None = None,
    ) -> None:
        """`stage` is this member's; what is kept is the state of that, or of the stage of another."""
        self.error = ""
        """Why the last state was not kept, where it was not."""
        self._service = service
        self.now = service.seams.clock.monotonic
        self._run = run
        self._admission = admission
        self._stage = stage
        self._copy_of = copy_of
        self._schedule = CopySchedule(run.manifest.save_every)

    def is_due(self, step: int) -> bool:
        """Return whether a state after so many steps is to be kept."""
        return self._schedule.is_due(self.now(), step)

    def begin(self, step: int) -> None:
        """Note that a state of this step is being kept, or there already."""
        self._schedule.step = step

    async def keep(self, trainer: LocalTrainer, rounds: Rounds, nursery: trio.Nursery) -> None:
        """Put the state of a member that trains away in the background, and who takes part."""
        self.begin(trainer.step)
        saved = self.part(is_training=True)
        snapshot = await trainer.snapshot(rounds.schedule.count, self._run.id, rounds.outer)
        nursery.start_soon(self.remember, saved)
        nursery.start_soon(self.save, snapshot)

    def part(self, *, is_training: bool) -> SavedRun:
        """Return what this node needs to be a member again."""
        admission = self._admission
        peers, revoked = tuple(admission.admitted)[-MEMBERS_MAX:], admission.revocations.facts
        return SavedRun(self._run.fact, admission.chain, is_training, peers, self._stage, revoked)

    async def remember(self, saved: SavedRun) -> None:
        """Keep what this node needs to be a member again. On a full disk it will not be one."""
        with suppress(OSError):
            storage = self._service.seams.storage
            await self._service.seams.executor.run(partial(save_run, storage, self._run, saved))

    async def save(self, snapshot: Snapshot) -> None:
        """Keep a state in place of the one before."""
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
        """Return the state that was kept last, None where there is none."""
        work, storage = self._service.seams.executor.run, self._service.seams.storage
        return await work(partial(load_state, storage, self._run.text, bytes_max, self._copy_of))


def release(service: LocalRunsService, run: Run) -> None:
    """Forget all that was kept of a run, which is over for this node."""
    forget(service.seams.storage, run.text)
    for stage in (None, *range(stage_count(run))):
        service.guests.release(_label(run, stage))


def _label(run: Run, copy_of: int | None) -> str:
    return f"{run.text}.state" + ("" if copy_of is None else f".{copy_of}")
