"""`checkpoint list|save|export|fetch`, on a data folder alone and through a node."""

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import trio

from node.checkpoint_commands import CheckpointCommands
from node.content.graphs import graph_name
from node.control import CommandHandler, Emit
from node.errors import RunFailed, UsageError
from node.main import run
from node.storage.folder import FolderStorage
from tests.node.saved import SMALL_CHUNK_BYTES, Saved, saved, use_small_chunks
from tests.node.test_checkpoints import checkpoints_in, save
from tests.node.test_cli import run_in_thread, serving
from tests.node.test_copies import Keepers, keep_all, name_all, run_by, scenario, spread
from tests.stack import Swarm


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_chunks(monkeypatch)
    for name in [name for name in os.environ if name.startswith(("PEERLOOM_", "XDG_DATA"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)


Printed = pytest.CaptureFixture[str]


async def a_folder(path: Path) -> Saved:
    """Return a data folder with two checkpoints of a run and the run's graph, but no node."""
    storage, of = FolderStorage(path), saved("gpt")
    checkpoints = checkpoints_in(storage)
    for step in (3, 4):
        await save(checkpoints, of, step)
    storage.write(graph_name(of.model.hash), of.model.data)
    return of


# Without a node


async def test_checkpoints_are_listed_from_a_data_folder(tmp_path: Path, capsys: Printed) -> None:
    of = await a_folder(tmp_path / "data")
    assert run(["checkpoint", "list", "--data-dir", "data", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "peerloom.checkpoints/1"
    newest = document["checkpoints"][-1]
    assert newest["created"].endswith("Z")
    size = sum(map(len, of.parameters + of.moments))
    assert {key: newest[key] for key in ("run", "model", "step", "samples", "stages", "stages_here")} == {
        "run": of.run.text, "model": "gpt", "step": 4, "samples": 128, "stages": 2, "stages_here": [1, 2],
    }  # fmt: skip
    assert (newest["size_bytes"], newest["copies"], len(document["checkpoints"])) == (size, None, 2)
    for line in (["checkpoint", "--data-dir", "data"], ["--data-dir", "data", "checkpoint", "list"]):
        assert run(line) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["RUN", "MODEL", "STEP", "SIZE", "HERE", "COPIES", "MADE"]
        assert lines[2].startswith(f"{of.run.text[:8]}  gpt    4 of 5  ")
        assert "  all   -  " in lines[2]


async def test_a_checkpoint_is_exported_without_a_node(tmp_path: Path, capsys: Printed) -> None:
    of = await a_folder(tmp_path / "data")
    here = ["--data-dir", "data"]
    assert run(["checkpoint", "export", of.run.text[:6], "--out", "m.safetensors", *here]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"step 4 of run {of.run.text[:8]} in m.safetensors, ")
    tensors = safetensors.torch.load_file("m.safetensors")
    assert {"tokens.weight", "head.weight"} <= set(tensors)
    assert run(["checkpoint", "export", of.run.text, "--step", "3", "--out", "m3", "--json", *here]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "peerloom.checkpoint-export/1"
    assert (document["step"], document["size_bytes"]) == (3, (tmp_path / "m3").stat().st_size)


async def test_an_impossible_export_is_refused_with_a_remedy(tmp_path: Path, capsys: Printed) -> None:
    of = await a_folder(tmp_path / "data")
    text, storage = of.run.text, FolderStorage(tmp_path / "data")

    def refused(line: str, code: int, words: str) -> None:
        assert run(["checkpoint", *line.split(), "--data-dir", "data"]) == code
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") <= 3
        assert words in said.err

    refused("export zz --out x", 2, "run 'zz' is not known here")
    refused(f"export {text} --step 1 --out x", 5, "no checkpoint of step 1")
    refused(f"export {'ab' * 8} --out x", 5, "checkpoint fetch RUN")
    refused(f"export {text} --out none/x", 2, "no folder")
    refused(f"export {text}", 2, "missing option '--out'")
    refused(f"fetch {text}", 3, "no node runs")
    refused(f"save {text}", 3, "no node runs")
    storage.delete(graph_name(of.model.hash))
    refused(f"export {text} --out x", 5, "the graph of the model gpt is not here")
    storage.write(graph_name(of.model.hash), of.model.data)
    for file, size in storage.sizes("blobs").items():
        if size == SMALL_CHUNK_BYTES:
            storage.write_soon(file, b"damaged")
    refused(f"export {text} --out x", 5, "cannot be exported: blob")
    refused(f"export {text} --out x", 5, "2 stages only some are here: ")
    assert run(["checkpoint", "list", "--data-dir", "nowhere"]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["data"]


def test_an_empty_data_folder_gets_a_remedy(tmp_path: Path, capsys: Printed) -> None:
    (tmp_path / "data").mkdir()
    assert run(["checkpoint", "--data-dir", "data"]) == 0
    assert "python -m node checkpoint fetch RUN" in capsys.readouterr().out


# With a node


async def test_commands_ask_a_running_node(tmp_path: Path, capsys: Printed) -> None:
    asked: list[dict[str, Any]] = []
    found = {
        "run": "ab" * 8, "model": "gpt", "step": 4, "steps": 5, "samples": 9, "size_bytes": 1000, "stages": 2,
        "stages_here": [1], "copies": 3, "created": "2027-01-01T00:00:00.000Z",
    }  # fmt: skip

    def answer(result: dict[str, Any]) -> CommandHandler:
        async def handle(arguments: dict[str, Any], emit: Emit) -> object:
            asked.append(arguments)
            return result

        return handle

    handlers = {
        "checkpoint.list": answer({"checkpoints": [found]}),
        "checkpoint.save": answer({"run": "ab" * 8, "step": 7}),
        "checkpoint.fetch": answer(found),
        "checkpoint.export": answer({"run": "ab" * 8, "step": 4, "size_bytes": 10}),
    }
    here = ("--data-dir", "data")
    async with serving(tmp_path / "data", **handlers):
        assert await run_in_thread("checkpoint", *here) == 0
        assert "1 of 2  3       2027" in capsys.readouterr().out
        assert await run_in_thread("checkpoint", "save", "abab", *here) == 0
        assert capsys.readouterr().out == "run abababab: checkpoint after step 7\n"
        assert (
            await run_in_thread("checkpoint", "fetch", "abab", "--from", "lab-1", "--step", "4", *here) == 0
        )
        assert capsys.readouterr().out == "step 4 of run abababab is here, 1.0 kB\n"
        assert await run_in_thread("checkpoint", "export", "abab", "--out", "x", *here) == 0
    assert asked == [
        {},
        {"run": "abab"},
        {"run": "abab", "step": 4, "from": ["lab-1"]},
        {"run": "abab", "step": None, "out": str(tmp_path / "x")},
    ]


async def emit(event: Any) -> None:
    return


Handlers = Callable[[str], Callable[..., Awaitable[Any]]]


def commands(several: Keepers, name: str) -> Handlers:
    keeper = several[name]

    async def saves(run: str) -> int:
        return int(run, 16) % 10

    made = CheckpointCommands(keeper.node, keeper.checkpoints, keeper.copies, saves)

    def handler(command: str) -> Callable[..., Awaitable[Any]]:
        async def call(**arguments: Any) -> Any:
            return await made.handlers[f"checkpoint.{command}"](arguments, emit)

        return call

    return handler


def test_a_node_lists_fetches_and_exports_checkpoints_of_others(tmp_path: Path) -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c = (several[name] for name in "abc")
        of = run_by(a)
        await spread(a, b, of, [c])
        await trio.sleep(5)
        listed = await commands(several, "c")("list")()
        assert [(each["run"], each["copies"]) for each in listed["checkpoints"]] == [(of.run.text, 2)]
        at_d = commands(several, "d")
        assert await at_d("list")() == {"checkpoints": []}
        with pytest.raises(RunFailed, match="no checkpoint of run"):
            await at_d("export")(run=of.run.text, out=str(tmp_path / "x"))
        fetched = await at_d("fetch")(run=of.run.text)
        assert (fetched["step"], fetched["stages_here"]) == (4, [1, 2])
        assert [each["copies"] for each in (await at_d("list")())["checkpoints"]] == [3]
        for gone in "abc":
            group.kill(gone)
        exported = await at_d("export")(run=of.run.text[:8], step=4, out=str(tmp_path / "x"))
        assert exported["size_bytes"] == (tmp_path / "x").stat().st_size
        with pytest.raises(UsageError, match="no such file"):
            await at_d("export")(run=of.run.text, out=str(tmp_path / "none" / "x"))

    scenario("abcd", test)


def test_an_export_fetches_stages_that_the_node_lacks(tmp_path: Path) -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b, c = (several[name] for name in "abc")
        of = run_by(a)
        states = [await a.snapshot(of, 0), await b.snapshot(of, 1)]
        wanted = [[c.peer], [b.peer]]
        await keep_all(a, of, 4, states, [a.peer, b.peer], wanted)
        name = await a.seal(of, states)
        assert len(await name_all(a, of, 4, name, [b.peer, c.peer])) == 2
        await trio.sleep(5)
        at_c = commands(several, "c")
        assert (await at_c("list")())["checkpoints"][0]["stages_here"] == [1]
        await at_c("export")(run=of.run.text, out=str(tmp_path / "x"))
        assert (await at_c("list")())["checkpoints"][0]["stages_here"] == [1, 2]
        assert set(safetensors.torch.load_file(tmp_path / "x")) >= {"tokens.weight"}

    scenario("abc", test)


def test_members_are_named_by_name_or_id_and_errors_are_explained() -> None:
    async def test(group: Swarm, several: Keepers) -> None:
        a, b = (several[name] for name in "ab")
        of = run_by(a)
        await spread(a, b, of, [b])
        at_c = commands(several, "c")
        fetched = await at_c("fetch")(run=of.run.text, **{"from": ["b"]})
        assert fetched["copies"] is None
        with pytest.raises(UsageError, match="--from nobody: no member has that name or id"):
            await at_c("fetch")(run=of.run.text, **{"from": ["nobody"]})
        with pytest.raises(RunFailed, match="there are those of steps 4"):
            await at_c("fetch")(run=of.run.text, step=9)
        with pytest.raises(UsageError, match="not known here"):
            await at_c("fetch")(run="ab")
        assert await at_c("save")(run=of.run.text[:5]) == {
            "run": of.run.text,
            "step": int(of.run.text, 16) % 10,
        }

    scenario("abc", test)
