"""`check_graph` accepts valid graphs, and refuses each inconsistency with its own reason."""

import time
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from partition.model.check import check_graph
from partition.model.graph import (
    GRAPH_BYTES_MAX,
    NODES_MAX,
    STRUCTURE_BYTES_MAX,
    Constant,
    ConstantValue,
    Entry,
    Expression,
    FillStep,
    Graph,
    GraphNode,
    GraphState,
    Items,
    Metric,
    Parameter,
    ParameterValue,
    Recipe,
    Size,
    StateValue,
    StoredValues,
    Symbol,
    TensorType,
    Value,
    decode_graph,
    encode_graph,
)
from tests.partition.graphs import ONES, ZEROS, GraphBuilder
from tests.partition.hostile import mutated_case
from tests.partition.random_graphs import graphs

T = TypeVar("T", bound=msgspec.Struct)


def replace(thing: T, **changes: Any) -> T:
    return msgspec.structs.replace(thing, **changes)


def swapped(items: tuple[Any, ...], place: int, item: Any) -> tuple[Any, ...]:
    return (*items[:place], item, *items[place + 1 :])


def good() -> Graph:
    """A batch norm, a label, a constant and two layers in `train`; a cache in `decode`."""
    build = GraphBuilder()
    batch = build.symbol("batch", 2, 64)
    build.begin("train")
    x = build.input("x", "float32", batch, 4)
    y = build.label("y", "int64", batch)
    hidden = build.node("linear", x, build.parameter("a.weight", 3, 4), build.parameter("a.bias", 3))
    mean = build.parameter("n.running_mean", 3, kind="statistic", source=ZEROS)
    variance = build.parameter("n.running_var", 3, kind="statistic", source=ONES)
    hidden = build.node("batch_norm", hidden, None, None, mean, variance, True, 0.1, 1e-5, False)
    hidden = build.node("add.Tensor", hidden, build.constant(np.ones(3, np.float32), "shift"))
    mask = build.constant(np.array([True, False, True]))
    logits = build.node("masked_fill.Scalar", hidden, mask, -1.0)
    loss = build.node("cross_entropy_loss", logits, y, None, 2)
    right = build.node("sum", build.node("eq.Tensor", build.node("argmax", logits, 1), y))
    build.end(outputs=[logits], loss=loss, metrics={"right": right}, boundaries=[3])
    build.begin("decode")
    z = build.input("z", "float32", batch, 4)
    cache = build.state("cache", "float32", batch, 4)
    build.end(outputs=[z], updates=[(cache, build.node("add.Tensor", z, cache))], boundaries=[0])
    build.layers = ["a", "b"]
    return build.finish()


GOOD = good()


def train(**changes: Any) -> Graph:
    return replace(GOOD, entries=swapped(GOOD.entries, 0, replace(GOOD.entries[0], **changes)))


def decode(**changes: Any) -> Graph:
    return replace(GOOD, entries=swapped(GOOD.entries, 1, replace(GOOD.entries[1], **changes)))


def node(place: int, **changes: Any) -> Graph:
    nodes = GOOD.entries[0].nodes
    return train(nodes=swapped(nodes, place, replace(nodes[place], **changes)))


def arguments(place: int, index: int, argument: Any) -> Graph:
    return node(place, arguments=swapped(GOOD.entries[0].nodes[place].arguments, index, argument))


def parameter(place: int, **changes: Any) -> Graph:
    rows = GOOD.parameters
    return replace(GOOD, parameters=swapped(rows, place, replace(rows[place], **changes)))


def constant(place: int, **changes: Any) -> Graph:
    rows = GOOD.constants
    return replace(GOOD, constants=swapped(rows, place, replace(rows[place], **changes)))


def sizes(*rows: Expression) -> Graph:
    return replace(GOOD, expressions=(*GOOD.expressions, *rows))


def typed(*kinds: TensorType) -> Graph:
    return replace(GOOD, types=(*GOOD.types, *kinds))


def recipe(*steps: FillStep) -> Graph:
    return parameter(0, source=Recipe(steps))


NAN, INF = float("nan"), float("inf")
VARYING = TensorType("float32", (Size(0),))
STORED = StoredValues(0, 48, b"\0" * 32)
NORM = GOOD.entries[0].nodes[1]

WRONG: dict[str, tuple[Graph, str]] = {
    "no symbol": (replace(GOOD, symbols=()), "no size varies"),
    "empty bounds": (replace(GOOD, symbols=(Symbol("batch", 5, 4),)), "from 5 to 4"),
    "symbols of one name": (replace(GOOD, symbols=(GOOD.symbols[0],) * 2), "the name 'batch'"),
    "a symbol without a row": (replace(GOOD, expressions=()), "no row"),
    "another row for a symbol": (sizes(Expression("symbol", 0)), "second row"),
    "a row in a symbol's place": (replace(GOOD, expressions=(Expression("add", 1),)), "not symbol 0"),
    "a size made of later ones": (sizes(Expression("add", Size(9))), "later ones"),
    "a size made of itself": (sizes(Expression("add", Size(1))), "later ones"),
    "a division by zero": (sizes(Expression("floordiv", 1, 0)), "divides by zero"),
    "a division by zero at the smallest": (
        sizes(Expression("sub", Size(0), 2), Expression("mod", 3, Size(1))),
        "divides by zero",
    ),
    "a size of 64 bits": (
        sizes(Expression("mul", 2**40, 2**20), Expression("mul", Size(1), Size(1))),
        "63 bits",
    ),
    "a negative side": (
        replace(sizes(Expression("sub", 0, 5)), types=(TensorType("float32", (Size(1),)),)),
        "negative side",
    ),
    "a side that is no size": (typed(TensorType("float32", (Size(99),))), "not a size"),
    "a tensor of 2^80 bytes": (typed(TensorType("int8", (2**40, 2**40))), "bytes"),
    "an empty tensor with endless sides": (typed(TensorType("int8", (2**40, 2**40, 0))), "bytes"),
    "an unknown operator": (replace(GOOD, operators=("aten.as_strided.default",)), "not allowed"),
    "an operator twice": (replace(GOOD, operators=(*GOOD.operators, GOOD.operators[0])), "occurs twice"),
    "an empty parameter": (parameter(0, type=TensorType("float32", (0, 4))), "no elements"),
    "a parameter of varying shape": (parameter(0, type=VARYING), "varies"),
    "an integer parameter": (parameter(0, type=TensorType("int64", (3, 4))), "int64"),
    "two floating types": (parameter(1, type=TensorType("float64", (3,))), "has all float32 or all float64"),
    "a parameter of 2^40 bytes": (parameter(0, type=TensorType("float32", (2**38,))), "bytes"),
    "a statistic of two dimensions": (parameter(2, type=TensorType("float32", (3, 1))), "dimensions"),
    "two parameters of one name": (parameter(0, names=("a.bias",)), "the name 'a.bias'"),
    "a name of the file format": (parameter(0, names=("__metadata__",)), "safetensors reserves"),
    "a tied name twice": (parameter(0, names=("w", "w")), "the name 'w'"),
    "a nameless parameter": (parameter(0, names=("",)), "no name"),
    "a constant with a parameter's name": (constant(0, names=("a.bias",)), "the name 'a.bias'"),
    "a counter with a parameter's name": (replace(GOOD, counters=("a.bias",)), "the name 'a.bias'"),
    "a recipe that is not finite": (recipe(FillStep("constant", NAN)), "invalid"),
    "an infinite bound": (recipe(FillStep("uniform", -INF, 1.0)), "invalid"),
    "a range that is not finite": (recipe(FillStep("uniform", -1e308, 1e308)), "invalid"),
    "a range upside down": (recipe(FillStep("uniform", 1.0, 0.0)), "invalid"),
    "a negative deviation": (recipe(FillStep("normal", 0.0, -1.0)), "invalid"),
    "a clamp by no number": (recipe(FillStep("normal", 0.0, 1.0), FillStep("clamp", NAN, 1.0)), "invalid"),
    "a row that does not exist": (recipe(FillStep("constant", 0.0), FillStep("zero_row", 3.0)), "invalid"),
    "half a row": (recipe(FillStep("constant", 0.0), FillStep("zero_row", 0.5)), "invalid"),
    "another stored length": (parameter(0, source=StoredValues(0, 47, b"\0" * 32)), "are stored"),
    "stored one over the other": (
        replace(
            GOOD,
            parameters=(
                replace(GOOD.parameters[0], source=STORED),
                replace(GOOD.parameters[1], source=StoredValues(47, 12, b"\0" * 32)),
                *GOOD.parameters[2:],
            ),
        ),
        "an earlier one",
    ),
    "a constant too short": (constant(0, data=b"\0" * 11), "11 bytes, but 12"),
    "a constant of varying shape": (constant(0, type=VARYING), "varies"),
    "a bool of two": (constant(1, data=b"\0\1\2"), "bytes other than"),
    "a state of no size": (
        replace(GOOD, states=(GraphState("s", TensorType("bool", (Size(9),))),)),
        "not a size",
    ),
    "two entry points of one name": (decode(name="train"), "the name 'train'"),
    "a nameless entry point": (decode(name=""), "no name"),
    "two ports of one name": (
        train(labels=(replace(GOOD.entries[0].labels[0], name="x"),)),
        "the name 'x'",
    ),
    "a type too few": (train(types=GOOD.entries[0].types[:-1]), "types"),
    "a type too many": (train(types=(*GOOD.entries[0].types, 0)), "types"),
    "a type of no row": (train(types=swapped(GOOD.entries[0].types, 3, 99)), "no type"),
    "a port of two types": (train(types=swapped(GOOD.entries[0].types, 0, 1)), "two types"),
    "training without a loss": (train(loss=None), "loss"),
    "a loss that is not trained": (decode(loss=1), "loss"),
    "a metric without a loss": (decode(metrics=(Metric("m", 1),)), "without a loss"),
    "nothing comes out": (decode(outputs=()), "no outputs"),
    "training with a state": (train(updates=((0, 0),)), "updates a state"),
    "no boundary between layers": (train(boundaries=()), "0 boundaries between 2"),
    "a boundary before all": (train(boundaries=(0,)), "boundary at 0"),
    "a boundary after all": (train(boundaries=(8,)), "boundary at 8"),
    "boundaries that do not ascend": (
        replace(train(boundaries=(3, 3)), layers=("a", "b", "c")),
        "boundary at 3",
    ),
    "a boundary outside of another entry point": (decode(boundaries=(2,)), "boundary at 2"),
    "a label in the first layer": (train(boundaries=(5,)), "needs a label"),
    "a node of another number": (node(2, id=3), "called 3"),
    "an operator of no row": (node(2, operator=99), "not in its table"),
    "an owner of no row": (node(2, owner=99), "not in its table"),
    "a node that makes nothing": (
        train(nodes=(*GOOD.entries[0].nodes, GraphNode(8, 0, (), (), ()))),
        "makes nothing",
    ),
    "a value made twice": (node(2, outputs=(2,)), "makes value 2"),
    "a value left out": (node(2, outputs=(5,)), "makes value 5"),
    "a value of itself": (arguments(2, 0, Value(4)), "before it is made"),
    "a value of later": (arguments(2, 0, Value(7)), "before it is made"),
    "a value of later in a list": (arguments(2, 0, Items((Value(7),))), "before it is made"),
    "a size of no row": (arguments(2, 0, Size(7)), "row 7"),
    "a parameter of no row": (arguments(2, 0, ParameterValue(7)), "row 7"),
    "a constant of no row": (arguments(2, 0, ConstantValue(7)), "row 7"),
    "a state of no row": (arguments(2, 0, StateValue(7)), "row 7"),
    "a number that is none": (arguments(3, 2, NAN), "not a number"),
    "a keyword twice": (node(2, keywords=(("alpha", 1), ("alpha", 2))), "the name 'alpha'"),
    "a statistic as a weight": (arguments(0, 2, ParameterValue(2)), "not a batch norm"),
    "a statistic as a batch norm's weight": (arguments(1, 1, ParameterValue(2)), "a different argument"),
    "a batch norm that moves a weight": (arguments(1, 3, ParameterValue(1)), "not a pair"),
    "a batch norm that moves one row": (arguments(1, 3, ParameterValue(3)), "not a pair"),
    "a batch norm of half a pair": (arguments(1, 3, None), "not a pair"),
    "a batch norm of few arguments": (node(1, arguments=NORM.arguments[:5]), "lacks"),
    "an output that does not exist": (train(outputs=(99,)), "is not a value"),
    "an output twice": (train(outputs=(5, 5)), "twice"),
    "a loss that does not exist": (train(loss=99), "is not a value"),
    "a loss that is no scalar": (train(loss=5), "not a scalar"),
    "a count that is no scalar": (train(count=5), "not a scalar"),
    "a metric that is no scalar": (train(metrics=(Metric("m", 5),)), "not a scalar"),
    "metrics of one name": (train(metrics=(Metric("m", 6), Metric("m", 6))), "the name 'm'"),
    "too many metrics": (train(metrics=tuple(Metric(f"m{n}", 6) for n in range(17))), "17 metrics"),
    "a state that does not exist": (decode(updates=((1, 1),)), "does not exist"),
    "a state by nothing": (decode(updates=((0, 9),)), "does not exist"),
    "a state twice": (decode(updates=((0, 0), (0, 1))), "twice"),
    "a state of another type": (
        replace(GOOD, states=(replace(GOOD.states[0], type=TensorType("float64", (Size(0), 4))),)),
        "a different type",
    ),
}  # fmt: skip


def test_a_valid_graph_passes() -> None:
    check_graph(GOOD)
    check_graph(decode_graph(encode_graph(GOOD)))


@settings(max_examples=25, deadline=None)
@given(graphs())
def test_random_graphs_pass(graph: Graph) -> None:
    check_graph(graph)


@pytest.mark.parametrize("name", WRONG)
def test_inconsistent_graphs_are_refused(name: str) -> None:
    graph, reason = WRONG[name]
    with pytest.raises(RemoteProtocolError, match=reason.replace("^", r"\^")):
        check_graph(graph)


def test_an_instance_norm_keeps_no_statistics() -> None:
    graph = replace(
        GOOD,
        operators=tuple(
            "aten.instance_norm.default" if name == "aten.batch_norm.default" else name
            for name in GOOD.operators
        ),
    )
    with pytest.raises(RemoteProtocolError, match="keeps statistics"):
        check_graph(graph)


def test_a_frozen_batch_norm_may_read_any_tensor() -> None:
    frozen = tuple(replace(row, kind="frozen") if row.kind == "statistic" else row for row in GOOD.parameters)
    with pytest.raises(RemoteProtocolError, match="not a pair"):
        check_graph(replace(GOOD, parameters=frozen))
    check_graph(replace(arguments(1, 5, False), parameters=frozen))


def test_norms_with_shared_statistics_update_them_alike() -> None:
    def shared(momentum: float) -> Graph:
        build = GraphBuilder()
        batch = build.symbol("batch")
        build.begin()
        x, y = build.input("x", "float32", batch, 3), build.label("y", "float32", batch, 3)
        pair = [build.parameter(name, 3, kind="statistic") for name in ("mean", "variance")]
        once = build.node("batch_norm", x, None, None, *pair, True, 0.1, 1e-5, False)
        twice = build.node("batch_norm", once, None, None, *pair, True, momentum, 1e-5, False)
        build.end(outputs=[twice], loss=build.node("mse_loss", twice, y, 2))
        return build.finish()

    check_graph(shared(0.1))
    with pytest.raises(
        RemoteProtocolError, match=r"node 1 .* updates batch statistics differently from an earlier"
    ):
        check_graph(shared(0.2))


def test_a_graph_of_a_later_version_is_refused_with_its_version() -> None:
    data = encode_graph(GOOD)
    with pytest.raises(RemoteProtocolError, match="version 3 of the format; readable are 1 to 2"):
        decode_graph(data[:1] + b"\x03" + data[2:])


def test_a_graph_has_exactly_one_encoding() -> None:
    data = encode_graph(GOOD)
    # This encodes the same version in two bytes.
    with pytest.raises(RemoteProtocolError, match="canonical"):
        decode_graph(data[:1] + b"\xcc\x01" + data[2:])
    with pytest.raises(RemoteProtocolError):
        decode_graph(data + b"\0")
    with pytest.raises(RemoteProtocolError):
        decode_graph(data[:-1])


@pytest.mark.parametrize("depth", [20, 2_000, 1_000_000])
def test_deep_nesting_is_refused_at_once(depth: int) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_graph(b"\x9d" + b"\x91" * depth + b"\x01")


def test_a_structure_that_would_fill_memory_is_refused_unbuilt() -> None:
    tree = msgspec.to_builtins(GOOD)
    item = [7, [None] * 1024]
    tree[10][0][3] = [[0, 0, [item] * 64, [], [0], 0]] * 140
    data = msgspec.msgpack.encode(tree)
    assert STRUCTURE_BYTES_MAX < len(data) < GRAPH_BYTES_MAX
    with pytest.raises(RemoteProtocolError, match="in addition to its constants"):
        decode_graph(data)


def test_names_of_constants_are_part_of_the_hash_but_not_their_data() -> None:
    names = tuple(f"name-{number:07}" for number in range(64))
    constant = Constant(names, TensorType("uint8", (0,)), b"")
    data = encode_graph(replace(GOOD, constants=(constant,) * 11_000))
    assert STRUCTURE_BYTES_MAX < len(data) < GRAPH_BYTES_MAX
    with pytest.raises(RemoteProtocolError, match="in addition to its constants"):
        decode_graph(data)


def test_a_graph_may_be_large_because_of_its_constants() -> None:
    size = STRUCTURE_BYTES_MAX + 1
    large = Constant((), TensorType("uint8", (size,)), b"\7" * size)
    graph = replace(GOOD, constants=(*GOOD.constants, large))
    check_graph(decode_graph(encode_graph(graph)))


def _chain(length: int) -> Graph:
    first = GOOD.entries[0]
    nodes = tuple(GraphNode(number, 0, (Value(number), 2.0), (), (number + 1,)) for number in range(length))
    entry = Entry("forward", first.inputs, (), nodes, (0,) * (length + 1), (length,), None, None, (), (), ())
    return replace(GOOD, operators=("aten.mul.Tensor",), entries=(entry,), layers=("a",), states=())


def test_all_entry_points_together_share_one_limit_of_nodes() -> None:
    graph = _chain(NODES_MAX // 2)
    second = replace(graph.entries[0], name="decode")
    check_graph(replace(graph, entries=(*graph.entries, second)))
    with pytest.raises(RemoteProtocolError, match="together have more than"):
        check_graph(replace(graph, entries=(*graph.entries, second, replace(GOOD.entries[0], name="again"))))


def test_the_time_of_a_check_is_linear_in_the_graph() -> None:
    def seconds(length: int) -> float:
        graph = _chain(length)
        began = time.process_time()
        check_graph(graph)
        return time.process_time() - began

    seconds(1_000)
    # The graph has eight times the nodes. A quadratic check would take 64 times as long.
    assert seconds(40_000) < 32 * max(seconds(5_000), 1e-3)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_mutated_graphs_cause_only_refusals(seed: int) -> None:
    data = mutated_case(seed, [GOOD]).graph
    try:
        check_graph(decode_graph(data))
    except RemoteProtocolError:
        return


def test_an_unused_parameter_is_allowed() -> None:
    spare = Parameter(("spare",), TensorType("float32", (2,)), "parameter", Recipe(()))
    check_graph(replace(GOOD, parameters=(*GOOD.parameters, spare)))
