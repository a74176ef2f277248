"""The events of a scenario, resolved to peers by number."""

import math
from itertools import islice
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.churn.disturbances import Disturbance, disturbances, late_numbers, version_of
from sim.churn.model import Churn, ChurnEvent, Version

NODES = 40
ONE_STAYS = Churn()


def region_of(number: int) -> str:
    return ("europe", "asia")[number % 2]


def resolve(
    *events: ChurnEvent, seed: int = 1, churn: Churn = ONE_STAYS, late: float = 0.0
) -> list[Disturbance]:
    found = disturbances(
        events, nodes=NODES, seconds=1_000.0, seed=seed, churn=churn, late_share=late, region_of=region_of
    )
    return list(islice(found, 1_000))


kinds = st.sampled_from(
    ["partition", "one-way", "no-datagrams", "crash", "leave", "join", "freeze", "slow", "restart", "loss"]
)
events = st.builds(
    ChurnEvent,
    at_seconds=st.floats(0, 1_100),
    kind=kinds,
    share=st.floats(0, 1),
    regions=st.sampled_from([(), ("asia",), ("asia", "europe")]),
    lasts_seconds=st.floats(0, 100),
    every_seconds=st.sampled_from([0.0, 30.0]),
)


@settings(deadline=None)
@given(st.lists(events, max_size=5), st.integers(0, 2**32))
def test_events_come_in_order_and_affect_their_share_of_peers(found: list[ChurnEvent], seed: int) -> None:
    resolved = resolve(*found, seed=seed, churn=Churn(permanent=3), late=0.25)
    assert [each.begins for each in resolved] == sorted(each.begins for each in resolved)
    joined: list[int] = []
    for each in resolved:
        assert each.numbers == tuple(sorted(set(each.numbers)))
        assert 0 <= each.begins <= each.ends
        if each.kind in ("crash", "leave", "restart", "join"):
            assert min(each.numbers) >= 3
        if each.kind == "join":
            joined += each.numbers
            assert all(each.begins <= start <= each.ends for start in each.starts)
        else:
            assert set(each.numbers) & set(late_numbers(NODES, 0.25, 3)) <= set(joined)
    assert len(joined) == len(set(joined))


def test_a_share_of_a_region_is_exact_and_drawn_by_the_seed() -> None:
    asia = ChurnEvent(5.0, "partition", share=0.25, regions=("asia",), lasts_seconds=20.0)
    (one,) = resolve(asia)
    (same,) = resolve(asia)
    (other,) = resolve(asia, seed=2)
    assert one == same
    assert one.numbers != other.numbers
    assert len(one.numbers) == 5
    assert {region_of(number) for number in one.numbers} == {"asia"}
    assert (one.begins, one.ends) == (5.0, 25.0)


def test_a_region_failure_without_an_end_is_immediate_and_permanent() -> None:
    (crash,) = resolve(ChurnEvent(5.0, "crash", share=1.0, regions=("europe",), lasts_seconds=0.0))
    assert crash.numbers == tuple(range(2, NODES, 2))  # peer 0 is permanent
    assert crash.ends == math.inf


def test_a_repeated_event_affects_different_peers_each_time() -> None:
    found = resolve(ChurnEvent(100.0, "freeze", share=0.1, lasts_seconds=5.0, every_seconds=300.0))
    assert [each.begins for each in found] == [100.0, 400.0, 700.0]
    assert len({each.numbers for each in found}) == 3


def test_a_flash_crowd_starts_each_held_peer_once_over_its_duration() -> None:
    late = late_numbers(NODES, 0.5, 1)
    first, second, third = resolve(
        ChurnEvent(10.0, "join", share=0.5, lasts_seconds=60.0),
        ChurnEvent(20.0, "join", share=1.0, lasts_seconds=1.0),
        ChurnEvent(30.0, "freeze", share=1.0),
        late=0.5,
    )
    assert (len(first.numbers), len(second.numbers)) == (10, 10)
    assert sorted((*first.numbers, *second.numbers)) == list(late)
    assert len(set(first.starts)) == 10
    assert len(third.numbers) == NODES


def test_each_restart_upgrades_a_share_of_the_remaining_peers() -> None:
    churn = Churn(versions=(Version("1.0", 0.75), Version("1.1", 0.25)), permanent=0)
    old = [number for number in range(NODES) if version_of(churn, number, 1) == "1.0"]
    assert 20 < len(old) < NODES
    found = resolve(
        ChurnEvent(0.0, "restart", share=0.5, version="2.0", every_seconds=100.0),
        ChurnEvent(250.0, "crash", share=1.0, versions=("2.0",)),
        churn=churn,
    )
    restarts = [each for each in found if each.kind == "restart"]
    assert [len(each.numbers) for each in restarts] == [20, 10, 5, 2, 2, 1]
    assert all(each.ends == each.begins and each.version == "2.0" for each in restarts)
    (crash,) = [each for each in found if each.kind == "crash"]
    assert crash.numbers == tuple(sorted(number for each in restarts[:3] for number in each.numbers))
    bug = resolve(ChurnEvent(1.0, "crash", share=1.0, versions=("1.0",)), churn=churn)
    assert bug[0].numbers == tuple(old)


def test_adding_an_event_changes_nothing_for_unaffected_peers() -> None:
    one = ChurnEvent(5.0, "slow", share=0.3, factor=9.0)
    other = ChurnEvent(3.0, "loss", share=0.3, loss=0.5)
    alone = resolve(one)
    both = resolve(one, other)
    assert [each for each in both if each.kind == "slow"] == alone
    assert (both[0].kind, both[0].loss, both[0].factor) == ("loss", 0.5, 1.0)


def test_every_kind_of_event_is_tested_here() -> None:
    kind: Any = msgspec.inspect.type_info(ChurnEvent)
    (field,) = [field for field in kind.fields if field.name == "kind"]
    drawn = {resolve(ChurnEvent(1.0, each), late=0.5)[0].kind for each in field.type.values}
    assert drawn == set(field.type.values)
