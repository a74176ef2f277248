"""Which relays a node asks for a place (a reservation), and when it asks them again."""

from node.services.relays.places import (
    ANSWER_SECONDS,
    RENEW_SECONDS,
    TRIED_MAX,
    WANTED,
    PlaceLease,
    PlaceSearch,
)
from node.services.relays.settings import RELAYS as USUAL
from node.transport.paths import idle_seconds
from tests.node.test_transport_parts import peer_ids

RELAYS = peer_ids(TRIED_MAX + 10)


def test_the_best_relays_are_asked_until_enough_have_accepted() -> None:
    search = PlaceSearch()
    asked = [search.next(0.0, RELAYS) for _ in range(WANTED + 1)]
    assert asked == [*RELAYS[:WANTED], None]
    assert search.asked == tuple(RELAYS[:WANTED])


def test_a_relay_that_refused_rests_longer_than_a_lost_one() -> None:
    search = PlaceSearch()
    assert search.next(0.0, RELAYS[:1]) == RELAYS[0]
    search.ended(1.0, RELAYS[0])
    assert search.next(USUAL.refused_seconds, RELAYS[:1]) is None
    assert search.next(1.0 + USUAL.refused_seconds, RELAYS[:1]) == RELAYS[0]
    search.kept(1.0 + USUAL.refused_seconds, RELAYS[0])
    search.ended(200.0, RELAYS[0])
    assert search.next(200.0 + USUAL.lost_seconds, RELAYS[:1]) == RELAYS[0]


def test_a_relay_that_hangs_up_is_left_out_longer_each_time() -> None:
    search, now, pauses = PlaceSearch(), 0.0, []
    for _ in range(6):
        began = now
        while search.next(now, RELAYS[:1]) is None:
            now += USUAL.lost_seconds
        pauses.append(now - began)
        search.kept(now, RELAYS[0])
        search.ended(now, RELAYS[0])
    assert pauses == [
        0.0,
        USUAL.lost_seconds,
        4 * USUAL.lost_seconds,
        16 * USUAL.lost_seconds,
        64 * USUAL.lost_seconds,
        USUAL.refused_seconds,
    ]
    now += USUAL.refused_seconds
    assert search.next(now, RELAYS[:1]) == RELAYS[0]
    search.kept(now, RELAYS[0])
    now += USUAL.stood_seconds
    search.ended(now, RELAYS[0])
    assert search.next(now + USUAL.lost_seconds, RELAYS[:1]) == RELAYS[0], (
        "a place that lasted did not reset the pause"
    )


def test_the_number_of_relays_left_out_is_bounded() -> None:
    search = PlaceSearch()
    for relay in RELAYS:
        assert search.next(0.0, [relay]) == relay
        search.ended(0.0, relay)
    held, most = search.sizes["left alone"]
    assert held == most == TRIED_MAX


def test_a_place_is_renewed_and_a_silent_relay_is_lost() -> None:
    lease = PlaceLease(0.0)
    assert lease.deadline == ANSWER_SECONDS
    lease.kept(1.0)
    assert lease.deadline == 1.0 + RENEW_SECONDS
    assert lease.wake(61.0)
    assert lease.deadline == 61.0 + ANSWER_SECONDS
    assert not lease.wake(71.0)


def test_an_idle_relayed_path_is_closed_sooner_than_others() -> None:
    assert idle_seconds("relayed", has_better=True) < idle_seconds("relayed", has_better=False)
    assert idle_seconds("relayed", has_better=False) < idle_seconds("punched", has_better=False)
    assert idle_seconds("direct", has_better=True) == idle_seconds("direct", has_better=False)
