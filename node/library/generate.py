"""Writes `node/library/blocking.py`, the blocking form of the public methods of `node/api/surface.py` and of
the objects that they return.

    python -m node.library.generate

A development tool; a test checks that the file is up to date.
"""

import ast
from pathlib import Path

WRITTEN = Path(__file__).with_name("blocking.py")
ROOT = Path(__file__).parents[2]
LINE_LENGTH_MAX = 110
HEADER = '''"""The public surface in blocking form. Generated from `node/api/surface.py`: do not edit.

Write it anew with `python -m node.library.generate`.
"""
'''


SURFACES = (
    ("node.api.surface", "Surface", "BlockingSurface"),
    ("node.content.directory", "Directory", "BlockingDirectory"),
    ("node.api.handles", "RunHandle", "BlockingRunHandle"),
)
"""The classes with public methods: module, class, and the name of the blocking form. The first
class may return the others."""


def generate() -> str:
    """Return the text of `blocking.py`."""
    files = [ROOT.joinpath(*name.split(".")).with_suffix(".py") for name, _, _ in SURFACES]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    classes = [_class(tree, of, form) for tree, (_, of, form) in zip(trees, SURFACES, strict=True)]
    body = "\n\n".join(reversed(classes))
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    defined = {
        node.name: name
        for tree, (name, _, _) in zip(trees, SURFACES, strict=True)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    return f"{HEADER}\n{_imports(trees, used, defined)}\n\n\n{body}"


def _class(tree: ast.Module, of: str, form: str) -> str:
    surface = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == of)
    methods = [
        "    def __repr__(self) -> str:\n        return self._portal.call_sync(lambda: repr(self._of))\n"
        for member in surface.body
        if isinstance(member, ast.FunctionDef) and member.name == "__repr__"
    ]
    methods += [
        _method(member)
        for member in surface.body
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith("_")
    ]
    methods += [
        "    def __iter__(self) -> "
        + ast.unparse(member.returns or ast.Constant(None)).replace("AsyncIterator", "Iterator")
        + ":\n        return self.events()\n"
        for member in surface.body
        if isinstance(member, ast.FunctionDef) and member.name == "__aiter__"
    ]
    return (
        f"class {form}:\n"
        f'    """The interface of `{of}` for other threads. Each call may raise PortalClosed."""\n\n'
        f"    def __init__(self, portal: Portal[Any], of: {of}) -> None:\n"
        "        self._portal = portal\n"
        "        self._of = of\n\n" + "\n".join(methods)
    )


def _imports(trees: list[ast.Module], used: set[str], defined: dict[str, str]) -> str:
    standard: dict[str, list[str]] = {}
    modules: list[str] = []
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names if alias.name in used]
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = alias.asname or alias.name
                if name in used:
                    whole = alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
                    standard.setdefault(node.module, []).append(whole)
    standard.setdefault("typing", []).append("Any")
    if "partial" in used:
        standard.setdefault("functools", []).append("partial")
    if "Iterator" in used:
        standard.setdefault("collections.abc", []).append("Iterator")
    standard["node.portal"] = ["Portal"]
    for name, module in defined.items():
        if name in used:
            standard.setdefault(module, []).append(name)

    groups: list[list[str]] = [[f"import {name}" for name in sorted(set(modules))], [], []]
    for module in sorted(standard):
        root = module.split(".")[0]
        place = 2 if root in ("crypto", "dht", "gossip", "partition", "node") else 1 if root == "numpy" else 0
        names = ", ".join(sorted(set(standard[module]), key=_import_order))
        groups[place].append(f"from {module} import {names}")
    return "\n\n".join("\n".join(group) for group in groups if group)


def _import_order(name: str) -> tuple[int, str]:
    """Return a key that sorts constants, then classes, then the rest, as ruff does."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


def _method(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    is_property = any(ast.unparse(each) == "property" for each in method.decorator_list)
    returns = ast.unparse(method.returns) if method.returns is not None else "None"
    is_stream = returns.startswith("AsyncIterator[")
    returns = returns.replace("AsyncIterator[", "Iterator[", 1)
    taken = [*method.args.posonlyargs, *method.args.args][1:]
    if method.args.vararg or method.args.kwonlyargs:
        raise ValueError(
            f"{method.name}: a public method must take plain arguments, so that both forms agree"
        )
    call = "".join(f", {argument.arg}" for argument in taken)
    nested = next((form for _, of, form in SURFACES if of == returns), None)
    function = f"self._of.{method.name}"
    if method.args.kwarg is not None:
        function = f"partial({function}, **{method.args.kwarg.arg})"
    kind = "run" if isinstance(method, ast.AsyncFunctionDef) else "call_sync"
    if nested is not None and not is_property:
        body = f"return {nested}(self._portal, self._portal.{kind}({function}{call}))"
        if len(body) + 8 > LINE_LENGTH_MAX:
            body = (
                body.replace("(self._portal, ", "(\n            self._portal, ", 1).removesuffix(")")
                + "\n        )"
            )
        returns = nested
    elif nested is not None:
        body = f"return {nested}(self._portal, self._portal.call_sync(lambda: self._of.{method.name}))"
        returns = nested
    elif is_property:
        body = f"return self._portal.call_sync(lambda: self._of.{method.name})"
    elif is_stream:
        body = _wrapped(f"return self._portal.iterate(self._of.{method.name}{call})")
    else:
        body = f"self._portal.{kind}({function}{call})"
        if returns != "None":
            body = f"return {body}"
        body = _wrapped(body)
    lines = ["    @property"] if is_property else []
    lines += _signature(method.name, _parameters(method, taken), returns)
    lines += _docstring(method)
    lines += [f"        {body}", ""]
    return "\n".join(lines)


def _wrapped(body: str) -> str:
    """Return a call, wrapped over several lines if needed."""
    if len(body) + 8 <= LINE_LENGTH_MAX:
        return body
    begin, arguments = body.removesuffix(")").split("(", 1)
    if len(arguments) + 12 > LINE_LENGTH_MAX:
        arguments = ",\n            ".join(arguments.split(", ")) + ","
    return f"{begin}(\n            {arguments}\n        )"


def _parameters(method: ast.FunctionDef | ast.AsyncFunctionDef, taken: list[ast.arg]) -> list[str]:
    defaults = method.args.defaults
    first = len(taken) - len(defaults)
    parameters = ["self"]
    for place, argument in enumerate(taken):
        text = argument.arg + (f": {ast.unparse(argument.annotation)}" if argument.annotation else "")
        if place >= first:
            text += f" = {ast.unparse(defaults[place - first])}"
        parameters.append(text.replace("'", '"'))
    if method.args.kwarg is not None:
        rest = method.args.kwarg
        parameters.append(f"**{rest.arg}: {ast.unparse(rest.annotation or ast.Name('Any'))}")
    return parameters


def _signature(name: str, parameters: list[str], returns: str) -> list[str]:
    line = f"    def {name}({', '.join(parameters)}) -> {returns}:"
    if len(line) <= LINE_LENGTH_MAX:
        return [line]
    return [f"    def {name}(", *(f"        {each}," for each in parameters), f"    ) -> {returns}:"]


def _docstring(method: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    text = ast.get_docstring(method)
    if text is None:
        raise ValueError(f"{method.name}: a public method needs a docstring")
    first, *rest = text.splitlines()
    if not rest:
        return [f'        """{first}"""']
    return [f'        """{first}', *(f"        {line}".rstrip() for line in rest), '        """']


def main() -> None:
    """Write the file."""
    WRITTEN.write_text(generate(), encoding="utf-8")


if __name__ == "__main__":
    main()
