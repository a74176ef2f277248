"""A swarm of whole nodes on simulated seams, training for real: set-up shared by several tests.

Virtual time, real protocol code, real torch arithmetic. `reference` is what every result is held
against: one process, the same micro-batches, seeds and rules.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import trio
import trio.testing

from crypto.identity import Identity, PeerId
from node import config
from node.events import Event, RunEnded
from node.runs.data import Batches, load_digits
from node.runs.manifest import Manifest, Run, make_run
from node.runs.weights import weights_name
from node.runtime import Node
from node.services.capacity import Capacity
from partition import stage as api
from partition.codec import pack
from partition.execute import StageExecutor
from partition.plan.plan import planner_of
from partition.stage import OptimizerSettings, StageSpecification
from sim.executor import SimExecutor
from sim.network import LinkModel, Links
from sim.seams import Medium, MemoryStorage, SimClock
from sim.seeds import seeded_entropy, seeded_rng

Tensors = Mapping[str, "np.ndarray[Any, np.dtype[Any]]"]

STAGE_SECONDS = 0.02
"""What one forward or backward pass is modelled to take: long beside a message, short beside a probe."""


@dataclass
class Swarm:
    """Living nodes by name, their crash switches, and every event each has published."""

    nodes: dict[str, Node] = field(default_factory=dict)
    scopes: dict[str, trio.CancelScope] = field(default_factory=dict)
    events: dict[str, list[Event]] = field(default_factory=dict)
    medium: Medium = field(default_factory=lambda: Medium(Links(LinkModel(), 1)))

    def kill(self, name: str) -> PeerId:
        """As SIGKILL: nothing more leaves or enters, no goodbye."""
        peer = self.nodes[name].peer
        self.medium.kill(peer)
        self.scopes[name].cancel()
        return peer

    def name_of(self, peer: PeerId) -> str:
        return next(name for name, node in self.nodes.items() if node.peer == peer)


@asynccontextmanager
async def swarm(names: str, *, seed: int = 1, stage_seconds: float = STAGE_SECONDS) -> AsyncIterator[Swarm]:
    """Nodes called by one letter each; each joins through the one before it."""
    group = Swarm(medium=Medium(Links(LinkModel(), seed)))
    async with trio.open_nursery() as nursery:
        before: str | None = None
        for name in names:
            await nursery.start(_live, group, name, before, seed, stage_seconds)
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
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    identity = Identity(bytes([seed, ord(name)]) * 16)
    storage = MemoryStorage()
    storage.write("identity.key", identity.seed)
    storage.write("static.key", bytes(32))
    events = group.events[name] = []
    join = [group.nodes[before].network.addresses[0].short] if before else []
    node = Node(
        config.Config(name=name, swarm=config.Swarm(preset="local"), data_dir=Path("/simulated")),
        join=join,
        network=group.medium.attach(identity.peer),
        clock=SimClock(),
        rng=seeded_rng(seed, identity.peer),
        entropy=seeded_entropy(seed, identity.peer),
        executor=SimExecutor(lambda request: stage_seconds if _computes(request) else 0.0),
        storage=storage,
        capacity=Capacity("cpu", 1, 8 << 30, 16 << 30, 5e9, ""),
        report=events.append,
    )
    with trio.CancelScope() as scope:
        group.scopes[name] = scope
        async with node:
            group.nodes[name] = node
            task_status.started()
            await trio.sleep_forever()


def _computes(request: object) -> bool:
    return isinstance(request, api.Forward | api.Backward)


def manifest(*, dtype: str = "float64", **changes: Any) -> Manifest:
    """Five steps of simple-cnn on digits over 2 stages x 2 replicas, without compression."""
    fields: dict[str, Any] = {
        "model": "simple-cnn",
        "data": "digits",
        "sample_shape": (1, 8, 8),
        "classes": 10,
        "test_samples": 360,
        "steps": 5,
        "microbatch": 4,
        "microbatches": 8,
        "optimizer": OptimizerSettings(kind="sgd", learning_rate=0.05, momentum=0.9),
        "seed": 7,
        "dtype": dtype,
        "codec": "raw",
        "stages": 2,
        "replicas": 2,
        "created_milliseconds": 1,
    }
    return Manifest(**(fields | changes))


async def train(
    group: Swarm,
    requester: str,
    wanted: Manifest,
    on_event: Callable[[Event], Awaitable[None]] | None = None,
    *,
    watcher: str = "",
) -> tuple[Run, list[Event]]:
    """Have `requester` submit a run; its events until it ended, as the node called `watcher` (the
    requester by default) sees them. `on_event` may disturb."""
    node = group.nodes[requester]
    run = make_run(node.signer, wanted)
    seen: list[Event] = []
    with group.nodes[watcher or requester].watch() as events:
        await node.runs.submit(run, planner_of(node.membership.live))
        with trio.fail_after(600):
            async for event in events:
                seen.append(event)
                if on_event is not None:
                    await on_event(event)
                if isinstance(event, RunEnded):
                    return run, seen
    raise AssertionError("the run did not end")


def weights(group: Swarm, name: str, run: Run) -> Tensors:
    """The run's result as this member keeps it."""
    data = group.nodes[name].seams.storage.read(weights_name(run.text))
    assert data is not None, f"{name} does not keep the weights"
    tensors: Tensors = safetensors.numpy.load(data)
    return tensors


def reference(run: Run) -> Tensors:
    """The same run in one process: one stage, micro-batches in order."""
    wanted = run.manifest
    specification = StageSpecification(
        run=run.random_key,
        model=wanted.model,
        sample_shape=wanted.sample_shape,
        classes=wanted.classes,
        first_layer=0,
        last_layer=1,
        dtype=wanted.dtype,
        seed=wanted.seed,
        optimizer=wanted.optimizer,
        samples_max=wanted.microbatch,
    )
    layers = len(specification.built.layers)
    specification = StageSpecification(
        **{name: getattr(specification, name) for name in specification.__struct_fields__}
        | {"last_layer": layers}
    )
    arenas = {name: memoryview(bytearray(size)) for name, size in api.arena_bytes(specification).items()}
    executor = StageExecutor(specification, arenas)
    batches = Batches(load_digits(), microbatch=wanted.microbatch, seed=wanted.seed, dtype=wanted.dtype)
    for step in range(wanted.steps):
        for number in range(step * wanted.microbatches, (step + 1) * wanted.microbatches):
            inputs, labels = batches.train(number)
            forward = api.Forward(step, number, True, pack(inputs, "raw"), pack(labels, "raw"))
            assert isinstance(executor.handle(forward), api.Forwarded)
        arenas["totals"][:] = arenas["gradients"]
        applied = executor.handle(api.Apply(step, wanted.microbatch * wanted.microbatches))
        assert isinstance(applied, api.Applied)
    exported = executor.handle(api.Export())
    assert isinstance(exported, api.Exported)
    tensors: Tensors = safetensors.numpy.load(exported.data)
    return tensors


def assert_equal(result: Tensors, expected: Tensors, dtype: str) -> None:
    """The metric: float64 every tensor <= 1e-9, float32 the whole vector <= 1e-5."""
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


def simulate(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run under a clock that jumps."""

    async def main() -> None:
        await scenario()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
