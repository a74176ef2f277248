"""Documents and docstrings name only existing files, sections, settings and code.

`tests/test_documented_commands.py` checks commands of `peerloom`; commands that need no node are run here.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from node import toml
from node.errors import EXIT_DONE
from node.main import run
from node.protocols.run_file import RunFile, check_run_file
from tests.source import ROOT
from tests.test_documented_commands import commands

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
ROOMS = (
    "benchmarks",
    "crypto",
    "deploy",
    "dht",
    "docs",
    "examples",
    "gossip",
    "node",
    "partition",
    "sim",
    "tests",
)
SUFFIXES = "py|md|toml|yml|svg|html|js|css|service|txt|json|plist"
FILE = re.compile(rf"(?<![\w/.-])((?:{'|'.join(ROOMS)})/[\w./-]*\w\.(?:{SUFFIXES}))(?![\w/])")
"""A path from the root of the repository."""
SHORT = re.compile(r"`([a-z_]+/[a-z_/]+\.py)`")
"""A path in a code span that may omit a package, as in tables of ARCHITECTURE.md."""
SECTION = re.compile(r"`?((?:docs/)?[\w-]+\.md)`?,?\s+\(?\"([^\"]+)\"\)?")
"""A page and a section of it."""
LINK = re.compile(r"\]\(([^)#\s]+)")
SCRIPT = re.compile(r"python (benchmarks/\w+\.py)((?: --?[a-z][\w-]*(?: [A-Z0-9][\w]*)?)*)")
PYTHON = re.compile(r"(?:# \w+\.py\n)?(?:import \w+$|from [\w.]+ import |with \w|async with )", re.MULTILINE)
"""Matches the beginning of a block of Python, as opposed to shell commands."""
MADE = {"docs/cloudmesh.svg"}
"""Files that a command written next to them creates."""
WITHOUT_NODE = (
    ["--version"],
    ["--help"],
    ["sim", "--help"],
    ["model", "--help"],
    ["checkpoint", "list"],
)
"""Commands of the documents that are quick and need no node."""


@cache
def product_texts() -> dict[str, str]:
    """Return the files of the program, with their docstrings and comments."""
    rooms = ("crypto", "dht", "gossip", "partition", "node", "sim", "benchmarks", "examples")
    paths = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def headings(page: str) -> set[str]:
    """Return the section titles of a page, each on one line."""
    path = ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page
    return set(re.findall(r"^#+ (.+?)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE))


def missing_sections(text: str) -> Iterator[str]:
    for page, section in SECTION.findall(text):
        if not ((ROOT / page).exists() or (ROOT / "docs" / page).exists()):
            yield page
        elif " ".join(section.split()) not in headings(page):
            yield f"{page}: {section}"


def missing_files(text: str) -> list[str]:
    return [each for each in FILE.findall(text) if each not in MADE and not (ROOT / each).exists()]


def blocks(page: Path) -> Iterator[list[str]]:
    """Return the indented blocks of a page, without their indentation; a blank line does not end a block."""
    block: list[str] = []
    for line in [*page.read_text(encoding="utf-8").splitlines(), "end"]:
        if line.startswith("    ") or (block and not line.strip()):
            block.append(line[4:])
        elif block:
            yield block
            block = []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_sections_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert missing_files(text) == []
    assert list(missing_sections(text)) == []
    tails = [str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert [
        each for each in SHORT.findall(text) if not any(f"/{x}".endswith(f"/{each}") for x in tails)
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_have_existing_targets(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [each for each in links if "://" not in each and not (page.parent / each).exists()] == []


def test_the_site_lists_each_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - set(index.splitlines()) == {"index"}


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    assert len(text.encode()) <= 8_000
    assert max(map(len, text.splitlines())) <= 120


def test_files_and_sections_that_docstrings_name_exist() -> None:
    wrong = {
        place: found
        for place, text in product_texts().items()
        if (found := [*missing_files(text), *missing_sections(text)])
    }
    assert wrong == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_of_benchmark_commands_on_a_page_exist(page: Path) -> None:
    for script, flags in SCRIPT.findall(page.read_text(encoding="utf-8")):
        source = (ROOT / script).read_text(encoding="utf-8")
        common = (ROOT / "benchmarks" / "_figures.py").read_text(encoding="utf-8") if flags else ""
        for flag in re.findall(r"--[a-z][\w-]*", flags):
            name = flag.removeprefix("--").replace("-", "_")
            is_added = f'"{flag}"' in source + common or re.search(rf"\b{name}=", source)
            assert is_added, f"{script} {flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_python_and_toml_parse(page: Path) -> None:
    for block in blocks(page):
        text = "\n".join(block).strip("\n")
        if PYTHON.match(text):
            code = text.partition("\npeerloom ")[0]  # the input that follows
            source = re.sub(r"^(\s*)\.\.\.", r"\1pass", code, flags=re.MULTILINE)
            compile(source, f"<{page.name}>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        if re.match(r"model = ", text):
            wanted = toml.parse(text, RunFile, name=page.name).value
            check_run_file(wanted, page.name)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_example_runs_are_accepted(path: Path) -> None:
    if "model =" in path.read_text(encoding="utf-8"):
        check_run_file(toml.load(path, RunFile), path.name)


@pytest.mark.parametrize("words", WITHOUT_NODE, ids=" ".join)
def test_commands_that_need_no_node_run(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PEERLOOM_DATA_DIR", str(tmp_path))
    assert run(words) == EXIT_DONE, capsys.readouterr().err


def test_a_missing_file_or_section_is_detected() -> None:
    assert list(missing_sections('docs/failures.md, "No such section"')) == [
        "docs/failures.md: No such section"
    ]
    assert missing_files("see `docs/gone.md` and tests/test_nothing.py") == [
        "docs/gone.md",
        "tests/test_nothing.py",
    ]
    assert list(commands("    peerloom runs list"))
