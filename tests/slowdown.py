"""Measures how much slower a slot computes while the other slots are busy, for tests and benchmarks."""

from partition.plan.operations import Amount
from partition.plan.rates import MEGA, Calibration

TYPICAL = Amount(1, 10 * MEGA, 1 << 20)
"""An operator of a small model, used to weigh the terms of its cost."""


def slowdown(alone: Calibration, beside: Calibration) -> float:
    """Return the ratio of a slot's times for the same work with the other slots busy and idle: the mean over
    the operator classes that both measured, for a typical call.
    """
    ratios = []
    paces = {row.kind: row.forward for row in alone.kinds}
    for row in beside.kinds:
        before = paces[row.kind].picoseconds(TYPICAL) if row.kind in paces else 0
        if before:
            after = row.forward.picoseconds(TYPICAL) / beside.share_permille
            ratios.append(after / (before / alone.share_permille))
    return sum(ratios) / len(ratios) if ratios else 1.0
