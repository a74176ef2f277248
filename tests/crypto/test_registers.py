"""The register of places (bounded slots): which holder gets a place, and which holder is evicted for it."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.crowds import is_local
from crypto.registers import SLOW_SECONDS, STRANGER_PATIENCE_SECONDS, Budget, Register, Silence
from crypto.token_buckets import prefix_of

HOME = prefix_of("127.0.0.1")
LONG = 10.0


class Holding:
    """A holder of a place that has just become silent."""

    def __init__(self, silent_since: float = inf) -> None:
        self.silent_since = silent_since


def register(places_max: int = 4, per_peer_max: int = 4, per_network_max: int = 4) -> Register[Holding]:
    return Register(Budget(places_max, per_peer_max, per_network_max, LONG))


def test_a_silent_holder_makes_room_for_a_waiting_one() -> None:
    places, silent = register(1), Holding(0.0)
    assert places.admit(0.0, silent, b"a", HOME) == ()
    assert places.admit(STRANGER_PATIENCE_SECONDS, Holding(), b"b", HOME) == (silent,)
    assert silent not in places
    assert len(places) == 1


def test_a_holder_that_is_served_keeps_its_place() -> None:
    places = register(1)
    places.admit(0.0, Holding(), b"a", HOME)
    assert places.admit(1e6, Holding(), b"b", HOME) is None


def test_no_holder_is_evicted_while_there_is_room() -> None:
    places = register(2)
    places.admit(0.0, Holding(0.0), b"a", HOME)
    assert places.admit(1e6, Holding(), b"b", HOME) == ()


def test_unknown_peers_are_evicted_before_a_peer_that_completed_a_request() -> None:
    places, old, stranger = register(2), Holding(0.0), Holding(1.0)
    places.admit(0.0, old, b"a", HOME)
    places.credit(old)
    places.admit(1.0, stranger, b"b", HOME)
    assert places.admit(5.0, Holding(5.0), b"c", HOME) == (stranger,)
    assert places.is_known(b"a")


def test_a_known_peer_within_its_budget_may_be_silent_for_longer() -> None:
    places, known = register(1), Holding(0.0)
    places.admit(0.0, known, b"a", HOME)
    places.credit(known)
    assert places.admit(LONG - 1, Holding(), b"b", HOME) is None
    assert places.admit(LONG, Holding(), b"b", HOME) == (known,)


def test_the_silent_holder_of_the_greediest_source_is_evicted_first() -> None:
    places, lone = register(3), Holding(0.0)
    crowd = [Holding(1.0), Holding(2.0)]
    places.admit(0.0, lone, b"a", prefix_of("203.0.113.1"))
    for number, each in enumerate(crowd):
        places.admit(0.0, each, b"crowd%d" % number, prefix_of("198.51.100.7"))
    assert places.admit(60.0, Holding(), b"b", prefix_of("192.0.2.1")) == (crowd[0],)


def test_one_peer_gets_no_more_than_its_budget() -> None:
    places = register(4, per_peer_max=2)
    for _ in range(2):
        assert places.admit(0.0, Holding(), b"a", HOME) == ()
    assert places.admit(0.0, Holding(), b"a", HOME) is None
    assert places.admit(0.0, Holding(), b"b", HOME) == ()


def test_one_network_gets_no_more_than_its_budget_unless_local() -> None:
    places = register(8, per_network_max=2)
    sources = [prefix_of(f"198.51.100.{number}") for number in range(3)]
    for number in range(2):
        assert places.admit(0.0, Holding(), b"%d" % number, sources[number]) == ()
    assert places.admit(0.0, Holding(), b"2", sources[2]) is None
    for number in range(4):
        assert places.admit(0.0, Holding(), b"at home %d" % number, HOME) == ()


def test_a_peer_without_a_place_gets_one_from_the_greediest_peer() -> None:
    places = register(3)
    held = [Holding() for _ in range(3)]
    for each in held:
        places.admit(0.0, each, b"a", HOME)
    assert places.admit(0.0, Holding(), b"b", HOME) == (held[2],)


def test_a_peer_without_a_place_need_not_wait_among_equals() -> None:
    places = register(2)
    held = [Holding(0.1), Holding(0.2)]
    for number, each in enumerate(held):
        places.admit(0.0, each, b"%d" % number, HOME)
    assert places.admit(0.2, Holding(), b"b", HOME) is None
    assert places.admit(0.2 + SLOW_SECONDS, Holding(0.5), b"b", HOME) == (held[0],)


def test_a_protocol_has_its_own_budget() -> None:
    places = register(4)
    places.open("/a", Budget(1, 1, 1, LONG))
    places.open("/b", Budget(1, 1, 1, LONG))
    first, second = Holding(), Holding()
    for peer, each in ((b"a", first), (b"b", second)):
        places.admit(0.0, each, peer, HOME)
    assert places.enter(0.0, first, "/a") == ()
    assert places.enter(0.0, second, "/a") is None
    assert second in places
    assert places.enter(0.0, second, "/b") == ()
    assert places.count(b"a", "/a") == 1
    places.leave(first)
    assert places.enter(0.0, second, "/a") == ()


def test_a_peer_that_waits_for_this_node_is_not_silent() -> None:
    silence = Silence()
    assert silence.since == inf
    silence.begin(1.0)
    silence.begin(2.0)
    assert silence.since == 1.0
    silence.moved(3.0)
    assert silence.since == 3.0
    silence.end(4.0)
    assert silence.since == 4.0
    silence.end(5.0)
    silence.moved(6.0)
    assert silence.since == inf


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("10.1.2.3", True), ("192.168.0.4", True), ("172.20.1.1", True), ("::1", True),
     ("fe80::1", True), ("fd00::1", True), ("8.8.8.8", False), ("2001:db8::1", False)],
)  # fmt: skip
def test_loopback_and_local_networks_are_local(host: str, *, expected: bool) -> None:
    assert is_local(prefix_of(host)) == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans(), st.booleans()), max_size=60))
def test_no_budget_is_ever_exceeded(moves: list[tuple[int, int, bool, bool]]) -> None:
    places = register(6, per_peer_max=3, per_network_max=4)
    places.open("/a", Budget(3, 2, 2, LONG))
    for now, (peer, host, is_silent, enters) in enumerate(moves):
        holder = Holding(float(now) if is_silent else inf)
        name, source = b"%d" % peer, prefix_of(f"198.51.{host % 2}.{host}")
        before = len(places)
        evicted = places.admit(float(now), holder, name, source)
        assert (holder in places) == (evicted is not None)
        assert len(places) == before + (evicted is not None) - len(evicted or ())
        if evicted is not None and enters:
            places.enter(float(now), holder, "/a")
        assert len(places) <= 6
        assert all(places.count(b"%d" % each) <= 3 for each in range(6))
        assert sum(places.count(b"%d" % each, "/a") for each in range(6)) <= 3
