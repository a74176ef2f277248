"""Estimates how full the common batch is, from members' claims bounded by their earlier contributions.

A claim of samples costs nothing, and a batch that looks full is averaged. So a member counts only while
rounds wait for it (`node.averaging.expectations`), and for at most `GROWTH` times its weight in samples in
the previous round with it. Before its first round it counts for at most one batch. Weights are bounded
relative to their median, so a member at that bound may have contributed more than its weight shows.
"""

from collections.abc import Mapping

from crypto.identity import PeerId
from gossip.averaging.weights import WEIGHT_MEDIANS_MAX
from gossip.roster import Report
from node.averaging.rounds import Round
from node.optimizer.session import TrainingSession

GROWTH = 2.0
"""A member's batch may grow to this multiple of its contribution to the previous round, because its batches
vary."""
BOUNDED_SHARE = 0.99
"""A weight at this share of the bound or above counts as at the bound."""


class BatchSamples:
    """One peer's estimate of the others' samples."""

    def __init__(self) -> None:
        self._brought: dict[PeerId, int | None] = {}

    def completed(self, made: Round, samples: int, session: TrainingSession | None, weighting: str) -> None:
        """Record a finished round and this peer's samples in it. Only a mean weighted by samples shows the
        others' samples."""
        shares = made.shares
        own = None if session is None else shares.get(session.peer)
        if not own or weighting != "samples" or made.aggregate != "mean":
            return
        middle = sorted(shares.values())[(len(shares) - 1) // 2]
        for peer, share in shares.items():
            is_bounded = share >= BOUNDED_SHARE * WEIGHT_MEDIANS_MAX * middle
            self._brought[peer] = None if is_bounded else round(samples * share / own)

    def total(self, own: int, step: int, target: int, reports: Mapping[PeerId, Report]) -> int:
        """Return the number of samples of all peers that this step waits for, including this peer's `own`."""
        return own + sum(
            report.samples.at_most(self._bound(peer, target))
            for peer, report in reports.items()
            if report.step.equals(step)
        )

    def _bound(self, peer: PeerId, target: int) -> int:
        brought = self._brought.get(peer)
        return target if brought is None else min(target, int(GROWTH * brought))
