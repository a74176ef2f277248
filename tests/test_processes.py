"""Exactness with real processes: four nodes of their own, one of them killed with SIGKILL in a step.

The requester and trainer is a node in this process, on the same real seams; so the run is known
to the reference.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.numpy

from crypto.identity import PeerId, parse_peer
from node import config
from node.cli.demo.processes import SwarmProcesses
from node.events import MemberJoined, ReplicaDropped, RunEnded, RunPlanned, StepCommitted
from node.runs.weights import weights_name
from node.runtime import Node
from node.storage.folder import FolderStorage
from tests.stack import Model, assert_equal, manifest, prepare, reference, simple_cnn

NAMES = "abcd"
SWARM = "processes"


@pytest.fixture
def captured() -> Model:
    """Before the test's time begins, for this loads torch."""
    return simple_cnn()


@pytest.fixture
def processes(tmp_path: Path, captured: Model) -> Iterator[SwarmProcesses]:
    """Four nodes of their own; also before the test's time begins, for a busy machine starts them slowly."""
    swarm = SwarmProcesses(tmp_path, SWARM, time.sleep)
    try:
        swarm.launch(NAMES)
        first = swarm.start(NAMES[0], None)
        for name in NAMES[1:]:
            swarm.start(name, first.address)
        yield swarm
    finally:
        swarm.close()


async def test_a_sigkill_in_the_middle_of_a_step_changes_no_result(
    tmp_path: Path, captured: Model, processes: SwarmProcesses
) -> None:
    # Many small micro-batches: a step takes long beside the moment in which it is applied.
    wanted = manifest(captured, microbatches=48, microbatch=2, steps=4, test_samples=60)
    names = {parse_peer(node.peer): name for name, node in processes.nodes.items()}
    settings = config.Config(
        name="e",
        data_dir=tmp_path / "e",
        swarm=config.Swarm(name=SWARM, preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.Join(lan=False),
    )
    node = Node(settings, join=[processes.nodes[NAMES[0]].address])
    steps: list[int] = []
    replayed: list[int] = []
    victim: PeerId | None = None
    async with node:
        with node.watch() as events:
            met = set(node.membership.live)
            while not names.keys() <= met:
                event = await events.receive()
                if isinstance(event, MemberJoined):
                    met.add(event.peer)
            # These four need not have heard of each other yet; and should a busy machine make one of them
            # look dead, the result must not depend on that either.
            run = prepare(node, wanted)
            await node.runs.submit(run)
            async for event in events:
                if isinstance(event, RunPlanned) and victim is None:
                    victim = next(peer for stage in event.stages for peer in stage if peer in names)
                if isinstance(event, StepCommitted):
                    steps.append(event.step)
                    if event.step == 1:
                        assert victim is not None
                        processes.kill(names[victim])
                if isinstance(event, ReplicaDropped) and (event.peer, event.step) == (victim, 2):
                    replayed.append(event.microbatches_replayed)
                if isinstance(event, RunEnded):
                    assert event.outcome == "done", event.detail
                    break
        assert steps == [0, 1, 2, 3]
        assert len(replayed) == 1
        assert replayed[0] > 0, "it was in the middle of the step"
        data = node.seams.storage.read(weights_name(run.text))
    assert data is not None
    assert_equal(safetensors.numpy.load(data), reference(run), "float64")
    kept = [FolderStorage(tmp_path / name).read(weights_name(run.text)) for name in NAMES]
    assert data in kept, "members keep the same bytes"
    assert set(kept) <= {data, None}
