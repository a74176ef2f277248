"""A scenario: everything about an experiment except its seed, as a TOML file and as a frozen value.

Reading is strict. An unknown key, a wrong type, a value out of range, or a value that contradicts another is
an error that names its line. Not here: the rules between values (`sim.scenario.rules`).
"""

import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from node import toml
from node.errors import UsageError
from node.suggest import did_you_mean
from sim.scenario.model import Scenario
from sim.scenario.rules import faults

BUILT_IN = ("lan", "wan", "churn", "partition", "flapping", "spot", "serving", "nat")
"""The scenarios included with the simulator."""


def load(name_or_path: str | Path) -> Scenario:
    """Load a built-in scenario by name, or a scenario from a file. Raises UsageError."""
    text, name, folder = _source(name_or_path)
    document = toml.parse(text, Scenario, name=name)
    scenario = document.value
    if scenario.churn.trace:
        # The path is relative to the folder of the scenario file, wherever the program was started.
        trace = str((folder / scenario.churn.trace).resolve())
        scenario = msgspec.structs.replace(
            scenario, churn=msgspec.structs.replace(scenario.churn, trace=trace)
        )
    for path, what in faults(scenario):
        raise UsageError(f"{document.where(*path)}: {what}")
    return scenario


def text_of(name_or_path: str | Path) -> str:
    """Return the file of a scenario as written, with its comments. Raises UsageError."""
    return _source(name_or_path)[0]


def with_values(scenario: Scenario, values: Mapping[str, str], *, source: str = "--set") -> Scenario:
    """Return the scenario with changed values, given as a person types them: `{"nodes": "300",
    "churn.speedup": "10"}`.

    A number in a key is an index into a list: `events.0.share`. Text needs no quotes. Errors name `source`.

    Raises:
        UsageError: the same errors as for a file with these values.
    """
    for key, text in values.items():
        where = f"{source} {key}={text}"
        tree = _tree(scenario)
        _put(tree, key.split("."), _value(text), where)
        scenario = toml.convert(tree, Scenario, name=where, lines={}).value
    for _, what in faults(scenario):
        raise UsageError(f"{source} {' '.join(f'{key}={text}' for key, text in values.items())}: {what}")
    return scenario


def to_toml(scenario: Scenario) -> str:
    """Return the scenario as a TOML file with all its values; `load` reads an equal scenario from it."""
    return "\n".join(_lines(_tree(scenario), ())).lstrip("\n") + "\n"


def _source(name_or_path: str | Path) -> tuple[str, str, Path]:
    """Return the scenario's text, its name for errors, and the folder to which its paths are relative."""
    given = str(name_or_path)
    if given in BUILT_IN:
        file = files("sim") / "scenarios" / f"{given}.toml"
        return file.read_text(encoding="utf-8"), f"{given}.toml", Path()
    path = Path(name_or_path)
    if not (isinstance(name_or_path, Path) or given.endswith(".toml") or os.sep in given or path.is_file()):
        hint = did_you_mean(given, BUILT_IN) or f"; use one of {', '.join(BUILT_IN)}, or the path of a file"
        raise UsageError(f"there is no scenario '{given}'{hint}")
    return toml.read_text(path), str(path), path.parent


def _tree(scenario: Scenario) -> dict[str, Any]:
    """Return all values as plain dicts and lists. None and inf are left out: TOML has no null, no file may
    contain inf, and both are defaults."""
    tree: dict[str, Any] = _without_defaults(msgspec.to_builtins(scenario))
    return tree


def _without_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if item is not None and item != math.inf}
        return {key: _without_defaults(item) for key, item in kept.items()}
    return [_without_defaults(item) for item in value] if isinstance(value, list | tuple) else value


def _put(tree: Any, keys: Sequence[str], value: Any, where: str) -> None:
    for place, key in enumerate(keys):
        step: str | int = key
        if isinstance(tree, list):
            if not (key.isdecimal() and int(key) < len(tree)):
                name = ".".join(keys[:place])
                raise UsageError(f"{where}: {name} has {len(tree)} items: use an index such as {name}.0")
            step = int(key)
        elif not isinstance(tree, dict):
            raise UsageError(f"{where}: {'.'.join(keys[:place])} is a value, not a table")
        if place == len(keys) - 1:
            tree[step] = value
        else:
            tree = tree.setdefault(step, {}) if isinstance(step, str) else tree[step]


def _value(text: str) -> Any:
    """Parse a TOML value, or return the text itself."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return tree["value"] if len(tree) == 1 else text


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Return the lines of a table's own values, followed by those of its subtables."""
    lines = [f"{key} = {_written(value)}" for key, value in table.items() if not _is_table(value)]
    for key, value in table.items():
        if not _is_table(value):
            continue
        name = ".".join((*path, key))
        if isinstance(value, dict):
            inner = _lines(value, (*path, key))
            lines += ["", f"[{name}]", *inner]
        else:
            for item in value:
                lines += ["", f"[[{name}]]", *_lines(item, (*path, key))]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _written(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are valid in TOML, which also requires DEL to be escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return "[" + ", ".join(map(_written, value)) + "]"
    return repr(value)
