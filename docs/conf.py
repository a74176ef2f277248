"""How Sphinx makes the site of these pages: `make docs`. It reads the network for nothing."""

import re
from pathlib import Path
from typing import Any

project = "Peerloom"
copyright = "The Peerloom authors"  # noqa: A001 - Sphinx reads this name
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Peerloom"
html_show_sphinx = False
html_copy_source = False
myst_heading_anchors = 4
exclude_patterns = ["_build"]
suppress_warnings = ["myst.header"]
templates_path: list[str] = []

_HERE = Path(__file__).parent
_PAGE = re.compile(r"(?<![\w/(\[`.-])(?:docs/)((?:[\w-]+/)?[\w-]+\.md)(?![\w/])")


def _link(_: Any, name: str, source: list[str]) -> None:
    """Make links of pages that a text names: `docs/plan.md` is the way to write one that also reads well in a
    terminal. Indented and fenced blocks stay."""
    depth = name.count("/")
    is_fenced = False
    lines = source[0].splitlines()
    for number, line in enumerate(lines):
        is_fenced ^= line.startswith("```")
        if is_fenced or line.startswith("    "):
            continue
        lines[number] = _PAGE.sub(lambda found: _linked(found, depth), line)
    source[0] = "\n".join(lines) + "\n"


def _linked(found: re.Match[str], depth: int) -> str:
    page = found[1]
    if not (_HERE / page).exists():
        raise FileNotFoundError(f"{found.string.strip()[:80]}: no page docs/{page}")
    return f"[{page.removesuffix('.md')}]({'../' * depth}{page})"


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("source-read", _link)
