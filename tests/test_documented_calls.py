"""Each library call in README.md and docs/ names an existing function, and arguments that the function
takes."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.optim.lr_scheduler import CosineAnnealingLR

import node
import sim
from node.api.handles import RunHandle
from node.api.preparing import _homes
from node.journal import Journal
from node.library.blocking import BlockingDirectory
from node.library.sync import SyncNode
from node.optimizer.settings import Settings
from node.optimizer.wrapper import PeerOptimizer
from node.planning.report import PlanReport
from tests.test_documented_commands import PAGES, fault
from tests.test_documented_commands import commands as commands_of
from tests.test_documents import product_texts

CODE = re.compile(r"((?:^    .*\n)+)|`([^`\n]+)`", re.MULTILINE)
"""Blocks of indented lines, and code spans."""
CALL = re.compile(r"(?<![\w./\"])(me\.dht|me|run|optimizer|report|node|sim)\.([a-z_A-Z]\w*)(\()?")
OBJECTS: dict[str, tuple[Any, ...]] = {
    "me": (SyncNode, node.Node),
    "me.dht": (BlockingDirectory,),
    "run": (RunHandle,),
    "optimizer": (PeerOptimizer,),
    "report": (PlanReport,),
    "node": (node,),
    "sim": (sim,),
}
"""The object that each name in the documents stands for; `me` is a node in either form."""
MODULES = {"node", "sim"}


def calls(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the object, the name and the arguments ("" for none) of calls in code."""
    for code in CODE.finditer(text):
        found = code[1] or code[2]
        for call in CALL.finditer(found):
            if call[2] == "toml":
                continue  # the file run.toml
            yield call[1], call[2], arguments(found[call.end() - 1 :]) if call[3] else ""


def arguments(text: str) -> str:
    """Return a text up to the end of its first parenthesis."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: place + 1]
    return ""


def wrong(owner: str, name: str, given: str) -> str | None:
    """Return the missing name or argument of a call; None if the call is right."""
    found = [getattr(each, name) for each in OBJECTS[owner] if hasattr(each, name)]
    if (owner, name) == ("me", "watch"):
        found = [Journal.watch]  # a node adopts this one from its journal
    if owner in MODULES and (given == "" or not found):
        return None  # this is a module's path, which `tests/test_documents.py` checks
    if not found:
        return f"{owner} has no {name}"
    with suppress(SyntaxError):  # this has a gap for the reader to fill
        call = ast.parse(f"f{given}", mode="eval").body
        if isinstance(call, ast.Call):
            unknown = {str(each.arg) for each in call.keywords} - taken(found[0])
            return f"{owner}.{name} takes no {', '.join(sorted(unknown))}" if unknown else None
    return None


def taken(function: Callable[..., object]) -> set[str]:
    """Return the names of a function's parameters; further options of an optimizer are those of its
    settings."""
    names = set(inspect.signature(function).parameters)
    if function is SyncNode.optimizer:
        names |= {field.name for field in dataclasses.fields(Settings)}
    if "settings" in names:
        names |= set(_homes())
    elif function is PeerOptimizer.scheduler:
        names |= set(inspect.signature(CosineAnnealingLR).parameters)  # the one in the README
    return names


# The library's page is generated from the signatures themselves.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "library.md"], ids=lambda page: page.name
)
def test_calls_of_a_page_exist_with_their_arguments(page: Path) -> None:
    told = [(each, wrong(*each)) for each in calls(page.read_text(encoding="utf-8"))]
    assert [problem for _, problem in told if problem] == []


def test_the_readme_names_calls_of_every_object() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {owner for owner, _, _ in calls(text)} == set(OBJECTS)


@pytest.mark.parametrize(
    "line", ["`me.avergae(x)`", "`me.dht.put(k, v, ttl=3)`", "    me = node.sync(nme='a')\n", "`run.pasue()`"]
)
def test_an_unknown_call_is_found(line: str) -> None:
    assert [wrong(*each) for each in calls(line)] != [None]


def test_commands_that_the_program_advises_exist_with_their_flags() -> None:
    told = [
        (place, words, fault(words))
        for place, text in product_texts().items()
        for span in re.findall(r"`peerloom[^`\n]*`", text)
        for words in commands_of(span)
    ]
    assert len(told) > 50
    assert [each for each in told if each[-1]] == []
