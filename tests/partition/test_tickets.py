"""Tickets that expire and are revoked, as members of a run see them."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, IdentitySigner
from crypto.identity import Identity
from partition.run.admission import (
    EXPIRED,
    REVOKED,
    SELDOM_SECONDS,
    Admission,
    Expelled,
    Joins,
    Present,
    Revoke,
)
from partition.run.tickets import (
    CHAIN_MAX,
    REVOKED_MAX,
    Chain,
    Revocations,
    make_revocation,
    make_ticket,
)

RUN, OTHER_RUN = bytes(32), bytes([1]) * 32
WALL = 1e9
OWNER, *MEMBERS = (IdentitySigner(Identity(bytes([number + 1]) * 32), "tests") for number in range(6))
HOUR = 3600.0


def chain(*numbers: int, wall: float = WALL, until: float = WALL + HOUR) -> Chain:
    """Make a chain of tickets: the owner asks the first member, and each member asks the next."""
    signers = [OWNER, *(MEMBERS[number] for number in numbers)]
    return tuple(make_ticket(author, RUN, member.peer, wall, until) for author, member in pairwise(signers))


def member(*numbers: int, chain_max: int = CHAIN_MAX) -> Admission:
    return Admission(MEMBERS[numbers[-1]], RUN, OWNER.peer, chain(*numbers), wall=WALL, chain_max=chain_max)


def owner() -> Admission:
    return Admission(OWNER, RUN, OWNER.peer, (), wall=WALL)


def test_a_ticket_that_expires_excludes_its_holder() -> None:
    own, other = owner(), member(0)
    own.receive(MEMBERS[0].peer, Present(RUN, chain(0)))
    for each in (own, other):
        each.expire(WALL + HOUR - 1)
    assert own.admits(MEMBERS[0].peer)
    assert not other.ended
    for each in (own, other):
        each.expire(WALL + HOUR)
        assert each.events[-1] == Expelled(RUN, MEMBERS[0].peer, EXPIRED)
    assert not own.admits(MEMBERS[0].peer)
    assert other.ended == EXPIRED
    assert not other.can_vouch
    own.receive(MEMBERS[0].peer, Present(RUN, chain(0)))
    assert not own.admits(MEMBERS[0].peer), "the member was admitted again by the same ticket"


def test_a_chain_expires_with_its_earliest_ticket() -> None:
    own = owner()
    short = make_ticket(MEMBERS[0], RUN, MEMBERS[1].peer, WALL, WALL + 2 * HOUR)
    own.receive(MEMBERS[1].peer, Present(RUN, (*chain(0), short)))
    own.expire(WALL + 1.5 * HOUR)
    assert not own.admits(MEMBERS[1].peer)


def test_a_revocation_excludes_a_member_and_those_it_invited() -> None:
    own, other, out, vouched = owner(), member(2), member(0), member(0, 1)
    for each in (own, other):
        each.receive(MEMBERS[0].peer, Present(RUN, chain(0)))
        each.receive(MEMBERS[1].peer, Present(RUN, chain(0, 1)))
    own.receive(MEMBERS[2].peer, Present(RUN, chain(2)))
    told = dict(own.revoke(MEMBERS[0].peer, WALL + 1))
    assert set(told) == {MEMBERS[number].peer for number in range(3)}, (
        "not every member was notified, including the excluded one"
    )
    passed_on = other.receive(OWNER.peer, told[MEMBERS[2].peer])
    assert {peer for peer, _ in passed_on} == {MEMBERS[0].peer, MEMBERS[1].peer}
    assert other.receive(MEMBERS[1].peer, told[MEMBERS[2].peer]) == [], "the revocation was forwarded twice"
    for each in (out, vouched):
        each.receive(OWNER.peer, told[MEMBERS[0].peer])
        assert each.ended == REVOKED
    for each in (own, other):
        assert not each.admits(MEMBERS[0].peer)
        assert not each.admits(MEMBERS[1].peer)
        answer = each.receive(MEMBERS[0].peer, Present(RUN, chain(0), asks=True))
        assert [type(message) for _, message in answer] == [Revoke], "the member did not learn the reason"
    assert own.admits(MEMBERS[2].peer)


def test_only_the_owner_undoes_a_revocation() -> None:
    own, until = owner(), WALL + HOUR
    own.revoke(MEMBERS[0].peer, WALL)
    again = make_ticket(MEMBERS[1], RUN, MEMBERS[0].peer, WALL + 1, until)
    own.receive(MEMBERS[0].peer, Present(RUN, (*chain(1), again)))
    assert not own.admits(MEMBERS[0].peer)
    later = chain(0, wall=WALL + 1)
    own.receive(MEMBERS[0].peer, Present(RUN, later))
    assert own.admits(MEMBERS[0].peer)
    assert not Admission(MEMBERS[0], RUN, OWNER.peer, later, revocations=own.revocations.facts).ended


@pytest.mark.parametrize(
    "fact",
    [
        make_revocation(MEMBERS[0], RUN, MEMBERS[1].peer, WALL),
        make_revocation(OWNER, OTHER_RUN, MEMBERS[1].peer, WALL),
        make_revocation(OWNER, RUN, OWNER.peer, WALL),
        make_ticket(OWNER, RUN, MEMBERS[1].peer, WALL),
        Fact(OWNER.peer, make_revocation(OWNER, RUN, MEMBERS[1].peer, WALL).body, bytes(64)),
    ],
)
def test_a_revocation_not_signed_by_the_owner_is_refused(fact: Fact) -> None:
    own = member(2)
    own.receive(MEMBERS[1].peer, Present(RUN, chain(1)))
    with pytest.raises(RemoteProtocolError):
        own.receive(MEMBERS[0].peer, Revoke(RUN, (fact,)))
    assert own.admits(MEMBERS[1].peer)


def test_new_members_receive_earlier_revocations() -> None:
    own = owner()
    own.revoke(MEMBERS[0].peer, WALL)
    answers = own.receive(MEMBERS[2].peer, Present(RUN, chain(2), asks=True))
    assert [type(message) for _, message in answers] == [Present, Revoke], (
        "the newcomer did not get the revocation on entering"
    )
    assert [type(message) for _, message in own.show(0.0, [])] == [Revoke]
    assert own.show(SELDOM_SECONDS - 1, []) == []
    assert [type(message) for _, message in own.show(SELDOM_SECONDS, [])] == [Revoke]


def test_a_run_of_invited_peers_refuses_a_chain_of_two() -> None:
    own = member(2, chain_max=1)
    assert not own.can_vouch
    with pytest.raises(RemoteProtocolError, match="more tickets"):
        own.receive(MEMBERS[1].peer, Present(RUN, chain(0, 1)))


def test_a_request_to_join_by_an_expired_chain_is_refused() -> None:
    last = make_ticket(MEMBERS[0], RUN, MEMBERS[1].peer, WALL + HOUR)
    with pytest.raises(RemoteProtocolError, match="expired"):
        Joins().check(MEMBERS[1], RUN, OWNER.peer, (*chain(0), last), MEMBERS[0].peer, WALL + HOUR)


def test_only_the_newest_revocations_are_kept() -> None:
    known = Revocations(OWNER, RUN, OWNER.peer)
    peers = [bytes([number // 256, number % 256]) * 16 for number in range(REVOKED_MAX + 3)]
    for peer in peers:
        known.learn([make_revocation(OWNER, RUN, peer, WALL)])  # type: ignore[arg-type]  # no curve's point
    assert len(known.facts) == REVOKED_MAX
    assert known.fact_of(peers[2]) is None  # type: ignore[arg-type]  # no curve's point
    assert known.fact_of(peers[3]) is not None  # type: ignore[arg-type]  # no curve's point


TIMES = st.integers(0, 9)
STEPS = st.one_of(
    st.tuples(st.just("show"), st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), TIMES),
    st.tuples(st.just("revoke"), st.integers(0, 4), TIMES),
    st.tuples(st.just("wait"), TIMES, TIMES),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=14))
def test_a_member_is_admitted_while_a_chain_it_showed_is_valid(steps: list[tuple[str, object, int]]) -> None:
    """Compare with the rules for the longest-lasting chain that each member showed. Times are in minutes;
    tickets are made at their time and last five minutes.
    """
    own, now = owner(), 0
    revoked: dict[int, int] = {}
    valid: dict[int, list[tuple[list[int], int]]] = {}

    def is_valid(path: list[int], at: int) -> bool:
        bars = [
            number in revoked and (place > 0 or at <= revoked[number]) for place, number in enumerate(path)
        ]
        return at + 5 > now and not any(bars)

    for kind, what, at in steps:
        if kind == "show":
            path = list(what)  # type: ignore[call-overload]  # a list
            made = chain(*path, wall=WALL + 60 * at, until=WALL + 60 * (at + 5))
            own.receive(MEMBERS[path[-1]].peer, Present(RUN, made))
            if is_valid(path, at):
                valid.setdefault(path[-1], []).append((path, at))
        elif kind == "revoke":
            number = int(what)  # type: ignore[call-overload]  # a number
            own.revoke(MEMBERS[number].peer, WALL + 60 * now)
            revoked[number] = now
        else:
            now += at
            own.expire(WALL + 60 * now)
        for number, chains in list(valid.items()):
            lasting = max(chains, key=lambda each: (each[1], chains.index(each)))
            if not is_valid(*lasting):  # it is excluded until it shows another
                del valid[number]
    own.expire(WALL + 60 * now)
    assert {MEMBERS[number].peer for number in valid} == set(own.admitted) - {OWNER.peer}
