"""Checkpoints of this node's runs: made from a stage's arenas, signed, fetched, restored, exported.

`store` has the layout on the disk, `replication` the copies. A checkpoint is made in this order, so that a
named checkpoint is always complete:

    snapshot    each stage, on one of its replicas: stores chunks as this node's blobs, and pins them
    (copies)    the keepers of each stage fetch its chunks to their disks
    seal        the committer signs the manifest of all stages
    (copies)    the keepers fetch the manifest, and announce in the DHT what they hold
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from crypto.errors import LocalProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from node.checkpoints.chunks import cutting, finish, restoring, verifying
from node.checkpoints.recut import chunks_of, copies_between, recutting
from node.checkpoints.store import CheckpointStore, StoredCheckpoint
from node.content.blobs import BlobSink, BlobsMissing, Refuse, fetch_all
from node.protocols.checkpoint import (
    CHECKPOINT_BYTES_MAX,
    CHECKPOINT_VERSION,
    Checkpoint,
    StageState,
    StatePart,
    check_checkpoint,
    check_part,
    decode_part,
    sign_checkpoint,
)
from node.protocols.manifest import Run, run_text
from node.seams import Executor, Seams
from node.storage.blobs import Blobs, hash_of
from partition.model.graph import Graph
from partition.plan.plan import Plan, plan_hash

T = TypeVar("T")


class Checkpoints:
    """The checkpoint service of one node. `refuse` is called for peers that violated the protocol."""

    def __init__(self, seams: Seams, signer: Signer, blobs: Blobs, *, refuse: Refuse) -> None:
        self.store = CheckpointStore(seams.storage, blobs)
        self._blobs = blobs
        self._seams = seams
        self._signer = signer
        self._refuse = refuse
        self._sink = BlobSink(blobs, seams.executor)

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function of the store in the executor, where waiting for the disk is allowed."""
        return await self._seams.executor.run(function)

    # Saving and restoring a stage

    async def snapshot(
        self,
        run: Run,
        step: int,
        stage: int,
        layers: tuple[int, int],
        parameters: memoryview,
        moments: memoryview,
        *,
        is_guest: bool,
    ) -> StageState:
        """Store a stage's state after `step` steps. Its arenas must not change meanwhile.

        `is_guest` marks another peer's run, which counts against the budget.

        Raises:
            NoRoom: the budget is used up. OSError: the disk is full.
        """
        store, executor = self.store, self._seams.executor
        with self._blobs.hold():
            part = await finish(executor, cutting(parameters, moments, self._blobs.put))
            return await self.call(
                partial(store.add_part, run.text, step, stage, part, layers, is_guest=is_guest)
            )

    async def restore(
        self, state: StageState, parameters: memoryview, moments: memoryview, holders: Sequence[PeerId]
    ) -> Mapping[PeerId, int]:
        """Restore a stage's state into its arenas. Missing chunks are fetched from `holders`, and not kept.
        Return how many bytes each holder delivered.

        Raises:
            Unreachable: no holder had it. RemoteProtocolError: it is not a state for this stage.
        """
        with self._blobs.hold():
            part = decode_part(await self._part_data(state, holders))
            delivered = await self._bring(part.chunks, holders)
            try:
                await self._restore(part, parameters, moments)
            except BlobsMissing:
                await self._verify(part.chunks)
                await self._bring(part.chunks, holders)
                await self._restore(part, parameters, moments)
            return delivered

    async def _restore(self, part: StatePart, parameters: memoryview, moments: memoryview) -> None:
        await finish(self._seams.executor, restoring(part, self._blobs.get, parameters, moments))

    async def restore_layers(
        self,
        checkpoint: Checkpoint,
        run: Run,
        graph: Graph,
        wanted: tuple[Sequence[tuple[int, int]], int],
        arenas: tuple[memoryview, memoryview],
        holders: Sequence[PeerId],
    ) -> Mapping[PeerId, int]:
        """Restore a stage's state from a checkpoint that was cut into different stages. `wanted` are the
        layers of all stages, and the number of the stage. Only chunks that contain a part of it are fetched.

        Returns and raises as `restore`.
        """
        work = partial(copies_between, checkpoint, run.manifest, graph, *wanted)
        copies = await self._seams.executor.run(work, apart=True)
        with self._blobs.hold():
            parts = {}
            for stage in sorted({copy.stage for copy in copies}):
                state = checkpoint.stages[stage]
                parts[stage] = decode_part(await self._part_data(state, holders))
                check_part(parts[stage], state)
            chunks = chunks_of(parts, copies)
            delivered = await self._bring(chunks, holders)
            try:
                await finish(self._seams.executor, recutting(parts, copies, self._blobs.get, arenas))
            except BlobsMissing:
                await self._verify(chunks)
                await self._bring(chunks, holders)
                await finish(self._seams.executor, recutting(parts, copies, self._blobs.get, arenas))
            return delivered

    # Whole checkpoints

    async def seal(
        self, run: Run, plan: Plan, *, step: int, samples: int, stages: Sequence[StageState], is_guest: bool
    ) -> bytes:
        """Sign and store the manifest of all stages of a plan; return the checkpoint's name. Raises NoRoom,
        OSError."""
        rows = [(stage.first_layer, stage.last_layer) for stage in plan.stages]
        if [(stage.first_layer, stage.last_layer) for stage in stages] != rows:
            raise LocalProtocolError("the checkpoint's stages are not those of its plan")
        checkpoint = Checkpoint(
            version=CHECKPOINT_VERSION,
            run=run.id,
            manifest=run.fact,
            graph=run.manifest.graph_hash,
            plan=plan_hash(plan),
            height=plan.height,
            step=step,
            samples=samples,
            stages=tuple(stages),
            created_milliseconds=int(self._seams.swarm_clock.wall() * 1000),
        )
        data = sign_checkpoint(self._signer, checkpoint)
        return await self.call(partial(self.store.add, data, is_guest=is_guest))

    async def read(self, name: bytes, holders: Sequence[PeerId]) -> tuple[PeerId, Run, Checkpoint, bytes]:
        """Return a checkpoint by its name, from this node or from `holders`: its author, run, content and
        bytes.

        Raises:
            Unreachable: no holder had it.
            RemoteProtocolError: it is not a checkpoint, or has an invalid signature.
        """
        data = await self._blob(name, CHECKPOINT_BYTES_MAX, holders)
        return *check_checkpoint(self._signer, data), data

    async def bring_stage(
        self,
        run: bytes,
        step: int,
        stage: int,
        state: StageState,
        holders: Sequence[PeerId],
        *,
        is_guest: bool,
    ) -> Mapping[PeerId, int]:
        """Keep a stage on this node, fetching its missing chunks; return how many bytes each holder
        delivered.

        When this returns, the stage survives a crash.

        Raises:
            Unreachable: the holders did not have all of it.
            RemoteProtocolError: its list of chunks does not match.
            NoRoom: the budget is used up.
            OSError: the disk is full.
        """
        data = await self._part_data(state, holders)
        part: StatePart = await self.call(
            partial(self.store.expect_part, run_text(run), step, stage, state, data, is_guest=is_guest)
        )
        delivered = await self._bring(part.chunks, holders)
        await self.call(partial(self._blobs.sync, [state.part, *part.chunks]))
        return delivered

    async def bring(self, kept: StoredCheckpoint, holders: Sequence[PeerId]) -> None:
        """Fetch all stages of a checkpoint to this node. Raises as `bring_stage`."""
        checkpoint = kept.checkpoint
        for number, state in enumerate(checkpoint.stages):
            await self.bring_stage(checkpoint.run, checkpoint.step, number, state, holders, is_guest=False)

    async def export(
        self, kept: StoredCheckpoint, graph: Graph, path: Path, holders: Sequence[PeerId]
    ) -> int:
        """Write a checkpoint's model to a safetensors file; return its length. Missing chunks are fetched
        from `holders`.

        Raises:
            Unreachable: no holder has a part.
            RemoteProtocolError: the checkpoint does not fit its graph.
            OSError.
        """
        if not kept.is_whole:
            await self.bring(kept, holders)
        try:
            return await finish(self._seams.executor, self.store.exporting(kept, graph, path))
        except BlobsMissing:
            for hashes in (
                await self.call(partial(self.store.stage_pins, kept.run, kept.checkpoint.step))
            ).values():
                await self._verify(hashes)
            await self.bring(kept, holders)
            return await finish(self._seams.executor, self.store.exporting(kept, graph, path))

    # Blobs

    async def _verify(self, names: Iterable[bytes]) -> None:
        """Read all blobs to find the damaged ones, after one was found. They are removed, and may be fetched
        again."""
        await finish(self._seams.executor, verifying(names, self._blobs.get))

    async def _part_data(self, state: StageState, holders: Sequence[PeerId]) -> bytes:
        return await self._blob(state.part, state.part_bytes, holders)

    async def _blob(self, name: bytes, bytes_max: int, holders: Sequence[PeerId]) -> bytes:
        data = await self.call(partial(self._blobs.get, name))
        if data is not None:
            return data
        sink = _MemorySink(self._seams.executor)
        await fetch_all(
            self._seams.network,
            {name: bytes_max},
            holders,
            sink=sink,
            refuse=self._refuse,
            clock=self._seams.clock,
        )
        return sink.found[name]

    async def _bring(self, wanted: Mapping[bytes, int], holders: Sequence[PeerId]) -> Mapping[PeerId, int]:
        return await fetch_all(
            self._seams.network,
            wanted,
            holders,
            sink=self._sink,
            refuse=self._refuse,
            clock=self._seams.clock,
        )


class _MemorySink:
    """A sink for a few blobs that are examined before they are kept."""

    def __init__(self, executor: Executor) -> None:
        self.found: dict[bytes, bytes] = {}
        self._executor = executor

    def has(self, name: bytes) -> bool:
        return name in self.found

    async def take(self, name: bytes, data: bytes) -> bool:
        if await self._executor.run(partial(hash_of, data)) != name:
            return False
        self.found[name] = data
        return True
