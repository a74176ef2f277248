"""`make soak` plays every test that a plain run skips or shortens."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.source import ROOT

READ = re.compile(
    r"(?:environ\.get\(|environ\[)\s*\"(PEERLOOM_[A-Z_]+)\"|\"(PEERLOOM_[A-Z_]+)\" (?:not )?in os\.environ"
)
BY_HAND = {"PEERLOOM_AXE", "PEERLOOM_DOCS"}
"""Variables that name something that a machine may have, or that make a test write a document, as
CONTRIBUTING.md says.
"""


def asked(path: Path) -> Iterator[str]:
    """Yield the environment variables that extend a test."""
    for found in READ.finditer(path.read_text(encoding="utf-8")):
        yield found[1] or found[2]


def played() -> dict[str, set[str]]:
    """For each variable: the pytest arguments with which `make soak` sets it."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    soak = text[text.index("soak: ") : text.index("clean:\n")]
    rows: dict[str, set[str]] = {}
    for line in soak.splitlines():
        for variable in re.findall(r"(PEERLOOM_[A-Z_]+)=", line):
            rows.setdefault(variable, set()).update(re.findall(r"tests(?:/[\w/]+(?:\.py)?)?", line))
    return rows


def test_make_soak_plays_all_that_a_plain_run_skips() -> None:
    rows = played()
    missing = {
        f"{path.relative_to(ROOT)} {variable}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for variable in asked(path)
        if variable not in BY_HAND
        and not any(str(path.relative_to(ROOT)).startswith(each) for each in rows.get(variable, ()))
    }
    assert missing == set()


def test_files_and_tests_that_soak_selects_exist() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    selected = re.findall(r"(tests/\S+\.py) -k (\w+)", text)
    assert selected
    for file, words in selected:
        assert re.search(rf"def test_\w*{words}", (ROOT / file).read_text(encoding="utf-8")), (file, words)
