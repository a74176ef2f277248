"""The proof that a served graph answers like its model, before it is offered.

Random sessions of several lengths go through the graph twice, in the interpreter that a stage uses: first
each prompt in one unit and alone; then in parts and by single tokens, with all sessions in one ragged batch.
Both must give the logits of the model itself on whole sequences. If there is no model, because a file
contains only the graph that serves, the two must agree with each other. That fails as soon as anything other
than `attend` mixes tokens, such as a convolution over the sequence, its mean, or attention that was not
rewritten.

The proof does not reach beyond its longest session, so longer attention windows are not tested. It costs
about fifteen passes over the weights and `FLOPS` of arithmetic. For a captured file, whose own values it does
not read, it needs memory for the largest parameters. It does not copy a model of transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import inf, prod
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

from crypto.errors import RemoteProtocolError
from partition.capture.errors import CaptureRefused
from partition.execute.attention import ROWS, Batch, padded, serving
from partition.execute.interpret import DTYPES, Program, compile_entry
from partition.execute.pages import PAGE_TOKENS, Pages, shape_of_layer
from partition.execute.tensor_io import tensor_of
from partition.model.cut import cut
from partition.model.graph import (
    EVALUATE,
    SERVE,
    Graph,
    GraphNode,
    Size,
    StageEntry,
    StageGraph,
    TensorType,
    values_of,
)
from partition.model.serving import attention_layers, count_words, is_whole
from partition.model.sizes import evaluate, shape_of
from partition.stage import Unit

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Maximum difference, as a share of the largest logit. Rounding of float32 and float64 stays a hundred times
below it. Half precision stays a few times below: its products and activations are rounded as in the model,
but attention is not, and one differing bit causes larger differences in later layers."""
FLOPS = 20_000_000_000
"""Maximum FLOPs of one session's products, for large models: about a second of one core."""
TOKENS_LEAST, TOKENS_MOST = 8, 80
"""Number of tokens in the longest session: enough for parts and single tokens, and more than a page."""
STEPS = 5
"""Number of tokens of each session that come one at a time."""
_SHIFTS = 4_096
"""Maximum distance between the starting points of parameters that share random numbers."""
_SEED = 20
_CPU = torch.device("cpu")
_TOKENS = Size(0)

Reference = Callable[[Tensor], Tensor]
"""A function that returns the logits, [tokens, vocabulary], for the ids of one session, [tokens]."""


class ServingDiffers(CaptureRefused):
    """The graph that serves differs from the model."""


@dataclass(frozen=True)
class ServingProof:
    """The result of a comparison: the tokens of all sessions, the largest relative difference, and the
    tolerance. `has_model` says whether the graph was compared with the model, or only with itself."""

    tokens: int
    error: float
    tolerance: float
    has_model: bool


def prove_folder_served(model: nn.Module, graph: Graph) -> ServingProof:
    """Compare a graph that serves a model of transformers with that model, which uses its own attention.

    Raises:
        CaptureRefused: the graph differs from the model.
    """

    def logits(ids: Tensor) -> Tensor:
        runner: Any = model
        found: Tensor = runner(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
        return found

    was_training = model.training
    model.eval()
    try:
        return _prove(graph, _held(model, graph), _tried(logits), (2, TOKENS_MOST))
    finally:
        model.train(was_training)


def prove_encoder_served(model: nn.Module, graph: Graph, pool: Callable[[Tensor], Tensor]) -> ServingProof:
    """Compare a graph that makes one vector of each text with its model, which uses its own attention. `pool`
    computes the vector from those of all tokens.

    Raises:
        CaptureRefused: the graph differs from the model.
    """

    def vectors(ids: Tensor) -> Tensor:
        runner: Any = model
        return pool(runner(input_ids=ids.unsqueeze(0)).last_hidden_state[0]).expand(len(ids), -1)

    # Some models count only the positions of tokens other than padding; a text here has no padding.
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    without = -1 if padding is None else int(padding)
    return _prove(graph, _held(model, graph), _tried(vectors), (2, TOKENS_MOST), without)


def _held(model: nn.Module, graph: Graph) -> dict[int, Tensor]:
    """Return the module's values by the graph's rows."""
    held: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    held |= dict(model.named_parameters(remove_duplicate=False))
    return {number: held[row.names[0]].detach() for number, row in enumerate(graph.parameters)}


def _tried(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function with the model's own exceptions turned into refusals."""

    def reference(ids: Tensor) -> Tensor:
        try:
            return run(ids)
        except Exception as error:  # a library's model may raise anything
            told = " ".join(str(error).split())[:300]
            raise CaptureRefused(f"the model itself fails: {type(error).__name__}: {told}") from error

    return reference


def prove_graph_served(served: Graph, captured: Graph) -> ServingProof:
    """Compare a graph that serves with the captured graph from which it was made, at random values. If the
    two are the same graph, it is compared with itself.

    Raises:
        CaptureRefused: the graph differs from the model.
    """
    values = random_values(captured)
    if captured.entries[0].name == SERVE:
        return _prove(served, values, None, (2, TOKENS_MOST))
    trained = _Trained(captured, values)
    return _prove(served, values, trained.logits, trained.lengths)


def random_values(graph: Graph) -> dict[int, Tensor]:
    """Return values for all parameters by row, drawn so that a deep model neither vanishes nor overflows.

    Parameters are views of the same numbers with different starting points, so they take only the memory of
    the largest ones.
    """
    shapes = [shape_of(row.type, ()) for row in graph.parameters]
    kinds = [
        (DTYPES[row.type.dtype], prod(shape[1:]) if len(shape) > 1 else 0)
        for row, shape in zip(graph.parameters, shapes, strict=True)
    ]
    generator = torch.Generator().manual_seed(_SEED)
    drawn: dict[tuple[torch.dtype, int], Tensor] = {}
    for kind in dict.fromkeys(kinds):
        most = max(prod(shape) for shape, each in zip(shapes, kinds, strict=True) if each == kind)
        dtype, inputs = kind
        numbers = torch.randn(most + _SHIFTS, generator=generator, dtype=dtype)
        drawn[kind] = numbers.mul_(inputs**-0.5) if inputs else numbers.mul_(0.1).add_(1)
    return {
        row: drawn[kind][(begin := 97 * row % _SHIFTS) : begin + prod(shape)].view(shape)
        for row, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
    }


def _prove(
    graph: Graph,
    parameters: Mapping[int, Tensor],
    reference: Reference | None,
    bounds: tuple[int, int],
    avoided: int = -1,
) -> ServingProof:
    dtypes = {DTYPES[row.type.dtype] for row in graph.parameters} & set(TOLERANCES)
    tolerance = max((TOLERANCES[dtype] for dtype in dtypes), default=TOLERANCES[torch.float32])
    lengths = _lengths(graph, bounds)
    generator = torch.Generator().manual_seed(_SEED)
    vocabulary = _vocabulary(graph)
    sessions = [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]
    sessions = [torch.where(ids == avoided, (avoided + 1) % vocabulary, ids) for ids in sessions]
    error = 0.0
    try:
        with torch.no_grad():
            whole = _Whole(graph, parameters, len(sessions))
            at_once = [
                whole.logits([Unit(_name(number), 0, len(ids), len(ids))], ids)
                for number, ids in enumerate(sessions)
            ]
            in_parts = _beside(whole, sessions) if whole.is_whole else _in_parts(whole, sessions)
            wanted = at_once if reference is None else [reference(ids) for ids in sessions]
            against = "of the whole prompt" if reference is None else "of the model"
            parts = "beside others" if whole.is_whole else "in parts and token by token"
            ways = (("at once", at_once), (parts, in_parts))
            for way, found in ways[reference is None :]:
                for logits, model in zip(found, wanted, strict=True):
                    far, place = _difference(logits, model)
                    error = max(error, far)
                    if not far <= tolerance:
                        where = "" if whole.is_whole else _mixing(whole, vocabulary)
                        raise ServingDiffers(
                            f"served {way}, its logits are not those {against}: they differ by "
                            f"{far:.1e} at token {place + 1} of {len(model)}, but only "
                            f"{tolerance:.0e} is allowed{where}"
                        )
    except RemoteProtocolError as problem:
        raise CaptureRefused(f"the graph that serves the model cannot be computed: {problem}") from problem
    return ServingProof(sum(lengths), error, tolerance, reference is not None)


def _lengths(graph: Graph, bounds: tuple[int, int]) -> list[int]:
    """Return the number of tokens of each session."""
    weights = sum(prod(shape_of(row.type, ())) for row in graph.parameters)
    longest = min(TOKENS_MOST, max(TOKENS_LEAST, FLOPS // max(1, 2 * weights)))
    least, most = max(1, bounds[0]), min(bounds[1], graph.symbols[2].maximum)
    wanted = (longest, longest // 2 + 1, longest // 4)
    return [max(least, min(length, most)) for length in wanted]


def _vocabulary(graph: Graph) -> int:
    entry = graph.entries[0]
    if is_whole(graph, entry):
        return count_words(graph)
    side = graph.types[entry.types[entry.outputs[0]]].shape[-1]
    if not isinstance(side, int):
        raise CaptureRefused("the last side of the model's logits is not fixed")
    return side


def _beside(whole: "_Whole", sessions: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of sessions that are served together, each in one unit, because an encoder's sessions
    have no parts."""
    units = [Unit(_name(len(sessions) + n), 0, len(ids), len(ids)) for n, ids in enumerate(sessions)]
    rows = whole.logits(units, torch.cat(list(sessions)))
    return list(torch.split(rows, [len(ids) for ids in sessions]))


def _in_parts(whole: "_Whole", sessions: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits of sessions that are served together: each in two parts, then by single tokens."""
    parts = []
    for ids in sessions:
        first = max(1, len(ids) - STEPS)
        ends = [*([first // 2] if first > 1 else []), first, *range(first + 1, len(ids) + 1)]
        parts.append(list(pairwise([0, *ends])))
    found: list[list[Tensor]] = [[] for _ in sessions]
    for turn in zip_longest(*parts):
        going = [(number, *part) for number, part in enumerate(turn) if part is not None]
        units = [
            Unit(_name(len(sessions) + number), begin, end - begin, end - begin)
            for number, begin, end in going
        ]
        logits = whole.logits(units, torch.cat([sessions[number][begin:end] for number, begin, end in going]))
        for (number, _, _), rows in zip(
            going, torch.split(logits, [unit.tokens for unit in units]), strict=True
        ):
            found[number].append(rows)
    return [torch.cat(rows) for rows in found]


def _difference(found: Tensor, wanted: Tensor) -> tuple[float, int]:
    """Return the distance of logits as a share of the largest, and the row in which it is largest."""
    if found.shape != wanted.shape or not bool(wanted.isfinite().all()):
        return inf, 0
    apart = (found - wanted.to(found.dtype)).abs().amax(-1)
    apart = torch.where(apart.isfinite(), apart, torch.full_like(apart, inf))
    far, place = apart.max(0)
    return float(far / wanted.abs().max().clamp_min(torch.finfo(wanted.dtype).tiny)), int(place)


def _name(number: int) -> bytes:
    return number.to_bytes(16, "big")


class _Whole:
    """A served graph, uncut, over parameters in any memory, with pages for the sessions of a proof."""

    def __init__(self, graph: Graph, parameters: Mapping[int, Tensor], sessions: int) -> None:
        self.graph = graph
        self.stage: StageGraph = cut(graph, bytes(32), ())[0]
        self.entry: StageEntry = self.stage.entry(SERVE)
        self.is_whole = is_whole(self.stage, self.entry)
        self._parameters = parameters
        self._constants = _constants(self.stage)
        self._program = compile_entry(self.stage, SERVE, train=False, device=_CPU)
        self._context = graph.symbols[2].maximum
        sizes = evaluate(graph.expressions, (ROWS, ROWS, self._context))
        layers, dtypes = {}, {torch.float32}
        for layer, key, value in attention_layers(self.stage, self.entry):
            layers[layer] = shape_of_layer(shape_of(key, sizes), shape_of(value, sizes))
            dtypes = {DTYPES[key.dtype]}
        (dtype,) = dtypes
        page_bytes = PAGE_TOKENS * dtype.itemsize * sum(each.elements for each in layers.values())
        pages_each = -(-TOKENS_MOST // PAGE_TOKENS)
        # For both ways, and for two more sessions in case they differ.
        count = (2 * sessions + 2) * pages_each
        self._pages = Pages(layers, dtype, count * page_bytes, _CPU)

    def logits(self, units: Sequence[Unit], ids: Tensor) -> Tensor:
        """Continue sessions. Return the logits of all their tokens."""
        return self._run(self._program, units, ids)[0][: len(ids)]

    def values(self, units: Sequence[Unit], ids: Tensor, numbers: Sequence[int]) -> list[Tensor]:
        """Continue sessions. Return the values with these numbers."""
        told = structs.replace(self.entry, outputs=tuple(numbers))
        stage = structs.replace(self.stage, entries=(told,))
        return self._run(compile_entry(stage, SERVE, train=False, device=_CPU), units, ids)

    def _run(self, program: Program, units: Sequence[Unit], ids: Tensor) -> list[Tensor]:
        size = padded(len(ids), ROWS)
        positions = torch.cat([torch.arange(unit.position, unit.position + unit.tokens) for unit in units])
        given = [torch.zeros(size, dtype=torch.int64) for _ in range(3)]
        for tensor, numbers in zip(given, (ids, positions, torch.arange(len(ids))), strict=True):
            tensor[: len(ids)] = numbers
        spans = self._pages.begin(units, self._context)
        with serving(Batch(self._pages, spans)):
            results = program.run(
                self._parameters,
                self._constants,
                {},
                [given[number] for number in self.entry.inputs],
                [],
                (size, size, self._context),
            )
        self._pages.commit(units)
        return results.outputs


class _Trained:
    """The model, represented by the graph that trains it: its first output on whole sequences."""

    def __init__(self, graph: Graph, parameters: Mapping[int, Tensor]) -> None:
        entry = next((each for each in graph.entries if each.name == EVALUATE), graph.entries[0])
        stage = cut(graph, bytes(32), ())[0]
        share = stage.entry(entry.name)
        output = entry.outputs[0]
        types = dict(share.types) | {output: entry.types[output]}
        told = structs.replace(share, outputs=(output,), types=tuple(sorted(types.items())))
        self._graph, self._entry = graph, entry
        self._parameters = parameters
        self._constants = _constants(stage)
        self._program = compile_entry(
            structs.replace(stage, entries=(told,)), entry.name, train=False, device=_CPU
        )
        length = graph.types[entry.inputs[0].type].shape[1]
        assert isinstance(length, Size)  # otherwise `serving_graph` has refused it
        self._length = length.row
        symbol = graph.symbols[length.row]
        self.lengths = symbol.minimum, symbol.maximum

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits of one session."""
        graph = self._graph
        sizes = [symbol.minimum for symbol in graph.symbols]
        sizes[self._length] = len(ids)
        table = evaluate(graph.expressions, sizes)
        shape = shape_of(graph.types[self._entry.inputs[0].type], table)
        labels = [self._zeros(graph.types[port.type], table) for port in self._entry.labels]
        states = {row: self._zeros(state.type, table) for row, state in enumerate(graph.states)}
        inputs = [ids.expand(shape).contiguous()]
        results = self._program.run(self._parameters, self._constants, states, inputs, labels, sizes)
        return results.outputs[0][0]

    def _zeros(self, kind: TensorType, table: Sequence[int]) -> Tensor:
        return torch.zeros(shape_of(kind, tuple(table)), dtype=DTYPES[kind.dtype])


def _constants(stage: StageGraph) -> dict[int, Tensor]:
    return {
        row: tensor_of(constant, _CPU)
        for row, constant in zip(stage.constant_rows, stage.constants, strict=True)
    }


# Finding where a graph mixes tokens


def _mixing(whole: _Whole, vocabulary: int) -> str:
    """Name the operators, and their module, whose result for a token changes if its session comes in
    parts."""
    tokens, last = TOKENS_LEAST, 2
    if whole.graph.symbols[2].maximum < tokens:
        return ""
    ids = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(_SEED))
    types = dict(whole.entry.types)
    sides: dict[int, int] = {}
    for node in whole.entry.nodes:
        for value in node.outputs:
            kind = whole.graph.types[types[value]]
            if kind.shape.count(_TOKENS) == 1 and DTYPES[kind.dtype].is_floating_point:
                sides[value] = kind.shape.index(_TOKENS)
    numbers = list(sides)
    first, second = (bytes([255]) * 15 + bytes([number]) for number in (0, 1))
    at_once = whole.values([Unit(first, 0, tokens, tokens)], ids, numbers)
    whole.values([Unit(second, 0, tokens - last, 1)], ids[:-last], numbers)
    in_parts = whole.values([Unit(second, tokens - last, last, last)], ids[-last:], numbers)
    for number, one, other in zip(numbers, at_once, in_parts, strict=True):
        expected = one.narrow(sides[number], tokens - last, last)
        found = other.narrow(sides[number], 0, last)
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            nodes = _makers(whole.entry, number, sides)
            # The innermost module, because the last node may belong to the arithmetic of an enclosing module.
            owner = max((whole.graph.owners[node.owner] for node in nodes), key=len) or "the model"
            names = dict.fromkeys(whole.graph.operators[node.operator].split(".")[1] for node in nodes)
            return f"; {owner} mixes tokens ({', '.join(names)})"
    return ""


def _makers(entry: StageEntry, value: int, known: Mapping[int, object]) -> list[GraphNode]:
    """Return the nodes between a value and the known ones, in order."""
    makers = {each: node for node in entry.nodes for each in node.outputs}
    found: dict[int, GraphNode] = {}
    waiting = [value]
    while waiting:
        node = makers.get(waiting.pop())
        if node is not None and node.id not in found:
            found[node.id] = node
            waiting += [each for each in values_of(node) if each not in known]
    return [found[number] for number in sorted(found)]
