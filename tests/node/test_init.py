"""`peerloom init` and `examples`: the files that they write contain every key and are valid."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node import toml
from node.cli.init import EXAMPLES, example, node_file, run_file
from node.cli.key_texts import DATA_KEYS, NODE_KEYS, RUN_KEYS
from node.config import RULES, resolve
from node.config_file import ConfigFile
from node.errors import EXIT_DONE, UsageError
from node.main import run
from node.protocols.data_table import DataTable
from node.protocols.run_file import RunFile, check_run_file

WITHOUT_A_DEFAULT = re.compile(r"name = \"lab-1\"|data_dir = |\w+ = \.\.\.")
"""Values that differ by machine: its name, its user's folder, and the replacement for `steps`."""


def uncommented(lines: list[str]) -> str:
    """Return the file as it is after a user has uncommented each key."""
    keys = (re.sub(r"^# (?=\w+ = )", "", line) for line in lines)
    return "\n".join(line for line in keys if not WITHOUT_A_DEFAULT.match(line))


def keys_of(table: Any, above: str = "") -> Iterator[str]:
    for name in table.__struct_fields__:
        value = getattr(table, name)
        if hasattr(value, "__struct_fields__"):
            yield from keys_of(value, f"{above}{name}.")
        else:
            yield above + name


def test_each_key_has_a_description() -> None:
    assert set(NODE_KEYS) == {".".join(rule.key) for rule in RULES} == set(keys_of(ConfigFile()))
    assert set(RUN_KEYS) == set(keys_of(RunFile()))
    assert set(DATA_KEYS) == set(DataTable.__struct_fields__)


def test_node_toml_shows_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    for lines in (node_file(), uncommented(node_file()).splitlines()):
        path.write_text("\n".join(lines))
        found = resolve({"config": str(path)}, {})
        assert replace(found, listen=replace(found.listen, may_move=True)) == resolve({}, {})


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_accepted_with_every_key(name: str) -> None:
    lines = run_file(example(name))
    texts = ("\n".join(lines), uncommented(lines))
    short, whole = (toml.parse(text, RunFile, name="RUN.toml").value for text in texts)
    assert short == whole
    check_run_file(short, "RUN.toml")


def test_init_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init"]) == run(["init", "node"]) == EXIT_DONE
    assert run(["examples", "digits"]) == EXIT_DONE
    assert toml.load(tmp_path / "RUN.toml", RunFile).model == "simple-cnn"
    (tmp_path / "RUN.toml").write_text("mine")
    assert run(["init"]) == UsageError.exit_code
    assert "exists, and was not changed" in capsys.readouterr().err
    assert (tmp_path / "RUN.toml").read_text() == "mine"
    assert run(["examples", "digit"]) == UsageError.exit_code
    assert "did you mean digits?" in capsys.readouterr().err
