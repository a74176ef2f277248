"""Admission to handshakes: limits that hold however many sources ask, and the order in which sources are
admitted."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from node.transport.handshake_limits import (
    KNOWN_BURST,
    KNOWN_RATE,
    SOURCE_BURST,
    SOURCE_RATE,
    SOURCES_MAX,
    STRANGERS_BURST,
    STRANGERS_RATE,
    HandshakeGate,
)

SOURCES = [bytes((number,)) for number in range(6)]


def all_of(admission: HandshakeGate, waiting: list[bytes], now: float) -> Counter[bytes]:
    """Return how many of the handshakes available now each source gets."""
    taken: Counter[bytes] = Counter()
    while (source := admission.choose(waiting, now)) is not None:
        taken[source] += 1
    return taken


@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.lists(st.sampled_from(SOURCES), min_size=1, unique=True)), max_size=8
    ),
    st.sets(st.sampled_from(SOURCES)),
)
def test_no_traffic_exceeds_the_allowed_handshake_rates(
    steps: list[tuple[float, list[bytes]]], known: set[bytes]
) -> None:
    admission, now, taken = HandshakeGate(0.0), 0.0, Counter[bytes]()
    for source in known:
        admission.proved(source, 0.0)
    for pause_seconds, waiting in steps:
        now += pause_seconds
        chosen = all_of(admission, waiting, now)
        assert chosen.keys() <= set(waiting)
        taken += chosen
    assert all(count <= SOURCE_BURST + SOURCE_RATE * now + 1e-6 for count in taken.values())
    for is_known, rate, burst in ((False, STRANGERS_RATE, STRANGERS_BURST), (True, KNOWN_RATE, KNOWN_BURST)):
        of_kind = sum(count for source, count in taken.items() if (source in known) == is_known)
        assert of_kind <= burst + rate * now + 1e-6


def test_a_newcomer_is_admitted_before_a_crowd_from_elsewhere() -> None:
    admission, crowd = HandshakeGate(0.0), SOURCES[:4]
    all_of(admission, crowd, 0.0)
    # From here on one token at a time becomes available, and all sources want it.
    assert admission.choose([*crowd, SOURCES[5]], 1.5 / STRANGERS_RATE) == SOURCES[5]


def test_sources_that_asked_equally_often_take_turns() -> None:
    admission, crowd = HandshakeGate(0.0), SOURCES[:4]
    taken = all_of(admission, crowd, 0.0)
    assert set(taken.values()) == {STRANGERS_BURST / 4}


def test_unknown_sources_cannot_use_up_the_share_of_known_ones() -> None:
    admission = HandshakeGate(0.0)
    admission.proved(SOURCES[0], 0.0)
    all_of(admission, SOURCES[1:], 0.0)
    assert admission.choose(SOURCES, 0.0) == SOURCES[0]


def test_handshakes_that_prove_a_peer_do_not_count_against_its_source() -> None:
    admission = HandshakeGate(0.0)
    for number in range(int(2 * SOURCE_BURST)):
        now = number / KNOWN_RATE
        assert admission.choose(SOURCES[:1], now) == SOURCES[0]
        admission.proved(SOURCES[0], now)
    assert all_of(admission, SOURCES[:1], now)[SOURCES[0]] == SOURCE_BURST


def test_the_number_of_remembered_sources_is_bounded() -> None:
    admission = HandshakeGate(0.0)
    for number in range(SOURCES_MAX + 10):
        source = number.to_bytes(4, "big")
        assert admission.choose([source], float(number)) == source
        admission.proved(source, float(number))
    assert len(admission._sources) == len(admission._proved) == SOURCES_MAX
