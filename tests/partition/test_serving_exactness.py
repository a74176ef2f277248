"""A served session has the same bits in any form: whole, in parts, token by token, and among any other
sessions."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.capture import capture
from partition.capture.models.gpt import gpt
from partition.capture.serving import capture_for_serving
from partition.model.check import check_graph
from partition.model.graph import Graph, decode_graph, encode_graph
from partition.model.serving import serving_graph
from partition.stage import CopySession, Refused, Unit
from tests.partition.serving_world import Chain, session

CONTEXT = 160
SESSIONS = 3
TYPES = [torch.float32, torch.float64, torch.bfloat16]
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 2e-2}
"""The allowed distance of served logits from the model's logits, the largest of which is about one."""


@cache
def world(threads: int, dtype: torch.dtype) -> tuple[Chain, torch.Tensor, torch.Tensor]:
    """A chain of two stages of a gpt, or of a llama in half precision; texts, and the model's own logits for
    them.
    """
    torch.manual_seed(5)
    if dtype == torch.bfloat16:
        return half_world(threads)
    task = gpt((CONTEXT,), 65, layers=2, heads=4, width=32, dropout=0.1)
    task.model.to(dtype)
    captured = capture(
        task.model, task.example_inputs, labels=task.labels, loss=task.loss, dynamic=task.dynamic
    )
    graph = serving_graph(captured.graph, CONTEXT)
    check_graph(decode_graph(encode_graph(graph)))
    chain = Chain(graph, task.model.state_dict(), stages=2, threads=threads)
    ids = torch.randint(0, 65, (SESSIONS, CONTEXT))
    with torch.no_grad():
        wanted = task.model.eval()(ids)
    return chain, ids, wanted


@cache
def half_model() -> tuple[Any, Graph]:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=65,
        max_position_embeddings=CONTEXT,
    )
    torch.manual_seed(5)
    model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    return model, capture_for_serving(model).graph


def half_world(threads: int) -> tuple[Chain, torch.Tensor, torch.Tensor]:
    model, graph = half_model()
    check_graph(decode_graph(encode_graph(graph)))
    chain = Chain(graph, model.state_dict(), stages=2, threads=threads)
    ids = torch.randint(0, 65, (SESSIONS, CONTEXT))
    with torch.no_grad():
        return chain, ids, model(ids, use_cache=False).logits


@pytest.fixture(params=[1, 2])
def threads(request: Any) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@cache
def alone(threads: int, dtype: torch.dtype) -> torch.Tensor:
    """Serve each session alone, and all in one call."""
    chain, ids, _ = world(threads, dtype)
    found = []
    for row in range(SESSIONS):
        found.append(chain.logits([Unit(session(row), 0, CONTEXT, CONTEXT)], ids[row].tolist()))
    return torch.stack(found)


parts = st.lists(
    st.lists(st.tuples(st.integers(0, SESSIONS - 1), st.integers(1, 70)), min_size=1, max_size=SESSIONS),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_served_logits_equal_those_of_the_model(threads: int, dtype: torch.dtype) -> None:
    _, _, wanted = world(threads, dtype)
    found = alone(threads, dtype)
    assert (found - wanted).abs().max() <= BOUNDS[dtype] * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_way_of_serving_gives_the_same_bits(threads: int, dtype: torch.dtype) -> None:
    chain, ids, _ = world(threads, dtype)
    wanted = alone(threads, dtype)

    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(plan=parts, singles=st.integers(0, 6))
    def serve(plan: list[list[tuple[int, int]]], singles: int) -> None:
        for row in range(SESSIONS):
            chain.end(session(row))
        reached = [0] * SESSIONS
        for batch in [*plan, *[[(row, 1) for row in range(SESSIONS)]] * singles]:
            units, tokens, rows = [], [], []
            for row, count in dict(batch).items():
                count = min(count, CONTEXT - reached[row])
                if count:
                    units.append(Unit(session(row), reached[row], count, count))
                    tokens += ids[row, reached[row] : reached[row] + count].tolist()
                    rows.append(wanted[row, reached[row] : reached[row] + count])
                    reached[row] += count
            if units:
                assert torch.equal(chain.logits(units, tokens), torch.cat(rows))

    serve()


def test_a_session_resumes_from_any_earlier_position() -> None:
    chain, ids, _ = world(1, torch.float32)
    wanted = alone(1, torch.float32)
    other = torch.randint(0, 65, (30,))
    chain.logits([Unit(session(0), 0, 100, 1)], ids[0, :100].tolist())
    chain.logits([Unit(session(0), 70, 30, 1)], other.tolist())
    found = chain.logits([Unit(session(0), 70, 50, 50)], ids[0, 70:120].tolist())
    assert torch.equal(found, wanted[0, 70:120])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_forked_session_has_the_same_bits_as_a_fresh_one(threads: int, dtype: torch.dtype) -> None:
    """The fork starts at the border of a page and within a page. The original continues, rolls back, and ends
    alongside."""
    chain, ids, _ = world(threads, dtype)
    wanted = alone(threads, dtype)[0]
    for row in range(SESSIONS):
        chain.end(session(row))
    other = torch.randint(0, 65, (CONTEXT,), generator=torch.Generator().manual_seed(1))
    for begin in (40, 64, 100, 128, 159):
        mixed = torch.cat((ids[0, :begin], other[begin:])).tolist()
        chain.end(session(0))
        fresh = chain.logits([Unit(session(0), 0, CONTEXT, CONTEXT)], mixed)
        chain.end(session(0))
        chain.logits([Unit(session(0), 0, begin, 1)], ids[0, :begin].tolist())
        chain.fork(session(1), session(0), begin)
        chain.fork(session(2), session(1), begin)
        left = CONTEXT - begin
        both = [Unit(session(row), begin, left, left) for row in (0, 1)]
        found = chain.logits(both, [*ids[0, begin:].tolist(), *mixed[begin:]])
        assert torch.equal(found[:left], wanted[begin:])
        assert torch.equal(found[left:], fresh[begin:])
        back = max(0, begin - 30)
        parts = min(40, CONTEXT - back)
        again = chain.logits([Unit(session(1), back, parts, parts)], ids[0, back : back + parts].tolist())
        assert torch.equal(again, wanted[back : back + parts])
        chain.end(session(0))
        found = chain.logits([Unit(session(2), begin, 1, 1)], [mixed[begin]])
        assert torch.equal(found, fresh[begin : begin + 1])
        for row in range(SESSIONS):
            chain.end(session(row))
        for stage in chain.stages:
            pages = stage._served.pages  # type: ignore[union-attr]  # it serves
            assert len(pages._free) == pages._count
            assert not pages._shared


def test_shared_pages_are_copied_only_on_write() -> None:
    chain, ids, _ = world(1, torch.float32)
    page = 64 * 2 * 32 * 4  # for the one layer of a stage
    small = Chain(chain.graph, chain.values, stages=2, cache_bytes=4 * page)
    small.logits([Unit(session(0), 0, 150, 1)], ids[0, :150].tolist())
    for row in range(1, 6):
        small.fork(session(row), session(0), 140)  # six sessions of three pages, and only four pages
    found = small.logits([Unit(session(1), 140, 1, 1)], ids[0, 140:141].tolist())
    assert torch.equal(found, alone(1, torch.float32)[0, 140:141])
    refused = small.ask([Unit(session(2), 140, 1, 1)], ids[0, 140:141].tolist())
    assert isinstance(refused, Refused)
    assert (refused.fault, refused.session) == ("room", session(2))
    small.end(session(1))
    found = small.logits([Unit(session(2), 140, 1, 1)], ids[0, 140:141].tolist())
    assert torch.equal(found, alone(1, torch.float32)[0, 140:141])


def test_a_session_cannot_start_from_missing_tokens() -> None:
    chain, ids, _ = world(1, torch.float32)
    for row in range(SESSIONS):
        chain.end(session(row))
    chain.logits([Unit(session(0), 0, 10, 1)], ids[0, :10].tolist())
    for base, tokens in ((session(0), 11), (session(9), 1)):
        refused = chain.stages[0].handle(CopySession(session(1), base, tokens))
        assert isinstance(refused, Refused)
        assert refused.fault == "position"
    assert isinstance(chain.stages[0].handle(CopySession(session(0), session(0), 5)), Refused)


def test_a_session_refuses_a_unit_that_does_not_follow() -> None:
    chain, ids, _ = world(1, torch.float32)
    for row in range(SESSIONS):
        chain.end(session(row))
    chain.logits([Unit(session(0), 0, 10, 1)], ids[0, :10].tolist())
    units = [Unit(session(0), 10, 1, 1), Unit(session(1), 5, 1, 1)]
    refused = chain.ask(units, [1, 2])
    assert isinstance(refused, Refused)
    assert (refused.fault, refused.session) == ("position", session(1))
    # No session has changed.
    found = chain.logits(units[:1], ids[0, 10:11].tolist())
    assert torch.equal(found, alone(1, torch.float32)[0, 10:11])


def test_a_session_without_a_page_fits_once_another_ends() -> None:
    chain, ids, _ = world(1, torch.float32)
    page = 64 * 2 * 32 * 4  # for the one layer of a stage
    small = Chain(chain.graph, chain.values, stages=2, cache_bytes=3 * page)
    small.logits([Unit(session(0), 0, 128, 1)], ids[0, :128].tolist())
    refused = small.ask([Unit(session(1), 0, 65, 1)], ids[1, :65].tolist())
    assert isinstance(refused, Refused)
    assert (refused.fault, refused.session) == ("room", session(1))
    small.end(session(0))
    found = small.logits([Unit(session(1), 0, 65, 65)], ids[1, :65].tolist())
    assert torch.equal(found, alone(1, torch.float32)[1, :65])


def test_an_unknown_token_spoils_no_session() -> None:
    chain, ids, _ = world(1, torch.float32)
    chain.end(session(2))
    chain.logits([Unit(session(2), 0, 20, 1)], ids[2, :20].tolist())
    refused = chain.ask([Unit(session(2), 20, 2, 2)], [3, 65])
    assert isinstance(refused, Refused)
    assert (refused.part, refused.fault) == ("input", "values")
    found = chain.logits([Unit(session(2), 20, 9, 9)], ids[2, 20:29].tolist())
    assert torch.equal(found, alone(1, torch.float32)[2, 20:29])
