"""The pages of docs/reference agree with the program."""

import pytest

from tests.reference_pages import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_equals_the_program(name: str) -> None:
    written = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert PAGES[name]() == written, "run python -m tests.reference_pages"
