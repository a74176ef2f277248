"""Means over labels that count, taken apart: so the sum and the number are there for a step to add up."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from partition.capture.steps import Call, Handle

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2


def mean_of_classes(call: Call) -> Handle:
    """Cross entropy or its like as a mean over the labels that count: their sum by their number.

    A batch none of whose labels counts is then 0, where torch gives a number that is none.
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


MEANS: Mapping[str, Callable[[Call], Handle]] = MappingProxyType(
    {
        f"aten.{name}.default": mean_of_classes
        for name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
    }
)
"""By full name."""
