"""Checkpoints of an active run on this node's disk: saves this node's stage, seals and restores whole
checkpoints, and stores the name of the newest.

After each step that the manifest names, the first replica of each stage stores a copy of its state and
reports it (`Saved`); training continues meanwhile. Not here: the rest of the protocol, and which checkpoint
is the newest (`partition.run.checkpoint_rounds`, a part of the run's member).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.checkpoints.replication import CheckpointOffer
from node.checkpoints.store import StoredCheckpoint
from node.errors import StageFailed, Unreachable
from node.events import CheckpointFailed, CheckpointKept
from node.protocols.checkpoint import StageState
from node.protocols.manifest import Run
from node.protocols.runs import Saved
from node.runs.context import RunService
from node.seams import Seams, Stage
from node.storage.blobs import NoRoom
from partition.plan.plan import Plan, plan_hash
from partition.run.checkpoint_rounds import CheckpointRounds
from partition.run.events import CheckpointEnded, CheckpointWhole, NewestChanged, SealWanted
from partition.run.messages import REASON_LENGTH_MAX
from partition.run.way_back import WayBack
from partition.steps.save_interval import SaveInterval

RESTORE_AGAIN_SECONDS = 2.0
_OFFER_BYTES_MAX = 64
CheckpointEvent = SealWanted | NewestChanged | CheckpointWhole | CheckpointEnded


def newest_name(run: str) -> str:
    """Return the storage name of a run's newest checkpoint."""
    return f"runs/{run}/newest"


def read_newest(seams: Seams, run: str) -> WayBack | None:
    """Return the newest checkpoint of a run according to this node's disk; None if that record is missing or
    damaged."""
    data = seams.storage.read(newest_name(run))
    try:
        offer: CheckpointOffer | None = (
            None if data is None else decode(data, CheckpointOffer, bytes_max=_OFFER_BYTES_MAX)
        )
    except RemoteProtocolError:
        return None
    return None if offer is None else (offer.checkpoint, offer.step)


class CheckpointPace(Protocol):
    """The part of a `node.pipeline.committer.CommitterShell` that checkpoints use."""

    saving: SaveInterval

    def checkpoint_took(self, step: int, seconds: float) -> None: ...
    def checkpoint_ended(self) -> None: ...


class CheckpointKeeper:
    """Keeps one member's checkpoints on disk. `rounds` is a part of the member's core. `live` returns current
    or former members that may deliver checkpoints. `act` carries out the core's requests."""

    def __init__(
        self,
        service: RunService,
        run: Run,
        rounds: CheckpointRounds,
        live: Callable[[], list[PeerId]],
        committer: Callable[[], CheckpointPace | None] = lambda: None,
        *,
        act: Callable[[], None],
    ) -> None:
        """Prepare checkpoints; `committer` returns this node's committer, or None if it does not commit."""
        self._service = service
        self._run = run
        self._rounds = rounds
        self._checkpoints = service.checkpoints
        self._copies = service.copies
        self._live = live
        self._act = act
        self._committer = committer
        self._writing = trio.Lock()
        self._written = rounds.newest

    def holds(self, checkpoint: WayBack) -> bool:
        """Return whether this node has the complete checkpoint."""
        kept: StoredCheckpoint | None = self._checkpoints.store.find(self._run.text, checkpoint[1])
        return kept is not None and kept.is_whole

    def on_event(self, event: CheckpointEvent) -> None:
        """Carry out an event of the core's checkpoint rounds."""
        committer = self._committer()
        match event:
            case SealWanted():
                self._start_task(self._seal, event)
            case NewestChanged(None):
                self._forget_newest()
            case NewestChanged():
                self._start_task(self._write_newest)
            case CheckpointWhole():
                self._publish_whole(event, None if committer is None else committer.saving)
            case CheckpointEnded():
                if committer is not None:
                    committer.checkpoint_ended()

    def _forget_newest(self) -> None:
        self._written = None
        self._service.seams.storage.delete(newest_name(self._run.text))
        self._rounds.stored(None)

    def _start_task(self, task: Callable[..., Any], *arguments: object) -> None:
        self._service.start_task(task, *arguments, of=self._run)

    @property
    def _now(self) -> float:
        return self._service.seams.clock.monotonic()

    @property
    def _is_guest(self) -> bool:
        return self._run.requester != self._service.signer.peer

    # As a replica

    async def save(self, plan: Plan, number: int, step: int, stage: Stage) -> None:
        """Copy a stage's state and store the copy, if this replica is the one that saves its stage.

        Returns once the state is copied. Raises StageFailed.
        """
        if not self._rounds.saves(plan, number):
            return
        run, began = self._service.seams.executor.run, self._now
        copy = await run(
            lambda: [memoryview(bytes(stage.vector(name))) for name in ("parameters", "moments")]
        )
        copied = self._now - began
        self._start_task(self._put_away, plan, number, step, *copy, copied)

    async def _put_away(
        self, plan: Plan, number: int, step: int, parameters: memoryview, moments: memoryview, copied: float
    ) -> None:
        """Store a copied state; `copied` is how many seconds the copy took."""
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
        """Report that this node cannot store a checkpoint of this step; the previous checkpoint stays the
        newest."""
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"the disk of this node: {error.strerror or error}"
        at = self._service.seams.clock.wall()
        self._service.publish(
            CheckpointFailed(at=at, run=self._run.text, step=step, reason=reason[:REASON_LENGTH_MAX])
        )

    async def restore(self, plan: Plan, name: bytes, step: int, stage: Stage) -> None:
        """Restore this node's stage of a plan from the layers of a checkpoint. If no reachable member has all
        of them, wait for one that may come back.

        Raises StageFailed if the checkpoint does not fit this stage.
        """
        holders = self._live()
        while True:
            try:
                await self._restore(plan, name, step, stage, holders)
            except Unreachable:
                await trio.sleep(RESTORE_AGAIN_SECONDS)
                # A newcomer knows only the current members, but a former member may still have the
                # checkpoint.
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

    # As the committer

    def saved(self, plan: Plan, sender: PeerId, message: Saved) -> None:
        """Handle a replica's message that it has stored its stage. Raises RemoteProtocolError."""
        row = plan.stages[message.stage] if message.stage < len(plan.stages) else None
        layers = None if row is None else (row.first_layer, row.last_layer)
        if layers != (message.state.first_layer, message.state.last_layer):
            raise RemoteProtocolError("the saved layers are not those of the stage")
        self._rounds.saved(sender, message.step, message.stage, message.state)
        committer = self._committer()
        if committer is not None:
            committer.checkpoint_took(message.step, message.milliseconds / 1_000)
        self._act()

    async def _seal(self, wanted: SealWanted) -> None:
        run, step, rounds = self._run, wanted.step, self._rounds
        samples, name = step * run.manifest.microbatches * run.manifest.microbatch, b""
        try:
            name = await self._checkpoints.seal(
                run,
                wanted.plan,
                step=step,
                samples=samples,
                stages=_typed(wanted.states),
                is_guest=self._is_guest,
            )
        except (NoRoom, OSError) as error:
            self._say_failed(step, error)
        finally:
            if name:
                rounds.sealed(self._now, step, name)
            else:
                rounds.seal_failed(step)
        self._act()
        if name:
            await self._copies.announce(run.text, CheckpointOffer(step, name))

    def _publish_whole(self, whole: CheckpointWhole, pace: SaveInterval | None) -> None:
        self._service.publish(
            CheckpointKept(
                at=self._service.seams.clock.wall(),
                run=self._run.text,
                step=whole.step,
                checkpoint=whole.name.hex(),
                copies=whole.copies,
                size_bytes=sum(state.state_bytes for state in _typed(whole.states)),
                next_steps=0 if pace is None else pace.steps,
                next_seconds=0.0 if pace is None else round(pace.seconds, 3),
            )
        )

    async def _write_newest(self) -> None:
        """Store the newest checkpoint's name; concurrent calls share writes."""
        seams, rounds = self._service.seams, self._rounds
        async with self._writing:
            newest = rounds.newest
            if newest is not None and newest != self._written:
                data = encode(CheckpointOffer(newest[1], newest[0]))
                try:
                    await seams.executor.run(partial(seams.storage.write, newest_name(self._run.text), data))
                except OSError as error:
                    self._say_failed(newest[1], error)
                else:
                    self._written = newest
                if rounds.newest is None:  # it belonged to a branch that was given up meanwhile
                    self._forget_newest()
        rounds.stored(newest)
        self._act()


def _typed(states: Sequence[object]) -> list[StageState]:
    return [state for state in states if isinstance(state, StageState)]
