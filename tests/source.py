"""The program as data, for the tests of its laws: every file of the tree, read and parsed once.

Files are parsed on first use and not on import, because every process of a test run imports this module, but
only one uses them.
"""

import ast
import gc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)
ROOT = Path(__file__).parent.parent
PACKAGES = ("crypto", "dht", "gossip", "partition", "node", "sim")
SIDES = ("tests", "benchmarks", "examples")
"""Code that is not part of the program: import laws do not apply to it, but rules of tidiness do."""


@dataclass(frozen=True)
class Source:
    """One file. `module` is its dotted name; `place` is its path from the root, for messages."""

    path: Path
    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _nodes(self) -> dict[type[ast.AST], list[ast.AST]]:
        found: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        for node in ast.walk(self.tree):
            found[type(node)].append(node)
        # Exempt these objects from garbage collection: there are millions, and they live as long as the
        # process.
        gc.freeze()
        return found

    def each(self, *kinds: type[Node]) -> Iterator[Node]:
        """Yield all nodes of the tree that have these types, one type after the other; a file is walked only
        once."""
        for kind in kinds:
            yield from self._nodes.get(kind, ())  # type: ignore[misc]  # the list of a type has that type

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Return all functions, including those in classes and in functions."""
        yield from self.each(ast.FunctionDef)
        yield from self.each(ast.AsyncFunctionDef)

    @property
    def place(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def package(self) -> str:
        return self.module.split(".")[0]


def sources(*folders: str) -> tuple[Source, ...]:
    """Return all Python files under these folders of the root, in the order of their paths."""
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
    """Return the dotted names of all modules of the program."""
    return frozenset(source.module for source in sources(*PACKAGES))


@cache
def imports(source: Source) -> list[tuple[int, str]]:
    """Return (line, module) of each import of a file, at any depth, including those for types alone.

    `from a import b` counts as a.b if that is a module, and otherwise as a.
    """
    found = [(node.lineno, alias.name) for node in source.each(ast.Import) for alias in node.names]
    for node in source.each(ast.ImportFrom):
        assert not node.level, f"{source.place}:{node.lineno}: imports are absolute here"
        base = node.module or ""
        names = [f"{base}.{alias.name}" for alias in node.names]
        found += [(node.lineno, name if name in modules() else base) for name in names]
    return sorted(set(found))
