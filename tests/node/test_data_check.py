"""Values that a model cannot accept are reported with file, sample and value before a run is planned."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node import toml
from node.commands import Commands
from node.content.datasets import Dataset, labelled, load_digits, load_folder, load_text, read_origins
from node.content.sources import convert
from node.errors import UsageError
from node.events import RunAccepted
from node.protocols.run_file import RunFile
from node.runs.data_check import check_values
from node.runs.manifest_builder import bind_data
from partition.model.graph import DataType, Graph
from partition.model.ranges import bounds
from tests.node.test_models import NAME, classifier
from tests.partition.graphs import GraphBuilder
from tests.stack import simple_cnn, simulate, swarm


def tokens(rows: int, head: int) -> Graph:
    """Return a model with an embedding of `rows` rows and `head` classes. It reshapes the labels, one for
    every position.
    """
    build = GraphBuilder("tokens", "float32")
    batch = build.symbol("batch", 1, 64)
    build.begin()
    x, y = build.input("x", "int64", batch, 4), build.label("y", "int64", batch, 4)
    values = build.node("embedding", build.parameter("embed", rows, 8), x)
    logits = build.node("linear", values, build.parameter("head", head, 8))
    flat = build.node("flatten.using_ints", logits, 0, 1)
    target = build.node("reshape", y, [-1])
    build.end(outputs=[logits], loss=build.node("cross_entropy_loss", flat, target, None, 2, 1))
    return build.finish()


def check(graph: Graph, data: Dataset) -> None:
    check_values(graph, data, bind_data(graph, data, 2, NAME), NAME, "folder")


def test_a_bad_value_is_reported_by_its_number_before_shuffling(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    for wrong in range(len(x)):
        y = np.arange(6) % 3
        y[wrong] = 9
        np.savez(tmp_path / "all.npz", x=x, y=y)
        convert("all.npz", tmp_path, tmp_path, validation=0.2)
        data, origins = load_folder(tmp_path), read_origins(tmp_path)
        graph = classifier(2)
        sizes = bind_data(graph, data, 2, NAME)
        with pytest.raises(UsageError, match=rf"all.npz: y of sample {wrong} \(from 0\) is 9"):
            check_values(graph, data, sizes, NAME, "all.npz", origins)


def data(x: Any, y: Any, test_x: Any = None, test_y: Any = None) -> Dataset:
    held_out = x if test_x is None else test_x, y if test_y is None else test_y
    return labelled("0" * 64, (x, y), held_out)


def test_the_allowed_ranges_of_labels_and_inputs_follow_from_the_graph() -> None:
    graph = tokens(50, 7)
    found = bounds(graph, graph.entries[0], (2,))
    assert {port: (row.count, row.ignored) for port, row in found.items()} == {0: (50, None), 1: (7, 1)}
    built_in = simple_cnn().graph
    (bound,) = bounds(built_in, built_in.entries[0], (4,)).values()
    assert (bound.count, bound.operator) == (10, "aten.cross_entropy_loss.default")


def test_the_built_in_data_fits_the_built_in_model() -> None:
    check(simple_cnn().graph, load_digits())


def test_a_label_out_of_range_is_reported() -> None:
    y = np.zeros(9, np.int64)
    y[5] = 3
    with pytest.raises(UsageError, match=r"folder/train.npz: y of sample 5 is 3; the model takes 0 to 2"):
        check(classifier(8), data(np.zeros((9, 8)), y))
    with pytest.raises(UsageError, match=r"folder/test.npz: y of sample 5 is 3"):
        check(classifier(8), data(np.zeros((9, 8)), np.zeros(9, np.int64), test_y=y))


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (-np.inf, "float32"), (1e300, "float32")])
def test_a_value_not_finite_in_the_models_type_is_reported(value: float, dtype: DataType) -> None:
    x = np.zeros((9, 2, 4))
    x[7, 1, 2] = value
    words = re.escape(f"train.npz: x of sample 7 at [1, 2] is {value}; want finite")
    with pytest.raises(UsageError, match=words):
        check(classifier(2, 4, dtype=dtype), data(x, np.zeros(9, np.int64)))


def test_held_out_values_of_a_different_type_are_reported() -> None:
    graph, whole = tokens(50, 7), np.zeros((4, 4), np.int64)
    with pytest.raises(UsageError, match=r"test.npz: x are float64; the model takes int64"):
        check(graph, data(whole, whole, test_x=whole + 0.5))


def test_tokens_without_an_embedding_are_reported_but_not_ignored_labels() -> None:
    x, y = np.zeros((9, 4), np.int64), np.ones((9, 4), np.int64)
    check(tokens(50, 1), data(x, y))
    x[3, 1] = 50
    with pytest.raises(UsageError, match=r"x of sample 3 at \[1\] is 50; the model takes 0 to 49"):
        check(tokens(50, 1), data(x, y))


def test_a_byte_without_an_embedding_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a" * 70 + b"\xff" + b"a" * 30)
    text = load_text(path, window=4)
    graph = tokens(128, 128)
    with pytest.raises(UsageError, match=r"x of sample 17 at \[2\] is 255; the model takes 0 to 127"):
        check_values(graph, text, bind_data(graph, text, 2, NAME), NAME, "text")


def test_bad_data_is_refused_before_a_run_is_announced(tmp_path: Path) -> None:
    y = np.zeros(64, np.int64)
    y[40] = 12
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}.npz", x=np.zeros((64, 1, 8, 8)), y=y)
    model = simple_cnn("float32")
    graph = tmp_path / "model.peerloom"
    graph.write_bytes(model.data)
    text = f"model = 'model.peerloom'\ndata = '{tmp_path}'\n[train]\nbatch = 16\nmicrobatch = 4\n"
    toml.parse(text, RunFile, name=NAME)

    async def scenario() -> None:
        async with swarm("a", preset="lan") as group:
            node = group.nodes["a"]
            arguments = {"text": text, "name": NAME, "path": str(tmp_path / NAME), "graph": str(graph)}

            async def emit(event: object) -> None:
                raise AssertionError(event)

            with pytest.raises(UsageError, match=r"train.npz: y of sample 40 is 12; the model takes 0 to 9"):
                await Commands(node).handlers["train"](arguments, emit)
            assert not any(isinstance(event, RunAccepted) for event in group.events["a"])

    simulate(scenario)
