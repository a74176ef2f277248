"""Exactness with real processes: two nodes, one of them killed with SIGKILL in a step.

The requester and trainer is a node in this process, on the same real seams, so that the reference computation
knows the run.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import trio

from crypto.identity import PeerId, parse_peer
from node import config
from node.checkpoints.weights import weights_name
from node.demo.processes import SwarmProcesses
from node.events import MemberJoined, ReplicaDropped, RunEnded, RunPlanned, RunResumed, StepCommitted
from node.main import run as run_command
from node.runtime import Node
from node.storage.folder import FolderStorage
from tests.stack import Model, assert_equal, manifest, prepare, reference, simple_cnn
from tests.test_recut import deep_model

NAMES = "ab"
SWARM = "processes"
full = pytest.mark.skipif(
    os.environ.get("PEERLOOM_KILLS") != "full", reason="half a minute a case: PEERLOOM_KILLS=full"
)
ALONE_SECONDS_MAX = 10.0
"""Maximum seconds from the death of one of two machines until the other computes the next step."""
STANDBY_SECONDS_MAX = 2.0
"""Maximum seconds from a holder's death until the next step is open, if another machine follows its stage."""

AGAIN_SECONDS_MAX = 240.0
WIDTH = 256
"""The width of layers whose computation takes longer than the other costs of a micro-batch."""


@pytest.fixture
def captured() -> Model:
    """Start the nodes before the test's time limit begins, because this loads torch."""
    return simple_cnn()


@pytest.fixture
def processes(tmp_path: Path, captured: Model) -> Iterator[SwarmProcesses]:
    """Start two separate nodes before the test's time limit begins, because a busy machine starts them
    slowly."""
    swarm = SwarmProcesses(tmp_path, SWARM, time.sleep, calibrate=False)
    try:
        swarm.launch(NAMES)
        first = swarm.start(NAMES[0], None)
        for name in NAMES[1:]:
            swarm.start(name, first.address)
        yield swarm
    finally:
        swarm.close()


def _settings(folder: Path) -> config.Config:
    """Return the settings of the node in this process."""
    return config.Config(
        name="e",
        data_dir=folder,
        swarm=config.SwarmSettings(name=SWARM, preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False),
        resources=config.Resources(calibrate=False),
    )


async def test_a_sigkill_in_the_middle_of_a_step_changes_no_result(
    tmp_path: Path, captured: Model, processes: SwarmProcesses
) -> None:
    # There are many small micro-batches, so that a step takes long compared with the moment in which it is
    # applied.
    wanted = manifest(captured, stages=1, microbatches=48, microbatch=2, steps=4, test_samples=60)
    names = {parse_peer(node.peer): name for name, node in processes.nodes.items()}
    settings = _settings(tmp_path / "e")
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
            # These two need not have heard of each other yet. If a busy machine makes one of them look dead,
            # the result must not depend on that either.
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
        assert replayed[0] > 0, "the victim was not in the middle of the step"
        data = node.seams.storage.read(weights_name(run.text))
    assert data is not None
    assert_equal(safetensors.numpy.load(data), reference(run), "float64")
    kept = [FolderStorage(tmp_path / name).read(weights_name(run.text)) for name in NAMES]
    assert data in kept, "members keep different bytes"
    assert set(kept) <= {data, None}


async def test_commands_audit_and_stop_a_run_and_end_a_node(
    tmp_path: Path, captured: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    async def told(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = await trio.to_thread.run_sync(run_command, [*arguments, "--json"])
        out = capsys.readouterr().out
        return code, json.loads(out) if out else {}

    swarm = SwarmProcesses(tmp_path, SWARM, time.sleep, calibrate=False)
    try:
        swarm.launch("a")
        other = swarm.start("a", None)
        async with Node(_settings(tmp_path / "e"), join=[other.address]) as node:
            with node.watch() as events, trio.fail_after(60):
                while len(node.membership.live) < 2:
                    await events.receive()
                wanted = manifest(
                    captured, stages=2, replicas=1, steps=100_000, test_samples=60, save_every=50
                )
                run = prepare(node, wanted)
                await node.runs.submit(run)
                async for event in events:
                    if isinstance(event, StepCommitted):
                        break
            here, there = ("--data-dir", str(tmp_path / "e")), ("--data-dir", str(tmp_path / "a"))
            found: set[tuple[int, str]] = set()
            with trio.fail_after(120):  # there may be no checkpoint yet, or the run may have left its step
                while found != {(0, "right"), (1, "right")}:
                    _, audited = await told("runs", "audit", run.text[:8], *here)
                    found = {(row["stage"], row["verdict"]) for row in audited.get("frames", ())}
                    assert "wrong" not in {verdict for _, verdict in found}, audited
            assert (await told("runs", "stop", run.text[:8], *there))[0] == 2, "the run belongs to another"
            code, document = await told("runs", "stop", run.text[:8], *here)
            assert (code, document["schema"], document["status"]) == (0, "peerloom/stop/1", "stopped")
            assert (document["told"], document["left"]) == (1, 0)
            _, listed = await told("runs", *there)
            assert [row["status"] for row in listed["runs"]] == ["stopped"]
            assert (await told("runs", "drop", run.text[:8], *there))[0] == 5, "no run is left to drop"
            with trio.fail_after(60):
                code, document = await told("leave", *there)
            assert (code, document["name"], document["runs"]) == (0, "a", [])
    finally:
        swarm.close()


async def test_a_run_continues_with_one_machine_of_two(
    tmp_path: Path, captured: Model, processes: SwarmProcesses
) -> None:
    """No machine is idle, because the requester offers nothing, so the remaining machine takes all layers."""
    wanted = manifest(captured, stages=2, replicas=1, steps=12, save_every=2, test_samples=60)
    names = {parse_peer(node.peer): name for name, node in processes.nodes.items()}
    resources = config.Resources(calibrate=False, accept_runs="never")
    settings = replace(_settings(tmp_path / "e"), resources=resources)
    resumed: list[RunResumed] = []
    stages: list[int] = []
    async with Node(settings, join=[processes.nodes[NAMES[0]].address]) as node:
        with node.watch() as events:
            met = set(node.membership.live)
            while not names.keys() <= met:
                event = await events.receive()
                if isinstance(event, MemberJoined):
                    met.add(event.peer)
            run = prepare(node, wanted)
            await node.runs.submit(run)
            async for event in events:
                if isinstance(event, RunPlanned):
                    stages.append(len(event.stages))
                    held = event.stages
                if isinstance(event, StepCommitted) and event.step == 5 and len(stages) == 1:
                    processes.kill(names[held[1][0]])
                if isinstance(event, RunResumed):
                    resumed.append(event)
                if isinstance(event, RunEnded):
                    assert event.outcome == "done", event.detail
                    break
        data = node.seams.storage.read(weights_name(run.text))
    assert data is not None
    assert stages[0] == 2
    assert stages[-1] == 1
    assert resumed, "no step was opened under the plan with one stage"
    assert_equal(safetensors.numpy.load(data), reference(run), "float64")


@full
def test_a_run_regains_its_stages_once_a_machine_joins(tmp_path: Path, processes: SwarmProcesses) -> None:
    """Three machines hold a stage each. One is killed, two then hold all layers, and a fourth takes some. A
    test in virtual time checks that every bit stays; this run must be long enough for another stage to pay
    off.
    """
    wanted = manifest(
        deep_model(width=WIDTH),
        stages=3,
        replicas=1,
        steps=100_000,
        save_every=10,
        microbatch=16,
        microbatches=4,
        test_samples=60,
    )

    async def play() -> None:
        processes.launch("cd")
        address = processes.nodes[NAMES[0]].address
        await trio.to_thread.run_sync(processes.start, "c", address)
        names = {parse_peer(node.peer): name for name, node in processes.nodes.items()}
        resources = config.Resources(calibrate=False, accept_runs="never")
        settings = replace(_settings(tmp_path / "e"), resources=resources)
        counts: list[int] = []
        async with Node(settings, join=[address]) as node:
            with node.watch() as events, trio.fail_after(AGAIN_SECONDS_MAX):
                met = set(node.membership.live)
                while not names.keys() <= met:
                    event = await events.receive()
                    if isinstance(event, MemberJoined):
                        met.add(event.peer)
                await node.runs.submit(prepare(node, wanted))
                async for event in events:
                    if isinstance(event, RunPlanned):
                        counts.append(len(event.stages))
                        if counts == [3, 2]:
                            await trio.to_thread.run_sync(processes.start, "d", address)
                    if isinstance(event, StepCommitted) and event.step == 15 and counts == [3]:
                        processes.kill("c")
                    if isinstance(event, RunResumed) and counts == [3, 2, 3]:
                        assert event.lost_steps == 0
                        break

    trio.run(play)


@full
async def test_a_machine_that_follows_a_stage_takes_over_from_its_killed_holder(
    tmp_path: Path, captured: Model, processes: SwarmProcesses
) -> None:
    """The third machine has no other work, and the newest checkpoint is far behind."""
    processes.launch("c")
    await trio.to_thread.run_sync(processes.start, "c", processes.nodes[NAMES[0]].address)
    wanted = manifest(
        captured, stages=2, replicas=1, steps=100_000, save_every=50_000, standbys=1, test_samples=60
    )
    names = {parse_peer(node.peer): name for name, node in processes.nodes.items()}
    resources = config.Resources(calibrate=False, accept_runs="never")
    settings = replace(_settings(tmp_path / "e"), resources=resources)
    steps: list[int] = []
    async with Node(settings, join=[processes.nodes[NAMES[0]].address]) as node:
        with node.watch() as events:
            met = set(node.membership.live)
            while not names.keys() <= met:
                event = await events.receive()
                if isinstance(event, MemberJoined):
                    met.add(event.peer)
            run = prepare(node, wanted)
            await node.runs.submit(run)
            killed = resumed = None
            async for event in events:
                if isinstance(event, RunPlanned) and event.standbys and killed is None:
                    stage = next(row for row in event.stages if event.standbys[0] in row)
                    killed = next(peer for peer in stage if peer not in event.standbys)
                    height, at_step = event.height, len(steps) + 10
                if isinstance(event, StepCommitted):
                    steps.append(event.step)
                    if killed is not None and len(steps) == at_step:
                        processes.kill(names[killed])
                if isinstance(event, RunResumed) and killed is not None and event.height > height:
                    resumed = event
                if resumed is not None and len(steps) > at_step + 20:
                    break
    assert resumed is not None
    assert resumed.lost_steps == 0
    assert steps == list(range(len(steps))), "a step was not committed exactly once"
    assert resumed.seconds <= STANDBY_SECONDS_MAX


@full
@pytest.mark.parametrize("way", ["killed", "left"])
async def test_the_requester_continues_alone_when_the_only_other_machine_leaves(
    way: str, tmp_path: Path, captured: Model
) -> None:
    """Both machines hold a stage, and there is no third. The run loses no step when one of them leaves."""
    swarm = SwarmProcesses(tmp_path, SWARM, time.sleep, calibrate=False, preset="lan")
    settings = _settings(tmp_path / "e")
    settings = replace(settings, swarm=config.SwarmSettings(name=SWARM, preset="lan"))
    wanted = manifest(
        captured,
        stages=2,
        replicas=1,
        steps=60,
        save_every=4,
        test_samples=60,
        on_lost_quorum="requester",
    )
    resumed: list[RunResumed] = []
    stages: list[int] = []
    try:
        swarm.launch("a")
        other = swarm.start("a", None)
        async with Node(settings, join=[other.address]) as node:
            with node.watch() as events, trio.fail_after(240):
                while len(node.membership.live) < 2:
                    await events.receive()
                run = prepare(node, wanted)
                await node.runs.submit(run)
                async for event in events:
                    if isinstance(event, RunPlanned):
                        stages.append(len(event.stages))
                    if isinstance(event, StepCommitted) and event.step == 20 and len(stages) == 1:
                        if way == "killed":
                            swarm.kill("a")
                        else:
                            run_away = ["leave", "--data-dir", str(tmp_path / "a"), "--json"]
                            node.runs.start_task(_told, run_away, of=None)
                    if isinstance(event, RunResumed):
                        resumed.append(event)
                    if isinstance(event, RunEnded):
                        assert event.outcome == "done", event.detail
                        break
            data = node.seams.storage.read(weights_name(run.text))
    finally:
        swarm.close()
    assert data is not None
    assert stages[-1] == 1
    assert max(event.seconds for event in resumed) <= ALONE_SECONDS_MAX
    if way == "left":
        assert {event.lost_steps for event in resumed} == {0}
    assert_equal(safetensors.numpy.load(data), reference(run), "float64")


async def _told(arguments: list[str]) -> None:
    await trio.to_thread.run_sync(run_command, arguments)
