"""The parts of a node that can be replaced are known, and no other part is accepted."""

import ast

import pytest

from node.errors import UsageError
from node.parts import PARTS
from node.runtime import Node
from node.serving.stage import HeldStage
from node.transport.network import RealNetwork
from tests.source import sources


def test_the_replaceable_parts_are_those_that_a_node_asks_for() -> None:
    asked = {
        ast.unparse(call.args[0]).rpartition(".")[2]
        for source in sources("node")
        for call in source.each(ast.Call)
        if ast.unparse(call.func).endswith("seams.part")
    }
    assert asked == {kind.__name__ for kind in PARTS}


def test_a_part_that_no_node_asks_for_is_refused() -> None:
    with pytest.raises(UsageError, match="no part RealNetwork") as refusal:
        Node(parts={RealNetwork: RealNetwork})
    assert "HeldStage" in (refusal.value.do or "")
    Node(parts={HeldStage: HeldStage})
