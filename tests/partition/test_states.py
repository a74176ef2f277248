"""States of sessions: which states are written in place, and that decoding equals eager execution."""

from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from partition.capture import capture
from partition.capture.models.gpt import GPT, GPTConfiguration
from partition.execute.alias import writable_in_place
from partition.execute.interpret import compile_entry
from partition.model.cut import cut, legal_positions
from partition.model.graph import Graph, GraphNode, Items, StageEntry, StateValue, Value
from partition.stage import SESSIONS_MAX, EndSession, Forward, Import, Ran, Refused, RunEntryPoint, StageDone
from partition.stage_layout import arena_bytes
from tests.partition.effort import lines_run
from tests.partition.graphs import GraphBuilder, whole
from tests.partition.held import Held, bundle, tensors_of

torch.set_num_threads(1)
PLACES = 128


def cache(kind: str = "plain") -> Graph:
    """Return a graph whose `decode` writes a row into a cache and returns the sum over it. `kind` says which
    node also reads which state.
    """
    build = GraphBuilder()
    build.symbol("batch")
    build.begin("decode")
    row = build.input("row", "float32", 1, 4)
    place = build.input("place", "int64", 1)
    state = build.state("cache", "float32", PLACES, 4)
    outputs = []
    view = build.node("slice.Tensor", state, 0, 0, 1)
    early = build.node("sum", view)
    value: Any = state
    if kind == "chain":
        value = build.node("index_copy", value, 0, place, row)
        row = build.node("mul.Tensor", row, row)
    if kind == "beside":
        row = view
    new = build.node("index_copy", value, 0, place, row)
    if kind == "late":
        outputs.append(build.node("sum", state))
    if kind == "late view":
        outputs.append(build.node("sum", view))
    if kind == "output view":
        outputs.append(view)
    if kind == "middle":
        again = build.node("index_copy", new, 0, place, build.node("mul.Tensor", row, row))
        outputs.append(build.node("sum", new))
        new = again
    updates = [(state, new)]
    if kind == "two states":
        updates.append((build.state("copy", "float32", PLACES, 4), new))
    outputs += [early, build.node("sum", new)]
    build.end(outputs=outputs, updates=updates)
    return build.finish()


def decode(held: Held, session: bytes, row: float, place: int) -> RunEntryPoint:
    row_14 = np.full((1, 4), row, dtype="float32")
    return RunEntryPoint(session, "decode", bundle(row_14, np.array([place]), sizes=(1,)))


@pytest.mark.parametrize(
    ("kind", "in_place"),
    [
        ("plain", (0,)),
        ("chain", (0,)),
        ("two states", (0,)),
        ("beside", ()),
        ("late", ()),
        ("late view", ()),
        ("output view", ()),
        ("middle", ()),
    ],
)
def test_a_state_is_written_in_place_only_if_not_read_later(kind: str, in_place: tuple[int, ...]) -> None:
    program = compile_entry(whole(cache(kind)), "decode", train=False, device=torch.device("cpu"))
    assert program.in_place == in_place


@pytest.mark.parametrize("kind", ["plain", "chain", "two states", "beside", "late", "late view", "middle"])
def test_writing_in_place_does_not_change_the_results(kind: str) -> None:
    graph = cache(kind)
    held = Held(whole(graph), (1,))
    # The functional version of the same graph: `train` compiles no in-place variants, and nothing in it is
    # trained.
    program = compile_entry(whole(graph), "decode", train=True, device=torch.device("cpu"))
    states = {row: torch.zeros(PLACES, 4) for row in range(len(graph.states))}
    for step in range(5):
        row, place = torch.full((1, 4), step + 1.0), torch.tensor([step * 7 % 3])
        results = program.run({}, {}, states, [row, place], [], (1,))
        states = states | {number: tensor.clone() for number, tensor in results.updates.items()}
        reply = held.ask(decode(held, b"one", step + 1.0, step * 7 % 3), Ran)
        for ours, theirs in zip(tensors_of(reply.output), results.outputs, strict=True):
            assert torch.equal(ours.reshape(theirs.shape), theirs)


@pytest.mark.parametrize("kind", ["chain", "states", "views"])
def test_states_to_write_in_place_are_found_in_linear_time(kind: str) -> None:
    """A hostile peer writes the entry point: a chain of updates, many states, and views of many tensors
    each."""
    operators = ("aten.masked_fill.Scalar", "aten.broadcast_tensors.default")

    def lines(count: int) -> int:
        nodes: list[GraphNode] = []
        for number in range(count):
            state = StateValue(number if kind == "states" else 0)
            old = Value(number) if number and kind == "chain" else state
            if kind == "views":
                first = number * 8
                taken = Items(tuple(Value(max(0, first - place)) for place in range(8)))
                nodes.append(GraphNode(number, 1, (taken,), (), tuple(range(first + 1, first + 9))))
            else:
                nodes.append(GraphNode(number, 0, (old, Value(0), 0.0), (), (number + 1,)))
        updates = {"chain": [(0, count)], "states": [(row, row + 1) for row in range(count)], "views": []}
        entry = StageEntry(
            "decode", (0,), (), tuple(nodes), (), (), (), (), None, None, (), tuple(updates[kind]), ()
        )
        found: list[Any] = []
        count_lines = lines_run(lambda: found.append(writable_in_place(entry, operators)))
        rows, twins = found[0]
        assert len(rows) == len(updates[kind])
        assert len(twins) == (0 if kind == "views" else count)
        return count_lines

    # The graph has eight times the nodes. A comparison of every pair would take 64 times as many lines.
    assert lines(1_000) < 10 * lines(125)


def test_a_hundred_steps_copy_no_cache() -> None:
    held = Held(whole(cache()), (1,))
    held.ask(decode(held, b"one", 1.0, 0), Ran)
    states = held.executor._sessions._kept[b"one"]
    buffer = states[0]
    for place in range(1, 101):
        total = held.ask(decode(held, b"one", 1.0, place), Ran)
        assert float(tensors_of(total.output)[1]) == 4.0 * (place + 1)
    assert states[0] is buffer


def test_sessions_are_separate_bounded_and_restart_after_their_end() -> None:
    held = Held(whole(cache()), (1,))

    def total(session: bytes, place: int) -> float:
        return float(tensors_of(held.ask(decode(held, session, 1.0, place), Ran).output)[1])

    assert [total(b"one", 0), total(b"one", 1), total(b"two", 0)] == [4.0, 8.0, 4.0]
    for number in range(SESSIONS_MAX - 2):
        total(b"%d" % number, 0)
    assert "sessions are open" in held.ask(decode(held, b"more", 1.0, 0), Refused).reason
    held.ask(EndSession(b"one"), StageDone)
    held.ask(EndSession(b"never begun"), StageDone)
    assert total(b"more", 0) == 4.0
    held.ask(EndSession(b"two"), StageDone)
    assert total(b"one", 5) == 4.0


def test_sessions_take_no_more_memory_than_was_offered() -> None:
    size = PLACES * 4 * 4
    held = Held(whole(cache()), (1,), memory_bytes_max=2 * size)
    held.ask(decode(held, b"one", 1.0, 0), Ran)
    held.ask(decode(held, b"two", 1.0, 0), Ran)
    assert "memory" in held.ask(decode(held, b"three", 1.0, 0), Refused).reason
    held.ask(EndSession(b"one"), StageDone)
    held.ask(decode(held, b"three", 1.0, 0), Ran)


def test_a_refused_call_starts_no_session_and_may_end_one() -> None:
    held = Held(whole(cache()), (1,))
    assert "aten.index_copy" in held.ask(decode(held, b"one", 1.0, PLACES), Refused).reason
    assert not held.executor._sessions.has(b"one")
    held.ask(decode(held, b"one", 1.0, 0), Ran)
    # The first write may have happened before the exception.
    assert "the session is over" in held.ask(decode(held, b"one", 1.0, PLACES), Refused).reason
    assert float(tensors_of(held.ask(decode(held, b"one", 1.0, 3), Ran).output)[1]) == 4.0
    late = Held(whole(cache("late")), (1,))
    late.ask(decode(late, b"one", 1.0, 0), Ran)
    late.ask(decode(late, b"one", 1.0, PLACES), Refused)
    assert float(tensors_of(late.ask(decode(late, b"one", 1.0, 3), Ran).output)[2]) == 8.0


def test_running_an_unknown_entry_point_is_refused() -> None:
    held = Held(whole(cache()), (1,))
    given = bundle(np.zeros((1, 4), "float32"), np.array([0]), sizes=(1,))
    assert "no entry point" in held.ask(RunEntryPoint(b"one", "encode", given), Refused).reason
    assert "no entry point" in held.ask(Forward(0, 0, True, given), Refused).reason
    held.ask(RunEntryPoint(b"one", "decode", bundle(np.zeros((1, 4), "float32"), sizes=(1,))), Refused)
    assert sum(arena_bytes(held.specification).values()) == 0


def test_a_gpt_decodes_alike_over_three_stages_and_in_one_process() -> None:
    torch.manual_seed(0)
    configuration = GPTConfiguration(40, PLACES, layers=3, heads=2, width=16, cache_rows=2)
    model = GPT(configuration).double().eval()
    tokens, rows, starts = torch.zeros((2, 5), dtype=torch.int64), torch.arange(2), torch.zeros(2).long()
    captured = capture(
        model,
        (tokens,),
        dynamic={"length": (1, PLACES, {0: 1})},
        entries={"decode": ("decode", (tokens, rows, starts), {"length": (1, PLACES, {0: 1})})},
    )
    legal = legal_positions(captured.graph)
    stages = cut(captured.graph, captured.hash, [legal[len(legal) // 3], legal[2 * len(legal) // 3]])
    chain = [Held(stage, (2, PLACES)) for stage in stages]
    state = model.state_dict()
    for held in chain:
        names = [parameter.names[0] for parameter in held.specification.graph.parameters]
        data = safetensors.numpy.save({name: state[name].numpy() for name in names})
        held.ask(Import(data), StageDone)
        program = compile_entry(held.specification.graph, "decode", train=False, device=torch.device("cpu"))
        assert program.in_place == held.specification.graph.state_rows
    given, places = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(100):
            expected = model.decode(given, rows, places)
            payload = bundle(given.numpy(), rows.numpy(), places.numpy(), sizes=(2, given.shape[1]))
            for held in chain:
                payload = held.ask(RunEntryPoint(b"talk", "decode", payload), Ran).output
            (logits,) = tensors_of(payload)
            assert (logits - expected).abs().max() <= 1e-9
            places = places + given.shape[1]
            given = expected[:, -1:].argmax(2)
