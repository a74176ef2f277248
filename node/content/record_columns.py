"""The columns of records: prompt and completion, messages, or text and label.

They are found by the names that trl and datasets document, or set by keys of `[data]`. Ambiguous names are
refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from node.content.columns import Schema
from node.content.delimited import LABELS
from node.content.model_folder import ModelFolder
from node.content.reading import SourceReading, shown, unclear
from node.content.records import Record, some_names
from node.errors import UsageError
from node.protocols.data_table import DataTable

Form = Literal["chat", "completion", "text", "labelled"]

_MESSAGES = ("messages", "conversations")
_TEXTS = ("text", "sentence")
_PAIRS = (
    ("prompt", "completion"), ("instruction", "output"), ("question", "answer"), ("prompt", "response"),
    ("instruction", "response"), ("input", "output"), ("prompt", "chosen"), ("source", "target"),
)  # fmt: skip
"""Pairs of column names that other programs use. All but the first pair must be confirmed by keys."""
NOT_CONTENT = frozenset({"id", "idx", "index", "uid", "source", "url", "meta", "metadata", "timestamp"})
"""Columns that describe where a record is from; they are left out."""


@dataclass(frozen=True)
class RecordColumns:
    """The columns of records. `inputs` are joined by a newline; `target` is the completion or the label."""

    form: Form
    inputs: tuple[str, ...]
    target: str = ""


def choose_columns(
    path: Path,
    names: Sequence[str],
    first: Record,
    model: ModelFolder,
    keys: DataTable,
    schema: Schema,
    reading: SourceReading,
) -> RecordColumns:
    """Return the columns of records. Raises UsageError if no reading fits, or more than one."""
    _check_known(path, names, keys, schema)
    ignored = set(keys.ignore or ())
    left = [name for name in names if name not in ignored]
    if model.kind == "classes":
        roles = _labelled(path, left, first, keys, schema)
    elif model.kind in ("causal", "sequences"):
        roles = _written(path, left, model, keys, schema)
    else:
        raise UsageError(
            f"{path}: records cannot be read for a model of this kind ({model.path})",
            "give arrays named like the model's inputs (input_ids, attention_mask, labels), as an npz or"
            ' from a function: data = "FILE.py:FUNCTION"',
        )
    used = {*roles.inputs, roles.target, ""}
    extra = [name for name in left if name not in used]
    bare = [name for name in extra if name.strip().lower() in NOT_CONTENT]
    odd = [name for name in extra if name not in bare]
    if odd:
        choices: list[Mapping[str, Any]] = [{"ignore": [*(keys.ignore or ()), *odd]}]
        if roles.form == "completion" and not isinstance(keys.prompt, tuple):
            choices.append({"prompt": [*roles.inputs, odd[0]], "completion": roles.target})
        raise unclear(
            path, f"besides {some_names(sorted(used - {''}))} it has {some_names(odd)}", keys, *choices
        )
    reading.skipped += [f"the column {shown(name)} by `ignore`" for name in sorted(ignored)]
    reading.skipped += [f"the column {shown(name)}, which says where a record is from" for name in bare]
    return roles


def _check_known(path: Path, names: Sequence[str], keys: DataTable, schema: Schema) -> None:
    completion = keys.completion if schema.needs_labels else ""
    wanted = [("messages", keys.messages), ("completion", completion), ("text", keys.text)]
    prompts = keys.prompt if isinstance(keys.prompt, tuple) else (keys.prompt,)
    label = keys.label if schema.needs_labels else ""
    for key, name in (*wanted, *(("prompt", each) for each in prompts), ("label", label)):
        if name and name not in names:
            raise UsageError(
                f"{path}: {key}: there is no column {shown(name)}", f"its columns are {some_names(names)}"
            )


def _written(
    path: Path, left: Sequence[str], model: ModelFolder, keys: DataTable, schema: Schema
) -> RecordColumns:
    """Return the columns from which a model learns to write text: a chat, a completion, or plain text."""
    if not schema.needs_labels and (alone := _prompts(left, keys)):
        return alone
    if keys.messages:
        return RecordColumns("chat", (keys.messages,))
    if keys.prompt or keys.completion:
        if not (keys.prompt and keys.completion):
            raise UsageError(f"{path}: give both prompt and completion, or neither")
        prompts = keys.prompt if isinstance(keys.prompt, tuple) else (keys.prompt,)
        return RecordColumns("completion", prompts, keys.completion)
    if keys.text:
        return RecordColumns("text", (keys.text,))
    found: list[tuple[RecordColumns, Mapping[str, Any]]] = [
        (RecordColumns("chat", (name,)), {"messages": name}) for name in _MESSAGES if name in left
    ]
    if {"prompt", "completion"} <= set(left):
        found.append(
            (
                RecordColumns("completion", ("prompt",), "completion"),
                {"prompt": "prompt", "completion": "completion"},
            )
        )
    found += [(RecordColumns("text", (name,)), {"text": name}) for name in ("text",) if name in left]
    if len(found) == 1:
        return found[0][0]
    if found:
        told = " and ".join(some_names((*roles.inputs, *filter(None, [roles.target]))) for roles, _ in found)
        raise unclear(path, f"it has {told}", keys, *(key for _, key in found[:2]))
    pairs = [{"prompt": a, "completion": b} for a, b in _PAIRS if a in left and b in left]
    guesses: Sequence[Mapping[str, Any]] = pairs or (
        [{"prompt": left[0], "completion": left[1]}] if len(left) > 1 else []
    )
    texts: list[Mapping[str, Any]] = (
        [] if model.kind == "sequences" else [{"text": each} for each in left[-1:]]
    )
    raise unclear(
        path,
        "it is not clear which columns hold prompt and completion, messages, or "
        f"text: it has {some_names(left)}",
        keys,
        *[*guesses[:1], *texts[:1]],
    )


def _prompts(left: Sequence[str], keys: DataTable) -> RecordColumns | None:
    """Return the columns of prompts if the records have no completions, which are then to be predicted."""
    named = keys.prompt if isinstance(keys.prompt, tuple) else (keys.prompt or "prompt",)
    target = keys.completion or "completion"
    return RecordColumns("completion", named) if {*named} <= {*left} and target not in left else None


def _labelled(
    path: Path, left: Sequence[str], first: Record, keys: DataTable, schema: Schema
) -> RecordColumns:
    labels = [keys.label] if keys.label else [name for name in left if name.strip().lower() in LABELS]
    if schema.label:
        labels = [schema.label]
    texts = [keys.text] if keys.text else [name for name in left if name.strip().lower() in _TEXTS]
    words = [name for name in left if isinstance(first[name], str) and name not in labels]
    if len(texts) != 1 and len(words) == 1:
        texts = words
    if len(labels) == 1 and not schema.needs_labels and labels[0] not in left:
        labels = [""]
    if len(texts) == 1 and len(labels) == 1:
        return RecordColumns("labelled", (texts[0],), labels[0])
    if len(texts) == 1 and not schema.needs_labels:
        return RecordColumns("labelled", (texts[0],))
    others = [name for name in left if name not in (*texts, *labels)]
    text = texts[0] if texts else (words or list(left))[0]
    label = labels[0] if labels else (others or list(left))[-1]
    raise unclear(
        path,
        f"it is not clear which columns are text and label: it has {some_names(left)}",
        keys,
        {"text": text, "label": label},
    )
