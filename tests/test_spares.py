"""A loaded process waits on an idle node, becomes the stage of a run, and ends with it: real processes."""

import contextlib
import dataclasses
from pathlib import Path

import psutil
import pytest
import trio

from node import config
from node.cli.status import spare_lines
from node.events import RunEnded, StepCommitted
from node.runs import readiness
from node.runtime import Node
from node.stages.host import StageHost
from tests.stack import Model, manifest, prepare, simple_cnn


@pytest.fixture
def captured() -> Model:
    """Before the test's time begins, for this loads torch."""
    return simple_cnn()


def waiting(node: Node) -> set[int]:
    """The processes that wait for a stage, or compute one."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "node.stages.process" in child.cmdline():
                found.add(child.pid)
    return found if node.runs.readiness.document["memory_bytes"] else set()


async def spare_of(node: Node) -> int:
    """The process that waits on a node, once it does."""
    while not (found := waiting(node)):  # noqa: ASYNC110 - no event tells
        await trio.sleep(0.02)
    (pid,) = found
    return pid


async def test_a_spare_process_becomes_a_stage_and_is_never_another_runs(
    tmp_path: Path, captured: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(readiness, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(readiness, "FREE_BYTES_MIN", 0)
    settings = config.Config(
        name="e",
        data_dir=tmp_path,
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.Join(lan=False),
        resources=config.Resources(calibrate=False, allow_unfenced=True),
    )
    async with Node(settings) as node:
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
