"""From torch's graph to functional steps: everything that our graphs cannot express is rewritten or refused.

Dropped: assertions, devices, batch norm's counters, regions without gradients (their inputs are detached
instead). Rewritten: each in-place operator, to its functional form. All handles on the same memory are
tracked, so that a view that torch would also have changed is never used with its old value. Uninitialised
memory becomes zeros; `view` becomes `reshape`, because a tensor that has crossed a cut has different strides.
Refused: the remaining operators that a graph must not contain; all of them are reported together, with
operator and module. `fx_pass` works operator by operator; this file handles the beginning and the end of an
entry point.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from partition.capture.errors import CaptureRefused
from partition.capture.export import ExportedGraph
from partition.capture.fx_pass import Walk
from partition.capture.origin import named
from partition.capture.reduction import as_sum
from partition.capture.steps import Leaf, Made, Reference, Step
from partition.capture.wrapper_module import BATCH
from partition.model.operators import OPERATORS

REFUSALS_SHOWN_MAX = 20
_ALIAS = "aten.alias.default"
_RATES = {"aten.dropout.default": 1, "aten.scaled_dot_product_attention.default": 4}
"""The position of an operator's drop rate among its arguments. With a rate of 0 the operator draws
nothing."""
_NORM = "aten.batch_norm.default"
_NORM_TRAINING = 5
_NORM_STATISTICS = (3, 4)
_aten = torch.ops.aten


@dataclass(frozen=True)
class Cleaned:
    """An entry point as steps in order. `results` are its outputs, loss, count and metrics; `updates` map
    buffers to their final values; `statistics` are the buffers that batch norms update. `draws` are the
    positions of its random steps among all that the model runs, if some are unused; `outputs` are the
    positions of its outputs among the model's."""

    steps: tuple[Step, ...]
    results: tuple[Reference, ...]
    updates: Mapping[str, Reference]
    statistics: tuple[str, ...]
    counters: tuple[str, ...]
    draws: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


def clean(exported: ExportedGraph) -> Cleaned:
    """Return the steps of one entry point, without dead steps.

    Raises:
        CaptureRefused: everything in this graph that cannot be expressed as steps, one line each.
    """
    program = exported.program
    mode = next(
        value.fake_mode
        for node in program.graph.nodes
        if isinstance(value := node.meta.get("val"), FakeTensor)
    )
    walk = Walk(exported, mode, has_gradients=exported.request.train)
    outputs = walk.graph(program.graph, program.graph_module, None)
    specs = program.graph_signature.output_specs
    by_name = {spec.arg.name: value for spec, value in zip(specs, outputs, strict=True)}
    updates = _updates(walk, by_name)
    results = _results(walk, [by_name[name] for name in exported.results])
    layout = exported.layout
    if layout.has_loss and not layout.has_count and not walk.refusals:
        loss = by_name[exported.results[layout.outputs]]
        total, count = as_sum(walk, loss, _batch(walk), exported.request.reduction)
        layout.has_count = count is not None
        results[layout.outputs : layout.outputs + 1] = _results(walk, [total, *([count] if count else [])])
    if walk.refusals:
        found = list(dict.fromkeys(walk.refusals))
        more = [f"and {len(found) - REFUSALS_SHOWN_MAX} more"] if len(found) > REFUSALS_SHOWN_MAX else []
        raise CaptureRefused("\n".join([*found[:REFUSALS_SHOWN_MAX], *more]), tuple(found))
    kept = _used(walk, results) if layout.has_loss else tuple(range(layout.outputs))
    results[: layout.outputs] = [results[place] for place in kept]
    layout.outputs = len(kept)
    steps = _alive(walk.steps, [*results, *updates.values()])
    counters = (*walk.counters, *exported.layout.counters)
    draws = _draws(walk.steps, steps)
    return Cleaned(steps, tuple(results), updates, _statistics(steps), counters, draws, kept)


def _used(walk: Walk, results: Sequence[Reference]) -> tuple[int, ...]:
    """Return the positions of the outputs from which loss, count or metrics are computed; the other outputs
    are unused."""
    count = walk.exported.layout.outputs
    needed = {id(step) for step in _alive(walk.steps, results[count:])}
    return tuple(
        place
        for place, reference in enumerate(results[:count])
        if isinstance(reference, Leaf) or id(reference.step) in needed or _is_alias_of(reference.step, needed)
    )


def _is_alias_of(step: Step, needed: Container[int]) -> bool:
    """Return whether a step is an alias made only because an output occurs twice, or is an input."""
    if step.operator != _ALIAS:
        return False
    first = step.arguments[0]
    return isinstance(first, Leaf) or (isinstance(first, Made) and id(first.step) in needed)


def _draws(all_steps: Sequence[Step], kept: Sequence[Step]) -> tuple[int, ...]:
    """Return the positions of the kept steps that draw among all steps that draw; () if all of these are
    kept."""
    living = {id(step) for step in kept}
    drawing = [step for step in all_steps if _is_drawing(step)]
    places = tuple(place for place, step in enumerate(drawing) if id(step) in living)
    return places if len(places) < len(drawing) else ()


def _is_drawing(step: Step) -> bool:
    if step.operator not in OPERATORS or not OPERATORS[step.operator].random:
        return False
    place = _RATES.get(step.operator)
    if place is None:
        return True
    return len(step.arguments) > place and bool(step.arguments[place])


def _batch(walk: Walk) -> Any:
    """Return the number of samples: an integer, or torch's symbol for it."""
    dynamic = next(each for each in walk.exported.request.dynamics if each.name == BATCH)
    port, place = dynamic.places[0]
    return walk.leaves[Leaf("input", port)].fake.shape[place]


def _updates(walk: Walk, by_name: Mapping[str, Any]) -> dict[str, Reference]:
    """Return the final value of every buffer that the entry point changes, in place or by assignment."""
    updates: dict[str, Reference] = {}
    for leaf, handle in walk.leaves.items():
        if leaf.kind == "buffer" and handle.storage.writers:
            walk.owner, walk.trace = handle.storage.writers[-1], None
            walk.check_fresh(handle, "the next call")
            updates[str(leaf.key)] = handle.reference
    for path, node in walk.exported.assigned.items():
        updates[path] = by_name[node].reference
    for path, reference in updates.items():
        if isinstance(reference, Leaf):
            walk.refuse(f"the buffer '{path}' is assigned a tensor that is not computed here; clone it first")
    return updates


def _results(walk: Walk, handles: Sequence[Any]) -> list[Reference]:
    """Return outputs, loss, count and metrics. Each output is a separate value."""
    references: list[Reference] = []
    outputs = walk.exported.layout.outputs
    walk.owner, walk.trace = "", None
    for number, handle in enumerate(handles):
        walk.check_fresh(handle, "the output")
        reference = handle.reference
        is_value = isinstance(reference, Made) or reference.kind == "input"
        if not is_value or (number < outputs and reference in references[:outputs]):
            reference = walk.emit(_aten.alias.default, handle, fakes=handle.fake).reference
        references.append(reference)
    return references


def _alive(steps: Sequence[Step], wanted: Sequence[Reference]) -> tuple[Step, ...]:
    alive = {id(reference.step) for reference in wanted if isinstance(reference, Made)}
    kept = []
    for step in reversed(steps):
        if id(step) in alive:
            kept.append(step)
            alive.update(
                id(reference.step) for reference in references_in(step) if isinstance(reference, Made)
            )
    return tuple(reversed(kept))


def references_in(step: Step) -> Iterator[Reference]:
    """Yield the tensors that a step takes."""
    for value in (*step.arguments, *(value for _, value in step.keywords)):
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Leaf | Made):
                yield item


def _statistics(steps: Sequence[Step]) -> tuple[str, ...]:
    """Return the buffers that batch norms update in training."""
    found: dict[str, None] = {}
    for step in steps:
        if step.operator != _NORM or not step.arguments[_NORM_TRAINING]:
            continue
        for index in _NORM_STATISTICS:
            statistic = step.arguments[index]
            if isinstance(statistic, Leaf) and statistic.kind == "buffer":
                found[str(statistic.key)] = None
            elif statistic is not None:
                raise CaptureRefused(f"{named(step.owner)}: its running statistics are not buffers")
    return tuple(found)
