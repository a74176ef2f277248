"""How much slower a slot is while the others are busy, for tests and benchmarks."""

from partition.plan.operations import Amount
from partition.plan.rates import MEGA, Calibration

TYPICAL = Amount(1, 10 * MEGA, 1 << 20)
"""An operator of a small model, to weigh the parts of a pace."""


def slowdown(alone: Calibration, beside: Calibration) -> float:
    """Return how many times as long a slot takes for the same work while the others are busy: the mean over
    the classes of operators that both know, of a typical call."""
    ratios = []
    paces = {row.kind: row.forward for row in alone.kinds}
    for row in beside.kinds:
        before = paces[row.kind].picoseconds(TYPICAL) if row.kind in paces else 0
        if before:
            after = row.forward.picoseconds(TYPICAL) / beside.share_permille
            ratios.append(after / (before / alone.share_permille))
    return sum(ratios) / len(ratios) if ratios else 1.0
