"""docs/scripts.md agrees with the tests of a script's parts."""

import ast

import pytest

from tests.node.optimizer.compatibility import MORE, TESTS
from tests.scripts_page import PAGE, page
from tests.source import ROOT


def test_the_page_of_scripts_is_the_generated_one() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.scripts_page"


@pytest.mark.parametrize("test", sorted({test for _, _, test in MORE}))
def test_each_row_of_the_table_has_its_test(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / TESTS / file).read_text())
    assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
