"""The outcome of a capture, or all reasons against it, shown to a user in advance.

Nothing is proved and nothing written: it makes one trace, one pass over it, and the checks that a peer makes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from partition.capture.capture import Captured
from partition.capture.errors import CaptureRefused
from partition.capture.origin import named
from partition.capture.task import Task, capture_task, check_admission
from partition.model.cut import legal_positions
from partition.model.graph import EVALUATE, Entry, Graph, Size, TensorType
from partition.model.operators import OPERATORS
from partition.model.sizes import shape_of

_NAMES_SHOWN_MAX = 6


@dataclass(frozen=True)
class Explanation:
    """`facts` are (name, value) pairs of a model that can be captured; otherwise `refusals` are the
    reasons."""

    seconds: float
    facts: tuple[tuple[str, str], ...] = ()
    refusals: tuple[str, ...] = ()


def explain(task: Task, *, name: str = "") -> Explanation:
    """Trace a model and report the outcome. An exception of the model itself is also a refusal."""
    begun = time.perf_counter()
    try:
        captured = capture_task(task, name=name, unproved=True)
        check_admission(task, captured)
    except CaptureRefused as refusal:
        reasons = refusal.reasons or tuple(str(refusal).splitlines())
        return Explanation(time.perf_counter() - begun, refusals=reasons)
    facts = _facts(captured)
    if task.reduction == "microbatch":
        facts["loss"] = (
            "of each micro-batch by itself, times its samples: the batch it sees is train.microbatch"
        )
    return Explanation(time.perf_counter() - begun, tuple(facts.items()))


def _facts(captured: Captured) -> dict[str, str]:
    graph = captured.graph
    first = graph.entries[0]
    trained = [row for row in graph.parameters if row.kind == "parameter"]
    count = sum(prod(shape_of(row.type, ())) for row in graph.parameters)
    facts = {
        "parameters": f"{count:,} in {len(graph.parameters)} tensors, {len(trained)} of them trained",
        "inputs": ", ".join(f"{port.name} {_type(graph, graph.types[port.type])}" for port in first.inputs),
    }
    if first.labels:
        labels = (f"{port.name} {_type(graph, graph.types[port.type])}" for port in first.labels)
        facts["labels"] = ", ".join(labels)
    for symbol in graph.symbols:
        is_fixed = symbol.minimum == symbol.maximum
        bounds = f"{symbol.minimum} alone" if is_fixed else f"{symbol.minimum} to {symbol.maximum}"
        facts[symbol.name] = bounds + (" samples in a micro-batch" if symbol.name == "batch" else "")
    if first.loss is not None:
        is_counted = first.count is not None
        facts["loss"] = "a sum, and the number by which it is divided" if is_counted else "a sum over samples"
    dropped = set(captured.outputs.get(first.name, ())) ^ set(range(len(first.outputs)))
    if dropped:
        facts["outputs"] = f"{len(first.outputs)} from which the loss is computed; others are left out"
    facts["random"] = _random(graph, first)
    facts["evaluation"] = (
        "a separate graph"
        if any(entry.name == EVALUATE for entry in graph.entries)
        else "the same graph, without what is only for training"
    )
    if captured.functions:
        facts["own backward"] = (
            "; ".join(captured.functions) + " (accepted if the proof finds the same gradients)"
        )
    if captured.unused:
        facts["not trained"] = _some(captured.unused)
    nodes = sum(len(entry.nodes) for entry in graph.entries)
    facts["operators"] = f"{nodes} nodes of {len(graph.operators)} kinds, all allowed on a peer"
    facts["cut"] = f"at {len(legal_positions(graph))} places, into at most {len(graph.layers)} layers"
    return facts


def _random(graph: Graph, entry: Entry) -> str:
    owners = [
        named(graph.owners[node.owner])
        for node in entry.nodes
        if OPERATORS[graph.operators[node.operator]].random
        and not graph.operators[node.operator].startswith("aten.scaled_dot_product")
    ]
    return f"drawn in {_some(list(dict.fromkeys(owners)))}" if owners else "nothing is drawn"


def _type(graph: Graph, kind: TensorType) -> str:
    sides = []
    for side in kind.shape:
        if isinstance(side, Size):
            sides.append(graph.symbols[side.row].name if side.row < len(graph.symbols) else "any")
        else:
            sides.append(str(side))
    return f"{kind.dtype} ({', '.join(sides)})"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN_MAX} more" if len(names) > _NAMES_SHOWN_MAX else ""
    return ", ".join(names[:_NAMES_SHOWN_MAX]) + more
