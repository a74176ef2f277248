"""Checkpoints for tests: small models with values in their stages' arenas, and nodes that keep the
checkpoints."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from crypto.facts import IdentitySigner
from crypto.identity import Identity
from node.checkpoints import chunks
from node.placement.admission import Machine, make_specification
from node.protocols import checkpoint
from node.protocols.manifest import Run, make_run
from partition.model.cut import cut_layers
from partition.model.graph import StageGraph
from partition.plan.plan import Plan, StagePlan
from partition.stage import OptimizerSettings, StageSpecification
from partition.stage_layout import arena_bytes
from tests.partition.captured_models import SAMPLES, captured
from tests.stack import Model, known, manifest

SMALL_CHUNK_BYTES = 64


def use_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks so small that a small model has many."""
    for module in (checkpoint, chunks):
        monkeypatch.setattr(module, "CHUNK_BYTES", SMALL_CHUNK_BYTES)


def signer(letter: str = "a") -> IdentitySigner:
    return IdentitySigner(Identity(letter.encode() * 32), "test")


@cache
def sample(name: str) -> Model:
    """Return one of the captured models. It is float64 if its samples are floating point, and float32
    otherwise."""
    return known(captured(SAMPLES[name], build(name)))


def build(name: str) -> torch.nn.Module:
    """Return the module of a captured model, with its initial parameters."""
    torch.manual_seed(1)
    model = SAMPLES[name].build()
    inputs, _ = SAMPLES[name].draw(1)
    return model.double() if isinstance(inputs, tuple) and inputs[0].is_floating_point() else model


@dataclass
class Saved:
    """A run of a model in some stages, and the contents of their arenas."""

    model: Model
    run: Run
    plan: Plan
    graphs: tuple[StageGraph, ...]
    specifications: list[StageSpecification]
    parameters: list[bytearray]
    moments: list[bytearray]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(stage.first_layer, stage.last_layer) for stage in self.plan.stages]


def saved(name: str = "residual", stages: int = 2, *, by: str = "a", seed: int = 1, **changes: Any) -> Saved:
    """Return a run that `by` requested. Its arenas hold values generated from `seed`."""
    model = sample(name)
    sizes = tuple(symbol.minimum for symbol in model.graph.symbols[1:])
    wanted: dict[str, Any] = {
        "sizes": sizes,
        "metrics": (),
        "model": name,
        "stages": stages,
        "optimizer": OptimizerSettings("adam"),
    }
    run = make_run(signer(by), manifest(model, **wanted | changes))
    layers = len(model.graph.layers)
    bounds = [layers * number // stages for number in range(stages + 1)]
    ranges = list(pairwise(bounds))
    peer = run.requester
    holders = [bytes([first + 1]) * 32 for first, _ in ranges]
    plan = Plan(
        run=run.id,
        parent=bytes([7]) * 32,
        height=3,
        roster=tuple(sorted({peer, *holders})),
        trainers=(peer,),
        microbatches=run.manifest.microbatches,
        stages=tuple(
            StagePlan(first, last, (holder,), (1,))
            for (first, last), holder in zip(ranges, holders, strict=True)
        ),
    )
    graphs = cut_layers(model.graph, model.hash, ranges)
    rng = Random(seed)
    made = Saved(model, run, plan, graphs, [], [], [])
    for number in range(stages):
        specification = make_specification(run, graphs, number, Machine(1, "cpu", 1 << 40))
        sizes_by_name = arena_bytes(specification)
        made.specifications.append(specification)
        made.parameters.append(numbers(rng, specification.dtype, sizes_by_name["parameters"]))
        made.moments.append(numbers(rng, specification.dtype, sizes_by_name["moments"]))
    return made


def numbers(rng: Random, dtype: str, size: int) -> bytearray:
    """Return `size` bytes that hold finite values."""
    count = size // np.dtype(dtype).itemsize
    return bytearray(np.array([rng.gauss(0, 1) for _ in range(count)], dtype).tobytes())
