"""What is decided about punching: the core, without sockets. Real NATs: `tests/lab/test_punching.py`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.contact import Address, make_address
from crypto.encoding import encode
from crypto.identity import PeerId
from node.transport.address_policy import AddressPolicy
from node.transport.punch_messages import CANDIDATES_MAX, OFFER_BYTES_MIN
from node.transport.punching import (
    ANSWER_PAUSE_SECONDS,
    HOST_TRIES_BURST,
    OBSERVED_SECONDS,
    OBSERVERS_MAX,
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    PunchBudget,
    SeenPlaces,
)

OUTSIDE, OTHER = make_address("45.1.0.2", 30_000), make_address("45.1.0.2", 30_001)


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def everywhere(address: Address) -> bool:
    """Admit every address."""
    return address.port > 0


@pytest.mark.parametrize(
    "offered",
    [
        "/ip4/45.2.0.2/tcp/80",
        "/ip4/127.0.0.1/tcp/9747",
        "/ip4/169.254.1.1/tcp/9747",
        "/ip4/10.1.1.1/tcp/9747",
    ],
)
def test_nothing_is_dialled_that_a_peer_may_not_claim(offered: str) -> None:
    policy = AddressPolicy()
    policy.look([("192.168.1.10", 9747)], ())
    assert PunchBudget(policy.admits).admit([offered], 0.0) == []
    assert PunchBudget(policy.admits).admit([str(OUTSIDE)], 0.0) == [OUTSIDE]


def test_names_circuits_and_nonsense_are_not_dialled() -> None:
    circuit = make_address("45.2.0.2", 9747, peer(1)).through(peer(2))
    offered = ["/dns4/example.org/tcp/9747", str(circuit), "?"]
    assert PunchBudget(everywhere).admit(offered, 0.0) == []


def test_one_address_of_a_host_is_dialled() -> None:
    assert PunchBudget(everywhere).admit([str(OUTSIDE), str(OTHER)], 0.0) == [OUTSIDE]


def test_a_host_is_dialled_rarely_whoever_offers_it() -> None:
    budget = PunchBudget(everywhere)
    dialled = [bool(budget.admit([str(OUTSIDE)], 0.0)) for _ in range(int(HOST_TRIES_BURST) + 1)]
    assert dialled == [True] * int(HOST_TRIES_BURST) + [False]
    assert budget.admit([str(OUTSIDE)], 60.0) == [OUTSIDE]


def test_a_peer_is_tried_ever_more_rarely_while_it_fails() -> None:
    budget, now, pauses = PunchBudget(everywhere), 0.0, []
    for _ in range(10):
        assert budget.may_start(peer(1), now)
        budget.ended(peer(1), worked=False)
        began = now
        while not budget.may_start(peer(1), now):
            now += 1.0
        pauses.append(now - began)
        budget.ended(peer(1), worked=False)
        now += PAUSE_SECONDS_MAX
    assert pauses[0] == PAUSE_SECONDS
    assert max(pauses) == PAUSE_SECONDS_MAX


def test_offers_of_one_peer_are_taken_now_and_then() -> None:
    budget = PunchBudget(everywhere)
    assert budget.may_answer(peer(1), 0.0)
    assert not budget.may_answer(peer(1), ANSWER_PAUSE_SECONDS - 1)
    assert budget.may_answer(peer(2), 0.0)
    assert budget.may_answer(peer(1), ANSWER_PAUSE_SECONDS)


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 255)), max_size=50))
def test_whatever_is_offered_memory_is_bounded(offers: list[tuple[int, int]]) -> None:
    budget = PunchBudget(everywhere)
    for now, (number, host) in enumerate(offers):
        budget.may_answer(peer(number), now)
        found = budget.admit([f"/ip4/45.0.{number % 256}.{host}/tcp/9747"] * 9, now)
        assert len(found) <= CANDIDATES_MAX
    assert all(size <= limit for size, limit in budget.sizes.values())


def test_two_observers_tell_how_a_router_maps() -> None:
    def own(host: str) -> bool:
        return host == "192.168.1.10"

    seen = SeenPlaces()
    assert seen.kind("tcp", 0.0, own) == ""
    seen.note(0.0, peer(1), "tcp", OUTSIDE)
    assert (seen.kind("tcp", 0.0, own), seen.place("tcp", 0.0)) == ("", OUTSIDE)
    seen.note(0.0, peer(2), "tcp", OUTSIDE)
    assert seen.kind("tcp", 0.0, own) == "alike"
    seen.note(1.0, peer(2), "tcp", OTHER)
    assert seen.kind("tcp", 1.0, own) == "unlike"
    assert seen.kind("udp", 1.0, own) == ""
    assert seen.kind("tcp", 1.0, lambda host: host == OUTSIDE.host) == "none"
    assert seen.kind("tcp", OBSERVED_SECONDS + 2, own) == ""
    for number in range(2 * OBSERVERS_MAX):
        seen.note(2.0, peer(number), "tcp", OTHER)
    assert seen.kind("tcp", 2.0, own) == "alike"


def test_an_offer_is_longer_than_a_third_of_what_it_has_sent() -> None:
    initiations, connections = 3 * 411, 3 * 60
    assert initiations + connections <= 3 * OFFER_BYTES_MIN
    assert len(encode(str(OUTSIDE))) < OFFER_BYTES_MIN
