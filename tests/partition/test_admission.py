"""Admission to a run in local mode: chains of tickets, and requests to join."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, IdentitySigner
from crypto.identity import Identity
from partition.run.admission import (
    FRESH_SECONDS,
    PRESENTS_MAX,
    Admission,
    Joins,
    PeerAdmitted,
    Present,
    Vouch,
)
from partition.run.tickets import CHAIN_MAX, check_chain, make_ticket

RUN, OTHER_RUN = bytes(32), bytes([1]) * 32
WALL = 1e9
SIGNERS = [IdentitySigner(Identity(bytes([number + 1]) * 32), "tests") for number in range(CHAIN_MAX + 3)]
REQUESTER = SIGNERS[0]


def chain_to(last: int, run: bytes = RUN) -> tuple[Fact, ...]:
    """Return a chain of tickets in which each member asks the next, from the requester to `last`."""
    pairs = pairwise(SIGNERS[: last + 1])
    return tuple(make_ticket(author, run, member.peer, WALL) for author, member in pairs)


def admission(number: int) -> Admission:
    return Admission(SIGNERS[number], RUN, REQUESTER.peer, chain_to(number))


def test_a_member_is_admitted_by_a_chain_from_the_requester() -> None:
    own, other = admission(1), admission(3)
    assert not own.admits(other._signer.peer)
    ((receiver, shown),) = other.show(0.0, [SIGNERS[4].peer])
    assert receiver == SIGNERS[4].peer
    answers = own.receive(SIGNERS[3].peer, shown)
    assert own.admits(SIGNERS[3].peer)
    assert own.events[-1] == PeerAdmitted(RUN, SIGNERS[3].peer)
    assert [type(message) for _, message in answers] == [Present, Vouch]
    assert other.admits(SIGNERS[1].peer), "a member was refused because of a chain that contains it"


def test_only_the_requester_needs_no_ticket() -> None:
    own = admission(1)
    own.admitted.clear()
    own.receive(REQUESTER.peer, Present(RUN, ()))
    assert own.admits(REQUESTER.peer)
    with pytest.raises(RemoteProtocolError, match="another peer"):
        own.receive(SIGNERS[5].peer, Present(RUN, ()))
    assert not own.admits(SIGNERS[5].peer)


LIES: dict[str, Callable[[], tuple[Fact, ...]]] = {
    "signed by itself": lambda: (make_ticket(SIGNERS[5], RUN, SIGNERS[5].peer, WALL),),
    "of another run": lambda: (make_ticket(REQUESTER, OTHER_RUN, SIGNERS[5].peer, WALL),),
    "of another peer": lambda: chain_to(2),
    "with a gap": lambda: (*chain_to(2), make_ticket(SIGNERS[3], RUN, SIGNERS[5].peer, WALL)),
    "in another's name": lambda: (
        Fact(REQUESTER.peer, make_ticket(REQUESTER, RUN, SIGNERS[5].peer, WALL).body, bytes(64)),
    ),
    "no ticket": lambda: (Fact(REQUESTER.peer, b"\xc1", bytes(64)),),
    "by another purpose": lambda: (
        REQUESTER.sign("lease", make_ticket(REQUESTER, RUN, SIGNERS[5].peer, WALL).body),
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_invalid_chain_is_refused(lie: str) -> None:
    own, joins = admission(1), Joins()
    with pytest.raises(RemoteProtocolError):
        own.receive(SIGNERS[5].peer, Present(RUN, LIES[lie](), asks=True))
    assert not own.admits(SIGNERS[5].peer)
    with pytest.raises(RemoteProtocolError):
        joins.check(SIGNERS[5], RUN, REQUESTER.peer, LIES[lie](), REQUESTER.peer, WALL)


def test_a_longer_chain_is_replaced_by_a_shorter_one_of_a_member() -> None:
    own, other = admission(1), admission(6)
    answers = own.receive(SIGNERS[6].peer, Present(RUN, other.chain, asks=True))
    (vouch,) = (message for _, message in answers if isinstance(message, Vouch))
    lengths = []
    for sender in (9, 1):  # a peer that is not a member vouches for no other peer
        other.receive(SIGNERS[sender].peer, vouch)
        lengths.append(len(other.chain))
    assert lengths == [6, 2]
    check_chain(SIGNERS[6], RUN, REQUESTER.peer, other.chain, SIGNERS[6].peer)
    with pytest.raises(RemoteProtocolError, match="not fresh"):
        Joins().check(SIGNERS[6], RUN, REQUESTER.peer, other.chain, SIGNERS[1].peer, WALL)


def test_a_request_to_join_counts_once_while_it_is_fresh() -> None:
    joins, me = Joins(), SIGNERS[3]
    chain = (*chain_to(2), make_ticket(SIGNERS[2], RUN, me.peer, WALL))
    with pytest.raises(RemoteProtocolError, match="another peer"):
        joins.check(me, RUN, REQUESTER.peer, chain, SIGNERS[1].peer, WALL)
    for late in (-FRESH_SECONDS - 1, FRESH_SECONDS + 1):
        with pytest.raises(RemoteProtocolError, match="not fresh"):
            joins.check(me, RUN, REQUESTER.peer, chain, SIGNERS[2].peer, WALL + late)
    joins.check(me, RUN, REQUESTER.peer, chain, SIGNERS[2].peer, WALL + 5)
    with pytest.raises(RemoteProtocolError, match="repeated"):
        joins.check(me, RUN, REQUESTER.peer, chain, SIGNERS[2].peer, WALL + 6)
    again = (*chain_to(2), make_ticket(SIGNERS[2], RUN, me.peer, WALL + 7))
    joins.check(me, RUN, REQUESTER.peer, again, SIGNERS[2].peer, WALL + 7)


def test_a_member_with_a_chain_of_full_length_asks_no_peer() -> None:
    assert admission(CHAIN_MAX - 1).can_vouch
    assert not admission(CHAIN_MAX).can_vouch


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=200))
def test_a_peer_without_proof_is_asked_ever_less_often(pauses: list[float]) -> None:
    own, now, asked = admission(1), 0.0, 0
    for pause in pauses:
        now += pause
        asked += len(own.show(now, [SIGNERS[7].peer]))
    assert asked <= PRESENTS_MAX + now / 30 + 1
