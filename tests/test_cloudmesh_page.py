"""docs/cloudmesh.md has all functions and shows all cases, and the tests that it names exist."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.cloudmesh import IS_WRITING, PAGE
from tests.cloudmesh_report import EXCEPTIONS, REPORT, VARIATIONS, cases, page, shown_in
from tests.source import ROOT

PLAY_FILE = ROOT / "tests" / "test_cloudmesh.py"


def test_each_test_that_the_page_names_exists() -> None:
    named = {test for _, case in cases() for test in case.tests}
    missing = []
    for name in sorted(named):
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = ast.FunctionDef, ast.AsyncFunctionDef
        if function not in {node.name for node in ast.walk(tree) if isinstance(node, functions)}:
            missing.append(name)
    assert missing == []
    files = [test for _, _, test in (*EXCEPTIONS, *VARIATIONS)]
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.skipif(IS_WRITING, reason="this run writes the page")
def test_the_page_shows_each_line_that_the_play_expects() -> None:
    shown = shown_in(PAGE.read_text())
    absent = [
        f"{key}: {wanted}"
        for keys, patterns in _expected()
        for key in keys.split(", ")
        for wanted in patterns
        if not any(re.search(wanted, line) for line in shown[key])
    ]
    assert absent == []


def _expected() -> Iterator[tuple[str, list[str]]]:
    """Yield the cases of each `show` of the play, with the patterns that are literals."""
    for node in ast.walk(ast.parse(PLAY_FILE.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "show":
            keys, _, *patterns = [each.value if isinstance(each, ast.Constant) else "" for each in node.args]
            if isinstance(keys, str) and keys:
                yield keys, [each for each in patterns if isinstance(each, str)]


@pytest.mark.skipif(IS_WRITING, reason="this run writes the page")
def test_the_page_has_every_function_and_shows_every_case() -> None:
    text = PAGE.read_text()
    shown = shown_in(text)
    assert text == page(shown)
    assert [section.number for section in REPORT] == [f"4.{number}" for number in range(1, 23)]
    kinds = {section.number: [case.kind for case in section.cases] for section in REPORT}
    assert {number for number, found in kinds.items() if len(found) < 3} == {"4.8"}, (
        "only 4.8 has no alternative case in the report"
    )
    wanted = {section.key(case) for section, case in cases() if case.is_played}
    assert wanted == shown.keys()
    assert [(len(EXCEPTIONS), len(VARIATIONS))] == [(8, 8)]
    assert "not known" not in text
    assert "one of these" not in text
