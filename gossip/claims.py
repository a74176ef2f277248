"""Counts that peers claim about themselves (steps, samples, rounds), and the evidence that bounds them: pure.

A claim supports no ordering and no arithmetic, so it must be compared with something before use: this peer's
own knowledge and pace, and the claims of other members. The kinds of evidence, strongest first:

- at least two members reach the count (`agreed_count`);
- the count is near the lower median of the members (`lower_median`), for a peer without knowledge of its own;
- this peer's own progress, and the time since it knew the others' counts (`CountEvidence`), for a single
  other claim.

Not here: the format of a report (`gossip.roster`), and the transfer of a state (`node.averaging.transfer`).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated

import msgspec

from crypto.identity import PeerId

COUNT_MAX = 2**40
"""Highest valid count: a thousand steps per second for 34 years."""
VOICES_MIN = 2
"""Number of members that must claim the same count before a peer gives up its own state."""
SLACK_STEPS = 10
"""Allowed distance in steps between members of one run, because reports take a while and rounds fail."""
PACE_FACTOR = 100.0
"""Assumed maximum speed of others relative to this peer, which may be a laptop compared with a rack of
GPUs."""
PACE_MIN = 1.0
"""Minimum number of steps per second assumed possible for others, however slow this peer is."""
PACE_GAIN = 0.1
"""The weight of the newest step in the moving average of the pace."""
SECONDS_MIN = 1e-3
"""Minimum duration of a step: a shorter step counts as this long."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=COUNT_MAX)]


@dataclass(frozen=True, slots=True)
class ClaimedCount:
    """A count that a peer claims. It can only be compared with a number that is known here."""

    _number: int

    def reaches(self, known: int) -> bool:
        """Return whether the claim is `known` or more."""
        return self._number >= known

    def equals(self, known: int) -> bool:
        """Return whether the claim equals `known`."""
        return self._number == known

    def at_most(self, bound: int) -> int:
        """Return the claim, but at most `bound`."""
        return min(self._number, bound)

    def is_between(self, first: int, last: int) -> bool:
        """Return whether the claim is between `first` and `last`, both included."""
        return first <= self._number <= last

    def is_near(self, known: int, slack: int) -> bool:
        """Return whether the claim is within `slack` of `known`."""
        return abs(self._number - known) <= slack


def lower_median(claims: Collection[ClaimedCount]) -> int:
    """Return the highest count that at least half of the claims reach (the lower median), or 0 without
    claims."""
    counts = sorted(claim._number for claim in claims)
    return counts[(len(counts) - 1) // 2] if counts else 0


def agreed_count(claims: Collection[ClaimedCount]) -> int:
    """Return the highest count that at least VOICES_MIN peers reach. With a single claim, return that."""
    counts = sorted((claim._number for claim in claims), reverse=True)
    return counts[min(VOICES_MIN, len(counts)) - 1] if counts else 0


@dataclass(frozen=True)
class LikelySteps:
    """The states that this peer may take according to the evidence: those of the steps from `first` to
    `last`."""

    first: int
    last: int
    holders_min: int = 1
    """Minimum number of peers that must hold the state."""
    holders_wanted: int = 1
    """Number of holders worth waiting for: with fewer, asking again is justified."""
    is_newest: bool = False
    """Whether to take the newest state if no two holders agree; if False, any of the states may be taken. A
    liar can claim the newest state, so set this only if the state is tested after it is taken."""
    is_nearest: bool = False
    """Whether honest states differ slightly. In that case, of three or more offers, the one nearest to the
    others is taken (`gossip.nearest`)."""
    lineage: bytes | None = None
    """If set, only states of this lineage are taken."""


def newcomer_steps(claims: Collection[ClaimedCount], slack: int, *, are_equal: bool) -> LikelySteps:
    """Return the steps at which a peer without a state joins. `are_equal`: all members at one step have the
    same state, so two of them can confirm it."""
    middle = lower_median(claims)
    near = sum(claim.is_near(middle, slack) for claim in claims)
    wanted = min(VOICES_MIN, near) if are_equal else 1
    # With more than two members, two honest ones hold the same state.
    needed = wanted if near > VOICES_MIN else 1
    return LikelySteps(max(0, middle - slack), middle + slack, needed, wanted, is_nearest=not are_equal)


class CountEvidence:
    """One peer's evidence about a count that all members of a run advance, such as the global step."""

    def __init__(self, now: float, count: int = 0) -> None:
        self._count = count
        self._known_at = now
        self._made_at = now
        self._pace = 0.0

    def made(self, now: float, count: int, *, is_known: bool) -> None:
        """Record that this peer advanced to `count` by itself. `is_known`: it advanced together with the
        others, or is alone in the run, so it knows their counts. If not, their counts are unknown from now
        on."""
        seconds = max(SECONDS_MIN, now - self._made_at)
        self._made_at = now
        pace = 1.0 / seconds
        self._pace = pace if not self._pace else (1 - PACE_GAIN) * self._pace + PACE_GAIN * pace
        if is_known:
            self.accept(now, count)

    def accept(self, now: float, count: int) -> None:
        """Record that the run is at `count`, as other members have shown."""
        self._count, self._known_at = count, now

    def count_max(self, now: float) -> int:
        """Return the maximum count that the run can have reached."""
        pace = max(PACE_MIN, PACE_FACTOR * self._pace)
        return self._count + SLACK_STEPS + int(max(0.0, now - self._known_at) * pace)

    def furthest(self, now: float, own: int, claims: Collection[ClaimedCount]) -> int:
        """Return the highest count supported by evidence: `own`, the count that two members reach, or a
        single claim that no other claim contradicts and that the run can have reached."""
        count = agreed_count(claims)
        if sum(claim.is_near(count, SLACK_STEPS) for claim in claims) < VOICES_MIN:
            # No second member is near this count, so only what the run can have reached counts.
            count = count if count <= self.count_max(now) else own
        return max(own, count)

    def likely_steps(self, now: float, own: int, claims: Collection[ClaimedCount]) -> LikelySteps:
        """Return the states that may replace this member's own, in a run in which all states of one step are
        equal."""
        furthest = self.furthest(now, own, claims)
        near = sum(claim.is_near(furthest, SLACK_STEPS) for claim in claims)
        holders = min(VOICES_MIN, max(1, near))
        return LikelySteps(own, furthest + SLACK_STEPS, holders, holders)


def common_lineage(own: bytes, others: Sequence[bytes], voices: int) -> bytes:
    """Return the lineage of most members, including this peer. A different lineage counts only if at least
    `voices` peers have it. A tie goes to the smaller hash, so that both sides agree."""
    lineages = Counter(others)
    lineages[own] += 1
    found = [each for each, count in lineages.items() if each == own or count >= voices]
    return min(found, key=lambda lineage: (-lineages[lineage], lineage))


def beginning(own: bytes | None, others: Sequence[bytes]) -> bytes:
    """Return the lineage with which a run begins before the first step: the most common one. A tie goes to
    the smaller hash, so that all peers with the same view choose the same. No work can be lost yet, so a
    single voice is enough. `own` None: this peer is not in the run yet."""
    known = list(others) if own is None else [own, *others]
    return common_lineage(known[0], known[1:], 1)


def rejoined_step(own: int, others: Sequence[tuple[ClaimedCount, bytes]]) -> int | None:
    """Return the step to return to if this peer trained alone, that is, if it is far beyond a majority that
    holds one state, and no other peer is near it. None if it need not return, or made most of its steps
    alone."""
    if any(step.is_near(own, SLACK_STEPS) for step, _ in others):
        return None
    for (step, _), count in Counter(others).items():
        if count >= VOICES_MIN and 2 * count > len(others) and own // 2 <= step._number < own:
            return step._number
    return None


@dataclass(frozen=True)
class OfferedState:
    """A state offered by a peer: the claimed step, and the hash of its bytes."""

    step: ClaimedCount
    digest: bytes


def choose_state(
    offers: Mapping[PeerId, OfferedState], likely: LikelySteps | None, rng: Random
) -> tuple[PeerId, ...]:
    """Return the holders of the state to take, of one of the `likely` steps if given. The most widely held
    state is chosen; a tie goes to the newest. If no two peers hold the same state, choose at random unless
    the newest is wanted, so that a liar cannot arrange to be chosen. Empty if no state is suitable."""
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
