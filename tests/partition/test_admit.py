"""Admission of a stage: its predicted cost is its real cost, and excessive or inconsistent graphs are
refused.
"""

import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from crypto.errors import RemoteProtocolError
from partition.execute.admit import admit
from partition.execute.interpret import DTYPES, compile_entry
from partition.execute.memory_meter import Meter
from partition.model.check import check_graph
from partition.model.cut import cut, legal_positions
from partition.model.graph import (
    Expression,
    Graph,
    GraphNode,
    Items,
    Size,
    StageGraph,
    TensorType,
    TypeName,
    Value,
    encode_graph,
    graph_hash,
)
from partition.model.sizes import evaluate, shape_of
from partition.stage import Admitted, OptimizerSettings, StageSpecification
from tests.partition.graphs import GraphBuilder, whole
from tests.partition.hand_models import gpt_graph

REFUSED_SECONDS_MAX = 3.0
"""Time limit for an admission. It takes some milliseconds; the rest is a margin for a busy machine."""


def specification(graph: Graph | StageGraph, **changes: Any) -> StageSpecification:
    stage = whole(graph) if isinstance(graph, Graph) else graph
    return StageSpecification(
        **{"run": b"run", "graph": stage, "sizes_max": tuple(s.maximum for s in stage.symbols), **changes}
    )


class LargeGraphBuilder(GraphBuilder):
    """An estimate that treats large powers of two by their type."""

    def _side(self, side: int) -> int | Size:
        return side if side and side % 2**20 == 0 else super()._side(side)


class Layer:
    """Return a graph of one input of (batch, 8) and the nodes that `of` adds to it. The graph ends in a
    sum."""

    def __init__(self, *shape: int | Size, dtype: Any = "float32", batch: int = 64) -> None:
        self.build = LargeGraphBuilder()
        self.batch = self.build.symbol("batch", 1, batch)
        self.build.begin()
        self.x = self.build.input("x", dtype, *(shape or (self.batch, 8)))

    def node(self, *arguments: Any, **keywords: Any) -> Any:
        return self.build.node(*arguments, **keywords)

    def graph(self, value: Any) -> Graph:
        self.build.end(outputs=[], loss=self.node("sum", value))
        graph = self.build.finish()
        check_graph(graph)
        return graph


def with_node(graph: Graph, place: int, **changes: Any) -> Graph:
    """Change a node behind the builder's back, as a hostile peer would."""
    (entry,) = graph.entries
    nodes = list(entry.nodes)
    nodes[place] = msgspec.structs.replace(nodes[place], **changes)
    return msgspec.structs.replace(graph, entries=(msgspec.structs.replace(entry, nodes=tuple(nodes)),))


def with_argument(graph: Graph, place: int, index: int, argument: Any) -> Graph:
    arguments = list(graph.entries[0].nodes[place].arguments)
    arguments[index] = argument
    return with_node(graph, place, arguments=tuple(arguments))


def refusal(graph: Graph | StageGraph, **changes: Any) -> str:
    """Return why a graph is refused; the refusal must come soon."""
    began = time.process_time()
    with pytest.raises(RemoteProtocolError) as caught:
        admit(specification(graph, **changes))
    assert time.process_time() - began < REFUSED_SECONDS_MAX
    return str(caught.value)


# Admitted graphs


@pytest.fixture(scope="module")
def gpt() -> Graph:
    return gpt_graph(64, 32, 48, 4, 3, 0.1)


class RealMeter(Meter):  # type: ignore[no-untyped-call]  # of torch
    """A mode that measures the real storages of tensors."""

    def __init__(self) -> None:
        super().__init__(2**40, 0, 0)
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._kept: set[int] = set()

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        made = func(*args, **kwargs)
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return made

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Return the storages of the stage itself, including views of them."""
        self._kept = {tensor.untyped_storage()._cdata for tensor in tensors}

    def _follow(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._kept:
            return
        release = self.hold(size)

        def gone(_: Any) -> None:
            del self._alive[key]
            release(size)

        self._alive[key] = weakref.ref(storage, gone)


def metered(graph: Graph, sizes: tuple[int, ...], **changes: Any) -> RealMeter:
    """Measure the same figures with real tensors and the real program."""
    given = specification(graph, sizes_max=sizes, **changes)
    entry = given.graph.entry("train")
    rows = evaluate(graph.expressions, sizes)
    types = dict(entry.types)

    def real(kind: TensorType) -> torch.Tensor:
        shape = shape_of(kind, rows)
        return torch.ones(shape, dtype=DTYPES[kind.dtype])

    parameters = {row: real(row_.type) for row, row_ in enumerate(graph.parameters)}
    for row, parameter in enumerate(graph.parameters):
        if parameter.kind == "parameter":
            parameters[row].requires_grad_().grad = torch.zeros_like(parameters[row])
    program = compile_entry(given.graph, "train", train=True, device=torch.device("cpu"))
    meter = RealMeter()
    meter.keep(
        tensor for value in parameters.values() for tensor in (value, value.grad) if tensor is not None
    )
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=given.autocast != "off")
    with meter, autocast:
        inputs = [real(graph.types[types[number]]) for number in entry.inputs]
        labels = [real(graph.types[types[number]]) for number in entry.labels]
        results = program.run(parameters, {}, {}, inputs, labels, sizes)
        assert results.loss is not None
        torch.autograd.backward([results.loss], [torch.ones_like(results.loss)])
    return meter


@pytest.mark.parametrize("autocast", ["off", "bfloat16"])
def test_admission_predicts_the_cost_of_a_real_run(gpt: Graph, autocast: str) -> None:
    foreseen = admit(specification(gpt, sizes_max=(4, 32), autocast=autocast))
    real = metered(gpt, (4, 32), autocast=autocast)
    assert foreseen.flops == real.flops > 0
    assert real.peak_bytes <= foreseen.peak_bytes <= 1.05 * real.peak_bytes
    assert 0 < foreseen.saved_bytes <= foreseen.peak_bytes


def test_predicted_costs_grow_with_the_batch(gpt: Graph) -> None:
    small, large = (admit(specification(gpt, sizes_max=(batch, 32))) for batch in (2, 8))
    assert large.flops == 4 * small.flops
    assert large.saved_bytes > 3 * small.saved_bytes


def test_a_stage_that_recomputes_keeps_only_its_inputs(gpt: Graph) -> None:
    kept = admit(specification(gpt, sizes_max=(4, 32)))
    again = admit(specification(gpt, sizes_max=(4, 32), recompute=True))
    assert again.saved_bytes == 4 * 32 * 8 < kept.saved_bytes


def test_every_stage_of_every_cut_is_admitted(gpt: Graph) -> None:
    check_graph(gpt)
    name = graph_hash(encode_graph(gpt))
    positions = legal_positions(gpt)
    total = 0
    for stage in cut(gpt, name, positions[:: max(1, len(positions) // 4)][:4]):
        total += admit(specification(stage, sizes_max=(4, 32))).flops
    # The product does not include a node that is computed twice because of a boundary.
    assert total == admit(specification(gpt, sizes_max=(4, 32))).flops


def test_an_entry_point_with_states_is_run_too() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch", 1, 8)
    build.begin("decode")
    x = build.input("x", "float32", batch, 1, 4)
    place = build.input("place", "int64", batch)
    cache = build.state("cache", "float32", 8, 16, 4)
    new = build.node(
        "index_put", cache, [build.node("arange", batch), place], build.node("squeeze.dim", x, 1)
    )
    build.end(outputs=[build.node("sum.dim_IntList", new, [1])], updates=[(cache, new)])
    graph = build.finish()
    check_graph(graph)
    figures = admit(specification(graph))
    assert figures.peak_bytes >= 8 * 16 * 4 * 4
    lying = build.states[0]
    wrong = msgspec.structs.replace(lying, type=TensorType("float32", (8, 16, 8)))
    assert "the graph claims" in refusal(msgspec.structs.replace(graph, states=(wrong,)))


def test_admission_leaves_batch_norm_statistics_unchanged() -> None:
    layer = Layer()
    mean, variance = (layer.build.parameter(name, 8, kind="statistic") for name in ("mean", "variance"))
    graph = layer.graph(layer.node("batch_norm", layer.x, None, None, mean, variance, True, 0.1, 1e-5, True))
    assert admit(specification(graph)).peak_bytes > 64 * 8 * 4


def test_twelve_blocks_are_admitted_in_little_time() -> None:
    graph = gpt_graph(512, 64, 96, 6, 12, 0.1)
    began = time.process_time()
    admit(specification(graph, sizes_max=(4, 64)))
    assert time.process_time() - began < REFUSED_SECONDS_MAX


# Graphs that cost too much


def test_a_graph_of_four_terabytes_of_zeros_is_refused() -> None:
    layer = Layer()
    graph = layer.graph(layer.node("add.Tensor", layer.x, 1))
    graph = with_node(graph, 0, operator=0)
    large = Layer()
    value = large.node("mul.Tensor", large.x, large.node("sum", large.node("zeros", [2**20, 2**20])))
    reason = refusal(large.graph(value))
    assert "aten.zeros.default" in reason
    assert "needs 4.4 TB of memory, but 1.1 TB is offered" in reason
    assert isinstance(admit(specification(graph)), Admitted)


def test_forty_doubling_concatenations_are_refused() -> None:
    layer = Layer()
    value = layer.node("view", layer.x, [-1])
    graph = layer.graph(value)
    (entry,) = graph.entries
    # Each is twice the one before; the types are as claimed.
    nodes, types, kinds = [entry.nodes[0]], [entry.types[0], entry.types[1]], list(graph.types)
    expressions = list(graph.expressions)
    operators = (*graph.operators, "aten.cat.default")
    for number in range(1, 41):
        row = graph.types[entry.types[1]].shape[0] if number == 1 else Size(len(expressions) - 1)
        expressions.append(Expression("mul", row, 2))
        kinds.append(TensorType("float32", (Size(len(expressions) - 1),)))
        nodes.append(
            GraphNode(number, len(operators) - 1, (Items((Value(number), Value(number))),), (), (number + 1,))
        )
        types.append(len(kinds) - 1)
    nodes.append(GraphNode(41, graph.operators.index("aten.sum.default"), (Value(41),), (), (42,)))
    types.append(entry.types[2])
    entry = msgspec.structs.replace(entry, nodes=tuple(nodes), types=tuple(types), loss=42)
    bomb = msgspec.structs.replace(
        graph, entries=(entry,), types=tuple(kinds), expressions=tuple(expressions), operators=operators
    )
    check_graph(bomb)
    reason = refusal(bomb, memory_bytes_max=4_000_000_000)
    assert "aten.cat.default" in reason
    assert "4.0 GB is offered" in reason


def test_a_huge_expand_is_free_until_it_is_copied() -> None:
    free = Layer()
    wide = free.node("expand", free.node("unsqueeze", free.x, 2), [-1, -1, 2**29])
    assert admit(specification(free.graph(free.node("select.int", wide, 2, 7)))).peak_bytes < 100_000
    copied = Layer()
    wide = copied.node("expand", copied.node("unsqueeze", copied.x, 2), [-1, -1, 2**29])
    graph = copied.graph(copied.node("select.int", copied.node("mul.Tensor", wide, 2.0), 2, 7))
    assert "aten.mul.Tensor" in refusal(graph, memory_bytes_max=4_000_000_000)


def test_two_thousand_large_products_are_refused() -> None:
    layer = Layer(2048, 2048)
    value = layer.x
    for _ in range(2_000):
        value = layer.node("mm", value, layer.x)
    reason = refusal(layer.graph(value), flops_max=10**12)
    assert "operations offered" in reason
    assert "node 58 " in reason


def test_many_cheap_operators_are_not_free() -> None:
    layer = Layer(1024, 1024)
    value = layer.x
    for _ in range(200):
        value = layer.node("neg", value)
    assert "operations offered" in refusal(layer.graph(value), flops_max=10**8)


def test_a_window_costs_its_size_for_each_result() -> None:
    layer = Layer(1, 1, 512, 512)
    graph = layer.graph(layer.node("max_pool2d", layer.x, [255, 255], [1, 1], [127, 127]))
    assert "operations offered" in refusal(graph, flops_max=10**9)


def test_parameters_and_moments_count_before_anything_is_run() -> None:
    layer = Layer()
    graph = layer.graph(layer.node("linear", layer.x, layer.build.parameter("w", 1000, 8)))
    needed = 5 * 1000 * 8 * 4
    adam = OptimizerSettings("adam")
    assert "parameters and optimizer need 160.0 kB" in refusal(graph, optimizer=adam, memory_bytes_max=needed)
    assert "needs" in refusal(graph, optimizer=adam, memory_bytes_max=needed + 1_000)
    admit(specification(graph, optimizer=adam, memory_bytes_max=needed + 2_000_000))


# Inconsistent graphs


def test_shapes_that_differ_from_torchs_are_refused() -> None:
    layer = Layer()
    graph = layer.graph(layer.node("neg", layer.x))
    kinds = list(graph.types)
    row = graph.entries[0].types[1]
    kinds.append(TensorType("float32", (Size(0), 9)))
    types = (row, len(kinds) - 1, graph.entries[0].types[2])
    entry = msgspec.structs.replace(graph.entries[0], types=types)
    lying = msgspec.structs.replace(graph, types=tuple(kinds), entries=(entry,))
    check_graph(lying)
    assert (
        "node 0 (aten.neg.default): value 1 is float32[64, 8], but the graph claims float32[64, 9]"
        in refusal(lying)
    )


def test_shapes_that_are_right_only_at_the_largest_sizes_are_refused() -> None:
    layer = Layer()
    graph = layer.graph(layer.node("neg", layer.x))
    entry = graph.entries[0]
    kinds = (*graph.types, TensorType("float32", (64, 8)))
    types = (entry.types[0], len(kinds) - 1, entry.types[2])
    lying = msgspec.structs.replace(
        graph, types=kinds, entries=(msgspec.structs.replace(entry, types=types),)
    )
    assert "value 1 is float32[1, 8], but the graph claims float32[64, 8]" in refusal(lying)


def test_a_dtype_that_differs_from_torchs_is_refused() -> None:
    layer = Layer()
    graph = layer.graph(layer.node("to.dtype", layer.x, TypeName("float64")))
    assert "is int64" in refusal(with_argument(graph, 0, 1, TypeName("int64")))


ARGUMENTS: dict[str, tuple[str, list[Any], int, Any, str]] = {
    "a stride of zero": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 3, (0, 1), "stride"),
    "a stride below zero": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 3, (-1, 1), "stride"),
    "a padding of 2^31": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 4, (2**31, 1), "padding"),
    "a dilation of zero": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 5, (0, 1), "dilation"),
    "groups of zero": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 6, 0, "groups"),
    "groups that do not divide": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 6, 3, "RuntimeError"),
    "a stride made of sizes": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 3, (Size(0), Size(0)), "stride"),
    "a stride of three": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 3, (1, 1, 1), "stride"),
    "no integer": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 6, 1.0, "groups"),
    "a bool for an integer": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 6, True, "groups"),
    "a text for a list": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 3, "same", "stride"),
    "a number for a tensor": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 0, 3, "self|input"),
    "None for a tensor": ("conv2d", [[1, 1], [1, 1], [1, 1], 1], 1, None, "weight"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_dangerous_arguments_of_kernels_are_refused(name: str) -> None:
    operator, rest, index, argument, reason = ARGUMENTS[name]
    layer = Layer(2, 4, 8, 8)
    weight = layer.build.parameter("w", 4, 4, 3, 3)
    graph = layer.graph(layer.node(operator, layer.x, weight, None, *rest))
    admit(specification(graph))
    wild = Items(argument) if isinstance(argument, tuple) else argument
    found = refusal(with_argument(graph, 0, index, wild))
    assert "node 0 (aten.conv2d.default)" in found
    assert any(word in found for word in reason.split("|"))


def test_arguments_that_only_the_stage_may_set_are_refused() -> None:
    layer = Layer()
    graph = layer.graph(layer.node("rand_like", layer.x))
    for keyword in ("device", "layout", "pin_memory"):
        assert f"'{keyword}'" in refusal(with_node(graph, 0, keywords=((keyword, 1),)))
    assert "no keyword 'generator'" in refusal(with_node(graph, 0, keywords=(("generator", 1),)))
    layer = Layer()
    graph = layer.graph(layer.node("bernoulli.p", layer.x, 0.5))
    assert "'generator'" in refusal(with_node(graph, 0, keywords=(("generator", 1),)))


def test_sparse_gradients_are_refused() -> None:
    layer = Layer(4, dtype="int64")
    table = layer.build.parameter("table", 5, 3)
    graph = layer.graph(layer.node("embedding", table, layer.x, -1, False, False))
    admit(specification(graph))
    assert "'sparse'" in refusal(with_argument(graph, 0, 4, True))


def test_too_many_and_too_few_arguments_and_results_are_refused() -> None:
    layer = Layer()
    graph = layer.graph(layer.node("neg", layer.x))
    (x,) = graph.entries[0].nodes[0].arguments
    assert "2 arguments, at most 1" in refusal(with_node(graph, 0, arguments=(x, x)))
    assert "'self' is missing" in refusal(with_node(graph, 0, arguments=()))
    stage = whole(graph)
    (entry,) = stage.entries
    nodes = (msgspec.structs.replace(entry.nodes[0], outputs=(1, 3)), *entry.nodes[1:])
    wrong = msgspec.structs.replace(stage, entries=(msgspec.structs.replace(entry, nodes=nodes),))
    assert "2 results where 1 come" in refusal(wrong)


def test_a_tensor_is_split_only_into_the_named_pieces() -> None:
    layer = Layer(1, 2**27)
    pieces = layer.node("split.Tensor", layer.x, 2**26, 1)
    graph = layer.graph(pieces[0])
    assert "134217728 pieces" in refusal(with_argument(graph, 0, 1, 1))
    layer = Layer(2, 2**26)
    graph = layer.graph(layer.node("unbind.int", layer.x, 0)[1])
    assert "67108864 pieces" in refusal(with_argument(graph, 0, 1, 1))


def test_arguments_that_cause_loops_in_python_are_limited() -> None:
    layer = Layer()
    graph = layer.graph(layer.node("diff", layer.x, 1))
    assert "argument 'n'" in refusal(with_argument(graph, 0, 1, 10**9))


def test_an_einsum_is_limited_to_its_equation() -> None:
    layer = Layer()
    graph = layer.graph(layer.node("einsum", "bi,bj->bij", [layer.x, layer.x]))
    admit(specification(graph))
    assert "'equation'" in refusal(with_argument(graph, 0, 0, "__import__('os')"))


def test_gradients_of_non_differentiable_arguments_are_refused() -> None:
    layer = Layer()
    weight = layer.build.parameter("w", 8)
    target = layer.build.constant(np.zeros(4, np.int64))
    table = layer.build.parameter("table", 4, 8)
    graph = layer.graph(layer.node("nll_loss", table, target, weight, 2, -100))
    assert "not differentiable" in refusal(graph)


def test_losses_of_integers_are_refused_before_the_backward_pass() -> None:
    layer = Layer()
    count = layer.build.constant(np.zeros((1, 8), np.int64))
    graph = layer.graph(layer.node("huber_loss", layer.x, count, 2))
    assert "a loss of torch.float32, torch.int64" in refusal(graph)


def test_limits_wider_than_their_tensors_are_refused() -> None:
    layer = Layer(2, 3)
    wide = layer.build.parameter("wide", 1, 2, 3)
    graph = layer.graph(layer.node("clamp.Tensor", layer.x, layer.build.parameter("narrow", 3), wide))
    assert "limits of shape [1, 2, 3]" in refusal(graph)


def test_a_group_norm_with_a_bias_alone_is_refused() -> None:
    layer = Layer(2, 4, 3)
    graph = layer.graph(layer.node("group_norm", layer.x, 2, None, layer.build.parameter("b", 4)))
    assert "a bias but no weight" in refusal(graph)


def test_a_refusal_is_short_whatever_the_graph() -> None:
    layer = Layer()
    graph = layer.graph(layer.node("einsum", "bi,bj->bij", [layer.x, layer.x]))
    assert len(refusal(with_argument(graph, 0, 0, "\x1b[2J" + "\u202e" * 20))) < 400
