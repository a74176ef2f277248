"""From what a program gives as a model, data and settings to what the node wants to know of a run.

The node's process never imports torch. What must be captured or converted first is done by the command
`train --prepare` in a process of its own, which holds the files until the node has taken them; a `Task`, an
object of torch, is captured here, in the program's own process, which has torch already.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from node import toml
from node.errors import UsageError
from node.forks import keep_from_children
from node.invocation import KEEPS_SPANS
from node.protocols.data_table import DataTable
from node.protocols.manifest import RunFile, check_run_file
from node.seams import Executor
from node.suggest import did_you_mean

GRAPH_SUFFIX = ".peerloom"
VALUES_SUFFIX = ".safetensors"
NAME = "train()"
_LINES_SHOWN = 3
_LENGTH_SHOWN = 500


def run_document(model: str, data: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], Path, str]:
    """Return the tables of a run, the path that others in them are meant from, and how errors call it.

    `model` is a RUN.toml, or what stands in one; each setting is a key of one of its tables, by its own name.

    Raises:
        UsageError: no such file or setting.
    """
    if model.endswith(".toml"):
        path = Path(model).expanduser().absolute()
        text = toml.read_text(path)
        toml.parse(text, RunFile, name=model)  # said with its line
        document = tomllib.loads(text)
    else:
        path = Path.cwd() / "RUN.toml"
        document = {"model": model}
    name = model if model.endswith(".toml") else NAME
    if data:
        document["data"] = (
            data if not isinstance(document.get("data"), dict) else document["data"] | {"source": data}
        )
    homes = _homes()
    for key, value in settings.items():
        if key not in homes:
            raise UsageError(f"{name}: unknown setting '{key[:40]}'{did_you_mean(key, sorted(homes))}")
        table = homes[key]
        if table == "data" and isinstance(document.setdefault("data", "digits"), str):
            document["data"] = {"source": document["data"]}
        if table:
            document.setdefault(table, {})[key] = value
        else:
            document[key] = value
    return document, path, name


def _homes() -> dict[str, str]:
    """Return in which table of RUN.toml each key stands, "" for the file's own."""
    found = {field.name: "data" for field in msgspec.structs.fields(DataTable) if field.name != "source"}
    for field in msgspec.structs.fields(RunFile):
        default = field.default
        if isinstance(default, msgspec.Struct):
            found |= dict.fromkeys((each.name for each in msgspec.structs.fields(default)), field.name)
        elif field.name != "model":
            found[field.name] = ""
    return found


def toml_text(document: Mapping[str, Any]) -> str:
    """Return tables of plain values as TOML. Raises UsageError: a value that TOML does not have."""
    lines = [f"{key} = {_value(value)}" for key, value in document.items() if not isinstance(value, Mapping)]
    for key, table in document.items():
        if isinstance(table, Mapping):
            lines += [f"[{key}]", *(f"{name} = {_value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case Mapping():
            return "{" + ", ".join(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items()) + "}"
    raise UsageError(f"{NAME}: a setting is a number, text, list or table, not a {type(value).__name__}")


@asynccontextmanager
async def prepared(
    model: object, data: str, settings: Mapping[str, Any], executor: Executor
) -> AsyncIterator[dict[str, Any]]:
    """Yield what the node wants to know of the run, while its files lie there. Raises UsageError."""
    if isinstance(model, str | Path):
        async with _prepared_file(str(model), data, settings) as arguments:
            yield arguments
        return
    with tempfile.TemporaryDirectory(prefix="peerloom-task-") as folder:
        from node.library.capturing import capture_object

        graph = Path(folder) / f"model{GRAPH_SUFFIX}"
        await executor.run(lambda: capture_object(model, graph), apart=True)
        async with _prepared_file(str(graph), data, settings) as arguments:
            yield arguments


@asynccontextmanager
async def _prepared_file(model: str, data: str, settings: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    document, path, name = run_document(model, data, settings)
    text = toml_text(document)
    run_file = toml.parse(text, RunFile, name=name).value
    check_run_file(run_file, name)
    whole = {"text": text, "path": str(path), "name": name}
    if (files := _captured_already(run_file, path, name)) is not None:
        yield whole | files
        return
    async with _by_command(text, path, name) as arguments:
        yield arguments


def _captured_already(run_file: RunFile, path: Path, name: str) -> dict[str, str] | None:
    """Return where the model lies, if nothing is to be captured or converted. Raises UsageError."""
    if run_file.train.groups or run_file.source != "digits" or not run_file.model.endswith(GRAPH_SUFFIX):
        return None
    graph = path.parent / Path(run_file.model).expanduser()
    if not graph.is_file():
        raise UsageError(f"{name}: model: there is no file {graph}")
    values = graph.with_suffix(VALUES_SUFFIX)
    return {"graph": str(graph)} | ({"values": str(values)} if values.is_file() else {})


@asynccontextmanager
async def _by_command(text: str, path: Path, name: str) -> AsyncIterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="peerloom-train-") as folder:
        file = Path(folder) / "RUN.toml"
        file.write_text(text, encoding="utf-8")
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
            yield {**json.loads(line), "name": name}
        finally:
            with trio.CancelScope(shield=True):
                if process.stdin is not None:
                    await process.stdin.aclose()  # it ends, and its files with it
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


def error_lines(text: str) -> list[str]:
    """The lines of a command's error, without those that it said before."""
    lines = text.strip().splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    return lines[begins[-1] :][:_LINES_SHOWN] if begins else lines[-_LINES_SHOWN:]


def refusal(errors: bytes | bytearray, name: str) -> UsageError:
    """Return what a command's lines of errors say, the last ones, as the error of the call `name`."""
    lines = error_lines(errors.decode(errors="replace"))
    advice = lines.pop().strip().removeprefix("do: ") if lines and lines[-1].startswith("  do: ") else None
    what = " ".join(lines)[:_LENGTH_SHOWN].removeprefix("error: ").removeprefix(f"{name}: ")
    return UsageError(f"{name}: {what or 'the model could not be captured'}", advice)
