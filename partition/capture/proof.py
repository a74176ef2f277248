"""The requester's proof that a graph computes what the model does: both are computed, and must agree, before
anything is sent.

Forward, the gradient of every parameter, and evaluation are compared with the module as its author wrote it.
The model need not fit into memory: a parameter on meta has values only while an operator runs
(`partition.capture.lazy_tensor`), and only a sketch of each gradient is kept, its norm and its product with a
vector of signs. So a custom `autograd.Function` with a wrong backward, or an operator whose graph form
differs from eager mode, is found here and not by the peers that train the model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, prod
from typing import Any

import torch
from torch import nn

from partition.capture.capture import Further
from partition.capture.compare import Computed, compare, signs_of, tolerance_of
from partition.capture.errors import CaptureRefused, EvaluationDiffers
from partition.capture.lazy_tensor import Materialised, with_values
from partition.capture.module_state import restored
from partition.capture.own_backward import compared
from partition.capture.proof_inputs import given, lively
from partition.capture.proof_run import ProofRun, Provable
from partition.capture.reduction import Reduction
from partition.capture.trees import Inputs, Labels, form_of
from partition.model.graph import EVALUATE, Entry, Graph
from partition.model.operators import OPERATORS
from partition.model.sizes import shape_of

ADDITION_TOLERANCE = 1e-3
"""Relative tolerance for the losses of two halves compared with the loss of the whole batch: a batch norm's
effect is detected, rounding is not."""


@dataclass(frozen=True)
class Proof:
    """The result of a comparison: its extent, and the difference found.

    `entries` are the entry points, the first of them in training and in evaluation; the other numbers refer
    to its training. `error` is the largest of all differences, relative like `tolerance`.
    `materialised_bytes` is the maximum of bytes that parameters without memory had at a time; 0 if the model
    is really in memory. `sizes` are those of the training run; the evaluation's batch is larger by one, if
    the graph allows that.
    """

    entries: tuple[str, ...]
    loss: float
    outputs: int
    gradients: int
    parameters: int
    error: float
    tolerance: float
    materialised_bytes: int
    sizes: tuple[int, ...]


def prove(
    model: nn.Module,
    captured: Provable,
    inputs: Inputs,
    labels: Labels = (),
    *,
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, Callable[..., torch.Tensor]] | None = None,
    entries: Mapping[str, Further] | None = None,
    reduction: Reduction = "auto",
    seed: int = 0,
) -> Proof:
    """Compare a captured graph with its model: in training, in evaluation, and in its further entry points.

    Arguments are those of `capture`, but here values matter: floating-point inputs that are all equal are
    replaced by noise, because zeros would prove little. Without a loss, gradients are those of the outputs'
    product with signs. The states of further entry points are compared too. The model is unchanged
    afterwards.

    Raises:
        CaptureRefused: the graph differs from the model; the text names the first output, or the parameter
            nearest to the loss, that differs, and its module.
    """
    graph = captured.graph
    tolerance = tolerance_of(graph)
    counter = Materialised()
    with _as_it_trains(model, seed, counter):
        first = graph.entries[0]
        form, tensors = form_of(model.forward, inputs, labels, loss)
        examples = given(graph, first, form, lively(tensors, seed))
        run = ProofRun(model, captured, first, _forward, examples, loss, metrics or {}, signs_of(seed), seed)
        trained, error = _compare_training(run, tolerance)
        model.eval()
        run = replace(run, given=examples.enlarged())
        twin = next((entry for entry in graph.entries if entry.name == EVALUATE), None)
        if twin is not None:
            run = replace(run, entry=twin, given=replace(run.given, entry=twin))
        for when, each in (("evaluation", run), *_further_runs(run, entries or {})):
            try:
                error = max(error, _compare_evaluation(each, tolerance, when))
            except CaptureRefused as refusal:
                if twin is not None or each is not run:
                    raise
                raise EvaluationDiffers(str(refusal)) from refusal
        if loss is not None and reduction != "microbatch":
            _check_addition(replace(run, given=replace(examples, entry=run.entry)))
    return Proof(
        entries=tuple(entry.name for entry in graph.entries),
        loss=trained.numbers.get("loss", 0.0),
        outputs=len(trained.outputs),
        gradients=len(trained.gradients),
        parameters=sum(prod(shape_of(row.type, ())) for row in graph.parameters),
        error=error,
        tolerance=tolerance,
        materialised_bytes=counter.bytes_peak,
        sizes=examples.sizes,
    )


@contextmanager
def _as_it_trains(model: nn.Module, seed: int, counter: Materialised) -> Iterator[None]:
    """Give the model values and put it into training mode; undo all of that afterwards."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_without_fast_path())
        stack.enter_context(restored(model))
        stack.enter_context(with_values(model, seed, counter))
        if not model.training:
            model.train()
        yield


def _compare_training(run: ProofRun, tolerance: float) -> tuple[Computed, float]:
    """Return what the model computes in a step, and how far the graph is from it. Raises CaptureRefused."""
    graphed = run.graphed(train=True)
    wrong: list[str] = []
    with compared(wrong):
        trained = run.eager(train=True, beside=graphed)
    error = compare(run.graph, run.entry, trained, graphed, tolerance, "training")
    if wrong:
        raise CaptureRefused("\n".join(dict.fromkeys(wrong)))
    return trained, error


def _compare_evaluation(run: ProofRun, tolerance: float, when: str) -> float:
    """Return how far the graph is from the model without a step. Raises CaptureRefused."""
    graphed = run.graphed(train=False)
    eager = run.eager(train=False, beside=graphed)
    return compare(run.graph, run.entry, eager, graphed, tolerance, when)


def _further_runs(run: ProofRun, entries: Mapping[str, Further]) -> Iterator[tuple[str, ProofRun]]:
    """Yield, for each further entry point, its description for a refusal, and its run."""
    graph = run.graph
    for name, (method, inputs, *_) in entries.items():
        entry = _entry(graph, name)
        form, tensors = form_of(_signature(run.model, method), inputs, ())
        examples = given(graph, entry, form, lively(tensors, run.seed))
        call = partial(_call, method)
        yield f"'{name}'", replace(run, entry=entry, call=call, given=examples, loss=None, metrics={})


def _forward(model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    return model(*arguments, **keywords)


def _call(method: str | Callable[..., Any], model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    if isinstance(method, str):
        return getattr(model, method)(*arguments, **keywords)
    return method(model, *arguments, **keywords)


def _signature(model: nn.Module, method: str | Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = getattr(model, method) if isinstance(method, str) else partial(method, model)
    return made


def _entry(graph: Graph, name: str) -> Entry:
    try:
        return graph.entry(name)
    except KeyError:
        raise CaptureRefused(f"the graph has no entry point '{name}'") from None


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Disable the fused kernels that nn.TransformerEncoder uses in evaluation: their results differ if there
    is padding."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _check_addition(run: ProofRun) -> None:
    """Check that a batch's loss is the sum of the losses of its halves. Raises CaptureRefused."""
    whole = run.given
    parts = whole.halves()
    if parts is None:
        whole = whole.doubled()
        if whole is run.given:
            return  # the graph accepts only this batch size
        parts = run.given, run.given
    totals, counts = [], []
    for each in (whole, *parts):
        numbers = replace(run, given=each).graphed(train=False).numbers
        totals.append(numbers["loss"])
        counts.append(numbers.get("count", each.sizes[0]))
    if not all(map(isfinite, totals)) or not totals[0]:
        return
    added, counted = sum(totals[1:]) / totals[0], sum(counts[1:]) / (counts[0] or 1)
    if whole.sizes != parts[0].sizes and len(set(counts)) == 1 and counts[0] > 1:
        raise CaptureRefused(
            f"the loss has a count of {counts[0]:.0f}, however large the batch is. "
            "Return the number of samples as the count"
        )
    if abs(added - counted) <= ADDITION_TOLERANCE:
        return
    draws = any(
        OPERATORS[run.graph.operators[node.operator]].random
        and not OPERATORS[run.graph.operators[node.operator]].evaluate
        for node in run.entry.nodes
    )
    if abs(added - 2 * counted) <= ADDITION_TOLERANCE + 0.2 * draws:
        raise CaptureRefused(
            "the loss is a mean over the batch, which a step would divide a second "
            "time. Return the sum, or the pair of the sum and the number by which it "
            "is divided"
        )
    if not draws:
        raise CaptureRefused(
            f"the losses of two halves of a batch add up to {added:.3f} of that of the whole, counts to "
            f"{counted:.3f}: the loss looks at the batch as a whole (or its count is another). Say "
            "reduction='microbatch' if each micro-batch shall count as it is: the batch that it looks at is "
            "then that of train.microbatch"
        )
