"""Times of replicas with only a share of a processor, such as a container under a CPU quota.

Such a replica computes at the whole processor's speed as long as it pauses in between, and at its quota's
once it has no pause. So the fewer layers it holds the faster it seems, and a committer that believed it would
give it far too many. Its time without a pause is known from its calibration, which lasts for many periods of
a quota, and from steps in which it was slower than that.
"""

from collections.abc import Mapping
from fractions import Fraction

from partition.plan.problem import Problem, Split

QUOTA_PERMILLE_MAX = 850
"""A share of a processor above this is one that others use now and then, not a quota."""
KEPT = Fraction(3, 4)
"""The share of a found slowness that counts at the next look, if that does not find it again: it is neither
forgotten as soon as the replica holds fewer layers, nor kept for ever."""


class QuotaWatch:
    """One member's watch, over all plans of a run."""

    def __init__(self) -> None:
        self._slower: dict[str, Fraction] = {}

    def without_pauses(
        self, problem: Problem, split: Split, nanoseconds: Mapping[str, int], permille: Mapping[str, int]
    ) -> dict[str, int]:
        """Return the time of a micro-batch on each replica that computes without a pause, by the peers'
        names.

        `nanoseconds` are as measured, 0 for unknown, `permille` the shares of a processor, by which the
        problem's times were made.
        """
        found = dict(nanoseconds)
        for (first, last), group in zip(split.ranges, split.groups, strict=True):
            for peer in (problem.peers[place] for place in group):
                took = nanoseconds.get(peer.name, 0)
                if not took or permille.get(peer.name, 1000) > QUOTA_PERMILLE_MAX:
                    continue
                calibrated = max(1, sum(peer.forward[first:last]) + sum(peer.backward[first:last]))
                known = 1 + KEPT * (self._slower.get(peer.name, Fraction(1)) - 1)
                slower = max(Fraction(took, calibrated), known).limit_denominator(1000)
                self._slower[peer.name] = slower
                found[peer.name] = max(took, int(slower * calibrated))
        return found
