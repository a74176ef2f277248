"""The training of one member in local mode: a stage's process that holds the whole model, and the member's
own shard.

It makes steps and evaluations, and provides its parameters as a vector to average. Not here: the time and the
group of a round (`node.local.member`).
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import Any

import numpy as np
import safetensors.numpy
import trio
from blake3 import blake3

from crypto.identity import PeerId
from gossip.averaging.robust.reduction import Vector
from node.averaging.snapshot import Snapshot, make_snapshot
from node.content.datasets import Array, Batches
from node.errors import StageDiverged, StageFailed
from node.local.shard import Shard
from node.protocols.manifest import Run, own_data_of
from node.seams import Executor, Stage, Storage
from partition import stage as api
from partition.codecs.codec import Payload, pack, typed
from partition.run.local.courses import ColumnBroken
from partition.run.local.member_stage import StageCounts
from partition.stage import StageSpecification
from partition.stage_layout import arena_bytes, gradient_bytes, parameter_layout

Pick = Callable[[int], tuple[list[Array], list[Array]]]

OUTER = "outer/"
"""Prefix of a snapshot's arrays that a strategy hands to late joiners."""


@dataclass(frozen=True)
class Stepped:
    """One local step: the mean loss of its samples, or the reason why the step changed nothing."""

    loss: float
    samples: int
    diverged: str = ""


def state_bytes_max(specification: StageSpecification) -> int:
    """Return the maximum size of a stage's snapshot, including the strategy's arrays."""
    arenas = arena_bytes(specification)
    return 4 * (arenas["parameters"] + arenas["moments"]) + (1 << 20)


class LocalTrainer(StageCounts):
    """One member's model. It takes one call at a time."""

    def __init__(
        self,
        run: Run,
        specification: StageSpecification,
        stage: Stage,
        batches: Batches,
        executor: Executor,
        me: PeerId,
        *,
        in_flight: int = 1,
    ) -> None:
        """Up to `in_flight` micro-batches are in progress in `stage`, which keeps them in order."""
        super().__init__(run.manifest.steps)
        is_own = own_data_of(run.manifest) is not None
        self.shard = Shard(run.id, run.manifest.seed, batches.train_samples, me, is_whole=is_own)
        self.stage = stage
        self.dtype = specification.dtype
        self._in_flight = in_flight
        self._manifest = run.manifest
        self._batches = batches
        self._held_out, self._pick = self._held_out_samples(is_own=is_own)
        self._executor = executor
        self._specification = specification
        self._items = gradient_bytes(specification) // specification.item_bytes
        self._moments = specification.optimizer.moments
        # Random operators draw numbers by micro-batch, so each member needs a different range.
        self._first = int.from_bytes(blake3(run.id + me).digest()[:3], "big") << 24

    def _held_out_samples(self, *, is_own: bool) -> tuple[int, Pick]:
        """Return the number of held-out samples and the function that picks them: the run's samples, or this
        member's own if data stays with its owners."""
        manifest, batches = self._manifest, self._batches
        validation, test = manifest.validation_samples, manifest.test_samples
        if is_own:  # the remainder is not a whole batch, which not every model accepts
            size = manifest.microbatch
            validation, test = (
                count - count % size if count > size else count for count in batches.held_out_samples
            )
        return (validation, batches.validation) if validation else (test, batches.test)

    async def train_step(self) -> Stepped:
        """Make one optimizer step on this member's next samples. Raises StageFailed."""
        manifest = self._manifest
        try:
            done = await self._pass_all(manifest.microbatches, self._training_microbatch)
        except StageDiverged as error:
            return await self._skip(str(error))
        samples, loss = sum(each.samples for each in done), sum(each.loss for each in done)
        self._arena("totals")[:] = self._arena("gradients")
        normed = await self.stage.call(api.Norm())
        assert isinstance(normed, api.Normed)
        if not (isfinite(normed.squared_norm) and isfinite(loss)):
            return await self._skip("the gradient is not finite")
        norm = normed.squared_norm if manifest.optimizer.clip_norm else None
        await self.stage.call(api.Apply(self.step, max(1, samples), norm))
        self.step += 1
        self.samples += samples
        return Stepped(loss / max(1, samples), samples)

    async def _training_microbatch(self, number: int) -> api.Forward:
        rows = self.shard.take(self._manifest.microbatch)
        inputs, labels = await self._executor.run(partial(self._packed, self._batches.pick, rows))
        microbatch = self._first + (self.step * self._manifest.microbatches + number) % (1 << 24)
        return api.Forward(self.step, microbatch, True, inputs, labels)

    async def _test_microbatch(self, number: int) -> api.Forward:
        size = self._manifest.microbatch
        left = self._held_out - number * size
        inputs, labels = await self._executor.run(partial(self._packed, self._test, (number, left)))
        return api.Forward(self.step, number, False, inputs, labels)

    async def _pass_all(
        self, count: int, make: Callable[[int], Awaitable[api.Forward]]
    ) -> list[api.Forwarded]:
        """Pass `count` micro-batches through the stage, at most `in_flight` in parallel; return their
        results. After a failure no more are begun, and those in progress are awaited, so that no answer is
        outstanding."""
        done: dict[int, api.Forwarded] = {}
        errors: list[Exception] = []
        free = trio.Semaphore(self._in_flight)

        async def one(
            number: int, forward: api.Forward, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
        ) -> None:
            task_status.started()  # up to this point the order is that of the stage's queue
            try:
                forwarded = await self.stage.call(forward)
                assert isinstance(forwarded, api.Forwarded)
                done[number] = forwarded
            except (StageFailed, ColumnBroken) as error:
                errors.append(error)
            finally:
                free.release()

        async with trio.open_nursery() as nursery:
            for number in range(count):
                await free.acquire()
                if errors:
                    break
                await nursery.start(one, number, await make(number))
        if errors:
            # Raise StageDiverged, which only skips the step, only if all errors are of that kind.
            raise next((each for each in errors if not isinstance(each, StageDiverged)), errors[0])
        return [done[number] for number in range(count)]

    async def drop_step(self) -> None:
        """Drop a step that cannot be completed. Raises StageFailed."""
        await self.stage.call(api.Discard())
        await self.stage.call(api.Restore(self.step))

    async def _skip(self, reason: str) -> Stepped:
        await self.stage.call(api.Discard())
        await self.stage.call(api.Apply(self.step, 1, None if not self._clips else 0.0, is_skipped=True))
        self.step += 1
        return Stepped(0.0, 0, reason)

    @property
    def _clips(self) -> bool:
        return bool(self._manifest.optimizer.clip_norm)

    @property
    def held_out_microbatches(self) -> int:
        """The number of micro-batches of the held-out samples."""
        return -(-self._held_out // self._manifest.microbatch)

    async def evaluate(self, microbatches_max: int | None = None) -> tuple[float, int, tuple[float, ...]]:
        """Return the mean loss over the validation samples (or, if there are none, the held-out ones), their
        number, and the sums of their metrics. `microbatches_max` limits this to the first micro-batches.
        Raises StageFailed."""
        count = self.held_out_microbatches
        count = count if microbatches_max is None else min(count, microbatches_max)
        done = await self._pass_all(count, self._test_microbatch)
        samples, loss = sum(each.samples for each in done), sum(each.loss for each in done)
        metrics = np.zeros(len(self._manifest.metrics))
        for each in done:
            metrics += each.metrics
        return loss / max(1, samples), samples, tuple(float(each) for each in metrics)

    async def held_out_loss(self, microbatches_max: int | None = None) -> float:
        """Return the mean held-out loss of this member's parameters; inf if it is not a number."""
        try:
            loss, _, _ = await self.evaluate(microbatches_max)
        except StageDiverged:
            return inf
        return loss if isfinite(loss) else inf

    async def evaluate_result(self, name: str, storage: Storage) -> float:
        """Return the mean held-out loss of the model in a stored file; inf if it is not a number. This
        member's own parameters are restored afterwards. Raises StageFailed."""
        own = await self._executor.run(lambda: self._arena("parameters").copy())
        try:
            if not await self._executor.run(partial(self._read_result, name, storage)):
                return inf
            await self.stage.call(api.Restore(self.step))
            loss, _, _ = await self.evaluate()
            return loss if isfinite(loss) else inf
        except StageDiverged:
            return inf
        finally:
            with trio.CancelScope(shield=True):
                await self._executor.run(partial(np.copyto, self._arena("parameters"), own))
                await self.stage.call(api.Restore(self.step))

    def _read_result(self, name: str, storage: Storage) -> bool:
        """Write the parameters of a stored result into the arena; return whether they are complete."""
        data = storage.read(name)
        try:
            tensors = {} if data is None else safetensors.numpy.load(data)
        except (safetensors.SafetensorError, ValueError, TypeError, KeyError):
            return False
        arena = self._arena("parameters")
        for slot in parameter_layout(self._specification):
            tensor = tensors.get(slot.name)
            if tensor is None or tensor.shape != slot.shape:
                return False
            arena[slot.offset : slot.offset + slot.size] = tensor.reshape(-1)
        return bool(np.isfinite(arena).all())

    def _test(self, which: tuple[int, int]) -> tuple[list[Array], list[Array]]:
        number, left = which
        inputs, labels = self._pick(number)
        return [each[:left] for each in inputs], [each[:left] for each in labels]

    def _packed(self, pick: Any, which: object) -> tuple[Payload, Payload]:
        inputs, labels = pick(which)
        sizes = (len(inputs[0]), *self._manifest.sizes)
        first, second = (
            pack([typed(array) for array in arrays], "raw", sizes) for arrays in (inputs, labels)
        )
        return first, second

    # Parameters

    def _arena(self, name: str) -> Vector:
        array: Vector = np.frombuffer(self.stage.vector(name), self.dtype)
        return array

    async def copy_out(self, *, moments: bool) -> Vector:
        """Return a copy of the trained parameters, followed by the optimizer's moments."""
        return await self._executor.run(partial(self._copy_out, moments))

    def _copy_out(self, moments: bool) -> Vector:
        parameters = self._arena("parameters")[: self._items]
        return np.concatenate([parameters, self._arena("moments")]) if moments else parameters.copy()

    async def copy_in(self, vector: Vector) -> None:
        """Continue from these values, in the form of `copy_out`. Raises StageFailed."""
        await self._executor.run(partial(self._copy_in, vector))
        await self.stage.call(api.Restore(self.step))

    def _copy_in(self, vector: Vector) -> None:
        self._arena("parameters")[: self._items] = vector[: self._items]
        if vector.size > self._items:
            moments = self._arena("moments")
            moments[:] = vector[self._items :]
            if self._moments == 2:  # codecs and later changes may make squares negative
                squares = moments[self._items :]
                np.maximum(squares, 0, out=squares)

    # State for late joiners

    async def snapshot(self, rounds: int, lineage: bytes, outer: Mapping[str, Vector]) -> Snapshot:
        """Return this member's whole state, including the strategy's arrays."""
        return await self._executor.run(partial(self._snapshot, rounds, lineage, outer))

    def _snapshot(self, rounds: int, lineage: bytes, outer: Mapping[str, Vector]) -> Snapshot:
        vectors = {"parameters": self._arena("parameters"), "moments": self._arena("moments")}
        vectors |= {OUTER + name: vector for name, vector in outer.items()}
        arrays = {
            name: (self.dtype, (vector.size,), vector.view(np.uint8)) for name, vector in vectors.items()
        }
        return make_snapshot(self.step, rounds, lineage, arrays)

    @property
    def state_bytes_max(self) -> int:
        """The maximum size of a snapshot of this model."""
        return state_bytes_max(self._specification)

    async def take_over(self, found: Snapshot) -> dict[str, Vector]:
        """Continue from another member's state; return its arrays for the strategy. Raises ValueError if it
        does not fit this model, or its values cannot be used."""
        if found.table.step > self._manifest.steps:
            raise ValueError("the state of others has a step that the run does not have")
        arrays = found.arrays()
        outer: dict[str, Vector] = {}
        for name in ("parameters", "moments"):
            row, data = arrays.get(name, (None, None))
            size = self._arena(name).size
            if row is None or data is None or row.shape != (size,) or row.dtype != self.dtype:
                raise ValueError(f"the state of others has no matching {name}")
        for _, data in arrays.values():
            if not np.isfinite(data.view(self.dtype)).all():
                raise ValueError("the state of others has values that are not finite")
        for name, (row, data) in arrays.items():
            if name.startswith(OUTER) and row.shape == (self._items,) and row.dtype == self.dtype:
                outer[name.removeprefix(OUTER)] = data.view(self.dtype).copy()
        for name in ("parameters", "moments"):
            await self._executor.run(partial(np.copyto, self._arena(name), arrays[name][1].view(self.dtype)))
        self.step = found.table.step
        await self.stage.call(api.Restore(self.step))
        return outer

    async def export(self) -> bytes:
        """Return the model as a safetensors file of one stage. Raises StageFailed."""
        exported = await self.stage.call(api.Export())
        assert isinstance(exported, api.Exported)
        return exported.data
