"""Stage executors with their own arenas, alone or as a row of stages, for tests."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from partition.codecs.choice import Frames, narrowest
from partition.codecs.codec import Array, Payload, Rounding, pack, typed
from partition.execute import StageExecutor
from partition.model.cut import cut, legal_positions
from partition.model.graph import Graph, StageGraph, encode_graph, graph_hash
from partition.stage import (
    Applied,
    Apply,
    Backward,
    BackwardDone,
    Forward,
    Forwarded,
    Norm,
    Normed,
    Reply,
    Request,
    StageSpecification,
)
from partition.stage_layout import arena_bytes, parameter_layout

T = TypeVar("T")


class Held:
    """One replica of a stage."""

    def __init__(self, graph: StageGraph, sizes_max: Sequence[int], **changes: Any) -> None:
        self.specification = StageSpecification(b"a run", graph, tuple(sizes_max), **changes)
        self.arenas = {
            name: memoryview(bytearray(size)) for name, size in arena_bytes(self.specification).items()
        }
        self.executor = StageExecutor(self.specification, self.arenas)

    def handle(self, request: Request) -> Reply:
        return self.executor.handle(request)

    def ask(self, request: Request, kind: type[T]) -> T:
        reply = self.executor.handle(request)
        assert isinstance(reply, kind), reply
        return reply

    def vector(self, name: str) -> Array:
        """Return an arena as values: a view, so writing to it changes the arena."""
        return np.frombuffer(self.arenas[name], dtype=self.specification.dtype)

    def named(self, arena: str) -> dict[str, Array]:
        """Return copies of each parameter's part of an arena that has room for it."""
        vector = self.vector(arena)
        return {
            slot.name: vector[slot.offset : slot.offset + slot.size].reshape(slot.shape).copy()
            for slot in parameter_layout(self.specification)
            if arena == "parameters" or slot.parameter.kind != "frozen"
        }


def bundle(*arrays: Array, sizes: Sequence[int]) -> Payload:
    return pack([typed(array) for array in arrays], "raw", sizes)


def tensors_of(payload: Payload) -> list[torch.Tensor]:
    """Return a payload's tensors; plain codec only."""
    found, offset = [], 0
    for header in payload.tensors:
        dtype = getattr(torch, header.dtype)
        part = bytearray(payload.data[offset : offset + header.size_bytes])
        found.append(torch.frombuffer(part, dtype=dtype).view(header.shape))
        offset += header.size_bytes
    return found


def spread(graph: Graph, stages: int) -> tuple[StageGraph, ...]:
    """Cut the graph at this many evenly spread legal positions."""
    legal = legal_positions(graph)
    positions = sorted({legal[len(legal) * number // stages] for number in range(1, stages)})
    return cut(graph, graph_hash(encode_graph(graph)), positions)


class Row:
    """A row of stages with `replicas` of each, which exchanges the sums that a run exchanges between stages.

    `frames` is the codec between stages, None for raw; its errors accumulate.
    """

    def __init__(
        self,
        stages: Sequence[StageGraph],
        sizes_max: Sequence[int],
        replicas: int = 1,
        frames: Frames | None = None,
        **changes: Any,
    ) -> None:
        self.rounding_forward = self.rounding_backward = Rounding()
        self._activations = narrowest(frames, is_gradient=False) if frames else "raw"
        self._gradients = narrowest(frames, is_gradient=True) if frames else "raw"
        self.chains = [[Held(stage, sizes_max, **changes) for stage in stages] for _ in range(replicas)]

    def forward(self, step: int, number: int, inputs: Payload, labels: Payload, *, train: bool) -> Forwarded:
        """Send one micro-batch forward and (if training) back, through the replicas whose turn it is."""
        chain = self.chains[number % len(self.chains)]
        values: Payload | None = inputs
        for stage in chain[:-1]:
            assert values is not None
            forwarded = stage.ask(Forward(step, number, train, values, None, self._activations), Forwarded)
            values = forwarded.output
            self.rounding_forward += forwarded.rounding
        assert values is not None
        closed = chain[-1].ask(Forward(step, number, train, values, labels, self._gradients), Forwarded)
        gradient = closed.gradient
        self.rounding_backward += closed.rounding
        if train:
            for stage in reversed(chain[:-1]):
                assert gradient is not None
                done = stage.ask(Backward(step, number, gradient, self._gradients), BackwardDone)
                gradient = done.gradient
                self.rounding_backward += done.rounding
        assert gradient is None
        return closed

    def apply(self, step: int, samples: int) -> None:
        """Sum over replicas and over tied stages, and apply the same step everywhere."""
        tied: dict[int, list[Array]] = {}
        for number in range(len(self.chains[0])):
            total = sum(chain[number].vector("gradients") for chain in self.chains)
            for chain in self.chains:
                chain[number].vector("totals")[:] = total
        for chain in self.chains:
            tied.clear()
            for stage in chain:
                for slot in parameter_layout(stage.specification):
                    if slot.is_tied and slot.parameter.kind != "frozen":
                        part = stage.vector("totals")[slot.offset : slot.offset + slot.size]
                        tied.setdefault(slot.row, []).append(part)
            for parts in tied.values():
                whole = np.sum(parts, axis=0)
                for part in parts:
                    part[:] = whole
        norm = sum(stage.ask(Norm(), Normed).squared_norm for stage in self.chains[0])
        for number in range(len(self.chains[0])):
            digests = {chain[number].ask(Apply(step, samples, norm), Applied).digest for chain in self.chains}
            assert len(digests) == 1

    def named(self, arena: str) -> dict[str, Array]:
        return {name: array for stage in self.chains[0] for name, array in stage.named(arena).items()}
