"""The program as data, for the tests that hold its laws: every file of the tree, read and parsed once.

Parsed when first looked at, not when a test file is imported: every process of a test run imports them all,
and one alone looks.
"""

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("crypto", "dht", "gossip", "partition", "node", "sim")
SIDES = ("tests", "benchmarks", "examples")
"""Code that is not the program: the laws of imports leave it alone, tidiness does not."""


@dataclass(frozen=True)
class Source:
    """One file. `module` is its dotted name, `place` its path from the root, for messages."""

    path: Path
    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def place(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def package(self) -> str:
        return self.module.split(".")[0]


def sources(*folders: str) -> tuple[Source, ...]:
    """All Python files under these folders of the root, in the order of their paths."""
    return tuple(source for folder in folders for source in _under(folder))


@cache
def _under(folder: str) -> tuple[Source, ...]:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Source(path, module, path.read_text(encoding="utf-8")))
    return tuple(found)


@cache
def modules() -> frozenset[str]:
    """The dotted names of all modules of the program."""
    return frozenset(source.module for source in sources(*PACKAGES))


def imports(source: Source, *, typing_only: bool = True) -> list[tuple[int, str]]:
    """(line, module) of all that a file imports, wherever in it.

    `from a import b` counts as a.b if that is a module, else as a. Without `typing_only`, imports under
    `if TYPE_CHECKING` are left out: they are never executed.
    """
    skipped = set() if typing_only else _under_type_checking(source.tree)
    found = []
    for node in ast.walk(source.tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{source.place}:{node.lineno}: imports are absolute here"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name if name in modules() else base) for name in names]
    return sorted(set(found))


def _under_type_checking(tree: ast.Module) -> set[ast.AST]:
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            found.update(inner for statement in node.body for inner in ast.walk(statement))
    return found
