"""Random graphs cut at random places: the parts compute what the whole computes, and only refusals are
raised.
"""

import time
from contextlib import suppress
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from partition.model.check import check_graph
from partition.model.cut import (
    cut,
    legal_positions,
)
from partition.model.graph import (
    ConstantValue,
    Entry,
    Expression,
    FillStep,
    FormatName,
    Graph,
    GraphNode,
    Items,
    Parameter,
    ParameterValue,
    Port,
    Recipe,
    Size,
    StageGraph,
    Symbol,
    TensorType,
    TypeName,
    Value,
)
from partition.model.layers import with_layers
from partition.model.operators import OPERATORS
from partition.plan.layer_costs import layer_costs
from tests.partition.random_graphs import derive, graphs, ports, run

NAME = b"n" * 32
SLOW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def entry_of(stage: StageGraph, name: str = "train") -> Any:
    return stage.entry(name)


def ids(stage: StageGraph, name: str = "train") -> list[int]:
    return [node.id for node in entry_of(stage, name).nodes]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Graph, tuple[StageGraph, ...]]:
    graph = draw(graphs())
    check_graph(graph)
    legal = legal_positions(graph)
    chosen = draw(st.sets(st.sampled_from(legal), max_size=5)) if legal else set[int]()
    return graph, cut(graph, NAME, sorted(chosen))


@SLOW
@given(cuts())
def test_the_parts_compute_what_the_whole_computes(case: tuple[Graph, tuple[StageGraph, ...]]) -> None:
    graph, stages = case
    for entry in graph.entries:
        whole = run(graph, entry.nodes, ports(entry))
        bundle = [whole[value] for value in range(len(entry.inputs))]
        updates: dict[int, int] = {}
        for stage in stages:
            part = stage.entry(entry.name)
            given_values = dict(zip(part.inputs, bundle, strict=True))
            given_values |= {value: whole[value] for value in part.labels}
            made = run(graph, part.nodes, given_values)
            assert all(made[value] == whole[value] for value in made)
            assert bool(part.labels) == (stage.is_last and bool(entry.labels))
            bundle = [made[value] for value in part.outputs]
            updates |= {row: made[value] for row, value in part.updates}
        last = stages[-1].entry(entry.name)
        assert updates == {row: whole[value] for row, value in entry.updates}
        if entry.loss is None:
            assert last.outputs == entry.outputs
        else:
            assert (last.loss, last.count, last.metrics, last.outputs) == (
                entry.loss,
                entry.count,
                entry.metrics,
                (),
            )
            assert made[entry.loss] == whole[entry.loss]
            assert all(made[metric.value] == whole[metric.value] for metric in entry.metrics)


@SLOW
@given(cuts())
def test_gradients_through_the_parts_equal_those_of_the_whole(
    case: tuple[Graph, tuple[StageGraph, ...]],
) -> None:
    graph, stages = case
    entry = graph.entries[0]
    assert entry.loss is not None
    _, whole = derive(graph, entry, entry.nodes, {entry.loss: 1})
    arriving = {entry.loss: 1}
    total: dict[int, int] = {}
    for stage in reversed(stages):
        part = stage.entry("train")
        assert tuple(arriving) == part.backward_outputs or stage.is_last
        by_value, by_row = derive(graph, entry, part.nodes, arriving)
        assert set(part.backward_inputs) <= set(part.inputs)
        # Each gradient is needed: it leads to one that is returned, and a parameter precedes it.
        assert all(by_value[value] for value in part.backward_inputs)
        arriving = {value: by_value[value] for value in part.backward_inputs}
        for row, gradient in by_row.items():
            assert row in stage.rows
            total[row] = (total.get(row, 0) + gradient) % (2**61 - 1)
    assert arriving == {}
    assert total == whole


@SLOW
@given(cuts())
def test_stages_hold_what_they_use_and_cover_the_whole_graph(
    case: tuple[Graph, tuple[StageGraph, ...]],
) -> None:
    graph, stages = case
    held = [set(stage.rows) for stage in stages]
    assert set[int]().union(*held) == set(range(len(graph.parameters)))
    assert sorted(row for stage in stages for row in stage.state_rows) == list(range(len(graph.states)))
    for stage, mine in zip(stages, held, strict=True):
        others = [other for place, other in enumerate(held) if place != stage.index]
        earlier = set[int]().union(*held[: stage.index])
        assert set(stage.tied) == mine & set[int]().union(*others)
        assert set(stage.borrowed) == mine & earlier
        assert stage.parameters == tuple(graph.parameters[row] for row in stage.rows)
        assert stage.constants == tuple(graph.constants[row] for row in stage.constant_rows)
        for part in stage.entries:
            assert list(part.inputs) == sorted(set(part.inputs))
            assert [node.id for node in part.nodes] == sorted({node.id for node in part.nodes})
            made = {value for node in part.nodes for value in node.outputs}
            assert [value for value, _ in part.types] == sorted({*part.inputs, *part.labels, *made})
            assert set(part.outputs) <= {*part.inputs, *made}
    for before, after in pairwise(stages):
        for name in [entry.name for entry in graph.entries]:
            assert before.entry(name).outputs == after.entry(name).inputs
            assert before.entry(name).backward_outputs == after.entry(name).backward_inputs


@SLOW
@given(cuts())
def test_a_batch_norm_keeps_its_order_among_all_uses_of_its_statistics(
    case: tuple[Graph, tuple[StageGraph, ...]],
) -> None:
    graph, stages = case
    norms = [
        node.id
        for node in graph.entries[0].nodes
        if graph.operators[node.operator].startswith("aten.batch_norm") and node.arguments[5]
    ]
    found = [row for stage in stages for row in entry_of(stage).statistics]
    assert found == [(number, place, len(norms)) for place, number in enumerate(norms)]


@SLOW
@given(graphs())
def test_random_operators_run_in_one_stage_only(graph: Graph) -> None:
    for position in legal_positions(graph)[:4]:
        for name in [entry.name for entry in graph.entries]:
            first, second = (stage.entry(name) for stage in cut(graph, NAME, [position]))
            twice = {node.id for node in first.nodes} & {node.id for node in second.nodes}
            for node in first.nodes:
                if node.id in twice:
                    assert "dropout" not in graph.operators[node.operator]
                    assert "linear" not in graph.operators[node.operator]


def large_graph(blocks: int) -> Graph:
    """Return blocks of eighteen nodes with a residual stream, built directly because the builder is slow."""
    nodes: list[GraphNode] = []
    stream = 0
    for block in range(blocks):
        last = stream
        for _ in range(16):
            nodes.append(GraphNode(len(nodes), 0, (Value(last),), (), (len(nodes) + 1,)))
            last = len(nodes)
        nodes.append(GraphNode(len(nodes), 1, (Value(last), ParameterValue(block)), (), (len(nodes) + 1,)))
        nodes.append(GraphNode(len(nodes), 2, (Value(stream), Value(len(nodes))), (), (len(nodes) + 1,)))
        stream = len(nodes)
    nodes.append(GraphNode(len(nodes), 3, (Value(stream),), (), (len(nodes) + 1,)))
    types = (TensorType("float32", (Size(0), 64)), TensorType("float32", ()))
    kinds = (0,) * len(nodes) + (1,)
    entry = Entry("train", (Port("x", 0),), (), tuple(nodes), kinds, (stream,), len(nodes), None, (), (), ())
    ones = Recipe((FillStep("constant", 1.0),))
    weight = TensorType("float32", (64, 64))
    return Graph(
        1,
        "large",
        (Symbol("batch", 1, 64),),
        (Expression("symbol", 0),),
        types,
        ("aten.relu.default", "aten.linear.default", "aten.add.Tensor", "aten.sum.default"),
        ("",),
        tuple(Parameter((f"{block}.weight",), weight, "parameter", ones) for block in range(blocks)),
        (),
        (),
        (entry,),
        ("model",),
    )


def test_a_graph_of_three_thousand_nodes_is_cut_quickly() -> None:
    graph = large_graph(blocks=170)
    check_graph(graph)
    positions = [index * len(graph.entries[0].nodes) // 8 for index in range(1, 8)]
    began = time.process_time()
    stages = cut(graph, NAME, positions)
    # It takes about a tenth of a second.
    assert time.process_time() - began < 1
    assert sum(len(stage.rows) for stage in stages) == 170


def test_a_tangled_graph_is_cut_in_limited_time() -> None:
    """There are ninety layers of 64 nodes. Each node joins all values before it in the previous layer."""
    nodes: list[GraphNode] = []
    before = list(range(1, 65))
    for place in before:
        nodes.append(GraphNode(len(nodes), 1, (Value(0), ParameterValue(0)), (), (place,)))
    for _ in range(90):
        now = []
        for place in range(64):
            made = len(nodes) + 1
            nodes.append(
                GraphNode(len(nodes), 0, (Items(tuple(map(Value, before[: place + 1]))),), (), (made,))
            )
            now.append(made)
        before = now
    made = len(nodes) + 1
    nodes.append(GraphNode(len(nodes), 0, (Items(tuple(map(Value, before))),), (), (made,)))
    nodes.append(GraphNode(len(nodes), 2, (Value(made),), (), (made + 1,)))
    plain = large_graph(blocks=1)
    entry = plain.entries[0]
    graph = replace(
        plain,
        operators=("aten.cat.default", "aten.linear.default", "aten.sum.default"),
        entries=(
            replace(
                entry, nodes=tuple(nodes), types=(0,) * (made + 1) + (1,), outputs=(made,), loss=made + 1
            ),
        ),
    )
    check_graph(graph)
    legal = legal_positions(graph)
    assert len(legal) > 50
    began = time.process_time()
    with suppress(ValueError):
        cut(graph, NAME, legal[::20])
    # About the cost of SEARCH_MAX, and of visiting the nodes: half a second.
    assert time.process_time() - began < 10


ANY_ARGUMENT = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from(["bij,jk->bik", "...i,...->", "->", ",,", "none"]),
    st.sampled_from([Size(0), Size(1), ParameterValue(0), ParameterValue(2), ConstantValue(0)]),
    st.sampled_from([TypeName("float32"), FormatName("contiguous")]),
)


@st.composite
def hostile(draw: st.DrawFn) -> Graph:
    """Draw a graph of the right form whose arguments do not fit its operators."""
    plain = draw(graphs(nodes_max=2))
    operators = tuple(
        draw(st.lists(st.sampled_from(sorted(OPERATORS)), min_size=4, max_size=12, unique=True))
    )
    types = (*plain.types, TensorType("float32", (Size(1), 0)), TensorType("int8", (Size(1),) * 8))
    rows = st.sampled_from([0, 0, 1, 2, 3, *range(len(types))])
    kinds = [0, draw(rows)]
    nodes: list[GraphNode] = []
    for number in range(draw(st.integers(1, 14))):
        known = st.integers(0, len(kinds) - 1).map(Value)
        one = st.one_of(
            known, known, ANY_ARGUMENT, st.lists(st.one_of(known, ANY_ARGUMENT)).map(tuple).map(Items)
        )
        made = tuple(range(len(kinds), len(kinds) + draw(st.integers(1, 3))))
        arguments = (Value(len(kinds) - 1), *draw(st.lists(one, max_size=9)))
        nodes.append(GraphNode(number, draw(st.integers(0, len(operators) - 1)), arguments, (), made))
        kinds += [draw(rows) for _ in made]
    wanted = sorted(draw(st.sets(st.integers(0, len(kinds) - 1), min_size=1, max_size=5)))
    nodes.append(
        GraphNode(len(nodes), 0, (Items(tuple(map(Value, (*wanted, len(kinds) - 1)))),), (), (len(kinds),))
    )
    ports = (Port("x", 0), Port("other", kinds[1]))
    entry = Entry(
        "train",
        ports,
        (),
        tuple(nodes),
        (*kinds, 5),
        tuple(draw(st.sets(st.integers(0, len(kinds)), max_size=3))),
        len(kinds),
        None,
        (),
        (),
        (),
    )
    expressions = (*plain.expressions, Expression("sub", Size(0), draw(st.integers(-1, 1))))
    return replace(plain, operators=operators, types=types, expressions=expressions, entries=(entry,))


@settings(
    max_examples=3 * settings().max_examples,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(hostile(), st.data())
def test_cutting_a_checked_graph_raises_only_value_errors(graph: Graph, data: st.DataObject) -> None:
    try:
        check_graph(graph)
    except RemoteProtocolError:
        return
    with suppress(ValueError):
        legal = legal_positions(graph)
        chosen = sorted(data.draw(st.sets(st.sampled_from(legal), max_size=4))) if legal else []
        cut(graph, NAME, chosen)
        layer_costs(with_layers(graph), (data.draw(st.integers(1, 64)),))
