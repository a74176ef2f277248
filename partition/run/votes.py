"""Quorums for the end of a run in local mode: arithmetic on sets of members.

Not here: the messages (`partition.run.ending`).
"""

from collections.abc import Collection
from dataclasses import dataclass

from crypto.identity import PeerId


def liars_max(count: int) -> int:
    """Return how many of `count` members may lie: less than a third, but at least one. A single member does
    not lie."""
    return max(1, (count - 1) // 3) if count > 1 else 0


def quorum(count: int) -> int:
    """Return the size of a quorum. Any two quorums of `count` members share an honest member."""
    return (count + liars_max(count)) // 2 + 1


@dataclass(frozen=True)
class Electorate:
    """The members with a vote, as one of them sees them. The run's requester breaks ties."""

    voters: frozenset[PeerId]
    requester: PeerId | None = None

    def is_quorum(self, members: Collection[PeerId]) -> bool:
        """Return whether these members are a quorum."""
        return len(self.voters.intersection(members)) >= quorum(len(self.voters))

    def is_majority(self, members: Collection[PeerId], among: Collection[PeerId]) -> bool:
        """Return whether `members` are more than half of the voters `among` these, or half of them including
        the requester."""
        found = self.voters.intersection(members)
        return 2 * len(found) + (self.requester in found) > len(self.voters.intersection(among))

    @property
    def liars_max(self) -> int:
        """The number of voters that may lie."""
        return liars_max(len(self.voters))
