"""Assignment of micro-batches: in proportion to the rates, and the same on every member."""

from fractions import Fraction
from math import ceil

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from partition.plan.assignment import deal, feeder_of
from partition.plan.plan import MICROBATCHES_MAX, REPLICAS_MAX, decode_plan, encode_plan
from tests.partition.fake_stage import peer
from tests.partition.small_plan import PLAN

rates = st.lists(st.integers(1, 1_000), min_size=1, max_size=6)
TRAINERS = tuple(peer(f"t{number}") for number in range(5))
FED = replace(PLAN, roster=tuple(sorted((*PLAN.roster, *TRAINERS))), trainers=TRAINERS)


@given(rates, st.integers(1, 200))
def test_no_other_deal_ends_a_stage_earlier(rates: list[int], microbatches: int) -> None:
    owners = list(deal(range(microbatches), range(len(rates)), rates).values())
    end = max(Fraction(owners.count(place), rate) for place, rate in enumerate(rates))
    # The number of micro-batches that could be done strictly earlier.
    done_before = sum(ceil(end * rate) - 1 for rate in rates)
    assert done_before < microbatches


@given(rates, st.integers(1, 60), st.data())
def test_only_named_replicas_get_work(rates: list[int], microbatches: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.sampled_from(range(len(rates))), min_size=1, unique=True))
    assert set(deal(range(microbatches), places, rates).values()) <= set(places)


def test_twice_the_rate_gets_twice_the_microbatches() -> None:
    owners = list(deal(range(9), range(2), (10, 20)).values())
    assert (owners.count(0), owners.count(1)) == (3, 6)


def test_a_busy_replica_is_dealt_less() -> None:
    owners = list(deal(range(6), range(2), (1, 1), (4, 0)).values())
    assert (owners.count(0), owners.count(1)) == (1, 5)


def test_unmeasured_replicas_get_work() -> None:
    assert list(deal(range(3), range(2), (0, 0)).values()) == [0, 1, 0]


def test_equal_replicas_take_turns_even_in_the_largest_stage() -> None:
    owners = deal(range(MICROBATCHES_MAX), range(REPLICAS_MAX), [1] * REPLICAS_MAX)
    assert [owners[number] for number in range(REPLICAS_MAX)] == list(range(REPLICAS_MAX))
    assert len(owners) == MICROBATCHES_MAX


@given(st.integers(0, 2**62), st.booleans(), st.sampled_from(TRAINERS))
def test_a_departed_trainers_micro_batches_move_and_no_others(number: int, train: bool, gone: bytes) -> None:
    before = feeder_of(FED, train, number)
    assert before == feeder_of(decode_plan(encode_plan(FED)), train, number)
    after = feeder_of(replace(FED, trainers=tuple(each for each in TRAINERS if each != gone)), train, number)
    assert after == before or before == gone


def test_every_trainer_feeds_its_own_share() -> None:
    feeding = [feeder_of(FED, True, number) for number in range(500)]
    assert min(feeding.count(trainer) for trainer in TRAINERS) > 60


def test_a_lone_trainer_feeds_everything() -> None:
    assert feeder_of(replace(PLAN, trainers=PLAN.trainers[:1]), False, 7) == PLAN.committer
