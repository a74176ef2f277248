"""Arithmetic of a step over a stage's arenas: shares of running statistics, and the norm of the totals."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

import torch

from crypto.errors import RemoteProtocolError
from partition.execute.interpret import Program, Results
from partition.execute.tensor_io import NotFinite, is_finite
from partition.execute.vector import Vector
from partition.stage import Backward, Forward, OptimizerSettings
from partition.stage_layout import Slot


def add_statistics(
    statistics: Mapping[int, torch.Tensor],
    program: Program,
    results: Results,
    request: Forward | Backward,
    *,
    microbatches: int,
) -> None:
    """Add a micro-batch's share of the running statistics after the step to the sums, or take it out.

    A single process would move the statistics by `momentum` once per use and micro-batch, in order. The j-th
    of N moves finally has the weight m (1 - m)^(N - 1 - j). So the shares can be added, no matter which
    replica computed them.
    """
    for norm, found in zip(program.norms, results.statistics, strict=True):
        turn = (request.microbatch % microbatches) * norm.uses + norm.ordinal
        share = norm.momentum * (1 - norm.momentum) ** (microbatches * norm.uses - 1 - turn)
        for row, tensor in zip((norm.mean_row, norm.variance_row), found, strict=True):
            if row in statistics:
                statistics[row].add_(tensor, alpha=request.sign * share)


def kept_shares(
    program: Program, moved: Iterable[tuple[int, float, int]], microbatches: int
) -> dict[int, float]:
    """Return, by row, the share of each running statistic that remains after a step: (1 - m)^N, to which the
    shares of all N moves are added. `moved` are the statistics that only other stages count: their shares
    come with the totals, as a tied gradient does."""
    kept = {
        row: (1 - norm.momentum) ** (microbatches * norm.uses)
        for norm in program.norms
        for row in (norm.mean_row, norm.variance_row)
    }
    for row, momentum, uses in moved:
        kept[row] = (1 - momentum) ** (microbatches * uses)
    return kept


def squared_norm(totals: Vector, slots: Sequence[Slot], borrowed: Collection[int]) -> float:
    """Return the squared norm of the total gradients, without rows that other stages count. The result is inf
    if any total, including statistics, is not finite: in that case no stage may apply the step."""
    totals.take()
    if not is_finite(totals.tensor):
        return inf
    total = 0.0
    for slot in slots:
        if slot.parameter.kind == "parameter" and slot.row not in borrowed:
            norm = torch.linalg.vector_norm(totals.exact_view(slot), dtype=torch.float64)
            total += float(norm) * float(norm)  # a power would raise an exception if the norm is infinite
    return total


def check_moments(moments: torch.Tensor, settings: OptimizerSettings) -> None:
    """Raise RemoteProtocolError for moments that no optimizer can have produced."""
    if not is_finite(moments):
        raise RemoteProtocolError("a moment is not finite")
    squares = moments[moments.numel() // 2 :]
    # A step takes the square roots of Adam's second vector.
    if settings.kind != "sgd" and squares.numel() and squares.min() < 0:
        raise RemoteProtocolError("a mean of squared gradients is negative")


def scalar(tensor: torch.Tensor, what: str) -> float:
    """Return the value of a scalar. Raises RemoteProtocolError if it is not a scalar, NotFinite if it is not
    finite."""
    if tensor.numel() != 1:
        raise RemoteProtocolError(f"{what} is not a single value")
    if not is_finite(tensor):
        raise NotFinite(f"{what} is {float(tensor.detach())}")
    return float(tensor.detach())
