"""docs/protocol.md agrees with the program's structs, and its limits are those that nodes set."""

import ast
import importlib
from typing import Any

from node.seams import USUAL_STREAMS, StreamLimits
from tests.hostile.wire import PROTOCOLS
from tests.protocol_page import PAGE, page
from tests.source import sources


def test_the_page_agrees_with_the_structs() -> None:
    assert PAGE.read_text() == page(), "write it again: python -m tests.protocol_page"


def test_limits_are_those_of_the_handlers() -> None:
    found: dict[str, StreamLimits] = {}
    for source in sources("node"):
        for call in source.each(ast.Call):
            if not isinstance(call.func, ast.Attribute) or call.func.attr != "handle":
                continue
            if not ast.unparse(call.func).endswith("network.handle"):
                continue
            name, limits = (named(source.module, call.args[index : index + 1]) for index in (0, 2))
            found[name] = limits or USUAL_STREAMS
    wanted = {each.name: each.limits for each in PROTOCOLS if each.said is not None}
    wanted |= {each.former: each.limits for each in PROTOCOLS if each.former}
    assert found == wanted


def named(module: str, expressions: list[ast.expr]) -> Any:
    """Return the value of an expression such as `wire.RUNS_PROTOCOL` in a module; None if it has none."""
    if not expressions:
        return None
    found: Any = importlib.import_module(module)
    for part in ast.unparse(expressions[0]).split("."):
        found = getattr(found, part)
    return found
