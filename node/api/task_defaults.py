"""Defaults for a run without a model, or with only the kind of task: "vision" or "language".

Each kind has a model and matching keys of `[train]`; keys given in RUN.toml take precedence. Without a model,
the kind follows from the data: text means language, images mean vision. A table or a function may be
anything, so it is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from node import toml
from node.content.sources import SCHEMES, is_archive, is_table_by_keys
from node.content.sources import is_table as is_table_by_name
from node.errors import UsageError
from node.protocols.run_file import RunFile, check_run_file


@dataclass(frozen=True)
class TaskDefault:
    """A built-in model, its options, and values for keys of `[train]`."""

    model: str
    options: Mapping[str, Any]
    train: Mapping[str, Any]

    def __str__(self) -> str:
        said = [f"{key} {value}" for key, value in (*self.options.items(), *self.train.items())]
        return ", ".join([self.model, *said])


TASKS: Mapping[str, TaskDefault] = MappingProxyType(
    {
        "vision": TaskDefault("simple-cnn", {}, {"batch": 128, "learning_rate": 0.001}),
        "language": TaskDefault(
            "gpt",
            {"layers": 4, "heads": 4, "width": 128},
            {"batch": 64, "learning_rate": 0.001, "clip_norm": 1.0},
        ),
    }
)
"""The defaults by kind. The rate and batch for vision are the defaults of `[train]`. The clipping is there
because a small transformer sometimes diverges without it."""


def read_run(text: str, base: Path, name: str) -> tuple[RunFile, str]:
    """Return the checked run described by the text of a RUN.toml in the folder `base`, and the filled-in
    defaults ("" if none). Errors refer to the file as `name`. Raises UsageError."""
    document = toml.tree(text, name=name)
    if not document:
        raise UsageError(f"{name}: the file is empty; it needs a model or data", 'data = "digits"')
    return with_task_default(document, base, name, toml.line_numbers(text))


def with_task_default(
    document: Mapping[str, Any], base: Path, name: str, lines: Mapping[toml.TomlPath, int]
) -> tuple[RunFile, str]:
    """Return the checked run described by these tables, with a model, and the filled-in defaults ("" if
    none).

    Raises:
        UsageError: the run is wrong, or there is no default for its data.
    """
    found, said = toml.convert(document, RunFile, name=name, lines=lines).value, ""
    kind = found.model or _kind_of(found, base, name)
    default = TASKS.get(kind)
    if default is not None:
        filled = {**document, "model": default.model}
        filled["options"] = {**default.options, **found.options}
        filled["train"] = {**default.train, **document.get("train", {})}
        said = f"model: {kind}{'' if found.model else ' (none is given)'}: {default}"
        found = toml.convert(filled, RunFile, name=name, lines=lines).value
    check_run_file(found, name)
    return found, said


def _kind_of(run_file: RunFile, base: Path, name: str) -> str:
    source = run_file.source
    path = base / Path(source).expanduser()
    if run_file.tokenizer:
        return "language"
    if source == "digits" or path.is_dir() or is_archive(source):
        return "vision"
    if ".py:" in source or is_table_by_name(source) or is_table_by_keys(run_file.data_keys):
        raise UsageError(
            f"{name}: the key 'model' is missing, and there is no default for {source[:80]}",
            'set model = "PATH.py:FUNCTION"; defaults exist for images ("vision") and texts ("language")',
        )
    return "vision" if "://" in source or source.startswith(SCHEMES) else "language"
