"""Step times of replicas that have only a share of a processor, such as a container under a CPU quota.

Such a replica computes at the whole processor's speed while it gets pauses in between, and at its quota's
speed without pauses. So it seems faster the fewer layers it holds, and a committer that trusted this
measurement would give it far too many layers. Its time without pauses is known from its calibration, which
lasts for many periods of a quota, and from steps in which it was slower than its calibration.
"""

from collections.abc import Mapping
from fractions import Fraction

from partition.plan.problem import Problem, Split

QUOTA_PERMILLE_MAX = 850
"""Maximum share of a processor that counts as a quota. A larger share means a processor that is shared at
times."""
KEPT = Fraction(3, 4)
"""How much of a known slowdown remains at the next check if that check does not confirm it. So the slowdown
is not forgotten as soon as the replica holds fewer layers, and it is not kept forever."""


class QuotaWatch:
    """One member's watch, over all plans of a run."""

    def __init__(self) -> None:
        self._slower: dict[str, Fraction] = {}

    def without_pauses(
        self, problem: Problem, split: Split, nanoseconds: Mapping[str, int], permille: Mapping[str, int]
    ) -> dict[str, int]:
        """Return, by peer, the time of a micro-batch on each replica if it computed without pauses.

        `nanoseconds` are the measured times, 0 if unknown; `permille` are the processor shares during the
        calibrations behind the problem's times.
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
