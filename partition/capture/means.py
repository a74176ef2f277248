"""Means over labels that count, split into a sum and a count that a step can add up."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from partition.capture.steps import Call, Handle

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2


def mean_of_classes(call: Call) -> Handle:
    """Return a mean over the labels that count (of cross entropy or a similar loss) as their sum divided by
    their number.

    A batch in which no label counts gives 0; torch gives NaN.
    """
    target: Handle = call.arguments[1]
    given = dict(enumerate(call.arguments)) | {
        place: call.keywords[name]
        for place, name in enumerate(("", "", "weight", "reduction", "ignore_index", "label_smoothing"))
        if name in call.keywords
    }
    short = call.name.split(".")[1]
    keys = 6 if short == "cross_entropy_loss" else 5
    arguments = [given.get(place, default) for place, default in enumerate((None, None, None, 1, -100, 0.0))]
    counts = not target.fake.is_floating_point() and arguments[2] is None and call.walk.has_loss
    if arguments[3] != _MEAN or not counts:
        return call.emit(call.operator, *call.arguments, **call.keywords)
    arguments[3] = _SUM
    total = call.emit(call.operator, *arguments[:keys])
    counted = call.walk.emit(_aten.ne.Scalar, target, arguments[4])
    count = call.walk.emit(_aten.sum.default, counted)
    least = call.walk.emit(_aten.clamp_min.default, count, 1)
    divided: Handle = call.walk.emit(_aten.div.Tensor, total, least, fakes=call.fakes)
    return divided


def margin_of_classes(call: Call) -> Handle:
    """Compute `multi_margin_loss` by its formula, because torch cannot compute its backward pass on tensors
    without memory."""
    names = ("self", "target", "p", "margin", "weight", "reduction")
    given = dict(zip(names, call.arguments, strict=False)) | dict(call.keywords)
    walk, scores, target = call.walk, call.first, given["target"]
    if scores.fake.dim() != 2:
        return call.emit(call.operator, *call.arguments, **call.keywords)
    places = walk.emit(_aten.unsqueeze.default, target, 1)
    right = walk.emit(_aten.gather.default, scores, 1, places)
    missed = walk.emit(_aten.add.Scalar, walk.emit(_aten.sub.Tensor, scores, right), given.get("margin", 1))
    missed = walk.emit(
        _aten.pow.Tensor_Scalar, walk.emit(_aten.clamp_min.default, missed, 0), given.get("p", 1)
    )
    if (weight := given.get("weight")) is not None:
        of_target = walk.emit(_aten.index_select.default, weight, 0, target)
        missed = walk.emit(_aten.mul.Tensor, missed, walk.emit(_aten.unsqueeze.default, of_target, 1))
    missed = walk.emit(_aten.scatter.value, missed, 1, places, 0)
    losses = walk.emit(_aten.mean.dim, missed, [1])
    match given.get("reduction", _MEAN):
        case 1:
            return call.emit(_aten.mean.default, losses)
        case 2:
            return call.emit(_aten.sum.default, losses)
    return call.emit(_aten.alias.default, losses)


MEANS: Mapping[str, Callable[[Call], Handle]] = MappingProxyType(
    {
        f"aten.{name}.default": mean_of_classes
        for name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
    }
    | {"aten.multi_margin_loss.default": margin_of_classes}
)
"""Rewrites by the operator's full name."""
