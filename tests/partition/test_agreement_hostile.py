"""Messages about the chain of plans from unknown peers, liars and broken members are refused and have no
effect."""

from itertools import combinations
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.chain import FORKS_MAX
from partition.plan.change import CHANGE_BYTES_MAX, Change, Joining, encode_change, successor
from partition.plan.learner import STRAYED_MAX
from partition.plan.paxos import ChainBroken, ForkOpened, PaxosChain
from partition.plan.paxos_messages import (
    AGREEMENT_BYTES_MAX,
    LINKS_BYTES_MAX,
    LINKS_MAX,
    ROUNDS_AHEAD_MAX,
    Accept,
    Accepted,
    AgreementMessage,
    Ballot,
    ChainHead,
    Decided,
    PreemptedBallot,
    Prepare,
    Promised,
)
from partition.plan.plan import NO_HASH, STEPS_MAX, committee, plan_hash
from partition.plan.quorum import FORK_SECONDS, QUORUM_SECONDS
from tests.partition.agreement_world import RUN, genesis
from tests.partition.fake_stage import peer

PLAN = genesis(12)
PARENT = plan_hash(PLAN)
ME, OTHER, THIRD, *_ = SEATS = committee(PLAN)
LEARNER = next(PeerId(me) for me in PLAN.roster if me not in SEATS)
STRANGER = peer("stranger")
NAMES: dict[str, Any] = {"run": RUN, "parent": PARENT}
MINE, THEIRS = Ballot(1, ME), Ballot(1, OTHER)
TRAINS, TRAINS_ALSO = (encode_change(Change(trainers=(me,))) for me in (OTHER, THIRD))
EMPTIES = encode_change(Change(lost=PLAN.stages[0].replicas))
FORKED = encode_change(Change(fork=bytes([1]) * 32))
LOOSE = (
    TRAINS[:1] + b"\xdc\x00\x00" + TRAINS[2:]
)  # an empty array in its longest form: valid, and not canonical


def core(**arguments: Any) -> PaxosChain:
    made = PaxosChain(ME, PLAN, Random(1), **arguments)
    made.unsaved = False
    return made


def state(of: PaxosChain) -> Any:
    """Return all state that a message could change."""
    held = vars(of._learner) | vars(of._reach) | vars(of._proposer) | vars(of)
    parts = ("_heads", "_strayed", "_proposal", "_wish", "_round", "_outbids", "unsaved", "events")
    return of.durable, of.deadline, of.head, of._learner.events, [repr(held[part]) for part in parts]


def proposing() -> PaxosChain:
    made = core()
    made.wish(0.0, Change(trainers=(ME,)))
    return made


def accepting() -> PaxosChain:
    made = proposing()
    for seat in SEATS[1:5]:
        made.receive(0.0, seat, Promised(**NAMES, ballot=MINE))
    return made


HIGH = Ballot(2 + ROUNDS_AHEAD_MAX, OTHER)

WRONG: list[tuple[PeerId, Any, str]] = [
    (OTHER, Prepare(run=bytes(32), parent=PARENT, ballot=THEIRS), "another run"),
    (OTHER, ChainHead(run=bytes(32), parent=PARENT, height=0), "another run"),
    (STRANGER, Prepare(**NAMES, ballot=Ballot(1, STRANGER)), "on no roster"),
    (STRANGER, Decided(**NAMES, links=(TRAINS,)), "on no roster"),
    (STRANGER, ChainHead(**NAMES, height=0), "on no roster"),
    (ME, ChainHead(**NAMES, height=0), "on no roster"),
    (LEARNER, Prepare(**NAMES, ballot=Ballot(1, LEARNER)), "outside the committee"),
    (LEARNER, Accepted(**NAMES, ballot=MINE), "outside the committee"),
    (OTHER, Prepare(**NAMES, ballot=Ballot(1, THIRD)), "ballot belongs to another"),
    (OTHER, Accept(**NAMES, ballot=Ballot(1, THIRD), value=TRAINS), "ballot belongs to another"),
    (OTHER, Prepare(**NAMES, ballot=HIGH), "absurdly high round"),
    (OTHER, Accept(**NAMES, ballot=HIGH, value=TRAINS), "absurdly high round"),
    (OTHER, Accept(**NAMES, ballot=Ballot(2, OTHER), value=b"nonsense"), "not a valid message"),
    (OTHER, Accept(**NAMES, ballot=Ballot(2, OTHER), value=bytes(CHANGE_BYTES_MAX + 1)), "at most"),
    (OTHER, Accept(**NAMES, ballot=Ballot(2, OTHER), value=EMPTIES), "would have no replica"),
    (OTHER, Accept(**NAMES, ballot=Ballot(2, OTHER), value=FORKED), "name does not follow"),
    (OTHER, Accept(**NAMES, ballot=Ballot(2, OTHER), value=LOOSE), "canonical"),
    (OTHER, Promised(**NAMES, ballot=THEIRS), "an answer is to another peer's ballot"),
    (OTHER, Promised(**NAMES, ballot=MINE, accepted=THEIRS), "cannot have been accepted"),
    (OTHER, Promised(**NAMES, ballot=MINE, value=TRAINS), "cannot have been accepted"),
    (OTHER, Promised(**NAMES, ballot=MINE, accepted=Ballot(2, OTHER), value=TRAINS), "cannot have been"),
    (OTHER, Promised(**NAMES, ballot=MINE, accepted=Ballot(1, min(SEATS)), value=EMPTIES), "no replica"),
    (OTHER, Accepted(**NAMES, ballot=MINE), "before the value was sent"),
    (OTHER, PreemptedBallot(**NAMES, ballot=MINE, promised=MINE), "by a lower one"),
    (OTHER, PreemptedBallot(**NAMES, ballot=MINE, promised=HIGH), "absurdly high round"),
    (OTHER, Decided(**NAMES, links=(TRAINS, EMPTIES)), "would have no replica"),
    (OTHER, Decided(**NAMES, links=(b"nonsense",)), "not a valid message"),
    (OTHER, Decided(**NAMES, links=(LOOSE,)), "canonical"),
    (OTHER, Decided(**NAMES, links=(FORKED,)), "name does not follow"),
    (OTHER, ChainHead(**NAMES, height=3), "a wrong height"),
]


@pytest.mark.parametrize(("sender", "message", "words"), WRONG)
def test_messages_that_no_correct_member_sends_are_refused_without_effect(
    sender: PeerId, message: Any, words: str
) -> None:
    victim = proposing()
    before = state(victim)
    with pytest.raises(RemoteProtocolError, match=words):
        victim.receive(1.0, sender, message)
    assert state(victim) == before


def test_a_valid_fork_is_refused_in_a_run_that_allows_none() -> None:
    alone = PaxosChain(OTHER, PLAN, Random(2), may_fork=True)
    link = fork_of(alone, (OTHER,))
    for victim, is_refused in ((core(), True), (core(may_fork=True), False)):
        before = state(victim)
        if is_refused:
            with pytest.raises(RemoteProtocolError, match="does not allow forks"):
                victim.receive(0.0, OTHER, Decided(**NAMES, links=(link,)))
            assert state(victim) == before
        else:
            assert victim.receive(0.0, OTHER, Decided(**NAMES, links=(link,))) == []
            assert victim.head == PLAN  # the member is not part of that fork


def fork_of(alone: PaxosChain, members: tuple[PeerId, ...]) -> bytes:
    """Return the link by which a member continues alone."""
    alone.reach(0.0, members)
    alone.wake(QUORUM_SECONDS)
    alone.wake(FORK_SECONDS)
    alone.wish(FORK_SECONDS, Change(lost=PLAN.stages[0].replicas, joined=(Joining(members[0], 0, 1),)))
    (link,) = alone.chain
    return link


@pytest.mark.parametrize(
    "message",
    [
        Promised(**NAMES, ballot=MINE),
        Accepted(**NAMES, ballot=Ballot(9, ME)),
        PreemptedBallot(**NAMES, ballot=Ballot(9, ME), promised=Ballot(10, OTHER)),
        Promised(run=RUN, parent=bytes(32), ballot=MINE),
        Prepare(**NAMES, fork=bytes([3]) * 32, ballot=THEIRS),
        Accept(**NAMES, fork=bytes([3]) * 32, ballot=THEIRS, value=TRAINS),
        Decided(run=RUN, parent=bytes(32), links=(TRAINS,), whole=True),
        Decided(**NAMES, links=()),
    ],
)
def test_late_and_foreign_messages_change_nothing(message: Any) -> None:
    idle = core()
    before = state(idle)
    assert idle.receive(0.0, OTHER, message) == []
    assert state(idle) == before


@pytest.mark.parametrize(
    "message",
    [
        Prepare(run=RUN, parent=bytes(32), ballot=THEIRS),
        Accept(run=RUN, parent=bytes(32), ballot=THEIRS, value=TRAINS),
        Decided(run=RUN, parent=bytes(32), links=(TRAINS,)),
    ],
)
def test_a_message_about_an_unknown_plan_only_triggers_a_question(message: Any) -> None:
    idle = core()
    before = state(idle)
    assert idle.receive(0.0, OTHER, message) == [(OTHER, ChainHead(**NAMES, height=0))]
    assert state(idle) == before


def test_a_proposer_with_two_values_at_one_ballot_is_refused() -> None:
    victim = core()
    victim.receive(0.0, OTHER, Accept(**NAMES, ballot=THEIRS, value=TRAINS))
    before = state(victim)
    with pytest.raises(RemoteProtocolError, match="two values"):
        victim.receive(0.0, OTHER, Accept(**NAMES, ballot=THEIRS, value=TRAINS_ALSO))
    assert state(victim) == before


def test_a_member_counts_once_however_often_it_votes() -> None:
    victim = accepting()
    for _ in range(20):
        assert victim.receive(0.0, OTHER, Accepted(**NAMES, ballot=MINE)) == []
    assert victim.head == PLAN


def test_a_second_decision_for_a_plan_is_refused_and_reported() -> None:
    victim = core()
    victim.receive(0.0, OTHER, Decided(**NAMES, links=(TRAINS,)))
    victim.events.clear()
    before = victim.durable, victim.head
    with pytest.raises(RemoteProtocolError, match="two different changes"):
        victim.receive(0.0, THIRD, Decided(**NAMES, links=(TRAINS_ALSO,)))
    assert victim.events == [ChainBroken(THIRD, 1)]
    assert (victim.durable, victim.head) == before


def test_absurd_heads_forks_and_branches_use_limited_memory() -> None:
    victim = core(may_fork=True)
    rng = Random(3)
    for number in range(500):
        sender = PeerId(rng.choice([each for each in PLAN.roster if each != ME]))
        for height in (0, 1, 2**31):
            victim.receive(
                0.0, sender, ChainHead(run=RUN, parent=rng.randbytes(32), height=height, samples=2**60)
            )
        victim.receive(0.0, OTHER, Prepare(**NAMES, fork=rng.randbytes(32), ballot=Ballot(number + 1, OTHER)))
    alone = PaxosChain(OTHER, PLAN, Random(2), may_fork=True)
    fork = fork_of(alone, (OTHER,))
    plan, links = successor(PLAN, alone_change(fork)), [fork]
    for number in range(LINKS_MAX - 1):
        change = Change(restored=bytes([1]) * 32, step=number)
        plan = successor(plan, change)
        links.append(encode_change(change))
    for _ in range(3):
        victim.receive(0.0, OTHER, Decided(**NAMES, links=tuple(links)))
    assert len(victim._learner._heads) < len(PLAN.roster)
    assert len(victim._learner._strayed) == STRAYED_MAX
    assert len(victim._acceptor.voted) <= 1 + FORKS_MAX
    assert victim.head == PLAN


def alone_change(link: bytes) -> Change:
    change: Change = decode(link, Change, bytes_max=CHANGE_BYTES_MAX)
    return change


def test_a_member_votes_in_no_more_forks_than_it_can_remember() -> None:
    others = [PeerId(each) for each in PLAN.roster if each != ME]
    victim, now = core(may_fork=True), 0.0
    stage = PLAN.stages[0].replicas[0]
    change = Change(lost=(stage,), joined=(Joining(ME, 0, 1),))
    opened = 0
    for few in list(combinations(others, 2))[: FORKS_MAX + 5]:
        victim.reach(now, few)
        victim.wish(now, change)
        now += FORK_SECONDS + QUORUM_SECONDS
        victim.wake(now)
        now += 20.0
        victim.wake(now)
        opened += any(isinstance(event, ForkOpened) for event in victim.events)
        victim.events.clear()
    # and the vote for the instance of all members
    assert (opened, len(victim._acceptor.voted)) == (FORKS_MAX, FORKS_MAX + 1)
    again = PaxosChain(ME, PLAN, Random(1), durable=victim.durable, may_fork=True)
    assert again.durable == victim.durable


# Codecs

peers = st.binary(min_size=32, max_size=32)
ballots = st.builds(Ballot, st.integers(1, 2**63 - 1), peers)
counts = st.integers(0, 2**63 - 1)
steps = st.integers(0, STEPS_MAX)
values = st.binary(min_size=1, max_size=100)
base = {"run": peers, "parent": peers, "fork": st.just(NO_HASH) | peers}
messages = st.one_of(
    st.builds(Prepare, **base, ballot=ballots),
    st.builds(Promised, **base, ballot=ballots, accepted=st.none() | ballots, value=st.none() | values),
    st.builds(PreemptedBallot, **base, ballot=ballots, promised=ballots),
    st.builds(Accept, **base, ballot=ballots, value=values),
    st.builds(Accepted, **base, ballot=ballots),
    st.builds(Decided, **base, links=st.lists(values, max_size=LINKS_MAX).map(tuple), whole=st.booleans()),
    st.builds(
        ChainHead,
        **base,
        height=st.integers(0, 2**32 - 1),
        step=steps,
        samples=counts,
        hosts=st.booleans(),
        checkpoint_step=steps,
        asks=st.booleans(),
    ),
)


def read(data: bytes) -> Any:
    return decode(data, AgreementMessage, bytes_max=AGREEMENT_BYTES_MAX)


@given(messages)
def test_every_message_survives_the_wire(message: Any) -> None:
    assert read(encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_not_a_message(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read(data)


@given(messages, st.data())
def test_an_altered_byte_is_refused_or_changes_a_field(message: Any, data: st.DataObject) -> None:
    raw = bytearray(encode(message))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255))
    try:
        again = read(bytes(raw))
    except RemoteProtocolError:
        return
    assert isinstance(again, AgreementMessage)
    try:
        core().receive(0.0, OTHER, again)
    except RemoteProtocolError:
        return


def test_the_longest_decided_message_can_be_decoded() -> None:
    links = (bytes(LINKS_BYTES_MAX // LINKS_MAX),) * LINKS_MAX
    message = Decided(**NAMES, links=links, whole=True)
    assert read(encode(message)) == message
    with pytest.raises(RemoteProtocolError):
        read(encode(replace(message, links=(*links, b"x"))))


@pytest.mark.parametrize(
    "message",
    [
        Prepare(**NAMES, ballot=Ballot(0, OTHER)),
        Prepare(**NAMES, ballot=Ballot(2**63, OTHER)),
        Prepare(**NAMES, ballot=Ballot(1, b"short")),
        Prepare(run=RUN, parent=b"short", ballot=THEIRS),
        Accept(**NAMES, ballot=THEIRS, value=bytes(CHANGE_BYTES_MAX + 1)),
        Accept(**NAMES, ballot=THEIRS, value=b""),
        ChainHead(**NAMES, height=-1),
        ChainHead(**NAMES, height=0, samples=-1),
    ],
)
def test_impossible_fields_are_refused_during_decoding(message: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        read(encode(message))
