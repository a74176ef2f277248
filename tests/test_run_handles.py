"""Runs in a program: `me.train`, and handles made from a run's id on any node."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import trio

import node
from node import config
from node.api.preparing import run_of
from node.cli.render import csv_text
from node.errors import RunFailed, UsageError
from node.events import RunEnded, StepCommitted
from node.runs.archive import Archive
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seams import SimNetworkFabric
from tests.node.simulated import simulated_node
from tests.stack import simple_cnn, simulate, swarm

SETTINGS: dict[str, Any] = {
    "steps": 3,
    "batch": 32,
    "microbatch": 16,
    "stages": 1,
    "replicas": 2,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return the built-in model as a captured file."""
    file = tmp_path / "model.peerloom"
    file.write_bytes(simple_cnn().data)
    return str(file)


def test_a_program_trains_follows_and_gets_the_result(model: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            run = await group.nodes["a"].train(model, **SETTINGS)
            kinds = [type(event) async for event in run]
            assert kinds.count(StepCommitted) == 3
            assert kinds[-1] is RunEnded
            result = await run.result(str(tmp_path / "out.safetensors"))
            assert (result.run, result.status, result.step) == (run.id, "done", 3)
            assert safetensors.numpy.load_file(result.out)
            rows = run.metrics
            assert [row["step"] for row in rows] == [1, 2, 3]
            assert all({"loss", "seconds", "samples_per_second"} <= row.keys() for row in rows)
            assert rows[-1]["accuracy"] == result.accuracy
            header, *lines = csv_text(rows).splitlines()
            assert header.startswith("step,loss,")
            assert len(lines) == 3

    simulate(scenario)


def test_a_handle_works_on_a_node_outside_the_run(model: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with swarm("abcde") as group:
            run = await group.nodes["a"].train(model, **{**SETTINGS, "steps": 6})
            outside = next(each for each in group.nodes.values() if run.id not in each.state.runs)
            other = outside.run(run.id)
            assert other.status == "unknown"
            assert (await other.show())["steps"] == 6
            with pytest.raises(RunFailed, match="is not running on this node"):
                _ = [event async for event in other]
            group.kill("a")  # the requester has stopped permanently
            result = await other.result(str(tmp_path / "out.safetensors"))
            assert result.status == "done"
            assert safetensors.numpy.load_file(result.out)
            with pytest.raises(UsageError, match="is not known here"):
                outside.run("zzz")
            with pytest.raises(RunFailed, match="none of the swarm's members"):
                await outside.run("f" * 16).show()

    simulate(scenario)


def test_a_handle_pauses_resumes_revises_and_stops(model: str) -> None:
    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:
            run = await group.nodes["a"].train(model, **{**SETTINGS, "steps": 100_000})
            assert (await run.pause())["is_paused"]
            assert run.status == "paused"
            await trio.sleep(0.5)
            before = (await run.show())["step"]
            await trio.sleep(5)
            assert (await run.show())["step"] == before
            await run.resume()
            await trio.sleep(1)
            assert (await run.show())["step"] > before
            assert (await run.revise(learning_rate=0.5, priority=9))["priority"] == 9
            for wrong in ({"steps": 0}, {"learning_rate": float("nan")}, {"priority": 10}, {}):
                with pytest.raises(UsageError):
                    await run.revise(**wrong)
            await run.stop()
            with pytest.raises(RunFailed, match="stopped: its requester stopped it"):
                await run.result()

    simulate(scenario)


def test_a_program_learns_that_a_run_cannot_be_placed(model: str) -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            for node_ in group.nodes.values():
                node_.limit(accept_runs="never")
            await trio.sleep(5)
            with pytest.raises(RunFailed, match="was not placed"):
                await group.nodes["a"].train(model, **SETTINGS)

    simulate(scenario)


def test_only_the_requester_lists_a_failed_request_and_until_its_restart(model: str) -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            a = group.nodes["a"]
            await trio.sleep(5)
            with pytest.raises(RunFailed, match="was not placed"):
                await a.train(model, **SETTINGS | {"place": "nowhere"})
            done = await a.train(model, **SETTINGS)
            await done.result()
            await trio.sleep(5)
            assert sorted(view.status for view in a.state.runs.values()) == ["done", "failed"]
            assert all(set(group.nodes[name].state.runs) <= {done.id} for name in "bc")
            for name in "abc":
                archive = Archive(group.storages[name], group.nodes[name].peer)
                archive.load()
                assert {record.text for record in archive.records} <= {done.id}
                assert name != "a" or archive.records

    simulate(scenario)


def test_an_error_in_a_programs_block_is_raised_unchanged() -> None:
    async def scenario() -> None:
        fabric = SimNetworkFabric(SimLinks(NetworkModel(), 1))
        with pytest.raises(UsageError, match="of the program's own"):
            async with simulated_node(fabric, 1):
                raise UsageError("of the program's own")

    simulate(scenario)


def test_settings_given_to_train_override_the_run_file_and_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "gpt"\n[train]\nsteps = 7\nbatch = 16\n[plan]\nstages = 2\n')
    run, path, _ = run_of(str(file), "digits", {"steps": 9, "replicas": 3, "options": {"width": 8}})
    assert path == file
    assert (run.train.steps, run.train.batch, run.plan.stages, run.plan.replicas) == (9, 16, 2, 3)
    assert run.options == {"width": 8}
    with pytest.raises(UsageError, match="unknown setting 'step'; did you mean 'steps'"):
        run_of("gpt", "", {"step": 1})
    with pytest.raises(UsageError, match="not a object"):
        run_of("gpt", "", {"steps": object()})
    file.write_text('model = "gpt"\n[train]\nsteps = 7\nbatch = "many"\n')
    assert run_of(str(file), "", {"batch": 16})[0].train.batch == 16
    with pytest.raises(UsageError, match=r"run\.toml:4: "):
        run_of(str(file), "", {"steps": 9})
    with pytest.raises(UsageError, match=r"^train\(\): train\.batch = "):
        run_of("gpt", "", {"batch": "many"})


def test_a_script_trains_a_built_in_model_and_prints_a_line(tmp_path: Path) -> None:
    """Real processes are used: a separate process captures the model, and the program itself never loads
    torch."""
    base = config.Config(
        name="a",
        data_dir=tmp_path / "a",
        swarm=config.SwarmSettings(name="handles", preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False),
    )
    base = replace(base, resources=replace(base.resources, calibrate=False))
    shown: list[str] = []
    with node.sync(base) as me:
        run = me.train("simple-cnn", steps=4, batch=32, microbatch=16)
        result = run.watch(shown.append)
        assert repr(run) == f"<run {run.id} done>"
        assert result.status == "done"
        assert shown[-1].startswith(f"{run.id[:8]} done     {'#' * 24} 4/4  loss ")
        assert me.run(run.id[:6]).id == run.id
        assert list(run) == [], "the run is not over"
        with pytest.raises(UsageError, match=r"^train\(\): model: no model is called 'simple-cn'") as refused:
            me.train("simple-cn")
        assert refused.value.do is not None
        assert refused.value.do.startswith("gpt, resnet18, simple-cnn;")
