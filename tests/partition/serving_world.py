"""Stages that serve, all in one process, for the proofs of serving."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from partition.capture.state_dict import bytes_of
from partition.codecs.codec import pack, unpack
from partition.execute.admit import admit, room_bytes
from partition.execute.executor import StageExecutor
from partition.model.cut import cut_layers
from partition.model.graph import Graph
from partition.stage import (
    CopySession,
    EndSession,
    Refused,
    Reload,
    Serve,
    Served,
    StageDone,
    StageSpecification,
    Unit,
)
from partition.stage_layout import arena_bytes, parameter_layout


def session(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Chain:
    """A model's stages, called one after the other."""

    def __init__(
        self,
        graph: Graph,
        values: Mapping[str, torch.Tensor],
        *,
        stages: int = 1,
        threads: int = 1,
        cache_bytes: int = 1 << 22,
        tokens: int = 512,
        packs: bool = True,
    ) -> None:
        self.graph, self.values = graph, values
        layers = len(graph.layers)
        ends = [layers * (number + 1) // stages for number in range(stages)]
        ranges = list(zip([0, *ends], ends, strict=False))
        sizes = (tokens, 256, graph.symbols[2].maximum)
        self.stages: list[StageExecutor] = []
        for share in cut_layers(graph, b"x" * 32, ranges):
            specification = StageSpecification(
                b"run", share, sizes, threads=threads, cache_bytes=cache_bytes, memory_bytes_max=1 << 32
            )
            admitted = admit(specification)
            arenas = {name: memoryview(bytearray(size)) for name, size in arena_bytes(specification).items()}
            room = room_bytes(specification, admitted) if packs else 0
            stage = StageExecutor(specification, arenas, room)
            for slot in parameter_layout(specification):
                name = next(name for name in slot.parameter.names if name in values)
                arenas["parameters"][slot.begin_bytes : slot.end_bytes] = bytes_of(values[name])
            assert isinstance(stage.handle(Reload()), StageDone)
            self.stages.append(stage)

    def ask(
        self, units: Sequence[Unit], tokens: Sequence[int], *, is_hidden: bool = False
    ) -> torch.Tensor | Refused | None:
        """Return the logits or the hidden states of the requested rows, or the first refusal."""
        payload = pack([("int64", np.array(tokens, dtype=np.int64))], "raw")
        answer: Served | None = None
        for stage in self.stages:
            reply = stage.handle(Serve(tuple(units), payload, is_hidden=is_hidden))
            if isinstance(reply, Refused):
                return reply
            assert isinstance(reply, Served)
            answer = reply
            if reply.output is not None:
                payload = reply.output
        if answer is None or answer.output is None:
            return None
        return torch.from_numpy(unpack(payload, bytes_max=payload.size_bytes)[0][1].copy())

    def end(self, name: bytes) -> None:
        for stage in self.stages:
            assert isinstance(stage.handle(EndSession(name)), StageDone)

    def fork(self, name: bytes, base: bytes, tokens: int) -> None:
        for stage in self.stages:
            assert isinstance(stage.handle(CopySession(name, base, tokens)), StageDone)

    def logits(self, units: Sequence[Unit], tokens: Sequence[int]) -> torch.Tensor:
        found = self.ask(units, tokens)
        assert isinstance(found, torch.Tensor), found
        return found
