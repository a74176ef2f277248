"""Splits a mean loss into the sum and the count that a step needs, so that micro-batches of any size add up.

Gradients of micro-batches are summed and divided once, at the end of a step, so a mean would be divided
twice. `as_sum` finds in the steps of a loss what its mean is taken over. A mean over samples is multiplied by
the batch size. If the mean is over labels or a mask (tokens that are not ignored), their number is the step's
count. A loss that it cannot analyse stays as it is, and `partition.capture.proof` detects it: there the
losses of two halves of a batch must add up to that of the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from partition.capture.errors import CaptureRefused
from partition.capture.fx_pass import Walk
from partition.capture.steps import Handle, Leaf, Made, Reference, Step, Symbolic, TraceStorage

Reduction = Literal["auto", "sum", "microbatch"]
"""How a step adds up a loss. `auto`: sums unchanged, and means as `as_sum` interprets them. `sum`: unchanged.
`microbatch`: a micro-batch's loss counts once for each of its samples, for losses of any form (contrastive
losses, sums of different means)."""

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2
_REDUCED = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "kl_div": 2,
    "soft_margin_loss": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "cross_entropy_loss": 3,
    "nll_loss": 3,
    "nll_loss2d": 3,
    "nll_loss_nd": 3,
    "multilabel_margin_loss": 2,
    "multi_margin_loss": 5,
    "cosine_embedding_loss": 4,
    "margin_ranking_loss": 4,
    "hinge_embedding_loss": 3,
    "poisson_nll_loss": 5,
}
"""The position of each loss's reduction among its arguments."""
_OF_CLASSES = ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd")
_SAME = {"to", "alias", "clone", "neg", "squeeze", "reshape", "view", "detach", "nan_to_num", "_to_copy"}
_SHAPED = _SAME | {"slice", "select", "unsqueeze", "expand", "flatten", "permute", "transpose", "contiguous"}
_BOUNDED = {"clamp", "clamp_min", "maximum", "add", "to", "_to_copy", "alias", "clone"}


@dataclass(frozen=True)
class SampleMean:
    """A mean over samples, or over `count` items."""

    count: Reference | None = None


def as_sum(walk: Walk, loss: Handle, batch: Any, reduction: Reduction) -> tuple[Handle, Handle | None]:
    """Return the loss as a sum, and its divisor at the end of a step; None stands for the batch size.

    `batch` is the number of samples, an integer or torch's symbol for it.
    """
    walk.owner = "loss"
    if reduction == "sum":
        return loss, None
    found = SampleMean() if reduction == "microbatch" else _kind(walk, loss.reference, batch)
    if not isinstance(found, SampleMean):
        return loss, None
    if found.count is None:
        return walk.emit(_aten.mul.Scalar, loss, batch, fakes=loss.fake), None
    count = _handle(found.count)
    if count.fake.dtype != torch.int64:
        count = walk.emit(_aten.to.dtype, count, torch.int64)
    step = loss.reference.step if isinstance(loss.reference, Made) else None
    if step is not None and _short(step) == "div" and _divisor(walk, step.arguments[1]) == found.count:
        return _handle(step.arguments[0], needs_gradient=True), count
    return walk.emit(_aten.mul.Tensor, loss, count), count


def _kind(walk: Walk, reference: Any, batch: Any) -> SampleMean | Literal["sum"] | None:
    """Return the kind of a scalar: a mean, a sum, or None if it cannot be determined."""
    if not isinstance(reference, Made):
        return None
    step, short = reference.step, _short(reference.step)
    arguments = step.arguments
    if short in _REDUCED:
        place = _REDUCED[short]
        how = arguments[place] if len(arguments) > place else dict(step.keywords).get("reduction", _MEAN)
        is_weighted = short in _OF_CLASSES and len(arguments) > 2 and arguments[2] is not None
        if how == _MEAN and is_weighted:
            raise CaptureRefused(
                "the loss is a mean weighted by class, so micro-batches cannot be added "
                "up. Return the sum and the number of labels, or use "
                "reduction='microbatch'"
            )
        return SampleMean() if how == _MEAN else "sum" if how == _SUM else None
    if short == "mean":
        return SampleMean() if _varies(arguments[0], batch) else None
    if short == "sum":
        return "sum" if _varies(arguments[0], batch) else _kind(walk, arguments[0], batch)
    if short in _SAME:
        return _kind(walk, arguments[0], batch)
    if short in ("add", "sub", "mul", "div", "rsub"):
        return _combined(walk, short, arguments, batch)
    return None


def _combined(
    walk: Walk, short: str, arguments: Sequence[Any], batch: Any
) -> SampleMean | Literal["sum"] | None:
    left, right = arguments[:2]
    first = _kind(walk, left, batch)
    if not isinstance(right, Made | Leaf):
        if isinstance(right, Symbolic) and short == "div":
            return SampleMean() if first == "sum" else first
        return first
    if short == "div":
        count = _divisor(walk, right)
        return SampleMean(count) if first == "sum" and count is not None else None
    second = _kind(walk, right, batch)
    if first is None or second is None:
        # Terms that do not come from the data, such as a penalty on weights, count as often as the rest.
        return first or second
    if isinstance(first, SampleMean) and isinstance(second, SampleMean):
        counts = {mean.count for mean in (first, second)} - {None}
        return SampleMean(counts.pop() if counts else None) if len(counts) < 2 else None
    return first if first == second else None


def _divisor(walk: Walk, reference: Any) -> Reference | None:
    """Return a count without the guard that keeps it from being zero; None if it is not a count."""
    while isinstance(reference, Made) and _short(reference.step) in _BOUNDED:
        others = [each for each in reference.step.arguments[1:] if isinstance(each, Made | Leaf)]
        if others:
            break
        reference = reference.step.arguments[0]
    if not isinstance(reference, Made):
        return None
    if _short(reference.step) not in ("sum", "count_nonzero") or reference.step.results[0].dim():
        return None
    return reference if _is_whole(walk, reference.step.arguments[0]) else None


def _is_whole(walk: Walk, reference: Any) -> bool:
    """Return whether a tensor contains only integers: a mask, or a result computed from masks."""
    if isinstance(reference, Leaf):
        known = walk.leaves.get(reference)
        return known is not None and not known.fake.is_floating_point()
    if not isinstance(reference, Made):
        return False
    if not reference.step.results[reference.index].is_floating_point():
        return True
    short = _short(reference.step)
    if short in ("to", "_to_copy"):
        return _is_whole(walk, reference.step.arguments[0])
    if short == "mul":
        return all(_is_whole(walk, each) for each in reference.step.arguments[:2])
    return short in _SHAPED and _is_whole(walk, reference.step.arguments[0])


def _varies(reference: Any, batch: Any) -> bool:
    """Return whether a tensor is known to have more elements for a larger batch."""
    if not isinstance(reference, Made) or isinstance(batch, int):
        return isinstance(reference, Made)
    symbols = batch.node.expr.free_symbols
    shape: Any = reference.step.results[reference.index].shape
    return any(not isinstance(side, int) and side.node.expr.free_symbols & symbols for side in shape)


def _short(step: Step) -> str:
    return step.operator.split(".")[1]


def _handle(reference: Any, *, needs_gradient: bool = False) -> Handle:
    assert isinstance(reference, Made)
    fake = reference.step.results[reference.index]
    return Handle(reference, fake, needs_gradient, TraceStorage("step"))
