"""Counts that a peer tells of itself (steps, samples, rounds), and the evidence that bounds them: pure.

A claim has no order and no arithmetic, so that none is used before it is held against something else: what
this peer knows itself, how fast it goes, and what other members say. Evidence, from the best down:

- at least two members reach the count (`agreed_count`);
- the count lies about where the lower median of the members is (`lower_median`), for a peer that knows
  nothing yet;
- this peer's own progress, and the time since it knew where the others were (`CountEvidence`), where only one
  member has something to say.

Not here: what a report looks like (`gossip.roster`), and the transfer of a state (`node.averaging.transfer`).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated

import msgspec

from crypto.identity import PeerId

COUNT_MAX = 2**40
"""A thousand steps a second for 34 years: nobody has counted further."""
VOICES_MIN = 2
"""Members that must say the same before one that has a state of its own gives it up."""
SLACK_STEPS = 10
"""Members of one run may well be so many steps apart: reports take a while, and rounds fail."""
PACE_FACTOR = 100.0
"""The others are at most so many times faster than this peer: it may be a laptop beside a rack of GPUs."""
PACE_MIN = 1.0
"""Steps a second that others may make, whatever this peer's own pace is."""
PACE_GAIN = 0.1
"""The weight of the newest step in the pace."""
SECONDS_MIN = 1e-3
"""A shorter step is taken to be this long."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=COUNT_MAX)]


@dataclass(frozen=True, slots=True)
class ClaimedCount:
    """A count that a peer tells of itself. Comparing it with a number that is known here is all it can do."""

    _number: int

    def reaches(self, known: int) -> bool:
        """Return whether the peer says that it is at `known` or further."""
        return self._number >= known

    def equals(self, known: int) -> bool:
        """Return whether the peer says that it is at `known`."""
        return self._number == known

    def at_most(self, bound: int) -> int:
        """Return the count, or `bound` where it is beyond that."""
        return min(self._number, bound)

    def is_between(self, first: int, last: int) -> bool:
        """Return whether the peer says that it is at one of these, both included."""
        return first <= self._number <= last

    def is_near(self, known: int, slack: int) -> bool:
        """Return whether the peer says that it is within `slack` of `known`."""
        return abs(self._number - known) <= slack


def lower_median(claims: Collection[ClaimedCount]) -> int:
    """Return the claim of which half are not below; of two the lower. 0 where there is none."""
    counts = sorted(claim._number for claim in claims)
    return counts[(len(counts) - 1) // 2] if counts else 0


def agreed_count(claims: Collection[ClaimedCount]) -> int:
    """Return the highest count that VOICES_MIN peers reach, or the only one where no other is there."""
    counts = sorted((claim._number for claim in claims), reverse=True)
    return counts[min(VOICES_MIN, len(counts)) - 1] if counts else 0


@dataclass(frozen=True)
class LikelySteps:
    """Which states may be taken, by the evidence: of the steps from `first` to `last`."""

    first: int
    last: int
    holders_min: int = 1
    """Held by so many."""
    holders_wanted: int = 1
    """It is worth asking again for so many."""
    is_newest: bool = False
    """Where no two hold the same, the newest is taken, and any if not: a liar can claim to be the newest, so
    that is for whoever tries what it takes."""
    is_nearest: bool = False
    """Honest members hold states that differ a little: of three or more that are offered, the one nearest to
    the others is taken (`gossip.nearest`)."""
    lineage: bytes | None = None
    """Only those that came about like this."""


def newcomer_steps(claims: Collection[ClaimedCount], slack: int, *, are_equal: bool) -> LikelySteps:
    """Return where a peer that has nothing of its own joins. `are_equal`: members at one step have the same
    state, so that two of them vouch for it."""
    middle = lower_median(claims)
    near = sum(claim.is_near(middle, slack) for claim in claims)
    wanted = min(VOICES_MIN, near) if are_equal else 1
    # Of more than two, two that are honest hold the same.
    needed = wanted if near > VOICES_MIN else 1
    return LikelySteps(max(0, middle - slack), middle + slack, needed, wanted, is_nearest=not are_equal)


class CountEvidence:
    """What one peer knows of a count that all members of a run move on, such as the global step."""

    def __init__(self, now: float, count: int = 0) -> None:
        self._count = count
        self._known_at = now
        self._made_at = now
        self._pace = 0.0

    def made(self, now: float, count: int, *, is_known: bool) -> None:
        """This peer has moved on to `count` by itself. `is_known`: with the others, or nobody else is there,
        so that it knows where all are; else they may be anywhere by now."""
        seconds = max(SECONDS_MIN, now - self._made_at)
        self._made_at = now
        pace = 1.0 / seconds
        self._pace = pace if not self._pace else (1 - PACE_GAIN) * self._pace + PACE_GAIN * pace
        if is_known:
            self.accept(now, count)

    def accept(self, now: float, count: int) -> None:
        """The run is here, as others have shown."""
        self._count, self._known_at = count, now

    def count_max(self, now: float) -> int:
        """Return how far the run can be by now."""
        pace = max(PACE_MIN, PACE_FACTOR * self._pace)
        return self._count + SLACK_STEPS + int(max(0.0, now - self._known_at) * pace)

    def furthest(self, now: float, own: int, claims: Collection[ClaimedCount]) -> int:
        """Return the furthest count that there is evidence for: `own`, what two members reach, or one where
        no other is near it and it can be so far."""
        count = agreed_count(claims)
        if sum(claim.is_near(count, SLACK_STEPS) for claim in claims) < VOICES_MIN:
            # Nobody stands by it: a claim of anything beyond it is no voice for it.
            count = count if count <= self.count_max(now) else own
        return max(own, count)

    def likely_steps(self, now: float, own: int, claims: Collection[ClaimedCount]) -> LikelySteps:
        """Return which states a member may take in place of its own, where those of one step are equal."""
        furthest = self.furthest(now, own, claims)
        near = sum(claim.is_near(furthest, SLACK_STEPS) for claim in claims)
        holders = min(VOICES_MIN, max(1, near))
        return LikelySteps(own, furthest + SLACK_STEPS, holders, holders)


def common_lineage(own: bytes, others: Sequence[bytes], voices: int) -> bytes:
    """Return the lineage that the most have, this peer included, and of others' only one that so many
    `voices` have. A tie goes to the smaller hash, so that both sides agree on who comes over."""
    lineages = Counter(others)
    lineages[own] += 1
    found = [each for each, count in lineages.items() if each == own or count >= voices]
    return min(found, key=lambda lineage: (-lineages[lineage], lineage))


def beginning(own: bytes | None, others: Sequence[bytes]) -> bytes:
    """Return the lineage with which a run begins in which nobody has made a step: the one that most have, of
    several the smaller hash, so that all that see the same members choose the same. None has anything to
    lose yet, so one voice is enough. `own` None: this peer is not in the run yet."""
    known = list(others) if own is None else [own, *others]
    return common_lineage(known[0], known[1:], 1)


def rejoined_step(own: int, others: Sequence[tuple[ClaimedCount, bytes]]) -> int | None:
    """Return the step of most others, which hold one state, where this peer is far beyond them and nobody is
    near it: it went on alone, and comes back to them. None where it need not, or has made most of its steps
    alone."""
    if any(step.is_near(own, SLACK_STEPS) for step, _ in others):
        return None
    for (step, _), count in Counter(others).items():
        if count >= VOICES_MIN and 2 * count > len(others) and own // 2 <= step._number < own:
            return step._number
    return None


@dataclass(frozen=True)
class OfferedState:
    """A state that a peer offers: of which step it says it is, and the hash of its bytes."""

    step: ClaimedCount
    digest: bytes


def choose_state(
    offers: Mapping[PeerId, OfferedState], likely: LikelySteps | None, rng: Random
) -> tuple[PeerId, ...]:
    """Return the holders of the state to take, of a likely step where that is given: the one that the most
    hold, the newest of those. Where no two hold the same, any, if it is not to be the newest: whoever lies
    must not be able to arrange that its own comes first. Empty where none will do."""
    if likely is not None:
        offers = {
            peer: offer for peer, offer in offers.items() if offer.step.is_between(likely.first, likely.last)
        }
    holders: dict[OfferedState, list[PeerId]] = {}
    for peer, offer in sorted(offers.items()):
        holders.setdefault(offer, []).append(peer)
    most = max((len(peers) for peers in holders.values()), default=0)
    if most < (1 if likely is None else likely.holders_min):
        return ()
    best = [offer for offer, peers in holders.items() if len(peers) == most]
    if most >= VOICES_MIN or likely is None or likely.is_newest:
        return tuple(holders[max(best, key=lambda offer: (offer.step._number, offer.digest))])
    return tuple(holders[rng.choice(best)])
