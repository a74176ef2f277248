"""The layers of a graph: their borders, number and names."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partition.model.check import check_graph
from partition.model.cut import cut_layers, legal_positions
from partition.model.graph import Graph
from partition.model.layers import with_layers
from tests.partition.graphs import GraphBuilder
from tests.partition.random_graphs import graphs


def transformer(blocks: int, width: int = 32) -> Graph:
    """Attention-like and feed-forward halves around a residual stream, with a tied embedding."""
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    ids, y = build.input("ids", "int64", batch), build.label("y", "int64", batch)
    table = build.parameter(("wte.weight", "lm_head.weight"), 256, width)
    x = build.node("embedding", table, ids, owner="wte")
    for number in range(blocks):
        for half, inner in (("attn", width), ("mlp", 4 * width)):
            owner = f"h.{number}.{half}"
            scale = build.parameter(f"{owner}.norm.weight", width)
            h = build.node("layer_norm", x, [width], scale, owner=f"{owner}.norm")
            up = build.parameter(f"{owner}.up.weight", inner, width)
            h = build.node("gelu", build.node("linear", h, up, owner=f"{owner}.up"), owner=owner)
            down = build.parameter(f"{owner}.down.weight", width, inner)
            h = build.node("linear", h, down, owner=f"{owner}.down")
            x = build.node("add.Tensor", x, h, owner=f"h.{number}")
    logits = build.node("linear", x, table, owner="lm_head")
    build.end(outputs=[logits], loss=build.node("cross_entropy_loss", logits, y, None, 2))
    graph = build.finish()
    check_graph(graph)
    return graph


def test_a_transformers_layers_are_the_halves_of_its_blocks() -> None:
    graph = with_layers(transformer(3))
    check_graph(graph)
    halves = ("h.0", "h.0.mlp", "h.1", "h.1.mlp", "h.2", "h.2.mlp")
    assert graph.layers == ("wte", *halves, "lm_head")
    assert graph.entries[0].boundaries == (1, 6, 11, 16, 21, 26, 31)


def test_between_layers_that_reduce_bytes_every_module_border_remains() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 64), build.label("y", "int64", batch)
    for number, (taken, made) in enumerate(pairwise((64, 48, 32, 16))):
        weight = build.parameter(f"fc{number}.weight", made, taken)
        x = build.node("relu", build.node("linear", x, weight, owner=f"fc{number}"), owner=f"act{number}")
    build.end(outputs=[x], loss=build.node("cross_entropy_loss", x, y, None, 2))
    graph = with_layers(build.finish())
    assert (graph.layers, graph.entries[0].boundaries) == (("fc0", "fc1", "fc2"), (2, 4))


@pytest.mark.parametrize("layers_max", [1, 2, 5, 9])
def test_the_number_of_layers_is_limited_and_their_costs_are_even(layers_max: int) -> None:
    graph = with_layers(transformer(12), layers_max=layers_max)
    assert layers_max // 2 < len(graph.layers) <= layers_max
    lengths = [last - first for first, last in pairwise((0, *graph.entries[0].boundaries, 122))]
    assert max(lengths) <= 2.5 * 122 / layers_max


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(), st.integers(1, 8))
def test_layers_of_any_graph_pass_the_check_and_can_be_cut(graph: Graph, layers_max: int) -> None:
    layered = with_layers(graph, layers_max=layers_max)
    check_graph(layered)
    count = len(layered.layers)
    assert count <= layers_max
    assert set(layered.entries[0].boundaries) <= set(legal_positions(graph))
    stages = cut_layers(layered, b"n" * 32, [(place, place + 1) for place in range(count)])
    assert len(stages) == count
    # Layers chosen earlier have no influence.
    assert with_layers(layered, layers_max=layers_max) == layered


def test_a_split_names_all_boundaries() -> None:
    graph = with_layers(transformer(4), split=["h.1", "h.2.mlp", "lm_head"])
    check_graph(graph)
    assert graph.entries[0].boundaries == (11, 26, 41)
    assert graph.layers == ("wte", "h.1", "h.2.mlp", "lm_head")


def test_modules_kept_together_are_not_divided() -> None:
    graph = with_layers(transformer(3), together=[["h.0", "h.1"], ["h.2.mlp", "lm_head"]])
    assert graph.layers == ("wte", "h.0", "h.2", "h.2.mlp")
    assert with_layers(transformer(3), together=[["wte", "lm_head"]]).layers == ("wte",)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"split": ["h.7"]}, r"no module 'h\.7' in the model; at the top are h, lm_head, wte"),
        ({"split": ["h.1.att"]}, "no module"),
        ({"split": ["wte"]}, "no cut is possible at the beginning of 'wte'"),
        ({"together": [["h.0", "nowhere"]]}, "no module 'nowhere'"),
        ({"split": ["h.1"], "together": [["h.0", "h.2"]]}, "belong together"),
        ({"split": ["h.1", "h.2"], "layers_max": 2}, "more than 2 layers"),
        ({"layers_max": 0}, "1 to 512 layers"),
        ({"layers_max": 513}, "1 to 512 layers"),
    ],
)
def test_impossible_layers_are_refused_with_the_reason(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        with_layers(transformer(3), **arguments)  # type: ignore[arg-type]  # the table mixes kinds of arguments


def test_names_differ_even_if_one_module_is_used_again() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 16), build.label("y", "float32", batch, 16)
    first, second = build.parameter("a.weight", 16, 16), build.parameter("b.weight", 16, 16)
    for _ in range(3):
        x = build.node("linear", x, first, owner="a")
        x = build.node("linear", x, second, owner="b")
    build.end(outputs=[x], loss=build.node("mse_loss", x, y, 2))
    graph = with_layers(build.finish())
    assert graph.layers == ("a", "b", "a:2", "b:2", "a:3", "b:3")


def test_other_entry_points_are_split_by_the_parameters_they_use() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 16), build.label("y", "float32", batch, 16)
    weights = [build.parameter(f"{number}.weight", 16, 16) for number in range(3)]
    for number, weight in enumerate(weights):
        x = build.node("linear", x, weight, owner=str(number))
    build.end(outputs=[x], loss=build.node("mse_loss", x, y, 2))
    build.begin("features")
    x = build.input("x", "float32", batch, 16)
    for number in (0, 1):
        x = build.node("linear", build.node("relu", x), weights[number], owner=str(number))
    build.end(outputs=[x])
    graph = with_layers(build.finish())
    check_graph(graph)
    assert graph.layers == ("0", "1", "2")
    # The second entry point does not use the last layer, which only passes values on.
    assert [entry.boundaries for entry in graph.entries] == [(1, 2), (3, 4)]
