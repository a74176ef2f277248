"""Graphs of version 2 may have frozen parameters of any floating type in one arena. Version 1 is
unchanged."""

from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from partition.capture import CaptureRefused, capture
from partition.capture.models.gpt import gpt
from partition.execute.executor import StageExecutor
from partition.execute.interpret import DTYPES
from partition.model.check import check_graph
from partition.model.cut import cut
from partition.model.graph import (
    FLOATING,
    ITEM_BYTES,
    TYPED_GRAPH_VERSION,
    Graph,
    Parameter,
    Recipe,
    StoredValues,
    TensorType,
    decode_graph,
    encode_graph,
    graph_hash,
    version_for,
)
from partition.stage import (
    Export,
    Exported,
    Import,
    Refused,
    Reload,
    StageDone,
    StageSpecification,
    vector_bytes,
)
from partition.stage_layout import arena_bytes, parameter_layout
from tests.partition.half_graphs import half_graph
from tests.partition.hostile import mutated_case
from tests.partition.test_check import GOOD

HALF = half_graph()
DIGEST = bytes(32)
NAME_OF_GOOD = "65a227ed167a9dd1cfaab0f0c53c576d"
"""The hash of the graph from before there was a version 2."""
tables = st.lists(
    st.tuples(st.sampled_from(FLOATING), st.lists(st.integers(1, 5), max_size=3)), min_size=1, max_size=12
)


def with_rows(table: list[tuple[Any, list[int]]]) -> Graph:
    """Return a served graph with further unused parameters, stored one after the other."""
    rows = list(HALF.parameters)
    rows += [
        Parameter((f"more.{number}",), TensorType(dtype, tuple(shape)), "frozen", Recipe(()))
        for number, (dtype, shape) in enumerate(table)
    ]
    offset = 0
    for number, row in enumerate(rows):
        rows[number] = replace(row, source=StoredValues(offset, row.stored_bytes, DIGEST))
        offset += row.stored_bytes
    return replace(HALF, parameters=tuple(rows), version=version_for(rows))


def specification(graph: Graph) -> StageSpecification:
    (share,) = cut(graph, DIGEST, ())
    return StageSpecification(b"run", share, (8, 4, 8), cache_bytes=1 << 16, memory_bytes_max=1 << 30)


def executor(graph: Graph) -> tuple[StageExecutor, memoryview]:
    wanted = specification(graph)
    arenas = {name: memoryview(bytearray(size)) for name, size in arena_bytes(wanted).items()}
    return StageExecutor(wanted, arenas), arenas["parameters"]


def test_a_graph_of_version_1_keeps_its_bytes_and_its_name() -> None:
    assert GOOD.version == 1
    assert graph_hash(encode_graph(GOOD)).hex()[:32] == NAME_OF_GOOD


@settings(max_examples=60, deadline=None)
@given(table=tables)
def test_a_typed_graph_survives_encoding_and_is_aligned_without_gaps(
    table: list[tuple[Any, list[int]]],
) -> None:
    graph = with_rows(table)
    found = decode_graph(encode_graph(graph))
    check_graph(found)
    assert (found, found.version) == (graph, TYPED_GRAPH_VERSION)
    wanted = specification(found)
    end = 0
    for slot in parameter_layout(wanted):
        assert slot.begin_bytes == end
        assert slot.begin_bytes % ITEM_BYTES[slot.dtype] == 0
        assert slot.parameter.stored_bytes == prod(slot.shape) * ITEM_BYTES[slot.dtype]
        end = slot.end_bytes
    sizes = arena_bytes(wanted)
    assert sizes == {"parameters": end, "gradients": 0, "totals": 0, "moments": 0}
    assert end == vector_bytes(wanted) == sum(row.stored_bytes for row in found.parameters)


@settings(max_examples=15, deadline=None)
@given(table=tables, seed=st.integers(0, 2**32))
def test_an_exported_stage_of_many_types_is_imported_bit_for_bit(
    table: list[tuple[Any, list[int]]], seed: int
) -> None:
    stage, arena = executor(with_rows(table))
    generator = torch.Generator().manual_seed(seed)
    for slot in parameter_layout(specification(with_rows(table))):
        values = torch.randn(prod(slot.shape), generator=generator).to(DTYPES[slot.dtype])
        arena[slot.begin_bytes : slot.end_bytes] = values.view(torch.uint8).numpy().tobytes()
    assert isinstance(stage.handle(Reload()), StageDone)
    exported = stage.handle(Export())
    assert isinstance(exported, Exported)
    other, taken = executor(with_rows(table))
    assert isinstance(other.handle(Import(exported.data)), StageDone)
    assert bytes(taken) == bytes(arena)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_non_finite_half_precision_values_are_refused(dtype: Any) -> None:
    stage, arena = executor(half_graph(dtype))
    exported = stage.handle(Export())
    assert isinstance(exported, Exported)
    bits = 0x7F80 if dtype == "bfloat16" else 0x7C00
    np.frombuffer(arena, np.uint16)[-1] = bits
    refused = stage.handle(Reload())
    assert isinstance(refused, Refused)
    assert "not finite" in refused.reason
    data = exported.data[:-2] + bits.to_bytes(2, "little")
    refused = stage.handle(Import(data))
    assert isinstance(refused, Refused)
    assert "not finite" in refused.reason


def changed(**row: Any) -> Graph:
    return replace(HALF, parameters=(replace(HALF.parameters[0], **row), *HALF.parameters[1:]))


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (replace(HALF, version=1), "bfloat16, but version 1 has all float32 or all float64"),
        (replace(GOOD, version=2), "which needs version 1, not 2"),
        (
            changed(kind="parameter"),
            "is bfloat16 and trained, but trained parameters must be all float32 or all float64",
        ),
        (
            changed(source=StoredValues(0, 256, DIGEST), type=TensorType("bfloat16", (16, 4))),
            "takes 128 bytes, but 256",
        ),
        (
            changed(type=TensorType("int8", (16, 8))),
            "is int8, but parameters must have a floating-point type",
        ),
        (changed(type=TensorType("bfloat16", (1 << 34,))), "takes 34359738368 bytes"),
    ],
    ids=["version 1", "version 2 for nothing", "trained", "stored", "integers", "long"],
)
def test_a_graph_with_unsuitable_types_is_refused(graph: Graph, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        check_graph(graph)


def test_a_half_precision_graph_that_trains_is_refused() -> None:
    rows = tuple(
        replace(row, type=replace(row.type, dtype="bfloat16"), kind="frozen") if not number else row
        for number, row in enumerate(GOOD.parameters)
    )
    with pytest.raises(
        RemoteProtocolError, match=f"'{rows[0].names[0]}' is bfloat16 and part of what is trained"
    ):
        check_graph(replace(GOOD, parameters=rows, version=2))
    (share,) = cut(replace(GOOD, parameters=rows), DIGEST, ())
    with pytest.raises(ValueError, match="a stage that trains must all be float32 or all float64"):
        StageSpecification(b"run", share, tuple(symbol.minimum for symbol in GOOD.symbols))


def test_a_half_precision_model_is_refused_for_training() -> None:
    task = gpt((8,), 16, layers=1, heads=2, width=8)
    task.model.to(torch.bfloat16)
    with pytest.raises(
        CaptureRefused, match=r"is torch.bfloat16: a stage trains float32 or float64; use model"
    ):
        capture(task.model, task.example_inputs, labels=task.labels, loss=task.loss, dynamic=task.dynamic)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_mutated_typed_graphs_cause_only_refusals(seed: int) -> None:
    data = mutated_case(seed, [HALF]).graph
    try:
        check_graph(decode_graph(data))
    except RemoteProtocolError:
        return


def test_an_unknown_storage_is_refused() -> None:
    tree = msgspec.msgpack.decode(encode_graph(HALF))
    place = list(Graph.__struct_fields__).index("parameters")
    tree[place][0][-1] = "blocks"
    with pytest.raises(RemoteProtocolError):
        decode_graph(msgspec.msgpack.encode(tree))
