"""The bit class of a served stage (a fingerprint of its exact output bits) depends on the machine's results
and on the number of threads."""

from functools import cache

import pytest
import torch
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from partition.capture import capture
from partition.capture.models.gpt import gpt
from partition.execute.executor import StageExecutor
from partition.model.check import check_graph
from partition.model.graph import LAYERS_MAX, Graph
from partition.model.operators import ATTEND
from partition.model.serving import serving_graph
from partition.stage import BitsFound, FindBits, Unit
from tests.partition.serving_world import Chain, session

CONTEXT = 96


@cache
def model(seed: int) -> tuple[Graph, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    task = gpt((CONTEXT,), 65, layers=2, heads=4, width=32)
    captured = capture(
        task.model, task.example_inputs, labels=task.labels, loss=task.loss, dynamic=task.dynamic
    )
    return serving_graph(captured.graph, CONTEXT), task.model.state_dict()


def chain(threads: int = 1, *, seed: int = 5, packs: bool = True) -> Chain:
    graph, values = model(seed)
    return Chain(graph, values, stages=2, threads=threads, packs=packs)


@pytest.mark.parametrize("layer", [-1, LAYERS_MAX + 1, 2**62, True, 1])
def test_attention_layers_need_distinct_numbers_within_limits(layer: int) -> None:
    graph, _ = model(5)
    (entry,) = graph.entries
    nodes = list(entry.nodes)
    place = next(n for n, node in enumerate(nodes) if graph.operators[node.operator] == ATTEND)
    arguments = (*nodes[place].arguments[:3], layer, *nodes[place].arguments[4:])
    nodes[place] = replace(nodes[place], arguments=arguments)
    changed = replace(graph, entries=(replace(entry, nodes=tuple(nodes)),))
    with pytest.raises(RemoteProtocolError, match="not have its own number"):
        check_graph(changed)


def bits(stage: StageExecutor) -> bytes:
    reply = stage.handle(FindBits())
    assert isinstance(reply, BitsFound)
    return reply.bits


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_replicas_share_a_bit_class_that_depends_on_threads() -> None:
    first, second = chain(), chain()
    classes = [bits(stage) for stage in first.stages]
    assert all(classes)
    assert classes == [bits(stage) for stage in second.stages]
    assert not set(classes) & {bits(stage) for stage in chain(seed=6).stages}
    assert not set(classes) & {bits(stage) for stage in chain(2).stages}


def test_a_probe_leaves_sessions_and_pages_unchanged() -> None:
    held = chain()
    ids = list(range(60))
    held.logits([Unit(session(1), 0, 50, 1)], ids[:50])
    for stage in held.stages:
        bits(stage)
    found = held.logits([Unit(session(1), 50, 10, 10)], ids[50:])
    assert torch.equal(found, chain().logits([Unit(session(2), 0, 60, 10)], ids))


def test_a_stage_whose_results_depend_on_batch_size_has_no_bit_class(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without padding and packing, torch uses a different kernel for one row than for several.
    monkeypatch.setattr("partition.execute.serving.ROWS", 1)
    assert b"" in [bits(stage) for stage in chain(packs=False).stages]
