"""A process that treats hostile graphs like a stage's process does: it checks, cuts, admits and really runs
them.

It reads cases from its input and answers each case with one line. So its parent detects a signal, a hang or
an exception by the missing answer. The process has resource limits, and a case that exceeds them ends the
process.
"""

import faulthandler
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch

from crypto.errors import RemoteProtocolError
from partition.codecs.codec import Payload, Typed, pack
from partition.execute.admit import admit
from partition.execute.executor import StageExecutor
from partition.model.check import check_graph
from partition.model.cut import cut
from partition.model.graph import ITEM_BYTES, StageGraph, TensorType, decode_graph, graph_hash
from partition.model.sizes import evaluate, shape_of
from partition.stage import Apply, Discard, Forward, Refused, RunEntryPoint, StageSpecification
from partition.stage_layout import arena_bytes

MEMORY_BYTES_MAX = 128_000_000
FLOPS_MAX = 2_000_000_000
CASE_SECONDS_MAX = 30
ADDRESS_SPACE_BYTES_MAX = 16 * 2**30
"""Limit on address space; torch's libraries reserve most of it without touching it."""


class Case(msgspec.Struct, frozen=True):
    """A graph as it would come from the network, or a stage as a cut would make it, and how to run it.

    `draw` chooses the input values.
    """

    graph: bytes
    stage: StageGraph | None
    draw: int
    autocast: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a case: `refused` before it ran, `stopped` by a refusal while it ran, or `ran` to its
    end.

    `ended` is a backward pass in which an operator raised an exception; a stage's process then ends itself.
    """

    verdict: str
    reason: str
    seconds: float
    peak_rss_bytes: int


def peak_rss_bytes() -> int:
    """Return the peak memory of this program alone; ru_maxrss also counts its parent's."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) * 1024


def answer(case: Case) -> tuple[str, str]:
    """Return (verdict, reason). Only a RemoteProtocolError is a refusal; any other exception propagates."""
    try:
        stage = case.stage
        if stage is None:
            graph = decode_graph(case.graph)
            check_graph(graph)
            (stage,) = cut(graph, graph_hash(case.graph), ())
        try:
            specification = StageSpecification(
                run=b"hostile",
                graph=stage,
                sizes_max=tuple(min(symbol.maximum, max(symbol.minimum, 4)) for symbol in stage.symbols),
                autocast="bfloat16" if case.autocast else "off",
                memory_bytes_max=MEMORY_BYTES_MAX,
                flops_max=FLOPS_MAX,
            )
        except ValueError as error:
            return "refused", str(error)
        admit(specification)
    except RemoteProtocolError as error:
        return "refused", str(error)
    try:
        refusal = _run(specification, case.draw)
    except RuntimeError as error:
        return "ended", str(error)
    return ("stopped", refusal) if refusal else ("ran", "")


def _run(specification: StageSpecification, draw: int) -> str:
    """Return why the stage stopped, or ""."""
    arenas = {name: memoryview(bytearray(size)) for name, size in arena_bytes(specification).items()}
    stage = StageExecutor(specification, arenas)
    rng = np.random.default_rng(draw)
    for sizes in {
        specification.sizes_max: None,
        tuple(symbol.minimum for symbol in specification.graph.symbols): None,
    }:
        for reply in _ask(specification, stage, rng, sizes):
            if isinstance(reply, Refused):
                return reply.reason
    return ""


def _ask(specification: StageSpecification, stage: StageExecutor, rng: Any, sizes: tuple[int, ...]) -> Any:
    graph = specification.graph
    for entry in graph.entries:
        types = {number: graph.types[row] for number, row in entry.types}
        inputs = _payload([types[number] for number in entry.inputs], graph, rng, sizes)
        labels = _payload([types[number] for number in entry.labels], graph, rng, sizes)
        if entry.name != "train":
            yield stage.handle(RunEntryPoint(b"of %d" % sizes[0], entry.name, inputs))
            continue
        for train in (False, True):
            reply = stage.handle(Forward(0, int(train), train, inputs, labels if entry.labels else None))
            yield reply
        yield stage.handle(Apply(0, 1, 1.0))
        yield stage.handle(Discard())


def _payload(kinds: list[TensorType], graph: StageGraph, rng: Any, sizes: tuple[int, ...]) -> Payload:
    rows = evaluate(graph.expressions, sizes)
    return pack([_array(kind, shape_of(kind, rows), rng) for kind in kinds], "raw", sizes)


def _array(kind: TensorType, shape: tuple[int, ...], rng: Any) -> Typed:
    """Return values of all kinds: mostly integers that are valid indices, and sometimes others."""
    if kind.dtype == "bool":
        return kind.dtype, rng.integers(0, 2, shape).astype(bool)
    if kind.dtype == "bfloat16":
        return kind.dtype, rng.integers(0, 0x4000, shape).astype(np.uint16)
    if kind.dtype.startswith("float"):
        return kind.dtype, rng.normal(size=shape).astype(kind.dtype)
    array = rng.integers(0, 2, shape)
    if rng.random() < 0.3:
        bits = 8 * ITEM_BYTES[kind.dtype]
        wild = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, -1, -2, 7, 100, -100, 2**6)
        array = rng.choice(np.array(wild, dtype=np.int64), shape)
    return kind.dtype, np.asarray(array).astype(kind.dtype)


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer cases until there are no more; each is four bytes of length and the encoded case."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES_MAX, ADDRESS_SPACE_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by name
    decoder = msgspec.msgpack.Decoder(Case)
    while header := source.read(4):
        case = decoder.decode(source.read(int.from_bytes(header, "big")))
        began = time.perf_counter()
        signal.alarm(CASE_SECONDS_MAX)
        verdict, reason = answer(case)
        signal.alarm(0)
        outcome = Outcome(
            verdict,
            reason,
            time.perf_counter() - began,
            peak_rss_bytes(),
        )
        sink.write(json.dumps(msgspec.to_builtins(outcome)).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
