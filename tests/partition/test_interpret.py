"""The interpreter computes like torch, frees values early, and changes no value in place."""

import gc
import weakref
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from crypto.errors import RemoteProtocolError
from partition.execute.interpret import Program, compile_entry
from partition.execute.seeds import seed_of
from partition.model.graph import Graph, StageGraph, TypeName
from partition.model.operators import OPERATORS
from tests.partition.graphs import GraphBuilder, whole
from tests.partition.hand_models import Cnn, Gpt, cnn_graph, gpt_graph

CPU = torch.device("cpu")
torch.set_num_threads(1)  # these tensors are too small to be worth a second one


def compiled(graph: Graph | StageGraph, entry: str = "train", *, train: bool = False) -> Program:
    stage = whole(graph) if isinstance(graph, Graph) else graph
    return compile_entry(stage, entry, train=train, device=CPU)


def by_row(graph: Graph, model: torch.nn.Module) -> dict[int, torch.Tensor]:
    tensors = model.state_dict(keep_vars=True)
    return {row: tensors[parameter.names[0]] for row, parameter in enumerate(graph.parameters)}


def gpt(dropout: float) -> tuple[Gpt, Graph]:
    torch.manual_seed(0)
    sizes = (50, 16, 24, 4, 2, dropout)
    return Gpt(*sizes), gpt_graph(*sizes)


def tokens(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(rows * 100 + length)
    both = torch.randint(0, 50, (2, rows, length), generator=draws)
    return both[0], both[1]


def one_node(operator: str, *arguments: Any, **keywords: Any) -> Graph:
    """Return `train` as one node over an input of 3 values; `...` marks the input."""
    build = GraphBuilder()
    build.symbol("batch")
    build.begin()
    x = build.input("x", "float32", 3)
    made = build.node(
        operator, *(x if argument is ... else argument for argument in arguments), owner="layer", **keywords
    )
    build.end(outputs=[made])
    return build.finish()


@pytest.mark.parametrize("train", [False, True])
def test_a_gpt_computes_bit_for_bit_what_the_module_computes(train: bool) -> None:
    model, graph = gpt(dropout=0.0)
    model.train(train)
    program = compiled(graph, train=train)
    for rows, length in ((3, 16), (1, 5), (3, 16)):
        given, wanted = tokens(rows, length)
        logits = model(given)
        loss = functional.cross_entropy(logits.view(-1, 50), wanted.view(-1), reduction="sum")
        results = program.run(by_row(graph, model), {}, {}, [given], [wanted], (rows, length))
        assert torch.equal(results.outputs[0], logits)
        assert results.loss is not None
        assert torch.equal(results.loss, loss)
        assert results.count is not None
        assert int(results.count) == rows * length
        assert int(results.metrics[0]) == int((logits.argmax(2) == wanted).sum())
        parameters = list(model.parameters())
        for ours, theirs in zip(
            torch.autograd.grad(results.loss, parameters), torch.autograd.grad(loss, parameters), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_dropout_repeats_with_its_seed_and_evaluation_draws_nothing() -> None:
    model, graph = gpt(dropout=0.5)
    rows = by_row(graph, model)
    given, wanted = tokens(2, 8)

    def logits(program: Program, step: int) -> torch.Tensor:
        seed = partial(seed_of, b"run", step, 7, "train")
        return program.run(rows, {}, {}, [given], [wanted], (2, 8), seed).outputs[0]

    program = compiled(graph, train=True)
    first = logits(program, 0)
    torch.manual_seed(1)
    assert torch.equal(logits(program, 0), first)
    assert not torch.equal(logits(program, 1), first)
    before = torch.random.get_rng_state()
    assert torch.equal(logits(compiled(graph), 0), model.eval()(given))
    assert torch.equal(before, torch.random.get_rng_state())


def test_every_random_node_draws_separately() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x = build.input("x", "float32", batch, 1000)
    build.end(outputs=[build.node("dropout", x, 0.5, True), build.node("dropout", x, 0.5, True)])
    one, other = (
        compiled(build.finish(), train=True)
        .run({}, {}, {}, [torch.ones(1, 1000)], [], (1,), partial(seed_of, b"run", 0, 0, "train"))
        .outputs
    )
    assert not torch.equal(one, other)
    assert set(one.flatten().tolist()) == {0.0, 2.0}


def test_draws_while_evaluating_are_seeded_too() -> None:
    program = compiled(one_node("rand", [4]))
    seed = partial(seed_of, b"run", 0, 0, "train")
    one, other = (program.run({}, {}, {}, [torch.ones(3)], [], (1,), seed).outputs[0] for _ in range(2))
    assert torch.equal(one, other)


def test_a_batch_norm_leaves_the_running_statistics_unchanged() -> None:
    torch.manual_seed(0)
    model, graph = Cnn(4), cnn_graph(4)
    rows = by_row(graph, model)
    before = {row: tensor.detach().clone() for row, tensor in rows.items()}
    images, labels = torch.randn(6, 1, 8, 8), torch.randint(0, 5, (6,))
    program = compiled(graph, train=True)
    results = program.run(rows, {}, {}, [images], [labels], (6,))
    assert all(torch.equal(before[row], tensor) for row, tensor in rows.items())
    with torch.no_grad():
        conv = model.conv1(images)
    mean, variance = results.statistics[0]
    assert torch.allclose(mean, conv.mean((0, 2, 3)))
    assert torch.allclose(variance, conv.var((0, 2, 3), unbiased=True))
    assert [(norm.ordinal, norm.uses, norm.momentum) for norm in program.norms] == [(0, 2, 0.2), (1, 2, 0.2)]
    assert torch.equal(results.outputs[0], model(images))
    evaluated = compiled(graph).run(rows, {}, {}, [images], [labels], (6,))
    assert torch.equal(evaluated.outputs[0], model.eval()(images))
    assert evaluated.statistics == []


def test_a_batch_norm_without_running_statistics_evaluates_by_the_batch() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    x = build.input("x", "float32", batch, 2)
    build.end(outputs=[build.node("batch_norm", x, None, None, None, None, True, 0.1, 1e-5, True)])
    x_2 = torch.tensor([[1.0, 5.0], [3.0, 9.0]])
    for train in (False, True):
        found = compiled(build.finish(), train=train).run({}, {}, {}, [x_2], [], (2,)).outputs[0]
        assert torch.allclose(found, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]), atol=1e-4)


def test_an_omitted_argument_has_its_value_for_evaluation() -> None:
    """The interpreter switches only explicit arguments to evaluation. So the default of an omitted argument
    must already be the value for evaluation.
    """
    for operator in OPERATORS.values():
        if not operator.name.startswith("aten."):
            continue  # an operator of ours, whose arguments are all explicit
        _, name, overload = operator.name.split(".")
        schema = getattr(getattr(torch.ops.aten, name), overload)._schema
        for index, content in operator.evaluate:
            argument = schema.arguments[index]
            assert not argument.has_default_value() or argument.default_value == content, operator.name


def test_sizes_lists_constants_and_named_arguments_reach_their_operators() -> None:
    build = GraphBuilder()
    batch, length = build.symbol("batch"), build.symbol("length")
    both = build.size("mul", batch, length)
    build.size("add", build.size("mul", both, 2), 2)  # the shape that `cat` will make
    build.begin()
    x = build.input("x", "float32", batch, length)
    ones = build.constant(np.ones(2, dtype="float32"), "ones")
    flat = build.node("view", x, [both])
    one, other = build.node(
        "split.sizes", build.node("cat", [flat, flat, ones]), [both, build.size("add", both, 2)]
    )
    scaled = build.node("add.Tensor", other, other, alpha=length)
    (only,) = build.node("split.Tensor", one, both)
    typed = build.node("sum", only, dtype=TypeName("float64"))
    build.end(outputs=[scaled, only, build.node("arange", length), typed])
    program = compiled(build.finish())
    for rows, columns in ((2, 3), (4, 5)):
        matrix = torch.randn(rows, columns)
        constants = {0: torch.ones(2)}
        scaled_, only_, places, total = program.run({}, constants, {}, [matrix], [], (rows, columns)).outputs
        expected = torch.cat([matrix.reshape(-1), torch.ones(2)])
        assert torch.allclose(scaled_, expected * (1 + columns))
        assert torch.equal(only_, matrix.reshape(-1))
        assert torch.equal(places, torch.arange(columns))
        assert total.dtype == torch.float64


class _Living(TorchDispatchMode):
    """Return the largest number of operator results alive simultaneously."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # so in torch
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.made.append(weakref.ref(made))
        self.most = max(self.most, sum(ref() is not None for ref in self.made))
        return made


def test_a_value_is_dropped_after_its_last_use() -> None:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin()
    value = build.input("x", "float32", batch)
    for _ in range(20):
        value = build.node("relu", value)
        build.node("neg", value)  # no node reads it
    build.end(outputs=[build.node("sum", value)])
    program = compiled(build.finish())
    gc.collect()
    vector = torch.randn(4)
    with _Living() as living, torch.no_grad():
        program.run({}, {}, {}, [vector], [], (4,))
    assert len(living.made) == 41
    assert living.most <= 3


def test_fake_and_meta_tensors_pass_through_like_real_ones() -> None:
    model, graph = gpt(dropout=0.1)
    program = compile_entry(whole(graph), "train", train=True, device=torch.device("meta"))
    rows = {row: torch.empty_like(tensor, device="meta") for row, tensor in by_row(graph, model).items()}
    given = torch.empty((4, 9), dtype=torch.int64, device="meta")
    assert program.run(rows, {}, {}, [given], [given], (4, 9)).outputs[0].shape == (4, 9, 50)
    with FakeTensorMode() as mode:
        fakes = {row: mode.from_tensor(tensor) for row, tensor in by_row(graph, model).items()}
        ids = torch.zeros((4, 9), dtype=torch.int64)
        results = compiled(graph, train=True).run(fakes, {}, {}, [ids], [ids], (4, 9), lambda node: node)
        assert results.loss is not None
        results.loss.backward()  # type: ignore[no-untyped-call]  # so in torch
    model2, cnn = Cnn(4), cnn_graph(4)
    with FakeTensorMode() as mode:
        fakes = {row: mode.from_tensor(tensor) for row, tensor in by_row(cnn, model2).items()}
        images, labels = torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)
        results = compiled(cnn, train=True).run(fakes, {}, {}, [images], [labels], (2,))
    assert [tuple(mean.shape) for mean, _ in results.statistics] == [(4,), (4,)]


class _Marked(torch.Tensor):
    """A minimal subclass."""


def test_parameters_may_be_of_a_subclass() -> None:
    model, graph = gpt(dropout=0.0)
    given, wanted = tokens(2, 6)
    marked = {row: tensor.detach().as_subclass(_Marked) for row, tensor in by_row(graph, model).items()}
    found = compiled(graph).run(marked, {}, {}, [given], [wanted], (2, 6)).outputs[0]
    assert torch.equal(torch.Tensor(found), model(given))


def test_an_operator_that_raises_is_named_with_its_owner() -> None:
    model, graph = gpt(dropout=0.0)
    given, wanted = tokens(2, 6)
    program = compiled(graph)
    for bad in (50, -1):
        with pytest.raises(
            RemoteProtocolError, match=r"aten\.embedding\.default of tokens: index out of range"
        ):
            program.run(by_row(graph, model), {}, {}, [given.clone().fill_(bad)], [wanted], (2, 6))
        with pytest.raises(RemoteProtocolError, match=r"aten\.cross_entropy_loss\.default of the model: "):
            program.run(by_row(graph, model), {}, {}, [given], [wanted.clone().fill_(bad)], (2, 6))


def test_a_graph_with_unknown_names_is_refused() -> None:
    stage = whole(one_node("relu", ...))
    with pytest.raises(RemoteProtocolError, match="entry point"):
        compiled(stage, "decode")
    with pytest.raises(RemoteProtocolError, match="operator"):
        compiled(msgspec.structs.replace(stage, operators=("aten.save.default",)))
    entry = stage.entries[0]
    for change in ({"outputs": (9,)}, {"inputs": ()}, {"nodes": entry.nodes * 2}):
        wrong = msgspec.structs.replace(entry, **change)
        with pytest.raises(RemoteProtocolError, match="value"):
            compiled(msgspec.structs.replace(stage, entries=(wrong,)))
