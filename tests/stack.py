"""A swarm of whole nodes on simulated seams (interfaces to the outside world) that really train: set-up
shared by several tests.

It has virtual time, real protocol code, and real torch arithmetic. `reference` is the expected result,
computed in one process with the same micro-batches, seeds and rules.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import safetensors.numpy
import torch
import trio

from crypto.identity import Identity, PeerId
from node import config
from node.checkpoints.weights import weights_name
from node.content.datasets import Dataset, load_digits
from node.content.graphs import graph_name, values_name
from node.events import Event, RunEnded
from node.offering import Offering
from node.placement.admission import Machine, make_specification
from node.protocols.manifest import Manifest, Run, make_run
from node.recording.recorder import Recorder
from node.runs.manifest_builder import make_batches
from node.runtime import Node
from node.seams import Parts
from node.service_settings import ServiceSettings
from node.services.capacity import Capacity
from partition import stage as api
from partition.capture import Captured
from partition.capture.models.model_spec import Precision, capture_built_in
from partition.capture.weights import write_weights
from partition.codecs.codec import pack, typed
from partition.execute import StageExecutor
from partition.model.cut import cut_layers
from partition.model.graph import Graph, StoredValues
from partition.stage import OptimizerSettings
from partition.stage_layout import arena_bytes, parameter_layout
from sim.executor import SimExecutor
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seams import SimClock, SimNetworkFabric
from sim.seeds import seeded_entropy, seeded_rng
from sim.storage import MemoryStorage
from sim.worlds.scheduling import run_virtually

Reply = TypeVar("Reply", bound=api.Reply)
Tensors = Mapping[str, "np.ndarray[Any, np.dtype[Any]]"]

torch.set_num_threads(1)  # with many small stages in one process, threads would only wait for each other

STAGE_SECONDS = 0.02
"""Modelled seconds of a forward or backward pass: long compared with a message, short compared with a
probe."""


@dataclass
class Swarm:
    """Live nodes by name, their kill switches, and every event that each node published."""

    nodes: dict[str, Node] = field(default_factory=dict)
    scopes: dict[str, trio.CancelScope] = field(default_factory=dict)
    storages: dict[str, MemoryStorage] = field(default_factory=dict)
    events: dict[str, list[Event]] = field(default_factory=dict)
    lives: Counter[str] = field(default_factory=Counter)
    medium: SimNetworkFabric = field(default_factory=lambda: SimNetworkFabric(SimLinks(NetworkModel(), 1)))
    preset: config.Preset = "lan"
    settings: ServiceSettings = field(default_factory=ServiceSettings)
    parts: Parts = field(default_factory=dict)
    parts_of: Mapping[str, Parts] = field(default_factory=dict)

    def kill(self, name: str) -> PeerId:
        """Kill a node as by SIGKILL: no further packets in or out, no goodbye."""
        peer = self.nodes[name].peer
        self.medium.kill(peer)
        self.scopes[name].cancel()
        return peer

    def name_of(self, peer: PeerId) -> str:
        return next(name for name, node in self.nodes.items() if node.peer == peer)


@asynccontextmanager
async def swarm(
    names: str,
    *,
    seed: int = 1,
    stage_seconds: float = STAGE_SECONDS,
    storages: Mapping[str, MemoryStorage] | None = None,
    recorders: Mapping[str, Recorder] | None = None,
    executors: Mapping[str, SimExecutor] | None = None,
    offer: Offering | None = None,
    network: NetworkModel | None = None,
    preset: config.Preset = "lan",
    settings: ServiceSettings | None = None,
    parts: Parts | None = None,
    parts_of: Mapping[str, Parts] | None = None,
) -> AsyncIterator[Swarm]:
    """Yield nodes, each named by one letter; each joins through the previous one. `storages` are disks of
    earlier processes, `recorders` record the nodes, and `executors` compute in place of stage processes.
    `offer` is each node's offer, `network` the network between the nodes, `preset` their timers: with "lan" a
    virtual second costs a fifth of one with "local". `settings` apply to the services. `parts` are
    replacement classes for all nodes, `parts_of` those for one node, by its name."""
    medium = SimNetworkFabric(SimLinks(network or NetworkModel(), seed))
    group = Swarm(
        medium=medium,
        preset=preset,
        settings=settings or ServiceSettings(),
        parts=parts or {},
        parts_of=parts_of or {},
    )
    async with trio.open_nursery() as nursery:
        before: str | None = None
        for name in names:
            disk, recorder = (storages or {}).get(name), (recorders or {}).get(name)
            own = (executors or {}).get(name)
            await nursery.start(_live, group, name, before, seed, stage_seconds, disk, recorder, own, offer)
            before = name
        with trio.fail_after(60):
            while any(  # noqa: ASYNC110 - virtual time: waiting costs nothing
                len(node.membership.live) < len(names) for node in group.nodes.values()
            ):
                await trio.sleep(0.1)
        yield group
        nursery.cancel_scope.cancel()


async def _live(
    group: Swarm,
    name: str,
    before: str | None,
    seed: int,
    stage_seconds: float,
    storage: MemoryStorage | None = None,
    recorder: Recorder | None = None,
    executor: SimExecutor | None = None,
    offer: Offering | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Start a node; `storage` is the disk of an earlier process, None for an empty disk."""
    identity = Identity(bytes([seed, ord(name)]) * 16)
    storage = group.storages[name] = storage or MemoryStorage()
    storage.write("identity.key", identity.seed)
    storage.write("static.key", bytes(32))
    events = group.events.setdefault(name, [])
    # Like a real node, a restarted one draws different nonces.
    life = [group.lives[name]] if group.lives[name] else []
    group.lives[name] += 1
    join = [group.nodes[before].network.addresses[0].short] if before else []
    node = Node(
        config.Config(
            name=name,
            swarm=config.SwarmSettings(preset=group.preset),
            data_dir=Path("/simulated"),
            offer=offer or Offering(),
        ),
        join=join,
        network=group.medium.attach(identity.peer),
        clock=SimClock(),
        rng=seeded_rng(seed, identity.peer, *life),
        entropy=seeded_entropy(seed, identity.peer, *life),
        executor=executor or SimExecutor(lambda request: stage_seconds if _computes(request) else 0.0),
        storage=storage,
        capacity=Capacity("cpu", 1, 8 << 30, 16 << 30, 5e9, ""),
        report=events.append,
        recorder=recorder,
        settings=group.settings,
        parts={**group.parts, **group.parts_of.get(name, {})},
    )
    with trio.CancelScope() as scope:
        group.scopes[name] = scope
        async with node:
            group.nodes[name] = node
            task_status.started()
            await trio.sleep_forever()


def _computes(request: object) -> bool:
    return isinstance(request, api.Forward | api.Backward)


@dataclass(frozen=True)
class Model:
    """A captured model as its requester has it: `values` is the file of its initial values, if any."""

    graph: Graph
    data: bytes
    hash: bytes
    values: bytes | None = None

    def put(self, node: Node) -> None:
        """Store the model at this node, as the `train` command would."""
        node.seams.storage.write(graph_name(self.hash), self.data)
        if self.values is not None:
            node.seams.storage.write(values_name(self.hash), self.values)


MODELS: dict[str, Model] = {}
"""Every model captured so far, by its hash in hex."""


def known(captured: Captured) -> Model:
    """Return a model that `manifest` may name, by its hash."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_weights(path, captured)
        stored = path.read_bytes() if captured.stored else None
    model = Model(captured.graph, captured.data, captured.hash, stored)
    MODELS[captured.hash.hex()] = model
    return model


@cache
def simple_cnn(dtype: Precision = "float64") -> Model:
    """Return the built-in model for digits."""
    return known(capture_built_in("simple-cnn", (1, 8, 8), 10, dtype=dtype))


def manifest(captured: Model | None = None, *, dtype: Precision = "float64", **changes: Any) -> Manifest:
    """Return a manifest of five steps of simple-cnn on digits, with 2 stages x 2 replicas."""
    captured = captured or simple_cnn(dtype)
    fields: dict[str, Any] = {
        "model": "simple-cnn",
        "graph": captured.hash.hex(),
        "data": "digits",
        "test_samples": 360,
        "steps": 5,
        "microbatch": 4,
        "microbatches": 8,
        "sizes": (),
        "metrics": tuple(metric.name for metric in captured.graph.entries[0].metrics),
        "optimizer": OptimizerSettings(kind="sgd", learning_rate=0.05, momentum=0.9),
        "autocast": "off",
        "recompute": False,
        "seed": 7,
        "frames": "exact",
        "stages": 2,
        "replicas": 2,
        "created_milliseconds": 1,
    }
    return Manifest(**(fields | changes))


def prepare(node: Node, wanted: Manifest) -> Run:
    """Sign a run as this node, which holds the run's model."""
    if wanted.graph in MODELS:
        MODELS[wanted.graph].put(node)
    return make_run(node.signer, wanted)


async def train(
    group: Swarm,
    requester: str,
    wanted: Manifest,
    on_event: Callable[[Event], Awaitable[None]] | None = None,
    *,
    watcher: str = "",
    seconds: float = 600,
) -> tuple[Run, list[Event]]:
    """Let `requester` submit a run. Return the run's events up to its end, within `seconds`, as the node
    `watcher` (by default the requester) sees them. `on_event` may disturb the run."""
    node = group.nodes[requester]
    run = prepare(node, wanted)
    seen: list[Event] = []
    with group.nodes[watcher or requester].watch() as events:
        await node.runs.submit(run)
        with trio.fail_after(seconds):
            async for event in events:
                seen.append(event)
                if on_event is not None:
                    await on_event(event)
                if isinstance(event, RunEnded):
                    return run, seen
    raise AssertionError("the run did not end")


def weights(group: Swarm, name: str, run: Run) -> Tensors:
    """Return the run's result at this member."""
    data = group.nodes[name].seams.storage.read(weights_name(run.text))
    assert data is not None, f"{name} does not keep the weights"
    tensors: Tensors = safetensors.numpy.load(data)
    return tensors


def reference(
    run: Run,
    dataset: Dataset | None = None,
    *,
    steps: int | None = None,
    rate: Callable[[int], float] = lambda _step: 1.0,
) -> Tensors:
    """Compute the same run in one process, with one stage and micro-batches in order. `steps`, and `rate` as
    a factor of each step's learning rate, follow a revision."""
    wanted = run.manifest
    model = MODELS[wanted.graph]
    graphs = cut_layers(model.graph, model.hash, [(0, len(model.graph.layers))])
    specification = make_specification(run, graphs, 0, Machine(1, "cpu", 1 << 40))
    arenas = {name: memoryview(bytearray(size)) for name, size in arena_bytes(specification).items()}
    executor = StageExecutor(specification, arenas)
    _fill(arenas["parameters"], specification, model, executor)
    batches = make_batches(dataset or load_digits(), wanted, model.graph)
    steps = wanted.steps if steps is None else steps
    for step in range(steps):
        samples, diverged = 0, False
        for number in range(step * wanted.microbatches, (step + 1) * wanted.microbatches):
            inputs, labels = (
                pack([typed(array) for array in arrays], "raw", (len(arrays[0]), *wanted.sizes))
                for arrays in batches.train(number)
            )
            forwarded = executor.handle(api.Forward(step, number, True, inputs, labels))
            if wanted.on_divergence == "continue" and isinstance(forwarded, api.Refused):
                diverged = True
                break
            assert isinstance(forwarded, api.Forwarded), forwarded
            samples += forwarded.samples
        arenas["totals"][:] = arenas["gradients"]
        norm = ask(executor, api.Norm(), api.Normed).squared_norm
        diverged = diverged or (norm is not None and not isfinite(norm))
        ask(
            executor,
            api.Apply(
                step,
                samples or 1,
                norm if wanted.optimizer.clip_norm else None,
                is_skipped=diverged and wanted.on_divergence == "continue",
                rate=rate(step),
            ),
            api.Applied,
        )
    tensors = safetensors.numpy.load(ask(executor, api.Export(), api.Exported).data)
    rows = model.graph.parameters
    tensors |= {name: tensors[row.names[0]] for row in rows for name in row.names[1:]}
    counts = {name: np.array(steps * wanted.microbatches) for name in model.graph.counters}
    return {**tensors, **counts}


def ask(executor: StageExecutor, request: api.Request, kind: type[Reply]) -> Reply:
    """Return a stage's answer, which must be of this kind."""
    reply = executor.handle(request)
    assert isinstance(reply, kind), reply
    return reply


def _fill(
    arena: memoryview, specification: api.StageSpecification, model: Model, executor: StageExecutor
) -> None:
    """Fill an arena with values fetched from the requester, as a replica does."""
    if model.values is None:
        return
    start = 8 + int.from_bytes(model.values[:8], "little")
    for slot in parameter_layout(specification):
        if isinstance(source := slot.parameter.source, StoredValues):
            at = slot.offset * specification.item_bytes
            begin = start + source.offset
            arena[at : at + source.length] = model.values[begin : begin + source.length]
    ask(executor, api.Reload(), api.StageDone)


def assert_equal(result: Tensors, expected: Tensors, dtype: str) -> None:
    """Assert equality: in float64 every tensor within 1e-9, in float32 the whole vector within 1e-5."""
    assert sorted(result) == sorted(expected)
    differences = {name: result[name].astype("f8") - expected[name].astype("f8") for name in expected}
    if dtype == "float64":
        for name, difference in differences.items():
            scale = max(1e-12, float(np.abs(expected[name]).max()))
            assert float(np.abs(difference).max()) / scale <= 1e-9, name
        return
    squares = sum(float((difference**2).sum()) for difference in differences.values())
    norm = sum(float((expected[name].astype("f8") ** 2).sum()) for name in expected)
    assert (squares / norm) ** 0.5 <= 1e-5


def is_equal(result: Tensors, expected: Tensors, dtype: str) -> bool:
    """Return whether `assert_equal` holds."""
    try:
        assert_equal(result, expected, dtype)
    except AssertionError:
        return False
    return True


def simulate(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run under a clock that jumps to the next event."""
    run_virtually(scenario)
