"""docs/scripts.md agrees with the tests of a script's parts."""

import ast

import pytest

from tests.node.optimizer.compatibility import MORE, TESTS
from tests.scripts_page import PAGE, page
from tests.source import ROOT


def test_the_scripts_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "docs/scripts.md is out of date: run python -m tests.scripts_page"


@pytest.mark.parametrize("test", sorted({test for _, _, test in MORE}))
def test_each_table_row_names_an_existing_test(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / TESTS / file).read_text())
    assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
