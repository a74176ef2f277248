"""Decisions about hole punching and its targets. For real NATs see `tests/lab/test_punching.py`."""

from collections import Counter
from random import Random
from typing import cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from crypto.contact import Address, make_address
from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import Unreachable
from node.seams import RealClock
from node.transport.address_book import AddressBook
from node.transport.address_policy import AddressPolicy
from node.transport.observers import Observers
from node.transport.punch_messages import CANDIDATES_MAX, OFFER_BYTES_MIN, PunchOffer, read_message
from node.transport.puncher import Puncher
from node.transport.punching import (
    ALL_TRIES_BURST,
    ANSWER_PAUSE_SECONDS,
    HOST_TRIES_BURST,
    OBSERVED_SECONDS,
    OBSERVERS_MAX,
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    PEER_TRIES_BURST,
    PEER_TRIES_PER_SECOND,
    REST_SECONDS,
    RESTS_MAX,
    RETRY_SECONDS,
    ObserverRests,
    PunchBudget,
    SeenPlaces,
)
from node.transport.simultaneous import PUNCH_RETRIES_SECONDS, connect_from, open_at
from node.transport.streams import SecureStream
from tests.node.nets import make_network, running, unused_address

ELSEWHERE = make_address("45.2.0.2", 30_000)
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
def test_addresses_that_a_peer_may_not_claim_are_not_dialled(offered: str) -> None:
    policy = AddressPolicy()
    policy.look([("192.168.1.10", 9747)], ())
    assert PunchBudget(policy.admits).admit(peer(1), [offered], 0.0) == []
    assert PunchBudget(policy.admits).admit(peer(1), [str(OUTSIDE)], 0.0) == [OUTSIDE]


def test_host_names_circuits_and_nonsense_are_not_dialled() -> None:
    circuit = make_address("45.2.0.2", 9747, peer(1)).through(peer(2))
    offered = ["/dns4/example.org/tcp/9747", str(circuit), "?"]
    assert PunchBudget(everywhere).admit(peer(1), offered, 0.0) == []


def test_only_one_address_of_a_host_is_dialled() -> None:
    assert PunchBudget(everywhere).admit(peer(1), [str(OUTSIDE), str(OTHER)], 0.0) == [OUTSIDE]


def test_a_host_is_dialled_rarely_whichever_peer_offers_it() -> None:
    budget = PunchBudget(everywhere)
    dialled = [bool(budget.admit(peer(1), [str(OUTSIDE)], 0.0)) for _ in range(int(HOST_TRIES_BURST) + 1)]
    assert dialled == [True] * int(HOST_TRIES_BURST) + [False]
    assert budget.admit(peer(1), [str(OUTSIDE)], 60.0) == [OUTSIDE]


def test_a_path_lost_after_a_success_is_punched_again_at_once() -> None:
    budget = PunchBudget(everywhere)
    for worked in (True, False):
        assert budget.may_start(peer(worked), 0.0)
        budget.ended(peer(worked), worked=worked)
        assert budget.may_answer(peer(worked), 0.0)
        budget.lost(peer(worked), RETRY_SECONDS / 2)
        assert budget.may_start(peer(worked), RETRY_SECONDS / 2) == worked
        assert budget.may_answer(peer(worked), RETRY_SECONDS / 2) == worked


def test_an_attempt_by_both_transports_counts_once_per_host() -> None:
    budget = PunchBudget(everywhere)
    for _ in range(int(HOST_TRIES_BURST)):
        assert budget.admit(peer(1), [str(OUTSIDE)], 0.0) == [OUTSIDE]
        assert budget.admit(peer(1), [str(OTHER)], 0.0, [OUTSIDE.host]) == [OTHER]
    assert budget.admit(peer(1), [str(OUTSIDE)], 0.0) == []


def test_a_failing_peer_is_dialled_ever_less_often() -> None:
    budget, now, pauses = PunchBudget(everywhere), 0.0, []
    assert budget.may_start(peer(1), now)
    for _ in range(10):
        budget.ended(peer(1), worked=False)
        began = now
        while not budget.may_start(peer(1), now):
            now += 1.0
        pauses.append(now - began)
    assert pauses[:4] == [RETRY_SECONDS, PAUSE_SECONDS, 2 * PAUSE_SECONDS, 4 * PAUSE_SECONDS]
    assert pauses[-1] == PAUSE_SECONDS_MAX


def test_offers_of_one_peer_are_accepted_at_intervals() -> None:
    budget = PunchBudget(everywhere)
    assert budget.may_answer(peer(1), 0.0)
    assert not budget.may_answer(peer(1), ANSWER_PAUSE_SECONDS - 1)
    assert budget.may_answer(peer(2), 0.0)
    assert budget.may_answer(peer(1), ANSWER_PAUSE_SECONDS)


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 255)), max_size=50))
def test_the_memory_for_offers_is_bounded(offers: list[tuple[int, int]]) -> None:
    budget = PunchBudget(everywhere)
    for now, (number, host) in enumerate(offers):
        budget.may_answer(peer(number), now)
        found = budget.admit(peer(number), [f"/ip4/45.0.{number % 256}.{host}/tcp/9747"] * 9, now)
        assert len(found) <= CANDIDATES_MAX
    assert all(size <= limit for size, limit in budget.sizes.values())


NET = [bytes([45, number, 0]) for number in range(10)]


def not_own(host: str) -> bool:
    return host == "192.168.1.10"


def test_two_observers_reveal_how_a_router_maps_ports() -> None:
    seen = SeenPlaces()
    assert seen.kind("tcp", 0.0, not_own) == ""
    seen.note(0.0, peer(1), "tcp", OUTSIDE, NET[1])
    assert (seen.kind("tcp", 0.0, not_own), seen.place("tcp", 0.0)) == ("", OUTSIDE)
    seen.note(0.0, peer(2), "tcp", OUTSIDE, NET[2])
    assert seen.kind("tcp", 0.0, not_own) == "alike"
    seen.note(1.0, peer(2), "tcp", OTHER, NET[2])
    assert seen.kind("tcp", 1.0, not_own) == "unlike"
    assert seen.kind("udp", 1.0, not_own) == ""
    assert seen.kind("tcp", 1.0, lambda host: host == OUTSIDE.host) == "none"
    assert seen.kind("tcp", OBSERVED_SECONDS + 2, not_own) == ""
    for number in range(2 * OBSERVERS_MAX):
        seen.note(2.0, peer(number), "tcp", OTHER, NET[number])
    assert seen.kind("tcp", 2.0, not_own) == "alike"


def test_observers_of_one_network_count_as_one() -> None:
    seen = SeenPlaces()
    for number in (1, 2, 3):
        seen.note(0.0, peer(number), "tcp", ELSEWHERE, NET[1])
    assert seen.kind("tcp", 0.0, not_own) == ""
    assert seen.agreed_place("tcp", 0.0) is None


@pytest.mark.parametrize("lie", [ELSEWHERE, OTHER], ids=["host", "port"])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_one_lying_observer_changes_neither_address_nor_mapping_type(lie: Address, place: int) -> None:
    seen = SeenPlaces()
    for number in (1, 2, 3):
        said = lie if number == place else OUTSIDE
        seen.note(0.0, peer(number), "tcp", said, NET[number])
    assert seen.kind("tcp", 0.0, not_own) == "alike"
    assert seen.place("tcp", 0.0) == seen.agreed_place("tcp", 0.0) == OUTSIDE
    assert seen.is_settled(0.0)


def test_contradicting_observers_establish_no_outer_address() -> None:
    seen = SeenPlaces()
    seen.note(0.0, peer(1), "tcp", OUTSIDE, NET[1])
    seen.note(0.0, peer(2), "tcp", ELSEWHERE, NET[2])
    assert seen.place("tcp", 0.0) is None
    assert not seen.is_settled(0.0)


def test_dials_to_all_hosts_together_are_rate_limited() -> None:
    budget = PunchBudget(everywhere)
    hosts = [make_address(f"45.{number // 200}.{number % 200}.2", 30_000) for number in range(200)]
    offers = [(peer(number), [str(each)]) for number, each in enumerate(hosts)]
    assert sum(bool(budget.admit(*offer, 0.0)) for offer in offers) == ALL_TRIES_BURST
    assert budget.admit(*offers[-1], 10.0) == [hosts[-1]]


def test_no_peer_is_dialled_at_a_port_of_a_router() -> None:
    book = AddressBook()
    book.observe(peer(1), OUTSIDE, 0.0)
    # The peer would dial at the same time, so both would begin the handshake.
    assert book.answered_at(peer(1)) == ()
    book.claim(peer(1), [OUTSIDE])
    assert book.answered_at(peer(1)) == (OUTSIDE,)
    book.prove(peer(2), OTHER)
    assert book.answered_at(peer(2)) == (OTHER,)


def test_one_peer_cannot_use_up_the_dials_for_all() -> None:
    budget, now, dialled = PunchBudget(everywhere), 0.0, 0
    for number in range(200):
        hosts = [f"/ip4/45.{number}.{each}.2/tcp/30000" for each in range(CANDIDATES_MAX)]
        dialled += len(budget.admit(peer(1), hosts, now))
        assert budget.admit(peer(number + 2), [f"/ip4/46.{number}.1.2/tcp/30000"], now)
        now += ANSWER_PAUSE_SECONDS
    assert dialled <= PEER_TRIES_BURST + PEER_TRIES_PER_SECOND * now


def test_introductions_use_up_neither_the_introducer_nor_each_other() -> None:
    budget = PunchBudget(everywhere)
    teller, greedy, honest = map(peer, (1, 2, 3))
    offers = [[f"/ip4/45.{n}.{m}.2/tcp/30000" for m in range(4)] for n in range(8)]
    dialled = [budget.admit(greedy, offer, 0.0, teller=teller) for offer in offers[:3]]
    assert sum(map(len, dialled)) == 4
    assert len(budget.admit(honest, offers[3], 0.0, teller=teller)) == 4
    for number in range(4, 40):
        budget.admit(peer(number), offers[4], 0.0, teller=teller)
    assert len(budget.admit(teller, offers[5], 0.0)) == 4
    assert all(size <= limit for size, limit in budget.sizes.values())


def test_ipv4_and_ipv6_are_judged_separately() -> None:
    outside6 = make_address("2a0f:1::2", 9747)
    seen = SeenPlaces()
    for number in (1, 2):
        seen.note(0.0, peer(number), "tcp", OUTSIDE, NET[number])
        seen.note(0.0, peer(number), "tcp", outside6, NET[number])
    text = seen.text(0.0, lambda host: host == outside6.host)
    assert text == ("TCP translated alike for all peers, so hole punching can work; IPv6: TCP not translated")
    assert seen.place("tcp", 0.0, 6) == outside6


# --- targets ---------------------------------------------------------------------------------------


async def test_an_unproven_claim_makes_no_node_dial_a_host() -> None:
    network = make_network("n")
    observers = Observers(network, RealClock(), Random(1), lambda: [peer(1), peer(2)], Counter())
    network.learn(peer(1), [OUTSIDE])
    network.learn(peer(2), [OUTSIDE], is_hint=True)
    assert network.known_addresses(peer(1)) == (OUTSIDE,)
    assert observers.candidates() == []
    network._book.prove(peer(1), OUTSIDE)
    assert observers.candidates() == [peer(1)]


class CountedObservers(Observers):
    """Dial each host in vain and count the dials."""

    count = 0

    async def ask(self, observer: tuple[PeerId, int]) -> None:
        self.count += 1
        await trio.sleep(0.01)


async def test_waiting_tasks_share_one_address_lookup() -> None:
    observers = CountedObservers(make_network("n"), RealClock(), Random(1), list, Counter())
    observers.asked[(peer(1), 4)] = cast("SecureStream", None)
    async with trio.open_nursery() as nursery:
        for _ in range(64):
            nursery.start_soon(observers.look)
    assert observers.count <= 2


async def test_a_host_that_does_not_answer_is_not_dialled_again_at_once() -> None:
    network = make_network("n")
    dialled: list[Address] = []

    async def refuse(places: object, address: Address) -> trio.SocketStream:
        assert places is not None
        dialled.append(address)
        raise Unreachable("refused", "a test")

    observers = Observers(network, RealClock(), Random(1), lambda: [peer(1)], Counter(), refuse)
    network._book.prove(peer(1), OUTSIDE)
    for _ in range(5):
        await observers.look()
    assert len(dialled) == 1


async def test_claimed_ipv6_addresses_are_dialled_as_rarely_as_others() -> None:
    network = make_network("n")
    dialled: list[Address] = []

    async def refuse(places: object, address: Address) -> trio.SocketStream:
        dialled.append(address)
        raise Unreachable("refused", "a test")

    observers = Observers(network, RealClock(), Random(1), lambda: [peer(1)], Counter(), refuse)
    claimed = make_address("2a0f:1::3", 9747)
    network._book.prove(peer(1), OUTSIDE)
    network.learn(peer(1), [claimed])
    while network.may_dial(peer(1), claimed):
        network._book.failed(peer(1), claimed)
    await observers.ask((peer(1), 6))
    assert dialled == []
    with pytest.raises(Unreachable, match="too often"):
        await network.open(peer(1), "/peerloom/reach/1", at=claimed)


def test_pauses_of_a_failing_host_double_in_bounded_memory() -> None:
    rests = ObserverRests()
    rests.failed("45.1.0.2", 0.0)
    assert not rests.may_ask("45.1.0.2", REST_SECONDS - 1)
    assert rests.may_ask("45.1.0.2", REST_SECONDS)
    rests.failed("45.1.0.2", REST_SECONDS)
    assert not rests.may_ask("45.1.0.2", 3 * REST_SECONDS - 1)
    rests.answered("45.1.0.2")
    assert rests.may_ask("45.1.0.2", REST_SECONDS)
    for number in range(2 * RESTS_MAX):
        rests.failed(str(number), 0.0)
    assert len(rests) == RESTS_MAX


async def test_a_refused_dial_is_repeated_at_most_twice_within_a_punch() -> None:
    network, made = make_network("n"), 0

    def count(family: int, place: tuple[str, int]) -> trio.socket.SocketType:
        nonlocal made
        made += 1
        return open_at(family, place)

    async with running(network):
        closed = unused_address()
        for pauses, expected in (((), 1), (PUNCH_RETRIES_SECONDS, 3)):
            made = 0
            with trio.fail_after(30), pytest.raises(Unreachable, match="refuses"):
                await connect_from(network.listening, closed, pauses, count)
            assert made == expected


async def test_private_addresses_are_dialled_only_behind_one_router() -> None:
    network = make_network("n")
    network._policy.look([("192.168.1.10", 9747)], ())
    network._policy.met("192.168.1.12")
    near, text = make_address("192.168.1.11", 9747), "/ip4/192.168.1.11/tcp/9747"
    elsewhere = make_address("45.2.0.2", 30_000)

    puncher = Puncher(network, RealClock(), Random(1), list, Counter())

    def admitted(*offered: str, own: Address | None) -> list[Address]:
        if own is not None:
            for number in (1, 2):
                puncher.seen.note(trio.current_time(), peer(number), "tcp", own, NET[number])
        return puncher._admitted(peer(1), offered)

    assert admitted(text, own=None) == []
    assert admitted(text, own=OUTSIDE) == []
    assert admitted(str(elsewhere), text, own=OUTSIDE) == [elsewhere]
    assert admitted(str(OTHER), text, own=OUTSIDE) == [OTHER, near]


def test_an_offer_shorter_than_its_padded_length_is_refused() -> None:
    short = encode(PunchOffer((), ("/ip4/45.1.0.2/udp/30000",)))
    with pytest.raises(RemoteProtocolError):
        read_message(short)
    filled = PunchOffer((), ("/ip4/45.1.0.2/udp/30000",), bytes(OFFER_BYTES_MIN - len(short)))
    assert read_message(encode(filled)) == filled
