"""Checkpoints of a running run: stages saved, copied to other members, sealed by the committer, restored.

After each step that the manifest names, the first replica of each stage stores a copy of its state and says
so (`Saved`); training goes on meanwhile. Once all stages have, the committer has each copied to other
members, seals the manifest, and announces its name (`Checkpointed`): a stage without a replica goes back to
it. `partition.run.checkpoint_rounds` makes the decisions; disks, copies and requests are here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, assert_never

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.checkpoints.replication import CheckpointOffer
from node.errors import StageFailed, Unreachable
from node.events import CheckpointFailed, CheckpointKept
from node.protocols.checkpoint import StageState
from node.protocols.manifest import Run
from node.protocols.runs import Saved
from node.runs.context import RunService
from node.seams import Stage
from node.storage.blobs import NoRoom
from partition.plan.plan import Plan, plan_hash
from partition.run.checkpoint_rounds import (
    CheckpointRounds,
    CheckpointWhole,
    NewestChanged,
    SealWanted,
    SpreadWanted,
)
from partition.run.messages import REASON_LENGTH_MAX, Checkpointed
from partition.steps.save_interval import SaveInterval

RESTORE_AGAIN_SECONDS = 2.0
_OFFER_BYTES_MAX = 64


def newest_name(run: str) -> str:
    """Return the storage name of the newest checkpoint of a run."""
    return f"runs/{run}/newest"


class Paced(Protocol):
    """The attributes of a `node.pipeline.committer.CommitterShell` that checkpoints use."""

    saving: SaveInterval

    def checkpoint_took(self, step: int, seconds: float) -> None: ...
    def checkpoint_ended(self) -> None: ...


class CheckpointKeeper:
    """One member's part in checkpoints. `live` are present or former members that could hand something over;
    `learned` is called when a newer checkpoint is complete."""

    def __init__(
        self,
        service: RunService,
        run: Run,
        live: Callable[[], list[PeerId]],
        committer: Callable[[], Paced | None] = lambda: None,
        *,
        learned: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare checkpoints; `committer` is this node's, None where it does not commit."""
        self._service = service
        self._run = run
        self._checkpoints = service.checkpoints
        self._copies = service.copies
        self._live = live
        self._learned = learned
        self._committer = committer
        self._writing = trio.Lock()
        newest = _read_newest(service, run.text)
        self._rounds: CheckpointRounds[StageState] = CheckpointRounds(
            run.id, service.signer.peer, live, None if newest is None else (newest.checkpoint, newest.step)
        )
        self._written = self._rounds.newest

    @property
    def restorable(self) -> tuple[bytes, int] | None:
        """Return the newest checkpoint that is complete somewhere, and its step."""
        return self._rounds.newest

    @property
    def can_restore(self) -> bool:
        """Return whether all of it is here, or may be at another live member."""
        if any(peer != self._service.signer.peer for peer in self._live()):
            return True
        newest = self.restorable
        kept = None if newest is None else self._checkpoints.store.find(self._run.text, newest[1])
        return kept is not None and kept.is_whole

    @property
    def _now(self) -> float:
        return self._service.seams.clock.monotonic()

    @property
    def _is_guest(self) -> bool:
        return self._run.requester != self._service.signer.peer

    # A replica's side

    async def save(self, plan: Plan, number: int, step: int, stage: Stage) -> None:
        """Copy a stage's state and store the copy, if this replica is the one to do so.

        Returns once it is copied. Raises StageFailed.
        """
        if not self._rounds.saves(plan, number):
            return
        run, began = self._service.seams.executor.run, self._now
        copy = await run(
            lambda: [memoryview(bytes(stage.vector(name))) for name in ("parameters", "moments")]
        )
        copied = self._now - began
        self._service.start_task(self._put_away, plan, number, step, *copy, copied, of=self._run)

    async def _put_away(
        self, plan: Plan, number: int, step: int, parameters: memoryview, moments: memoryview, copied: float
    ) -> None:
        """Store a copied state; `copied` is the time that the copy took, in seconds."""
        row, began = plan.stages[number], self._now
        try:
            state = await self._checkpoints.snapshot(
                self._run,
                step,
                number,
                (row.first_layer, row.last_layer),
                parameters,
                moments,
                is_guest=self._is_guest,
            )
        except (NoRoom, OSError) as error:
            self._say_failed(step, error)
            return
        took = int(1_000 * (copied + self._now - began))
        self._service.send(plan.committer, Saved(plan_hash(plan), step, number, state, took))

    def _say_failed(self, step: int, error: NoRoom | OSError) -> None:
        """Report that this node stores nothing of this step; the checkpoint before stays the newest."""
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"the disk of this node: {error.strerror or error}"
        at = self._service.seams.clock.wall()
        self._service.publish(
            CheckpointFailed(at=at, run=self._run.text, step=step, reason=reason[:REASON_LENGTH_MAX])
        )

    async def restore(self, plan: Plan, name: bytes, step: int, stage: Stage) -> None:
        """Restore this node's stage of a plan from the layers of a checkpoint; while no member has all of it,
        wait for one that may come back.

        Raises StageFailed: it is no state for this stage.
        """
        holders = self._live()
        while True:
            try:
                await self._restore(plan, name, step, stage, holders)
            except Unreachable:
                await trio.sleep(RESTORE_AGAIN_SECONDS)
                # A newcomer knows only whom it met: who was in the run before may still have it.
                said = await self._copies.holders(self._run.text)
                holders = list(dict.fromkeys([*self._live(), *said]))
            except RemoteProtocolError as error:
                raise StageFailed(f"the checkpoint of step {step} could not be restored: {error}") from None
            else:
                return

    async def _restore(
        self, plan: Plan, name: bytes, step: int, stage: Stage, holders: Sequence[PeerId]
    ) -> None:
        _, run, checkpoint, _ = await self._checkpoints.read(name, holders)
        number = plan.stage_of(self._service.signer.peer)
        if (run.id, checkpoint.step) != (self._run.id, step) or number is None:
            raise StageFailed(f"the checkpoint {name.hex()[:8]} is not that of step {step} of this run")
        arenas = stage.vector("parameters"), stage.vector("moments")
        ranges = [(row.first_layer, row.last_layer) for row in plan.stages]
        if ranges[number] in checkpoint.ranges:
            same = checkpoint.stages[checkpoint.ranges.index(ranges[number])]
            delivered = await self._checkpoints.restore(same, *arenas, holders)
        else:
            graph = await self._service.models.get(run.manifest.graph_hash, holders)
            wanted = (ranges, number)
            delivered = await self._checkpoints.restore_layers(
                checkpoint, run, graph, wanted, arenas, holders
            )
        self._copies.came(run.id, run.requester, delivered)

    # The committer's side

    def saved(self, plan: Plan, sender: PeerId, message: Saved) -> None:
        """Handle the message that a replica has stored its stage. Raises RemoteProtocolError."""
        row = plan.stages[message.stage] if message.stage < len(plan.stages) else None
        layers = None if row is None else (row.first_layer, row.last_layer)
        if layers != (message.state.first_layer, message.state.last_layer):
            raise RemoteProtocolError("other layers were saved than those of the stage")
        self._rounds.saved(plan, sender, message.step, message.stage, message.state)
        committer = self._committer()
        if committer is not None:
            committer.checkpoint_took(message.step, message.milliseconds / 1_000)
        if self._rounds.is_spreading:
            self._follow()  # else stages are missing yet

    def _follow(self) -> None:
        """Carry out the requests of the rounds."""
        events, self._rounds.events[:] = list(self._rounds.events), []
        for event in events:
            match event:
                case SpreadWanted() | SealWanted():
                    self._service.start_task(self._go_on, event, of=self._run)
                case NewestChanged():
                    self._learned()
                    self._service.start_task(self._write_newest, of=self._run)
                case CheckpointWhole():
                    self._service.start_task(self._tell_whole, event, of=self._run)
                case _:
                    assert_never(event)
        committer = self._committer()
        if committer is not None and not self._rounds.is_spreading:
            committer.checkpoint_ended()

    async def _go_on(self, wanted: SpreadWanted[StageState] | SealWanted[StageState]) -> None:
        try:
            await (self._spread(wanted) if isinstance(wanted, SpreadWanted) else self._seal(wanted))
        except (NoRoom, OSError) as error:
            self._say_failed(wanted.step, error)
            self._rounds.failed()
        except BaseException:
            self._rounds.failed()
            raise
        self._follow()

    async def _spread(self, wanted: SpreadWanted[StageState]) -> None:
        holders = [[saver] for saver in wanted.savers]
        have = await self._copies.spread(self._run.id, wanted.step, wanted.states, holders, wanted.keepers)
        self._rounds.spread(have)

    async def _seal(self, wanted: SealWanted[StageState]) -> None:
        run, step = self._run, wanted.step
        samples = step * run.manifest.microbatches * run.manifest.microbatch
        name = await self._checkpoints.seal(
            run, wanted.plan, step=step, samples=samples, stages=wanted.states, is_guest=self._is_guest
        )
        keepers = sorted({peer for each in wanted.keepers for peer in each})
        taken = {self._service.signer.peer, *await self._copies.conclude(run.id, step, name, keepers)}
        self._rounds.sealed(name, [[peer for peer in each if peer in taken] for each in wanted.keepers])

    async def _tell_whole(self, whole: CheckpointWhole[StageState]) -> None:
        await self._write_newest()
        for peer in whole.audience:
            self._service.send(peer, Checkpointed(plan_hash(whole.plan), whole.step, whole.name))
        at, committer = self._service.seams.clock.wall(), self._committer()
        paced = None if committer is None else committer.saving
        self._service.publish(
            CheckpointKept(
                at=at,
                run=self._run.text,
                step=whole.step,
                checkpoint=whole.name.hex(),
                copies=whole.copies,
                size_bytes=sum(state.state_bytes for state in whole.states),
                next_steps=0 if paced is None else paced.steps,
                next_seconds=0.0 if paced is None else round(paced.seconds, 3),
            )
        )

    def note_best(self, step: int | None) -> None:
        """Note the step of the best state, where the run keeps that state."""
        self._rounds.best_step = step

    def learn(self, step: int, name: bytes) -> None:
        """Note a complete checkpoint: the next plan may go back to it."""
        self._rounds.learn(step, name)
        self._follow()

    def left_branch(self, kept_step: int | None) -> None:
        """Forget the checkpoints of an abandoned branch, saved after `kept_step` steps. The files stay until
        there are too many, for others that want them."""
        if kept_step is not None:
            self._rounds.forget_after(kept_step)
            if self._rounds.newest is None:
                self._service.seams.storage.delete(newest_name(self._run.text))

    async def _write_newest(self) -> None:
        """Return once the newest checkpoint's name is on disk; concurrent calls share writes."""
        seams = self._service.seams
        async with self._writing:
            newest = self._rounds.newest
            if newest is None or newest == self._written:
                return
            data = encode(CheckpointOffer(newest[1], newest[0]))
            try:
                await seams.executor.run(partial(seams.storage.write, newest_name(self._run.text), data))
            except OSError as error:
                self._say_failed(newest[1], error)
            else:
                self._written = newest


def _read_newest(service: RunService, run: str) -> CheckpointOffer | None:
    data = service.seams.storage.read(newest_name(run))
    try:
        offer: CheckpointOffer | None = (
            None if data is None else decode(data, CheckpointOffer, bytes_max=_OFFER_BYTES_MAX)
        )
    except RemoteProtocolError:
        return None  # damaged: as if there were none
    return offer
