"""The bit class of a stage that serves: a fingerprint of its output bits on this machine, with this torch and
number of threads.

Two replicas of one stage with the same class have computed the same made-up tokens to the same bits, each
with its own weights and its own program. The class is determined by results. The names of processors,
instruction sets and builds are part of it but would not be enough, because libraries choose kernels by other
properties too.

The tokens are served twice: once in one unit, and once in parts, along with other tokens. If the bits differ,
an answer could not continue unchanged on a different replica, so the stage has no class. An encoder's
sessions have no parts, so they are only served along with others. Batches as long as a chunk of a prompt are
not tried; their products are tested separately (`partition.execute.products`).
"""

from collections.abc import Mapping
from itertools import pairwise
from math import prod

import torch
from blake3 import blake3

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from partition.execute.interpret import DTYPES, Program
from partition.execute.pages import PAGE_TOKENS
from partition.execute.serving import ServedStage
from partition.model.graph import SERVE, ParameterValue, Size, TensorType
from partition.model.serving import is_whole
from partition.model.sizes import evaluate, shape_of
from partition.stage import BITS_BYTES, StageSpecification, Unit

_TOKENS_MAX = PAGE_TOKENS + 8
"""Number of tokens of the longer probe: more than one block of keys."""
_TOKENS_LEAST = 20
_FLOPS = 20_000_000_000
"""Maximum FLOPs of the longer probe's products. If it needs more, the shorter probe is served."""
_COMPANY = 5
"""Number of tokens of a session that is served together with the parts."""
_SINGLES = 3
_NAMES = tuple(bytes([255]) * 15 + bytes([number]) for number in range(3))
"""Sessions of a probe. Gateways draw the names of theirs at random, so these do not collide."""
_TOKENS = Size(0)


def bit_class(
    specification: StageSpecification,
    served: ServedStage,
    program: Program,
    parameters: Mapping[int, torch.Tensor],
    constants: Mapping[int, torch.Tensor],
) -> bytes:
    """Return the class; empty if there is none. Sessions are unchanged.

    Raises:
        RemoteProtocolError: the stage cannot compute.
    """
    graph = specification.graph
    count = sum(prod(shape_of(row.type, ())) for row in graph.parameters)
    most = _TOKENS_MAX if 6 * _TOKENS_MAX * count <= _FLOPS else _TOKENS_LEAST
    tokens = min(most, specification.sizes_max[2], specification.sizes_max[0] - _COMPANY)
    if tokens <= _SINGLES + 1:
        return b""
    wants = graph.is_last
    inputs = _Inputs(specification, served, tokens)

    def serve(units: list[Unit]) -> list[torch.Tensor]:
        found = served.compute(
            tuple(units), inputs.joined([(unit.position, unit.tokens) for unit in units]), program,
            parameters, constants,
        )  # fmt: skip
        assert found is not None
        return found

    whole, parts, beside = _NAMES
    try:
        at_once = serve([Unit(whole, 0, tokens, tokens * wants)])
        served.pages.end(whole)
        half = tokens // 2
        cuts = [0, half, *range(half + 1, half + 1 + _SINGLES), tokens]
        if is_whole(graph, graph.entry(SERVE)):
            cuts = [0, tokens]
        is_same = True
        for number, (begin, end) in enumerate(pairwise(cuts)):
            units = [Unit(parts, begin, end - begin, (end - begin) * wants)]
            if not number:
                units.insert(0, Unit(beside, 0, min(_COMPANY, tokens), wants * min(_COMPANY, tokens)))
            found = serve(units)
            skipped = sum(unit.tokens for unit in units[:-1])
            for one, other, axis in zip(at_once, found, _axes(served, wants), strict=True):
                expected = one.narrow(axis, begin, end - begin)
                is_same &= _bytes(expected) == _bytes(other.narrow(axis, skipped, end - begin))
    finally:
        for name in _NAMES:
            served.pages.end(name)
    if not is_same:
        return b""
    digest = blake3(b"peerloom/bits/1\0" + encode(_names(specification.threads)))
    for tensor in at_once:
        digest.update(_bytes(tensor))
    return digest.digest(length=BITS_BYTES)


def _names(threads: int) -> tuple[object, ...]:
    return str(torch.__version__), torch.backends.cpu.get_cpu_capability(), threads


def _axes(served: ServedStage, wants: bool) -> list[int]:
    """Return, for each output, the axis of the tokens (or of the wanted rows)."""
    side = Size(1) if wants else _TOKENS
    return [kind.shape.index(side) for kind in served.sent_kinds]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class _Inputs:
    """A stage's inputs for made-up tokens, the same on every machine."""

    def __init__(self, specification: StageSpecification, served: ServedStage, tokens: int) -> None:
        graph = specification.graph
        known = _words(specification)
        table = evaluate(graph.expressions, (tokens, 1, specification.sizes_max[2]))
        self._axes = [kind.shape.index(_TOKENS) for kind in served.given_kinds]
        self._tensors = [
            _made(kind, shape_of(kind, table), known).to(specification.device) for kind in served.given_kinds
        ]

    def joined(self, parts: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Return the inputs of several parts (position, tokens), one after the other."""
        return [
            torch.cat([tensor.narrow(axis, begin, count) for begin, count in parts], axis)
            for tensor, axis in zip(self._tensors, self._axes, strict=True)
        ]


def _made(kind: TensorType, shape: tuple[int, ...], words: int) -> torch.Tensor:
    numbers = torch.arange(prod(shape)).mul_(40_503).remainder_(65_521).view(shape)
    dtype = DTYPES[kind.dtype]
    if not (dtype.is_floating_point or dtype.is_complex):
        return (numbers % words).to(dtype)
    return (numbers.to(torch.float64) / 32_768 - 1).to(dtype)


def _words(specification: StageSpecification) -> int:
    """Return the number of token ids that all token tables have."""
    graph = specification.graph
    rows = dict(zip(graph.rows, graph.parameters, strict=True))
    sides = [2]
    for node in graph.entry(SERVE).nodes:
        if graph.operators[node.operator] == "aten.embedding.default":
            table = node.arguments[0]
            if isinstance(table, ParameterValue) and table.row in rows:
                sides.append(shape_of(rows[table.row].type, ())[0])
    if len(sides) == 1:
        return 2
    found = min(sides[1:])
    if found < 1:
        raise RemoteProtocolError("a token table that is empty")
    return found
