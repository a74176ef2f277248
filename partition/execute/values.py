"""A parameter's first values from its recipe: the same on every machine, for every cut.

The seed is derived from the run's seed and the parameter's first *name*, so neither the cut nor the order
matters. Values are drawn in chunks of CHUNK elements, each with its own generator. So a range can be drawn
separately, and drawing takes only 8 MiB however large the parameter is. Arithmetic is in float64, so that a
float32 run and a float64 run start at the same point. Torch draws float64 normals on the CPU by one scalar
algorithm, while its float32 algorithm depends on the vector unit.
"""

from collections.abc import Iterator
from math import isfinite, prod

import torch
from blake3 import blake3

from crypto.encoding import encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from partition.model.graph import FillStep, Parameter, Recipe, Size

CHUNK = 1 << 20
"""Number of elements drawn by one generator. It is part of a seed's meaning: a different size would give
different values."""


def first_values(parameter: Parameter, seed: int, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Write the first values of a parameter that has a recipe into `out`, which is flat or has the
    parameter's shape.

    A recipe begins with zeros and applies its steps in order. `out` may be a view into an arena.

    Raises:
        LocalProtocolError: `out` has the wrong size or type, or the parameter's values are stored.
        RemoteProtocolError: a step is invalid.
    """
    sides = [side for side in parameter.type.shape if not isinstance(side, Size)]
    if not isinstance(parameter.source, Recipe):
        raise LocalProtocolError(f"the values of {parameter.names[0]} are stored, not drawn")
    if out.dtype != dtype or out.numel() != prod(sides) or len(sides) != len(parameter.type.shape):
        raise LocalProtocolError(f"{tuple(out.shape)} of {out.dtype} cannot hold {parameter.names[0]}")
    flat = out.detach().view(-1)
    row_size = prod(sides[1:])
    for start, chunk in drawn_chunks(parameter.source, parameter.names[0], seed, flat.numel(), row_size):
        flat[start : start + chunk.numel()].copy_(chunk)


def drawn_chunks(
    recipe: Recipe, name: str, seed: int, size: int, row_size: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first element, float64 values) of each chunk of a parameter of `size` elements, in order.

    The next chunk reuses the tensor. Raises RemoteProtocolError if a step is invalid.
    """
    for step in recipe.steps:
        _check(step, name, size, row_size)
    buffer = torch.empty(min(CHUNK, size), dtype=torch.float64)
    generator = torch.Generator()
    for start in range(0, size, CHUNK):
        chunk = buffer[: min(CHUNK, size - start)]
        generator.manual_seed(seed_of_chunk(seed, name, start // CHUNK))
        chunk.zero_()
        for step in recipe.steps:
            if step.kind == "zero_row":
                begin = int(step.first) * row_size - start
                chunk[max(0, begin) : max(0, begin + row_size)] = 0.0
            else:
                _apply(step, chunk, generator)
        yield start, chunk


def seed_of_chunk(seed: int, name: str, chunk: int) -> int:
    """Return 64 bits derived from everything that may change the draws, and nothing else."""
    digest = blake3(b"peerloom/1\0" + encode(("parameter", seed, name, chunk))).digest(length=8)
    return int.from_bytes(digest, "big", signed=True)


def _check(step: FillStep, name: str, size: int, row_size: int) -> None:
    """Refuse steps that torch would reject with its own error, or would accept although they are
    meaningless."""
    first, second = step.first, step.second
    wrong = step.kind != "clamp" and not (isfinite(first) and isfinite(second))
    match step.kind:
        case "uniform":
            wrong = wrong or first > second or not isfinite(second - first)
        case "normal":
            wrong = wrong or second < 0
        case "clamp":
            wrong = not first <= second  # one side may be open
        case "zero_row":
            wrong = wrong or first != int(first) or not 0 <= first < size // max(1, row_size)
        case _:
            pass
    if wrong:
        raise RemoteProtocolError(f"{name}: the recipe's step {step.kind}({first}, {second}) is invalid")


def _apply(step: FillStep, values: torch.Tensor, generator: torch.Generator) -> None:
    match step.kind:
        case "uniform":
            values.uniform_(step.first, step.second, generator=generator)
        case "normal":
            values.normal_(step.first, step.second, generator=generator)
        case "constant":
            values.fill_(step.first)
        case "multiply":
            values.mul_(step.first)
        case "add":
            values.add_(step.first)
        case "clamp":
            values.clamp_(step.first, step.second)
        case "erfinv":
            values.erfinv_()
        case _:  # the caller handles rows, because it knows where the chunk lies
            raise LocalProtocolError(f"no rule for {step.kind}")
