"""Where a graph may be cut, and that its parts compute the same as the whole."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from partition.model.check import check_graph
from partition.model.cut import (
    crossing_bytes,
    crossings,
    cut,
    cut_layers,
    follow,
    legal_positions,
)
from partition.model.graph import (
    Graph,
    StageGraph,
    encode_graph,
    graph_hash,
)
from tests.partition.effort import lines_run
from tests.partition.graphs import GraphBuilder

NAME = b"n" * 32


def entry_of(stage: StageGraph, name: str = "train") -> Any:
    return stage.entry(name)


def ids(stage: StageGraph, name: str = "train") -> list[int]:
    return [node.id for node in entry_of(stage, name).nodes]


def mlp(layers: int = 3, width: int = 8) -> GraphBuilder:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x = build.input("x", "float32", batch, width)
    y = build.label("y", "int64", batch)
    for layer in range(layers):
        owner = f"layers.{layer}"
        weight = build.parameter(f"{owner}.weight", width, width)
        x = build.node("relu", build.node("linear", x, weight, owner=owner), owner=f"act.{layer}")
    loss = build.node("cross_entropy_loss", x, y, None, 2)
    build.end(outputs=[x], loss=loss)
    return build


def test_a_chain_may_be_cut_everywhere_and_sends_only_stage_outputs() -> None:
    graph = mlp().finish()
    assert legal_positions(graph) == (1, 2, 3, 4, 5, 6)
    stages = cut(graph, graph_hash(encode_graph(graph)), [2, 4])
    assert [ids(stage) for stage in stages] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [entry_of(stage).outputs for stage in stages] == [(3,), (5,), ()]
    assert [stage.rows for stage in stages] == [(0,), (1,), (2,)]
    assert [entry_of(stage).labels for stage in stages] == [(), (), (1,)]


@pytest.mark.parametrize("positions", [[0], [7], [3, 3], [4, 2], [-1], [100]])
def test_other_positions_are_refused(positions: list[int]) -> None:
    with pytest.raises(ValueError, match=r"no cut|are not ascending"):
        cut(mlp().finish(), NAME, positions)


def test_no_cut_follows_a_node_that_needs_a_label_and_an_activation() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 4), build.label("y", "float32", batch, 4)
    half = build.node("mul.Tensor", y, 0.5)
    hidden = build.node("linear", x, build.parameter("a.weight", 4, 4))
    error = build.node("sub.Tensor", hidden, half)
    loss = build.node("sum", build.node("square", error))
    build.end(outputs=[hidden], loss=loss)
    graph = build.finish()
    assert legal_positions(graph) == (2,)
    first, last = cut(graph, NAME, [2])
    # A node that needs only labels goes to the stage that uses it.
    assert (ids(first), ids(last)) == ([1], [0, 2, 3, 4])


def test_a_value_and_a_cheap_function_of_it_are_sent_once() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 512), build.label("y", "float32", batch, 512)
    hidden = build.node("linear", x, build.parameter("a.weight", 512, 512))
    active = build.node("relu", hidden)
    turned = build.node("view", active, [build.size("mul", batch, 2), 256])
    back = build.node("view", turned, [batch, 512])
    both = build.node("add.Tensor", back, hidden)
    out = build.node("linear", build.node("mul.Tensor", both, active), build.parameter("b.weight", 512, 512))
    build.end(outputs=[out], loss=build.node("mse_loss", out, y, 2))
    graph = build.finish()
    first, last = cut(graph, NAME, [4])
    assert entry_of(first).outputs == entry_of(first).backward_outputs == (2,)
    assert ids(first) == [0]
    # One view of the sent tensor is enough, because the view that undoes the transposition is recomputed too.
    assert ids(last) == [1, 2, 3, 4, 5, 6, 7]
    assert crossings(graph, [4]) == ((2,),)


def test_masks_are_recomputed_and_dropout_is_sent() -> None:
    build = GraphBuilder()
    batch, tokens = build.symbol("batch"), build.symbol("tokens", 2, 512)
    build.begin()
    x = build.input("x", "float32", batch, tokens, 64)
    y = build.label("y", "float32", batch, tokens, 64)
    ones = build.node("ones", [tokens, tokens])
    mask = build.node("lt.Scalar", build.node("tril", ones), 0.5)
    known = build.constant(np.ones((64,), dtype=np.float32), "scale")
    scale = build.node("mul.Tensor", known, 2.0)
    h = x
    for layer in range(3):
        h = build.node("linear", h, build.parameter(f"{layer}.weight", 64, 64))
        scores = build.node("bmm", h, build.node("transpose.int", h, 1, 2))
        masked = build.node("masked_fill.Scalar", scores, mask, -1.0)
        h = build.node("mul.Tensor", build.node("bmm", build.node("softmax.int", masked, -1), h), scale)
        h = build.node("dropout", h, 0.1, True)
    build.end(outputs=[h], loss=build.node("mse_loss", h, y, 2))
    graph = build.finish()
    drop = next(
        node.id for node in graph.entries[0].nodes if graph.operators[node.operator].startswith("aten.drop")
    )
    stages = cut(graph, NAME, [drop + 1])
    assert len(entry_of(stages[0]).outputs) == 1
    assert entry_of(stages[0]).outputs == graph.entries[0].nodes[drop].outputs
    assert ids(stages[1])[:4] == [0, 1, 2, 3]
    assert stages[0].constant_rows == stages[1].constant_rows == (0,)


def test_random_numbers_are_drawn_in_one_stage_only() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 8), build.label("y", "float32", batch, 8)
    noise = build.node("rand", [batch, 8])
    h = build.node("linear", x, build.parameter("a.weight", 8, 8))
    dropped = build.node("dropout", h, 0.5, True)
    g = build.node("linear", dropped, build.parameter("b.weight", 8, 8))
    out = build.node("add.Tensor", build.node("add.Tensor", build.node("mul.Tensor", g, noise), dropped), h)
    build.end(outputs=[out], loss=build.node("mse_loss", out, y, 2))
    first, last = cut(build.finish(), NAME, [3])
    # Although cheap, neither the noise nor the result of dropout is computed twice.
    assert entry_of(first).outputs == (noise.id, h.id, dropped.id)
    assert ids(last) == [3, 4, 5, 6, 7]


def test_a_skip_connection_is_passed_on_with_its_gradient() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 8), build.label("y", "float32", batch, 8)
    skip = build.node("linear", x, build.parameter("in.weight", 8, 8))
    h = skip
    for layer in range(3):
        h = build.node("linear", h, build.parameter(f"{layer}.weight", 8, 8))
    quiet = build.node("detach", skip)
    out = build.node("add.Tensor", build.node("add.Tensor", h, skip), build.node("mul.Tensor", quiet, x))
    build.end(outputs=[out], loss=build.node("mse_loss", out, y, 2))
    graph = build.finish()
    stages = cut(graph, NAME, [2, 3, 4])
    middle = entry_of(stages[1])
    # x needs no gradient. The skip connection is sent once, for itself and for its detached use.
    assert middle.inputs == (0, 2, 3)
    assert middle.outputs == (0, 2, 4)
    assert middle.backward_inputs == (2, 3)
    assert middle.backward_outputs == (2, 4)
    assert entry_of(stages[0]).backward_inputs == ()


def test_a_value_used_only_by_a_detached_branch_has_no_gradient() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 8), build.label("y", "float32", batch, 8)
    early = build.node("linear", x, build.parameter("a.weight", 8, 8))
    h = build.node("linear", early, build.parameter("b.weight", 8, 8))
    late = build.node("linear", build.node("detach", early), build.parameter("c.weight", 8, 8))
    out = build.node("add.Tensor", h, late)
    build.end(outputs=[out], loss=build.node("mse_loss", out, y, 2))
    last = entry_of(cut(build.finish(), NAME, [2])[1])
    assert last.inputs == (2, 3)
    # The first stage's own use of the value still gets its gradient there, without a transfer.
    assert last.backward_inputs == (3,)


def test_inputs_behind_only_frozen_weights_get_no_gradient() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 8), build.label("y", "float32", batch, 8)
    h = build.node("linear", x, build.parameter("a.weight", 8, 8, kind="frozen"))
    out = build.node("linear", h, build.parameter("b.weight", 8, 8))
    build.end(outputs=[out], loss=build.node("mse_loss", out, y, 2))
    first, last = cut(build.finish(), NAME, [1])
    assert entry_of(first).outputs == (2,)
    assert entry_of(last).backward_inputs == ()


def test_a_loss_computed_early_is_carried_to_the_last_stage() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x = build.input("x", "float32", batch, 8)
    h = build.node("linear", x, build.parameter("a.weight", 8, 8))
    loss = build.node("sum", h)
    later = build.node("linear", h, build.parameter("b.weight", 8, 8))
    build.end(outputs=[later], loss=loss, metrics={"far": build.node("sum", later)})
    graph = build.finish()
    first, last = cut(graph, NAME, [3])
    assert entry_of(last).loss == loss.id
    assert entry_of(first).outputs == entry_of(last).inputs == (loss.id, later.id)
    assert entry_of(first).backward_outputs == entry_of(last).backward_inputs == (loss.id,)


def test_a_head_outside_the_loss_is_kept_but_not_run() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 8), build.label("y", "int64", batch)
    h = build.node("linear", x, build.parameter("used.weight", 8, 8))
    dead = build.node("linear", h, build.parameter("dead.weight", 8, 8))
    out = build.node("linear", h, build.parameter("out.weight", 8, 8))
    build.end(outputs=[dead], loss=build.node("cross_entropy_loss", out, y, None, 2))
    graph = build.finish()
    assert legal_positions(graph) == (2, 3)
    first, last = cut(graph, NAME, [2])
    assert ids(first) + ids(last) == [0, 2, 3]
    assert [parameter.names[0] for parameter in first.parameters] == ["used.weight", "dead.weight"]


def test_a_tied_weight_is_held_twice_and_counted_once() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("ids", "int64", batch), build.label("y", "int64", batch)
    table = build.parameter(("wte.weight", "head.weight"), 16, 8)
    h = build.node("embedding", table, x)
    h = build.node("linear", h, build.parameter("a.weight", 8, 8))
    logits = build.node("linear", h, table)
    build.end(outputs=[logits], loss=build.node("cross_entropy_loss", logits, y, None, 2))
    first, middle, last = cut(build.finish(), NAME, [1, 2])
    assert (first.rows, middle.rows, last.rows) == ((0,), (1,), (0,))
    assert (first.tied, middle.tied, last.tied) == ((0,), (), (0,))
    assert (first.borrowed, last.borrowed) == ((), (0,))


def test_a_tensor_without_elements_is_never_sent() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 8), build.label("y", "float32", batch, 8)
    h = build.node("linear", x, build.parameter("a.weight", 8, 8))
    none, _ = build.node(
        "split_with_sizes", build.node("linear", h, build.parameter("b.weight", 8, 8)), [0, 8], 1
    )
    g = build.node("linear", h, build.parameter("c.weight", 8, 8))
    out = build.node("cat", [g, none], 1)
    build.end(outputs=[out], loss=build.node("mse_loss", out, y, 2))
    graph = build.finish()
    assert legal_positions(graph) == (1, 2, 5)


def serving() -> Graph:
    """Return two blocks with a cache each, for training and decoding; the weight of the embedding is tied."""
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("ids", "int64", batch), build.label("y", "int64", batch)
    table = build.parameter("wte.weight", 16, 8)
    blocks = []
    h = build.node("embedding", table, x)
    for layer in range(2):
        blocks.append(build.parameter(f"h.{layer}.weight", 8, 8))
        h = build.node("linear", h, blocks[-1])
    logits = build.node("linear", h, table)
    build.end(outputs=[logits], loss=build.node("cross_entropy_loss", logits, y, None, 2))
    build.begin("decode")
    x = build.input("ids", "int64", 1)
    at = build.input("position", "int64", 1)
    h = build.node("embedding", table, x)
    updates = []
    for layer in range(2):
        state = build.state(f"cache.{layer}", "float32", 32, 8)
        key = build.node("linear", h, blocks[layer])
        cache = build.node("index_copy", state, 0, at, key)
        h = build.node("mm", h, build.node("mm", build.node("t", cache), cache))
        updates.append((state, cache))
    build.end(outputs=[build.node("linear", h, table)], updates=updates)
    return build.finish()


def test_decoding_is_cut_at_the_same_places_as_training() -> None:
    graph = serving()
    check_graph(graph)
    assert follow(graph, [1, 2, 3]) == ((1, 2, 3), (1, 6, 12))
    first, second = cut(graph, NAME, [2])
    assert (ids(first, "decode"), ids(second, "decode")) == ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11])
    assert (first.state_rows, second.state_rows) == ((0,), (1,))
    assert entry_of(first, "decode").updates == graph.entries[1].updates[:1]
    # The position is passed on to the second cache. The tied table is in both stages.
    assert entry_of(second, "decode").inputs == (1, 7)
    assert entry_of(second, "decode").outputs == graph.entries[1].outputs
    assert (first.tied, second.borrowed) == ((0,), (0,))


def test_no_cut_lies_between_uses_of_one_state() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin("decode")
    x = build.input("x", "float32", batch, 8)
    state = build.state("cache", "float32", 4, 8)
    h = build.node("linear", x, build.parameter("a.weight", 8, 8))
    h = build.node("mm", h, build.node("linear", build.node("t", state), build.parameter("b.weight", 4, 4)))
    h = build.node("linear", h, build.parameter("c.weight", 4, 4))
    h = build.node("mm", h, state)
    h = build.node("linear", h, build.parameter("d.weight", 8, 8))
    build.end(outputs=[h])
    graph = build.finish()
    check_graph(graph)
    assert legal_positions(graph) == (1, 6)


def test_statistics_that_another_stage_updates_are_also_moved_in_reading_stages() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 8), build.label("y", "float32", batch, 8)
    pair = [build.parameter(name, 8, kind="statistic") for name in ("mean", "variance")]
    h = build.node("batch_norm", x, None, None, *pair, True, 0.25, 1e-5, False)
    h = build.node("batch_norm", h, None, None, *pair, True, 0.25, 1e-5, False)
    h = build.node("linear", h, build.parameter("a.weight", 8, 8))
    h = build.node("batch_norm", h, None, None, *pair, False, 0.25, 1e-5, False)
    build.end(outputs=[h], loss=build.node("mse_loss", h, y, 2))
    first, second, third = cut(build.finish(), NAME, [1, 2])
    assert (entry_of(first).statistics, entry_of(second).statistics) == (((0, 0, 2),), ((1, 1, 2),))
    assert (entry_of(first).moved, entry_of(second).moved) == ((), ())
    assert (entry_of(third).statistics, entry_of(third).moved) == ((), ((0, 0.25, 2), (1, 0.25, 2)))


def test_the_time_of_a_cut_does_not_grow_with_stages_times_states() -> None:
    build = GraphBuilder()
    build.symbol("batch")
    build.begin("decode")
    x = build.input("x", "float32", 1000, 2)
    states = [build.state(f"cache.{row}", "float32", 2) for row in range(6_000)]
    rows = [row for _ in range(6) for row in build.node("unbind.int", x)]
    for block in range(300):
        x = build.node("add.Tensor", x, build.parameter(f"{block}.bias", 2))
    build.end(outputs=[x], updates=list(zip(states, rows, strict=True)))
    graph = build.finish()
    legal = legal_positions(graph)

    def lines(positions: Sequence[int]) -> int:
        return lines_run(lambda: cut(graph, NAME, positions))

    few, many = lines(legal[-1:]), lines(legal)
    assert len(legal) > 250
    assert many < 9 * few


def test_no_more_tensors_are_sent_than_fit_a_bundle() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x, y = build.input("x", "float32", batch, 8), build.label("y", "float32", batch, 8)
    parts = [build.node("linear", x, build.parameter(f"{place}.weight", 8, 8)) for place in range(66)]
    out = build.node("sum.dim_IntList", build.node("stack", parts), [0])
    build.end(outputs=[out], loss=build.node("mse_loss", out, y, 2))
    # Up to 63 results and the input are sent. If all 66 are joined, one is sent.
    assert legal_positions(build.finish()) == (*range(1, 64), 67, 68)


def test_costly_constants_are_sent_if_there_are_few() -> None:
    def graph(count: int) -> Graph:
        build = GraphBuilder()
        batch = build.symbol("batch")
        build.begin()
        x, y = build.input("x", "float32", batch, 512), build.label("y", "float32", batch, 512)
        square = build.constant(np.zeros((512, 512), dtype=np.float32))
        dear = [build.node("mm", build.node("mm", square, square), square) for _ in range(count)]
        out = build.node("linear", x, build.parameter("a.weight", 512, 512))
        out = build.node("linear", out, build.parameter("b.weight", 512, 512))
        for table in dear:
            out = build.node("mm", out, table)
        build.end(outputs=[out], loss=build.node("mse_loss", out, y, 2))
        return build.finish()

    first, _ = cut(graph(3), NAME, [7])
    # One matrix product of the constant is recomputed, two are not.
    assert entry_of(first).outputs == (3, 5, 7, 8)
    assert 65 * 2 + 1 in legal_positions(graph(65))
    with pytest.raises(ValueError, match="66 tensors would cross a cut, but at most 64 can"):
        cut(graph(65), NAME, [65 * 2 + 1])


def test_layers_are_cut_by_ranges() -> None:
    build = mlp(layers=4)
    build.entries[0] = replace(build.entries[0], boundaries=(2, 4, 6))
    build.layers = ["a", "b", "c", "d"]
    graph = build.finish()
    check_graph(graph)
    assert cut_layers(graph, NAME, [(0, 1), (1, 3), (3, 4)]) == cut(graph, NAME, [2, 6])
    for ranges in ([], [(0, 2)], [(1, 4)], [(0, 2), (1, 4)], [(0, 0), (0, 4)], [(0, 9)], [(0, 2), (3, 4)]):
        with pytest.raises(ValueError, match="layer"):
            cut_layers(graph, NAME, ranges)


def test_crossing_bytes_count_what_later_stages_need() -> None:
    assert crossing_bytes(mlp().finish(), (4,)) == (128,) * 7
