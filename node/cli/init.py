"""`peerloom init` and `peerloom examples`: commented files to begin with."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli.key_texts import DATA_KEYS, NODE_KEYS, RUN_KEYS
from node.cli.render import show
from node.errors import UsageError
from node.invocation import command_span
from node.suggest import nearest

LINE_COLUMNS = 100
"""Maximum line length. If a key's line would be longer, its text goes on the line above."""


@dataclass(frozen=True)
class RunExample:
    """An example run: its purpose, and the keys that differ from their defaults."""

    about: str
    keys: Mapping[str, Any]


EXAMPLES: Mapping[str, RunExample] = {
    "digits": RunExample(
        "a small network for images on the digits data, in two stages: two nodes or more, half a minute",
        {
            "model": "simple-cnn",
            "data": "digits",
            "train.steps": 220,
            "train.learning_rate": 0.002,
            "train.seed": 7,
            "plan.stages": 2,
        },
    ),
    "digits-local": RunExample(
        "the same, but each member trains the whole model and averages: members may join, leave or die",
        {
            "model": "simple-cnn",
            "data": "digits",
            "train.mode": "local",
            "train.steps": 2000,
            "train.batch": 32,
            "train.learning_rate": 0.002,
            "train.patience": 5,
        },
    ),
    "text": RunExample(
        "a small GPT on the bytes of a text file, `my.txt`",
        {
            "model": "gpt",
            "data": "my.txt",
            "options": {"layers": 4, "heads": 4, "width": 64},
            "train.steps": 300,
            "train.batch": 32,
            "train.microbatch": 8,
            "train.window": 64,
            "train.optimizer": "adamw",
            "train.learning_rate": 0.003,
            "train.schedule": "cosine",
            "train.warmup_steps": 20,
            "train.clip_norm": 1.0,
        },
    ),
    "table": RunExample(
        "a table, `my.csv`, whose label column is given; the model for it is chosen automatically",
        {"data.source": "my.csv", "data.label": "label", "train.epochs": 20},
    ),
    "script": RunExample(
        "your own model: `my_model.py` with a function `build` that returns a Task",
        {"model": "my_model.py:build", "data": "my_model.py:data"},
    ),
}


def init(
    what: Annotated[str, typer.Argument(metavar="run|node", help="Which file.")] = "run",
    like: Annotated[
        str, typer.Option("--like", metavar="NAME", help="Begin with this one of `peerloom examples`.")
    ] = "",
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="File to write; default: RUN.toml or node.toml here.")
    ] = "",
) -> None:
    """Write a commented RUN.toml or node.toml: every key with its default and meaning."""
    if what not in ("run", "node"):
        raise UsageError(f"init {what}: want run or node")
    if what == "node" and like:
        raise UsageError("--like: only runs have examples, node.toml has none")
    path = Path(out or ("RUN.toml" if what == "run" else "node.toml"))
    lines = run_file(example(like or "digits")) if what == "run" else node_file()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except FileExistsError:
        raise UsageError(f"{path} exists, and was not changed", "choose another file: --out FILE") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    use = command_span("train", str(path)) if what == "run" else command_span("--config", str(path))
    show([f"wrote {path}, with every key, most as comments; use it: {use}"])


def examples(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Print this one.")] = "",
) -> None:
    """List example runs, or print one of them."""
    if name:
        sys.stdout.write("\n".join(_short(example(name))) + "\n")
        return
    width = max(map(len, EXAMPLES))
    show(f"{name:<{width}}  {each.about}" for name, each in EXAMPLES.items())
    show(["print one: `peerloom examples NAME`; write it with all keys: `peerloom init --like NAME`"])


def example(name: str) -> RunExample:
    """Return the example with this name. Raises UsageError."""
    if name not in EXAMPLES:
        near = nearest(name, list(EXAMPLES))
        raise UsageError(
            f"there is no example {name}" + (f"; did you mean {near}?" if near else ""),
            "`peerloom examples`",
        )
    return EXAMPLES[name]


def node_file() -> list[str]:
    """Return the lines of a node.toml that changes nothing."""
    return [
        "# Settings of a node: `peerloom --config node.toml`. Flags and PEERLOOM_* override this file.",
        "# A line that begins with # shows a default; remove the # to change it.",
        *_lines((key, default, text, False) for key, (default, text) in NODE_KEYS.items()),
    ]


def run_file(chosen: RunExample) -> list[str]:
    """Return the lines of a RUN.toml with every key: the keys of `chosen` are set, all others are
    comments."""
    from node.protocols.data_table import DataTable
    from node.protocols.run_file import RunFile

    keys, texts = dict(chosen.keys), dict(RUN_KEYS)
    if "data." in "".join(keys):
        del texts["data"]
        texts |= {f"data.{key}": text for key, text in DATA_KEYS.items()}
    defaults = dict(_flat(RunFile())) | dict(_flat(DataTable("..."), "data."))
    rows = ((key, _toml(keys.get(key, defaults[key])), text, key in keys) for key, text in texts.items())
    return [
        f"# A run: {chosen.about}.",
        "# Start it on a node of a swarm: `peerloom train RUN.toml`. Lines that begin with # show defaults.",
        *_lines(rows),
    ]


def _short(chosen: RunExample) -> list[str]:
    texts = {**RUN_KEYS, **{f"data.{key}": text for key, text in DATA_KEYS.items()}}
    rows = ((key, _toml(value), texts[key], True) for key, value in chosen.keys.items())
    return [f"# {chosen.about}", *_lines(rows)]


def _lines(rows: Iterator[tuple[str, str, str, bool]]) -> Iterator[str]:
    """Yield keys with their values and meanings, table by table."""
    before = ""
    for key, value, text, is_set in rows:
        table, _, name = key.rpartition(".")
        if table != before:
            before = table
            yield ""
            yield f"[{table}]"
        line = f"{name} = {value}" if is_set else f"# {name} = {value}"
        if len(line) < 40 and 40 + len(text) + 2 <= LINE_COLUMNS:
            yield f"{line:<40}# {text}"
        else:
            yield f"# {text}"
            yield line


def _flat(table: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of RUN.toml, with its default."""
    for name in table.__struct_fields__:
        value = getattr(table, name)
        if hasattr(value, "__struct_fields__"):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "..."
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + " }"
            if value
            else "{}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)
