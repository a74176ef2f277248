"""Exactness with real processes: four nodes of their own, one of them killed with SIGKILL in a step.

The requester and trainer is a node in this process, on the same real seams; so the run is known
to the reference.
"""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import safetensors.numpy
import trio

from crypto.identity import PeerId, parse_peer
from node import config
from node.cli.client import ask
from node.errors import NoNode
from node.events import MemberJoined, ReplicaDropped, RunEnded, RunPlanned, StepCommitted
from node.runs.weights import weights_name
from node.runtime import Node
from node.storage.folder import FolderStorage
from partition.plan.plan import planner_of
from tests.stack import Model, assert_equal, manifest, prepare, reference, simple_cnn

ANYWHERE = config.Listen(addresses=(config.read_listen("127.0.0.1:0"),))


def start_node(folder: Path, name: str, join: str) -> subprocess.Popen[bytes]:
    """A node in a process of its own, on loopback only."""
    command = [sys.executable, "-m", "node", "--data-dir", str(folder / name), "--name", name]
    command += ["--listen", "127.0.0.1:0", "--preset", "local", "--cores", "1", "--join", join]
    # Who is killed leaves a folder of its stage behind.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


@asynccontextmanager
async def real_swarm(folder: Path) -> AsyncIterator[tuple[Node, dict[PeerId, subprocess.Popen[bytes]]]]:
    """The requester in this process, and four nodes that joined through it."""
    settings = config.Config(
        name="e", data_dir=folder / "e", swarm=config.Swarm(preset="local"), listen=ANYWHERE
    )
    processes: list[subprocess.Popen[bytes]] = []
    async with Node(settings) as node:
        try:
            with node.watch() as events:
                join = node.network.addresses[0].short
                processes += [start_node(folder, name, join) for name in "abcd"]
                joined = set()
                async for event in events:
                    if isinstance(event, MemberJoined):
                        joined.add(event.peer)
                    if len(joined) == len(processes):
                        break
            peers = await trio.to_thread.run_sync(peers_of, folder, processes)
            # The planner is one of them: it plans with those it has heard of.
            while not await trio.to_thread.run_sync(all_have_met, folder):  # noqa: ASYNC110 - other processes
                await trio.sleep(0.05)
            yield node, peers
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def peers_of(folder: Path, processes: list[subprocess.Popen[bytes]]) -> dict[PeerId, subprocess.Popen[bytes]]:
    """Which process is which peer."""
    peers = {}
    for name, process in zip("abcd", processes, strict=True):
        try:
            status = ask(folder / name, "status")
        except NoNode:
            raise AssertionError((folder / f"{name}.log").read_text()) from None
        peers[parse_peer(status["peer"])] = process
    return peers


def all_have_met(folder: Path) -> bool:
    """Whether each of the four knows the three others and the requester."""
    return all(ask(folder / name, "status")["members_alive"] == 4 for name in "abcd")


@pytest.fixture
def captured() -> Model:
    """Before the test's time begins, for this loads torch."""
    return simple_cnn()


async def test_a_sigkill_in_the_middle_of_a_step_changes_no_result(tmp_path: Path, captured: Model) -> None:
    # Many small micro-batches: a step takes long beside the moment in which it is applied.
    wanted = manifest(captured, microbatches=48, microbatch=2, steps=4, test_samples=60)
    async with real_swarm(tmp_path) as (node, processes):
        run = prepare(node, wanted)
        steps: list[int] = []
        replayed = 0
        victim: PeerId | None = None
        with node.watch() as events:
            await node.runs.submit(run, planner_of(node.membership.live))
            async for event in events:
                if isinstance(event, RunPlanned):
                    victim = next(p for stage in event.stages for p in stage if p in processes)
                if isinstance(event, StepCommitted):
                    steps.append(event.step)
                    if event.step == 1:
                        assert victim is not None
                        os.kill(processes[victim].pid, signal.SIGKILL)
                if isinstance(event, ReplicaDropped):
                    assert event.peer == victim
                    assert event.step == 2
                    replayed += event.microbatches_replayed
                if isinstance(event, RunEnded):
                    assert event.outcome == "done", event.detail
                    break
        assert steps == [0, 1, 2, 3]
        assert replayed > 0
        expected = reference(run)
        data = node.seams.storage.read(weights_name(run.text))
        assert data is not None
        assert_equal(safetensors.numpy.load(data), expected, "float64")
        survivor = next(name for name in "abcd" if name_is_alive(tmp_path, name))
        kept = FolderStorage(tmp_path / survivor).read(weights_name(run.text))
        assert kept == data, "a member keeps the same bytes"


def name_is_alive(folder: Path, name: str) -> bool:
    """Whether the node of this name still answers."""
    try:
        ask(folder / name, "status")
    except NoNode:
        return False
    return True
