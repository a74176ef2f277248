"""Who takes which micro-batch: the same for everybody, in proportion to the rates, moved only by a death."""

from fractions import Fraction
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from crypto.identity import PeerId
from partition.plan.plan import MICROBATCHES_MAX, REPLICAS_MAX, Plan, StagePlan, decode_plan, encode_plan
from partition.plan.schedule import Routes, deal, stage_owners

PEERS = tuple(PeerId(bytes([number]) * 32) for number in range(REPLICAS_MAX))


@st.composite
def stages(draw: st.DrawFn) -> StagePlan:
    rates = draw(st.lists(st.integers(0, 1_000), min_size=1, max_size=6))
    return StagePlan(0, 1, PEERS[: len(rates)], tuple(rates))


@given(stages(), st.integers(1, 60), st.data())
def test_a_drop_moves_only_what_the_dropped_had(
    stage: StagePlan, microbatches: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(stage.replicas))
    before = stage_owners(stage, microbatches, ())
    for number in range(1, len(order)):
        dropped = [PeerId(peer) for peer in order[:number]]
        after = stage_owners(stage, microbatches, dropped)
        for was, owner in zip(before, after, strict=True):
            assert owner not in dropped
            assert owner == was or was == dropped[-1]
        before = after
    assert stage_owners(stage, microbatches, [PeerId(peer) for peer in order]) == ()


@given(stages(), st.integers(1, 60), st.lists(st.sampled_from(PEERS), max_size=4))
def test_a_peer_of_another_stage_or_a_second_drop_moves_nothing(
    stage: StagePlan, microbatches: int, others: list[PeerId]
) -> None:
    dropped = [peer for peer in others if peer not in stage.replicas]
    twice = [*dropped, PEERS[0], *dropped, PEERS[0]]
    assert stage_owners(stage, microbatches, dropped) == stage_owners(stage, microbatches, ())
    assert stage_owners(stage, microbatches, twice) == stage_owners(stage, microbatches, [PEERS[0]])


@given(st.lists(st.integers(1, 1_000), min_size=1, max_size=6), st.integers(1, 200))
def test_no_deal_ends_a_stage_earlier(rates: list[int], microbatches: int) -> None:
    owners = list(deal(range(microbatches), PEERS[: len(rates)], rates).values())
    end = max(Fraction(owners.count(peer), rate) for peer, rate in zip(PEERS, rates, strict=False))
    done_before = sum(ceil(end * rate) - 1 for rate in rates)  # all that could be done strictly earlier
    assert done_before < microbatches


def test_twice_the_rate_gets_twice_the_microbatches() -> None:
    owners = list(deal(range(9), PEERS[:2], (10, 20)).values())
    assert (owners.count(PEERS[0]), owners.count(PEERS[1])) == (3, 6)


def test_the_same_answer_from_the_bytes_of_the_plan_and_for_every_step() -> None:
    plan = Plan(
        run=bytes(32),
        parent=bytes(32),
        height=0,
        planner=PEERS[0],
        trainer=PEERS[0],
        requester=PEERS[0],
        microbatches=5,
        stages=(StagePlan(0, 2, PEERS[:3], (3, 1, 2)), StagePlan(2, 3, PEERS[3:5], (1, 1))),
    )
    here, there = (Routes(plan, [PEERS[1]]), Routes(decode_plan(encode_plan(plan)), [PEERS[1]]))
    for stage in range(2):
        assert here.live(stage)
        for number in range(5):
            assert here.owner(stage, number) == there.owner(stage, number) == here.owner(stage, number + 35)


def test_equal_replicas_take_turns_in_the_largest_stage_of_a_plan() -> None:
    owners = deal(range(MICROBATCHES_MAX), PEERS, [1] * REPLICAS_MAX)
    assert [owners[number] for number in range(REPLICAS_MAX)] == list(PEERS)
    assert len(owners) == MICROBATCHES_MAX
