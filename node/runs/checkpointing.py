"""Checkpoints of a running run: stages saved, copied to other members, sealed by the committer, put back.

After a step whose number the manifest says, the first replica of each stage puts a copy of its state away and
says so (`Saved`); training goes on meanwhile. Once all stages have, the committer has each copied to other
members, seals the manifest, and tells everybody its name (`Checkpointed`): that is what a stage without a
replica goes back to.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.checkpoints.replication import Offer, checkpoint_holders
from node.errors import StageFailed, Unreachable
from node.events import CheckpointFailed, CheckpointKept
from node.protocols.checkpoint import StageState
from node.protocols.manifest import Run
from node.protocols.runs import Saved
from node.runs.context import Service
from node.seams import Stage
from node.storage.blobs import NoRoom
from partition.plan.plan import Plan, plan_hash
from partition.run.messages import REASON_LENGTH_MAX, Checkpointed
from partition.steps.save_interval import SaveInterval

COPIES_MIN = 2
"""Of each stage: what is on one disk only goes with the replica that will be missed."""
RESTORE_AGAIN_SECONDS = 2.0
_OFFER_BYTES_MAX = 64


def newest_name(run: str) -> str:
    """Return where a node remembers the newest checkpoint of a run, in its storage."""
    return f"runs/{run}/newest"


class Paced(Protocol):
    """What is needed of a `node.pipeline.committer.CommitterShell`."""

    saving: SaveInterval

    def checkpoint_took(self, step: int, seconds: float) -> None: ...


class Keeping:
    """One member's part. `live` are the members, of now or before, that could hand something over; `learned`
    is told that a newer checkpoint is whole."""

    def __init__(
        self,
        service: Service,
        run: Run,
        live: Callable[[], list[PeerId]],
        committer: Callable[[], Paced | None] = lambda: None,
        *,
        learned: Callable[[], None] = lambda: None,
    ) -> None:
        """`committer` is this node's, None where it does not commit."""
        self._service = service
        self._run = run
        self._checkpoints = service.checkpoints
        self._copies = service.copies
        self._live = live
        self._learned = learned
        self._committer = committer
        self._saved: dict[int, tuple[PeerId, StageState]] = {}
        self._saving = -1, -1
        self._is_spreading = False
        self._is_writing = False
        self._newest = _read_newest(service, run.text)

    @property
    def restorable(self) -> tuple[bytes, int] | None:
        """The newest checkpoint that is whole somewhere, and its step."""
        return None if self._newest is None else (self._newest.checkpoint, self._newest.step)

    @property
    def _now(self) -> float:
        return self._service.seams.clock.monotonic()

    @property
    def _is_guest(self) -> bool:
        return self._run.requester != self._service.signer.peer

    # A replica's side

    async def save(self, plan: Plan, number: int, step: int, stage: Stage) -> None:
        """Copy a stage's state and put the copy away, if that is for this replica to do.

        Returns once it is copied. Raises StageFailed.
        """
        if plan.stages[number].replicas[0] != self._service.signer.peer:
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
        """`copied` is what the copy took already, in seconds."""
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
        """Say that this node keeps nothing of this step; the checkpoint before stays the newest."""
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"the disk of this node: {error.strerror or error}"
        at = self._service.seams.clock.wall()
        self._service.publish(
            CheckpointFailed(at=at, run=self._run.text, step=step, reason=reason[:REASON_LENGTH_MAX])
        )

    async def restore(self, plan: Plan, name: bytes, step: int, stage: Stage) -> None:
        """Bring this node's stage of a plan to where a checkpoint has its layers; while nobody has all of it,
        whoever has may come back.

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
            await self._checkpoints.restore(same, *arenas, holders)
        else:
            graph = await self._service.models.get(run.manifest.graph_hash, holders)
            await self._checkpoints.restore_layers(checkpoint, run, graph, (ranges, number), arenas, holders)

    # The committer's side

    def saved(self, plan: Plan, sender: PeerId, message: Saved) -> None:
        """A stage is put away at one of its replicas. Raises RemoteProtocolError."""
        row = plan.stages[message.stage] if message.stage < len(plan.stages) else None
        if row is None or sender not in row.replicas:
            raise RemoteProtocolError("a stage was saved by a peer that does not hold it")
        if (message.state.first_layer, message.state.last_layer) != (row.first_layer, row.last_layer):
            raise RemoteProtocolError("other layers were saved than those of the stage")
        committer = self._committer()
        if committer is not None:
            committer.checkpoint_took(message.step, message.milliseconds / 1_000)
        saving = plan.height, message.step
        if saving > self._saving:
            self._saving, self._saved = saving, {}
        if saving == self._saving:
            self._saved[message.stage] = sender, message.state
            self._spread_next(plan)

    def _spread_next(self, plan: Plan) -> None:
        """Spread what all stages have saved, one checkpoint after the other."""
        height, step = self._saving
        if len(self._saved) == len(plan.stages) and height == plan.height and not self._is_spreading:
            self._is_spreading = True
            rows = [self._saved.pop(number) for number in range(len(plan.stages))]
            self._service.start_task(self._spread, plan, step, rows, of=self._run)

    async def _spread(self, plan: Plan, step: int, rows: Sequence[tuple[PeerId, StageState]]) -> None:
        try:
            await self._spread_now(plan, step, rows)
        except (NoRoom, OSError) as error:
            self._say_failed(step, error)
        finally:
            self._is_spreading = False
            self._spread_next(plan)

    async def _spread_now(self, plan: Plan, step: int, rows: Sequence[tuple[PeerId, StageState]]) -> None:
        run, live = self._run, set(self._live()) | {self._service.signer.peer}
        roster = [peer for peer in plan.members if peer in live]
        wanted = [
            checkpoint_holders(run.id, number, roster, [PeerId(peer) for peer in stage.replicas])
            for number, stage in enumerate(plan.stages)
        ]
        states = [state for _, state in rows]
        holders = [[sender] for sender, _ in rows]
        have = await self._copies.spread(run.id, step, states, holders, wanted)
        if not _are_enough(have, wanted):
            return  # the checkpoint before stays the newest
        samples = step * run.manifest.microbatches * run.manifest.microbatch
        name = await self._checkpoints.seal(
            run, plan, step=step, samples=samples, stages=states, is_guest=self._is_guest
        )
        keeping = sorted({peer for each in have for peer in each})
        taken = {self._service.signer.peer, *await self._copies.conclude(run.id, step, name, keeping)}
        have = tuple([peer for peer in each if peer in taken] for each in have)
        if not _are_enough(have, wanted):
            return
        await self.learn(step, name)
        for peer in plan.members:
            if peer != self._service.signer.peer and peer in live:
                self._service.send(peer, Checkpointed(plan_hash(plan), step, name))
        copies = min((len(set(each)) for each in have), default=0)
        size = sum(state.state_bytes for state in states)
        at, committer = self._service.seams.clock.wall(), self._committer()
        paced = None if committer is None else committer.saving
        self._service.publish(
            CheckpointKept(
                at=at,
                run=run.text,
                step=step,
                checkpoint=name.hex(),
                copies=copies,
                size_bytes=size,
                next_steps=0 if paced is None else paced.steps,
                next_seconds=0.0 if paced is None else round(paced.seconds, 3),
            )
        )

    async def learn(self, step: int, name: bytes) -> None:
        """A checkpoint is whole: whoever plans next may go back to it."""
        if self._newest is not None and step <= self._newest.step:
            return
        self._newest = Offer(step, name)
        self._learned()
        if self._is_writing:
            return  # whoever writes now goes on until the newest is written
        self._is_writing = True
        seams, written = self._service.seams, None
        try:
            while written != self._newest:
                written = self._newest
                data = encode(written)
                await seams.executor.run(partial(seams.storage.write, newest_name(self._run.text), data))
        finally:
            self._is_writing = False


def _are_enough(have: Sequence[Sequence[PeerId]], wanted: Sequence[Sequence[PeerId]]) -> bool:
    """Return whether each stage is on so many disks that it is not lost with the next one."""
    return all(len(each) >= min(COPIES_MIN, len(most)) for each, most in zip(have, wanted, strict=True))


def _read_newest(service: Service, run: str) -> Offer | None:
    data = service.seams.storage.read(newest_name(run))
    try:
        offer: Offer | None = None if data is None else decode(data, Offer, bytes_max=_OFFER_BYTES_MAX)
    except RemoteProtocolError:
        return None  # damaged: as if there were none
    return offer
