"""A spare process waits on an idle node, becomes the stages of one run, and ends with that run: real
processes."""

import contextlib
import dataclasses
import os
import resource
import signal
from pathlib import Path

import msgspec
import psutil
import pytest
import trio

from crypto.encoding import encode
from node import config
from node.cli.status import spare_lines
from node.errors import StageFailed
from node.events import RunEnded, StepCommitted
from node.executor import RealExecutor
from node.runs.readiness import SpareSettings
from node.runs.settings import RunServiceSettings
from node.runtime import Node
from node.service_settings import ServiceSettings
from node.stages.host import StageHost
from partition.stage import Forwarded
from tests.node.test_host import FORWARD, SPECIFICATION, gone
from tests.stack import Model, manifest, prepare, simple_cnn


@pytest.fixture
def captured() -> Model:
    """Start the node before the test's time limit begins, because this loads torch."""
    return simple_cnn()


def waiting(node: Node) -> set[int]:
    """Return the processes that wait for a stage, or compute one."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "node.stages.process" in child.cmdline():
                found.add(child.pid)
    return found if node.runs.readiness.document["memory_bytes"] else set()


async def spare_of(node: Node) -> int:
    """Wait for the spare process of a node, and return it."""
    while not (found := waiting(node)):  # noqa: ASYNC110 - no event tells
        await trio.sleep(0.02)
    (pid,) = found
    return pid


async def test_a_spare_process_becomes_a_stage_and_serves_only_one_run(
    tmp_path: Path, captured: Model
) -> None:
    settings = config.Config(
        name="e",
        data_dir=tmp_path,
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False),
        resources=config.Resources(calibrate=False, allow_unfenced=True),
    )
    soon = SpareSettings(idle_seconds=0.0, look_seconds=0.05, free_bytes_min=0, free_bytes_left_min=0)
    services = ServiceSettings(run_service=RunServiceSettings(spares=soon))
    async with Node(settings, settings=services) as node:
        first = await spare_of(node)
        (line,) = spare_lines(node.runs.readiness.document)
        assert "spare_process = false" in line
        run = prepare(node, manifest(captured, stages=1, microbatches=2, steps=2, test_samples=60))
        with node.watch() as events:
            await node.runs.submit(run)
            async for event in events:
                if isinstance(event, StepCommitted) and event.step == 0:
                    replica = node.runs.members[run.id].hosting.replica
                    assert replica is not None
                    assert isinstance(replica.stage, StageHost)
                    assert replica.stage.pid == first
                if isinstance(event, RunEnded):
                    assert event.outcome == "done", event.detail
                    break
        assert not psutil.pid_exists(first)
        assert await spare_of(node) != first
        given = dataclasses.replace(settings.resources, spare_process=False)
        node.provider.config = dataclasses.replace(settings, resources=given)
        while waiting(node):  # noqa: ASYNC110 - no event tells
            await trio.sleep(0.02)


async def test_the_next_stage_of_a_run_reuses_the_process_of_the_previous() -> None:
    executor = RealExecutor()
    first = await executor.open_stage(encode(SPECIFICATION))
    pid, before = first.pid, await first.call(FORWARD)
    limit, _ = resource.prlimit(pid, resource.RLIMIT_DATA)
    view = first.vector("parameters")
    larger = msgspec.structs.replace(SPECIFICATION, memory_bytes_max=SPECIFICATION.memory_bytes_max * 2)
    second = await executor.replace_stage(first, encode(larger))
    try:
        assert (second.pid, first._failure) == (pid, "the stage has been closed")
        assert second.admitted.fences == first.admitted.fences
        assert resource.prlimit(pid, resource.RLIMIT_DATA)[0] > limit, (
            "the memory limit is not that of the second stage"
        )
        after = await second.call(FORWARD)
        assert isinstance(before, Forwarded)
        assert isinstance(after, Forwarded)
        assert after.loss == before.loss, "the results differ from those of a new process"
        view[:] = bytes(len(view))
        assert bytes(second.vector("parameters")) != bytes(view), "its memory is shared"
        # A process that cannot be reused ends with its stage, and a new one is loaded.
        allowance = second._allowance
        assert await second.retire(dataclasses.replace(allowance, threads=SPECIFICATION.threads + 1)) is None
        async with second._lock:
            assert await second.retire(allowance) is None, (
                "a process was reused while its stage still serves a call"
            )
        os.kill(pid, signal.SIGSTOP)
        assert await second.retire(allowance, seconds=0.3) is None
    finally:
        await second.aclose()
    assert gone(pid)
    with pytest.raises(StageFailed, match="closed"):
        await first.call(FORWARD)
