"""Closures for operators: each picks its arguments from a list, calls the operator, and stores the result.

This is the one place where a name in a graph becomes something callable, through a dictionary made from
`partition.model.operators`. The list is that of `partition.execute.interpret`: every value and every argument
has an index in it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch

from partition.execute.attention import ATTEND_DIRECTLY
from partition.model.operators import ATTEND, OPERATORS

Call = Callable[..., Any]
Step = Callable[[list[Any]], None]
SEED, STATISTICS = 0, 1
"""Places in the list that hold no argument: the function from a node to its seed, and the collected
statistics of batch norms."""


def _resolve(name: str) -> Call:
    if name == ATTEND:
        return ATTEND_DIRECTLY
    _, operator, overload = name.split(".")
    call: Call = getattr(getattr(torch.ops.aten, operator), overload)
    return call


CALLS: Mapping[str, Call] = MappingProxyType(
    {
        name: _resolve(name)
        for row in OPERATORS.values()
        for name in (row.name, *((row.state_twin,) if row.state_twin else ()))
    }
)
"""The only mapping from names to callables."""


def _is_single(call: Any) -> bool:
    """Return whether the operator returns one tensor, not a list or a tuple of them."""
    returns = call._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def calling(call: Call, places: Sequence[int], results: Sequence[int], keywords: Mapping[str, Any]) -> Step:
    """Return a step that calls with the values at `places`, and always with the same keywords."""
    single = _is_single(call)
    if keywords:
        call = partial(call, **keywords)
    if not single:
        return _calling_for_many(call, places, results)
    result = results[0]
    if len(places) > 1:
        pick = itemgetter(*places)

        def step(values: list[Any]) -> None:
            values[result] = call(*pick(values))
    elif places:
        only = places[0]

        def step(values: list[Any]) -> None:
            values[result] = call(values[only])
    else:

        def step(values: list[Any]) -> None:
            values[result] = call()

    return step


def _calling_for_many(call: Call, places: Sequence[int], results: Sequence[int]) -> Step:
    def step(values: list[Any]) -> None:
        made = call(*[values[place] for place in places])
        for result, tensor in zip(results, made, strict=True):
            values[result] = tensor

    return step


def calling_by_name(
    call: Call, places: Sequence[int], results: Sequence[int], keywords: Mapping[str, int]
) -> Step:
    """Return a step whose keyword arguments are also taken from the list."""
    single = _is_single(call)

    def step(values: list[Any]) -> None:
        named = {key: values[place] for key, place in keywords.items()}
        made = call(*[values[place] for place in places], **named)
        for result, tensor in zip(results, (made,) if single else made, strict=True):
            values[result] = tensor

    return step


def counting(call: Call, places: Sequence[int], result: int) -> Step:
    """Return a step for a batch norm in training, computed as in torch, but with fresh buffers for its
    statistics.

    It uses a momentum of 1, so the buffers receive the batch's own mean and unbiased variance.
    """

    def step(values: list[Any]) -> None:
        given, weight, bias, mean, variance, training, _, epsilon, cudnn = [values[place] for place in places]
        found = (
            given.new_zeros(mean.shape, dtype=mean.dtype),
            given.new_zeros(variance.shape, dtype=mean.dtype),
        )
        values[result] = call(given, weight, bias, *found, training, 1.0, epsilon, cudnn)
        values[STATISTICS].append(found)

    return step


def seeded(step: Step, node: int, seed: Callable[[int], object]) -> Step:
    """Return the step, preceded by seeding its generator if the caller gave seeds."""

    def both(values: list[Any]) -> None:
        if values[SEED] is not None:
            seed(values[SEED](node))
        step(values)

    return both
