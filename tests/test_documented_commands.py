"""Each command in README.md and docs/ names existing subcommands and flags. The commands are not run."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from node.main import app
from sim.cli import app as simulator
from sim.replay.cli import app as replay
from tests.source import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
IN_CODE = re.compile(r"^    .*$|`([^`\n]+)`", re.MULTILINE)
"""Indented lines and code spans."""
COMMAND = re.compile(r"(?<![\w./=-])peerloom(?= |$)((?: (?![ #])[^\s;|<>#]+)*)")
"""A command ends at two blanks, a comment, or a shell operator."""
FLAG = re.compile(r"--?[a-z][\w-]*")


def commands(text: str) -> Iterator[list[str]]:
    """Return the words of each command after the program's name."""
    for code in IN_CODE.finditer(text):
        for found in COMMAND.finditer(code[1] or code[0]):
            yield [word for each in found[1].split() if (word := each.strip("[](),:."))]


@cache
def parsers() -> tuple[Any, Any, Any]:
    """Return typer's parsers of the node's, the simulator's and the replay's command lines."""
    node, sim, replayed = (typer.main.get_command(each) for each in (app, simulator, replay))
    return node, sim, replayed


def _names(parameter: Any) -> Iterator[str]:
    yield from (*parameter.opts, *parameter.secondary_opts)


def fault(words: list[str]) -> str | None:
    """Return the unknown part of a command line; None if all of it is known."""
    node, sim, replayed = parsers()
    at = node
    for number, word in enumerate(words):
        flag = FLAG.match(word)
        if flag is not None:
            readers = [at, node] if at.name == "install" else [at]  # it also takes the flags of a node
            known = {name for each in readers for flags in each.params for name in _names(flags)}
            if flag[0] not in known | {"--help", "--debug"}:
                return f"no flag {flag[0]} of {at.name or 'peerloom'}"
        elif getattr(at, "commands", None) and (number == 0 or not words[number - 1].startswith("-")):
            if word not in at.commands:
                return f"no command {word} of {at.name or 'peerloom'}"
            at = sim if word == "sim" else at.commands[word]
        elif at is sim and word == "replay":
            at = replayed
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_exist_with_their_flags(page: Path) -> None:
    told = [(words, fault(words)) for words in commands(page.read_text(encoding="utf-8"))]
    assert [f"peerloom {' '.join(words)}: {wrong}" for words, wrong in told if wrong] == []


@pytest.mark.parametrize(
    "line",
    ["peerloom stauts", "peerloom runs shwo RUN", "peerloom --jion ADDR", "peerloom sim lan --sed 3"],
)
def test_an_unknown_command_is_found(line: str) -> None:
    (words,) = commands(f"    $ {line}      # as typed\n")
    assert fault(words) is not None
