"""Counts of the votes of a run's members in local mode, from their messages about conclusions.

Not here: what follows from the counts for a member (`partition.run.ending`), and the arithmetic of quorums
(`partition.run.votes`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from crypto.identity import PeerId
from partition.run.conclusions import Conclusion, Said, rank, says_committed
from partition.run.votes import Electorate, liars_max

STALE_SECONDS = 10.0
"""A message that was not repeated for this long no longer counts for its conclusion."""
PATIENCE_SECONDS = 30.0
"""How long a member that holds a conclusion waits for the others to hold it too."""
LOOK_SECONDS = 150.0
"""How much longer to wait for a member that is fetching or trying a result."""


@dataclass
class OwnChoice:
    """This member's preferred conclusion. `refusing` are the other members that refuse it."""

    conclusion: Conclusion
    is_here: bool = False
    held_at: float = inf
    refusing: set[PeerId] = field(default_factory=set)

    @property
    def patient_until(self) -> float:
        return self.held_at + PATIENCE_SECONDS


class Poll:
    """The poll of one run, kept by the member `me`. `said` is each other member's latest message and the time
    of its arrival."""

    def __init__(self, me: PeerId, requester: PeerId | None) -> None:
        self.voters = frozenset({me})
        self.said: dict[PeerId, tuple[Said, float]] = {}
        self.claims: dict[PeerId, Conclusion] = {}
        """The first conclusion that each member reported as settled."""
        self._me = me
        self._requester = requester

    @property
    def electorate(self) -> Electorate:
        return Electorate(self.voters, self._requester)

    def forget(self, peer: PeerId) -> None:
        """Forget all messages of a member."""
        self.said.pop(peer, None)
        self.claims.pop(peer, None)

    def retract(self, peer: PeerId, conclusion: Conclusion) -> None:
        """Forget a member's latest message if it is about this conclusion."""
        if peer in self.said and self.said[peer][0].conclusion == conclusion:
            del self.said[peer]

    def backing(self, conclusion: Conclusion, backs: Callable[[Said, Conclusion], bool]) -> set[PeerId]:
        """Return the other members whose latest message backs a conclusion, as judged by `backs`."""
        return {peer for peer, (said, _) in self.said.items() if backs(said, conclusion)}

    def supported(self, now: float) -> dict[Conclusion, set[PeerId]]:
        """Return the conclusions that other members hold according to their recent messages, each with its
        holders."""
        found: dict[Conclusion, set[PeerId]] = {}
        for peer, (said, at) in self.said.items():
            if said.holds and (said.is_settled or now - at < STALE_SECONDS):
                found.setdefault(said.conclusion, set()).add(peer)
        return found

    def decided(self) -> Conclusion | None:
        """Return the conclusion that others have settled on, or that a quorum has committed to; None if there
        is none yet."""
        backers: dict[Conclusion, set[PeerId]] = {}
        for peer, conclusion in self.claims.items():
            backers.setdefault(conclusion, set()).add(peer)
        said = dict.fromkeys(said.conclusion for said, _ in self.said.values())
        decided = next((each for each in said if self._is_decision(each, backers.get(each, set()))), None)
        if decided is None and self._me not in self.voters and self.voters <= self.claims.keys():
            # If the voters could not agree, a member without a vote accepts the conclusion that most voters
            # have settled on.
            decided = min(backers, key=lambda each: (-len(backers[each]), rank(each)), default=None)
        return decided

    def _is_decision(self, conclusion: Conclusion, settled: set[PeerId]) -> bool:
        """Return whether a conclusion on which the members `settled` have settled is decided for all."""
        liars = liars_max(len(self.voters | settled))  # with two members, the other one may lie
        if len(settled) > liars or self._requester in settled:
            return True
        return self.electorate.is_quorum(self.backing(conclusion, says_committed))

    def carries(self, now: float, choice: OwnChoice, backing: set[PeerId]) -> bool:
        """Return whether the members `backing` suffice for a choice: they are a quorum; or after a while, a
        majority of the members that answer, with no more opponents than may lie."""
        electorate = self.electorate
        if electorate.is_quorum(backing):
            return True
        if now < choice.patient_until:
            return False
        best = choice.conclusion
        against = {peer for peer, (said, _) in self.said.items() if said.holds and said.conclusion != best}
        if len(against & self.voters - backing) > electorate.liars_max:
            return False
        asked = backing | against | choice.refusing
        if now < choice.patient_until + LOOK_SECONDS:
            asked |= self.said.keys()  # include those that are still trying a result
        return electorate.is_majority(backing, asked)
