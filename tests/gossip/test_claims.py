"""Evaluation of claims (counts that peers state about themselves), by pure functions."""

from random import Random

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from crypto.identity import PeerId
from gossip.claims import (
    COUNT_MAX,
    PACE_FACTOR,
    SLACK_STEPS,
    ClaimedCount,
    CountEvidence,
    LikelySteps,
    OfferedState,
    agreed_count,
    choose_state,
    common_lineage,
    lower_median,
    newcomer_steps,
    rejoined_step,
)

COUNTS = st.integers(0, COUNT_MAX - 1)
PEERS = [PeerId(blake3(bytes([number])).digest()) for number in range(8)]
A, B, C, D = (blake3(bytes([number])).digest() for number in range(4))


def claimed(*counts: int) -> list[ClaimedCount]:
    return [ClaimedCount(count) for count in counts]


def test_arithmetic_on_an_unchecked_claim_raises_an_error() -> None:
    claim = ClaimedCount(5)
    with pytest.raises(TypeError):
        assert claim > 3  # type: ignore[operator]  # that is the point
    with pytest.raises(TypeError):
        claim + 1  # type: ignore[operator]  # as above
    assert claim.at_most(3) == 3
    assert claim.reaches(5) > claim.reaches(6)


@given(st.lists(COUNTS, min_size=2, max_size=7), COUNTS)
def test_one_liar_cannot_move_a_count_beyond_honest_claims(honest: list[int], lie: int) -> None:
    for count in (agreed_count(claimed(*honest, lie)), lower_median(claimed(*honest, lie))):
        assert count <= max(honest)
    assert lower_median(claimed(*honest, lie)) >= min(honest)
    likely = newcomer_steps(claimed(*honest, lie), SLACK_STEPS, are_equal=True)
    assert likely.last <= max(honest) + SLACK_STEPS


@given(COUNTS, COUNTS)
def test_with_one_honest_member_a_higher_claim_is_implausible(honest: int, lie: int) -> None:
    likely = newcomer_steps(claimed(honest, lie), SLACK_STEPS, are_equal=True)
    assert likely.last <= honest + SLACK_STEPS


def trained(steps: int = 100, seconds: float = 0.1) -> CountEvidence:
    """Return evidence of a peer that has made steps together with others."""
    known = CountEvidence(0.0)
    for step in range(1, steps + 1):
        known.made(step * seconds, step, is_known=True)
    return known


def test_a_single_claim_counts_only_within_the_possible_pace() -> None:
    known, now = trained(), 10.0
    assert known.furthest(now, 100, claimed(2**39)) == 100
    assert known.furthest(now, 100, claimed(103)) == 103
    slept = now + 3600.0
    assert known.furthest(slept, 100, claimed(100 + 36_000)) == 36_100, (
        "the bound does not grow at the previous pace"
    )
    assert known.count_max(slept) == pytest.approx(100 + SLACK_STEPS + 3600 * 10 * PACE_FACTOR, rel=0.01)
    assert known.furthest(slept, 100, claimed(2**39)) == 100


def test_steps_made_alone_do_not_count_as_the_others_progress() -> None:
    known = trained()
    for step in range(101, 111):
        known.made(step * 0.1, step, is_known=False)
    assert known.furthest(11.0, 110, claimed(500)) == 500


def test_two_agreeing_members_are_believed_at_any_pace() -> None:
    known = trained()
    assert known.furthest(10.0, 100, claimed(90_000, 90_003, 2**39)) == 90_003
    assert known.likely_steps(10.0, 100, claimed(90_000, 90_003, 2**39)).holders_min == 2
    assert known.furthest(10.0, 100, claimed(90_000, 2**39)) == 100, (
        "lowered although no other member supports the lower claim"
    )


def test_a_member_follows_another_lineage_only_with_a_majority() -> None:
    low, high = sorted((A, B))
    assert common_lineage(high, [low], 1) == low, "of two peers, the smaller hash does not decide"
    assert common_lineage(low, [high], 1) == low
    assert common_lineage(high, [high, low], 2) == high
    assert common_lineage(high, [C, bytes(32)], 2) == high, "one liar with the smallest hash gets a majority"
    assert common_lineage(A, [B, B], 2) == B


def test_a_member_returns_to_the_others_after_steps_made_alone() -> None:
    two = [(ClaimedCount(1_000), A), (ClaimedCount(1_000), A)]
    assert rejoined_step(1_500, two) == 1_000
    assert rejoined_step(1_003, two) is None, "the member leaves although it is near the others"
    assert rejoined_step(9_000, two) is None, "the member stays although it made most steps alone"
    assert rejoined_step(1_500, [two[0], (ClaimedCount(0), B)]) is None, "a single peer counts as a majority"


def test_the_most_widely_held_state_is_chosen_else_a_random_one() -> None:
    def choose(
        *offers: tuple[int, bytes], holders_min: int = 1, seed: int = 1, is_newest: bool = False
    ) -> set[int]:
        given_ = {PEERS[n]: OfferedState(ClaimedCount(s), d) for n, (s, d) in enumerate(offers)}
        likely = LikelySteps(90, 110, holders_min, is_newest=is_newest)
        return {PEERS.index(peer) for peer in choose_state(given_, likely, Random(seed))}

    assert choose((100, A), (100, A), (109, B)) == {0, 1}
    assert choose((100, A), (100, A), (2**39, B), (2**39, B), (2**39, B)) == {0, 1}
    assert choose((100, A), (101, B), holders_min=2) == set()
    assert choose((2**39, A)) == set()
    assert choose((100, A), (2**39, B), (101, C), is_newest=True) == {2}
    alone = [choose((100, A), (101, B), (110, C), seed=seed) for seed in range(20)]
    assert {frozenset(each) for each in alone} == {frozenset({n}) for n in range(3)}
