"""Converts a program's model, data and settings to the node's description of a run.

The node's process never imports torch. The command `train --prepare` captures or converts in a process of its
own, which keeps the files until the node has taken them. A `Task`, which is a torch object, is captured here,
in the program's own process, which has already imported torch.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio
from msgspec.structs import replace

from node import toml
from node.api.task_defaults import with_task_default
from node.errors import UsageError
from node.forks import keep_from_children
from node.invocation import KEEPS_SPANS
from node.protocols.data_table import DataTable
from node.protocols.run_file import RunFile
from node.requests import Prepared
from node.seams import Executor
from node.suggest import did_you_mean

GRAPH_SUFFIX = ".peerloom"
VALUES_SUFFIX = ".safetensors"
NAME = "train()"
_LINES_SHOWN = 3
_LENGTH_SHOWN = 500


def run_of(model: str, data: str, settings: Mapping[str, Any]) -> tuple[RunFile, Path, str]:
    """Return the checked run, the path to which other paths in it are relative, and its name in errors.

    `model` is a RUN.toml or the value of its key `model`. Each setting is a key of one of its tables, given
    without the table's name.

    Raises:
        UsageError: there is no such file or setting, or it is wrong.
    """
    lines: dict[toml.TomlPath, int] = {}
    if model.endswith(".toml"):
        path, name = Path(model).expanduser().absolute(), model
        text = toml.read_text(path)
        document = toml.tree(text, name=name)
        lines = dict(toml.line_numbers(text))
    else:
        path, name = Path.cwd() / "RUN.toml", NAME
        document = {"model": model}
    if data:
        settings = {"data": data, **settings}
    homes = _homes()
    for key, value in settings.items():
        if key not in homes:
            raise UsageError(f"{name}: unknown setting '{key[:40]}'{did_you_mean(key, sorted(homes))}")
        table = homes[key]
        place = (table, key) if table else (key,)
        lines = {at: line for at, line in lines.items() if at[: len(place)] != place}
        if table == "data" or (key == "data" and isinstance(document.get("data"), dict)):
            tables = document.setdefault("data", "digits")
            document["data"] = tables if isinstance(tables, dict) else {"source": tables}
            table, key = "data", "source" if key == "data" else key
        within = document.setdefault(table, {}) if table else document
        if isinstance(within, dict):  # otherwise the error below names the line
            within[key] = _plain(value)
    found, _ = with_task_default(document, path.parent, name, lines)
    return found, path, name


def _homes() -> dict[str, str]:
    """Return the table of RUN.toml that each key belongs to; "" for the top level."""
    found = {field.name: "data" for field in msgspec.structs.fields(DataTable) if field.name != "source"}
    for field in msgspec.structs.fields(RunFile):
        default = field.default
        if isinstance(default, msgspec.Struct):
            found |= dict.fromkeys((each.name for each in msgspec.structs.fields(default)), field.name)
        elif field.name != "model":
            found[field.name] = ""
    return found


def _plain(value: Any) -> Any:
    """Return a value in a TOML type. Raises UsageError if TOML has no such type."""
    match value:
        case bool() | int() | float() | str():
            return value
        case Path():
            return str(value)
        case list() | tuple():
            return [_plain(each) for each in value]
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
    raise UsageError(f"{NAME}: a setting must be a number, text, list or table, not a {type(value).__name__}")


@asynccontextmanager
async def prepared(
    model: object, data: str, settings: Mapping[str, Any], executor: Executor
) -> AsyncIterator[Prepared]:
    """Yield the node's description of the run; its files exist only inside the context. Raises UsageError."""
    if isinstance(model, str | Path):
        async with _prepared_file(str(model), data, settings) as made:
            yield made
        return
    with tempfile.TemporaryDirectory(prefix="peerloom-task-") as folder:
        from node.api.capturing import capture_object

        graph = Path(folder) / f"model{GRAPH_SUFFIX}"
        await executor.run(lambda: capture_object(model, graph), apart=True)
        async with _prepared_file(str(graph), data, settings) as made:
            yield made


@asynccontextmanager
async def _prepared_file(model: str, data: str, settings: Mapping[str, Any]) -> AsyncIterator[Prepared]:
    run_file, path, name = run_of(model, data, settings)
    async with prepared_run(run_file, path, name) as made:
        yield made


@asynccontextmanager
async def prepared_run(run_file: RunFile, path: Path, name: str) -> AsyncIterator[Prepared]:
    """Yield the node's description of a checked run whose file is at `path`; the prepared files exist only
    inside the context. Raises UsageError."""
    if (files := _captured_already(run_file, path, name)) is not None:
        yield Prepared(name, str(path), msgspec.to_builtins(run_file), **files)
        return
    async with _by_command(run_file, path, name) as made:
        yield made


def _captured_already(run_file: RunFile, path: Path, name: str) -> dict[str, str] | None:
    """Return the location of the model if nothing must be captured or converted, else None. Raises
    UsageError."""
    if run_file.train.groups or run_file.source != "digits" or not run_file.model.endswith(GRAPH_SUFFIX):
        return None
    graph = path.parent / Path(run_file.model).expanduser()
    if not graph.is_file():
        raise UsageError(f"{name}: model: there is no file {graph}")
    values = graph.with_suffix(VALUES_SUFFIX)
    return {"graph": str(graph)} | ({"values": str(values)} if values.is_file() else {})


@asynccontextmanager
async def _by_command(run_file: RunFile, path: Path, name: str) -> AsyncIterator[Prepared]:
    with tempfile.TemporaryDirectory(prefix="peerloom-train-") as folder:
        file = Path(folder) / "run.json"
        file.write_bytes(msgspec.json.encode(run_file))
        words = ["train", str(file), "--prepare", str(path), "--data-dir", folder]
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-m", "node", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, KEEPS_SPANS: "1"},
        )
        pipes: Iterable[Any] = (process.stdin, process.stdout, process.stderr)
        keep_from_children(*(pipe for pipe in pipes if pipe is not None))
        errors = bytearray()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_read_all, process.stderr, errors)
                line = await _read_line(process.stdout)
                if line:
                    nursery.cancel_scope.cancel()
            if not line:
                raise refusal(errors, name)
            yield replace(msgspec.json.decode(line, type=Prepared), name=name)
        finally:
            with trio.CancelScope(shield=True):
                if process.stdin is not None:
                    await process.stdin.aclose()  # ends the process, which removes its files
                with trio.move_on_after(10):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                for pipe in (process.stdout, process.stderr):
                    if pipe is not None:
                        await pipe.aclose()


async def _read_line(pipe: Any) -> bytes:
    found = bytearray()
    async for data in pipe:
        found += data
        if b"\n" in data:
            return bytes(found.partition(b"\n")[0])
    return b""


async def _read_all(pipe: Any, into: bytearray) -> None:
    async for data in pipe:
        into += data


def _error_lines(text: str) -> list[str]:
    """Return the lines of a command's error, without its earlier output."""
    lines = text.strip().splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    return lines[begins[-1] :][:_LINES_SHOWN] if begins else lines[-_LINES_SHOWN:]


def refusal(errors: bytes | bytearray, name: str) -> UsageError:
    """Return the last lines of a command's errors as an error of the call `name`."""
    lines = _error_lines(errors.decode(errors="replace"))
    advice = lines.pop().strip().removeprefix("do: ") if lines and lines[-1].startswith("  do: ") else None
    what = " ".join(lines)[:_LENGTH_SHOWN].removeprefix("error: ").removeprefix(f"{name}: ")
    return UsageError(f"{name}: {what or 'the model could not be captured'}", advice)
