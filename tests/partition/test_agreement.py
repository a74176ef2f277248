"""The chain of plans under every disturbance that the world knows. Lies are covered in
`test_agreement_hostile`."""

import os
from collections.abc import Collection
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.chain import Chain, Kept, pack
from partition.plan.change import Change, Joining, encode_change, successor
from partition.plan.learner import BEHIND_SECONDS
from partition.plan.paxos import (
    ForkFound,
    ForkOpened,
    LeftBehind,
    PaxosChain,
    PlanDecided,
    QuorumFound,
    QuorumLost,
)
from partition.plan.paxos_messages import (
    LINKS_BYTES_MAX,
    LINKS_MAX,
    Accept,
    Accepted,
    Ballot,
    ChainHead,
    Decided,
    PreemptedBallot,
    Prepare,
    Promised,
    Sends,
    Vote,
    other_branch_wins,
)
from partition.plan.paxos_proposer import PROPOSE_SECONDS, RESEND_SECONDS_MAX, PaxosProposer
from partition.plan.plan import committee, plan_hash
from partition.plan.proposal import Proposal
from partition.plan.quorum import FORK_SECONDS, QUORUM_SECONDS, Instance, Reach, decides
from tests.partition.agreement_world import RUN, genesis, walk
from tests.partition.fake_stage import Broken, peer

WALK_EVENTS = int(os.environ.get("PEERLOOM_WALK_EVENTS", "20000"))
"""Number of events for each kind of walk; the environment raises the numbers for a soak."""
PLANTED_WALKS_MAX = 60
ROUGH: dict[str, Any] = {"loss": 0.3, "slow_seconds": 2.0, "crashes": 0.02}


# Whole histories


@pytest.mark.parametrize(
    "rules",
    [{}, {"may_fork": True}, {"breaks_ties": True}],
    ids=["without forks", "with forks", "with a tie-breaker"],
)
def test_no_disturbance_leads_to_two_successors_of_a_plan(rules: dict[str, bool]) -> None:
    events = decisions = restarts = seed = 0
    while events < WALK_EVENTS:
        world = walk(seed, **rules)
        events += world.events
        decisions += len(world.decided)
        restarts += world.restarts
        seed += 1
    assert decisions > seed
    assert restarts


# Bugs planted on purpose: the world must find them


class ForgetsItsVotes(PaxosChain):
    @property
    def durable(self) -> bytes:
        mine = self._acceptor
        return pack(Kept(self.base, self.chain, (), mine.abstains, mine.past))


class IgnoresWhatWasAccepted(PaxosChain):
    class Proposer(PaxosProposer):
        def _count(self, now: float, mine: Proposal) -> Sends:
            mine.best = Vote()
            return super()._count(now, mine)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._proposer.__class__ = self.Proposer


class IsContentWithHalf(PaxosChain):
    class Reach(Reach):
        def decides(self, instance: Instance, votes: Collection[PeerId]) -> bool:
            return 2 * len(votes) >= len(instance.committee)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reach.__class__ = self.Reach


class IsItsOwnTieBreaker(PaxosChain):
    class Reach(Reach):
        def decides(self, instance: Instance, votes: Collection[PeerId]) -> bool:
            return decides(instance.committee, votes, self._me)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reach.__class__ = self.Reach


class AcceptsBelowItsPromise(PaxosChain):
    def _vote_on(self, now: float, sender: PeerId, instance: Instance, message: Any) -> Any:
        if isinstance(message, Accept):
            last = self._acceptor.vote(instance)
            self._acceptor.cast(instance, Vote(None, last.accepted, last.value))
        return super()._vote_on(now, sender, instance, message)


@pytest.mark.parametrize(
    "planted",
    [
        {"agreement_class": ForgetsItsVotes},
        {"sends_before_saving": True},
        {"agreement_class": IgnoresWhatWasAccepted},
        {"agreement_class": IsContentWithHalf},
        {"agreement_class": IsItsOwnTieBreaker},
        {"agreement_class": AcceptsBelowItsPromise},
    ],
    ids=lambda planted: str(next(iter(planted.values()))),
)
def test_planted_bugs_are_found(planted: dict[str, Any]) -> None:
    with pytest.raises(Broken):
        search(planted)


def search(planted: dict[str, Any]) -> None:
    for seed in range(PLANTED_WALKS_MAX):
        walk(seed, **ROUGH, **planted)


# One decision


class Room:
    """Members that receive messages immediately, except deaf ones; without a clock."""

    def __init__(self, members: int, **arguments: Any) -> None:
        self.plan = genesis(members)
        self.seats = committee(self.plan)
        self.cores = {
            PeerId(me): PaxosChain(PeerId(me), self.plan, Random(index), **arguments)
            for index, me in enumerate(self.plan.roster)
        }
        self.deaf: set[PeerId] = set()
        self.sent: list[Any] = []

    def carry(self, me: PeerId, sends: Any, now: float = 0.0) -> None:
        """Deliver these messages and everything that follows, in the order of sending."""
        queue = [(me, receiver, message) for receiver, message in sends]
        while queue:
            sender, receiver, message = queue.pop(0)
            self.sent.append(message)
            if receiver in self.cores and not {sender, receiver} & self.deaf:
                answers = self.cores[receiver].receive(now, sender, message)
                queue += [(receiver, other, answer) for other, answer in answers]

    def wish(self, me: PeerId, change: Change, now: float = 0.0) -> None:
        self.carry(me, self.cores[me].wish(now, change), now)

    def events(self, me: PeerId) -> list[Any]:
        events, self.cores[me].events[:] = list(self.cores[me].events), []
        return events

    def heights(self) -> list[int]:
        return [core.head.height for core in self.cores.values()]

    def wake(self, me: PeerId, now: float) -> None:
        self.carry(me, self.cores[me].wake(now), now)

    def insist(self, me: PeerId) -> None:
        """Wake a member until it has nothing to do."""
        while self.cores[me].deadline < float("inf"):
            self.wake(me, self.cores[me].deadline)


def trains(me: bytes) -> Change:
    return Change(trainers=(me,))


def head_of(core: PaxosChain, **fields: Any) -> ChainHead:
    return ChainHead(run=RUN, parent=core.head_hash, fork=core.head.fork, height=core.head.height, **fields)


def test_a_lone_member_decides_immediately() -> None:
    room = Room(1)
    (me,) = room.seats
    room.cores[me].unsaved = False
    room.wish(me, trains(me))
    assert room.events(me) == [PlanDecided(successor(room.plan, trains(me)), trains(me), 1)]
    assert room.cores[me].unsaved
    assert room.sent == []


@pytest.mark.parametrize("members", [2, 3, 8, 9, 12])
def test_an_undisturbed_decision_asks_the_committee_twice(
    members: int,
) -> None:
    room = Room(members)
    room.wish(room.seats[0], trains(room.seats[0]))
    assert room.heights() == [1] * members
    others = len(room.seats) - 1
    kinds = [type(message) for message in room.sent]
    for kind, most in ((Prepare, others), (Promised, others), (Accept, others), (Accepted, others)):
        assert kinds.count(kind) <= most
    assert len(kinds) <= 4 * others + members - 1


def test_later_committee_members_wait_for_earlier_ones() -> None:
    room = Room(5)
    for rank, me in enumerate(room.seats):
        room.deaf.add(me)
        room.wish(me, trains(me), 100.0)
        waits = room.cores[me].deadline - 100.0
        assert rank == 0 or rank * PROPOSE_SECONDS <= waits <= 1.25 * rank * PROPOSE_SECONDS


def test_dead_members_are_not_waited_for() -> None:
    room = Room(5)
    third = room.seats[2]
    room.cores[third].reach(0.0, room.seats[2:])
    room.wish(third, trains(third))
    assert room.cores[third].head.height == 1


def test_a_waiting_proposer_moves_up_when_an_earlier_one_dies() -> None:
    room = Room(3)
    last = room.seats[2]
    room.wish(last, trains(last))
    assert room.heights() == [0, 0, 0]
    room.carry(last, room.cores[last].reach(0.1, [last, room.seats[1]]), 0.1)
    waits = room.cores[last].deadline - 0.1
    assert PROPOSE_SECONDS <= waits <= 1.25 * PROPOSE_SECONDS


def test_a_member_outside_the_committee_only_learns_decisions() -> None:
    room = Room(12)
    outside = next(me for me in room.cores if me not in room.seats)
    room.wish(outside, trains(outside))
    assert room.cores[outside].deadline == float("inf")
    assert room.sent == []
    room.wish(room.seats[0], trains(outside))
    assert room.cores[outside].head.trainers == (outside,)


def test_a_proposal_without_a_change_or_a_valid_plan_is_ignored() -> None:
    room = Room(1)
    (me,) = room.seats
    core = room.cores[me]
    assert core.wish(0.0, trains(me), parent=bytes(32)) == []
    assert core.wish(0.0, Change(lost=(me,))) == []  # no member would be left
    assert (core.head, core.deadline) == (room.plan, float("inf"))


def test_a_proposed_change_is_dropped_with_the_next_plan() -> None:
    room = Room(3)
    first, second, _ = room.seats
    room.wish(second, trains(second))
    room.wish(first, trains(first))
    assert room.cores[second].head.trainers == (first,)
    assert room.cores[second].deadline == float("inf")


def test_a_possibly_accepted_value_is_decided_by_the_next_proposer() -> None:
    room = Room(3)
    first, second, third = room.seats
    room.deaf.add(third)
    core, other = room.cores[first], room.cores[second]
    ((_, prepare), _) = core.wish(0.0, trains(first))
    ((_, promised),) = other.receive(0.0, first, prepare)
    ((_, accept), _) = core.receive(0.0, second, promised)
    other.receive(0.0, first, accept)  # the answer is lost, and so is the proposer
    room.deaf = {first}
    room.wish(third, trains(third))
    room.insist(third)
    assert room.cores[third].head.trainers == (first,)


def test_an_outbid_proposer_returns_with_a_higher_ballot() -> None:
    room = Room(3)
    first, second, _ = room.seats
    core = room.cores[first]
    ((_, prepare), _) = core.wish(0.0, trains(first))
    assert isinstance(prepare, Prepare)
    outbid = PreemptedBallot(
        run=RUN, parent=core.head_hash, ballot=prepare.ballot, promised=Ballot(7, second)
    )
    assert core.receive(0.0, second, outbid) == []
    ((_, again), _) = core.wake(core.deadline)
    assert isinstance(again, Prepare)
    assert again.ballot == Ballot(8, first)


def test_an_unanswered_question_is_repeated_ever_less_often() -> None:
    room = Room(3)
    core, now = room.cores[room.seats[0]], 0.0
    asked = core.wish(now, trains(room.seats[0]))
    waits = []
    for _ in range(7):
        waits.append(core.deadline - now)
        now = core.deadline
        assert core.wake(now) == asked
    assert waits[:5] == sorted(waits[:5])
    assert waits[-1] <= 1.25 * RESEND_SECONDS_MAX


# Restarts


def test_a_promise_and_an_acceptance_survive_a_restart() -> None:
    room = Room(3)
    me, other, third = room.seats
    names = {"run": RUN, "parent": plan_hash(room.plan)}
    value = encode_change(trains(other))
    room.cores[me].receive(0.0, other, Accept(**names, ballot=Ballot(5, other), value=value))
    again = PaxosChain(me, room.plan, Random(9), durable=room.cores[me].durable)
    lower, higher = Ballot(4, third), Ballot(6, third)
    assert again.receive(0.0, third, Prepare(**names, ballot=lower)) == [
        (third, PreemptedBallot(**names, ballot=lower, promised=Ballot(5, other)))
    ]
    assert again.receive(0.0, third, Prepare(**names, ballot=higher)) == [
        (third, Promised(**names, ballot=higher, accepted=Ballot(5, other), value=value))
    ]


def test_a_repeated_question_gets_the_same_answer_and_is_stored_once() -> None:
    room = Room(3)
    me, other, _ = room.seats
    core = room.cores[me]
    names: Any = {"run": RUN, "parent": plan_hash(room.plan), "ballot": Ballot(1, other)}
    for message in (Prepare(**names), Accept(**names, value=encode_change(trains(me)))):
        answer = core.receive(0.0, other, message)
        assert core.unsaved
        core.unsaved = False
        assert core.receive(0.0, other, message) == answer
        assert not core.unsaved


def test_a_restart_resumes_from_the_newest_stored_plan() -> None:
    room = Room(3)
    for _ in range(4):
        room.wish(committee(room.cores[room.seats[0]].head)[0], trains(room.seats[0]))
    core = room.cores[room.seats[1]]
    again = PaxosChain(core.me, room.plan, Random(1), durable=core.durable)
    assert (again.head, again.chain, again.base) == (core.head, core.chain, room.plan)
    assert again.durable == core.durable
    assert not again.unsaved


def test_damaged_or_foreign_durable_state_is_refused() -> None:
    room = Room(1)
    (me,) = room.seats
    durable = room.cores[me].durable
    with pytest.raises(RemoteProtocolError, match="damaged"):
        PaxosChain(me, room.plan, Random(0), durable=durable[:-1] + bytes([durable[-1] ^ 1]))
    with pytest.raises(ValueError, match="another run"):
        PaxosChain(me, replace(room.plan, run=bytes(32)), Random(0), durable=durable)
    with pytest.raises(ValueError, match="a different plan at height 0"):
        PaxosChain(me, replace(room.plan, microbatches=7), Random(0), durable=durable)


# Members that are behind


def grown(links: int) -> Room:
    """Return a lone member that has decided this many plans."""
    room = Room(1)
    (me,) = room.seats
    for _ in range(links):
        room.wish(me, trains(me))
    return room


def test_a_member_with_an_older_plan_is_sent_the_missing_links() -> None:
    room = Room(3)
    late = room.seats[2]
    room.deaf.add(late)
    for _ in range(3):
        first = next(me for me in committee(room.cores[room.seats[0]].head) if me != late)
        room.cores[first].reach(0.0, room.seats[:2])
        room.wish(first, trains(first))
    room.deaf.clear()
    room.carry(late, room.cores[late].tell(room.seats[0]))
    assert room.heights() == [3, 3, 3]
    assert room.events(late) == [PlanDecided(room.cores[late].head, trains(first), 3)]


def test_a_member_with_a_newer_plan_is_asked_for_the_missing_links() -> None:
    room = Room(3)
    late, other = room.seats[2], room.seats[0]
    room.deaf.add(late)
    room.wish(other, trains(other))
    room.deaf.clear()
    room.carry(other, room.cores[other].tell(late))
    assert room.heights() == [1, 1, 1]


def test_a_question_about_an_older_plan_is_answered_with_its_successor() -> None:
    room = Room(3)
    late, other = room.seats[2], room.seats[0]
    room.deaf.add(late)
    room.wish(other, trains(other))
    room.deaf.clear()
    room.wish(late, trains(late))
    room.insist(late)
    assert room.cores[late].head.trainers == (other,)


def test_only_the_newest_links_are_kept_and_a_restart_has_them_all() -> None:
    room = grown(LINKS_MAX + 6)
    core = room.cores[room.seats[0]]
    assert (core.base.height, core.head.height, len(core.chain)) == (6, LINKS_MAX + 6, LINKS_MAX)
    again = PaxosChain(core.me, room.plan, Random(1), durable=core.durable)
    assert (again.base, again.head, again.chain) == (core.base, core.head, core.chain)


def test_a_chain_of_large_links_is_folded_sooner() -> None:
    crowd = tuple(sorted(peer(f"c{number}") for number in range(900)))
    links = [encode_change(Change(admitted=crowd)), encode_change(Change(lost=crowd))] * 8
    chain = Chain(genesis(1), links)
    assert chain.head.height == 16
    assert LINKS_BYTES_MAX - 40_000 < sum(map(len, chain.links)) <= LINKS_BYTES_MAX
    again = Chain(chain.plans[0], chain.links)
    assert again.head == chain.head


def test_a_member_that_missed_too_much_can_rejoin() -> None:
    room = Room(3)
    late, other = room.seats[:2]
    links = []
    for number in range(LINKS_MAX + 1):
        links.append(encode_change(Change(restored=bytes([1]) * 32, step=number)))
    room.cores[other].rejoin(0.0, room.plan, links)
    for now in (0.0, BEHIND_SECONDS - 1):
        room.carry(late, room.cores[late].tell(other), now)
        assert room.events(late) == []
    room.carry(late, room.cores[late].tell(other), BEHIND_SECONDS)
    (event,) = room.events(late)
    assert event == LeftBehind(other, event.head)
    assert (event.head.height, room.cores[late].head.height) == (LINKS_MAX + 1, 0)
    room.cores[late].rejoin(0.0, room.cores[other].base, room.cores[other].chain)
    assert room.cores[late].head == room.cores[other].head


# Members in reach


def test_a_lost_quorum_and_its_return_are_reported() -> None:
    room = Room(5)
    core = room.cores[room.seats[0]]
    core.reach(10.0, room.seats[:2])
    assert core.deadline == 10.0 + QUORUM_SECONDS
    core.wake(10.0 + QUORUM_SECONDS)
    assert core.events == [QuorumLost(0, live=2, needed=3, missing=room.seats[2:])]
    core.reach(40.0, room.seats[:2])
    core.reach(41.0, room.seats[:3])
    assert core.events[1:] == [QuorumFound(0)]
    assert core.deadline == float("inf")


def test_a_short_gap_is_not_reported() -> None:
    room = Room(5)
    core = room.cores[room.seats[0]]
    core.reach(10.0, room.seats[:2])
    core.reach(10.0 + QUORUM_SECONDS / 2, room.seats)
    core.wake(10.0 + QUORUM_SECONDS)
    assert core.events == []


# Forks


def split(room: Room, size: int) -> tuple[PeerId, ...]:
    """Cut the last `size` of the committee off from the others until they may fork; return them."""
    few = room.seats[-size:]
    room.deaf = {me for me in room.cores if me not in few}
    for me in few:
        room.cores[me].reach(0.0, few)
    for seconds in (QUORUM_SECONDS, FORK_SECONDS):
        for me in few:
            room.wake(me, seconds)
    return few


def test_a_minority_continues_if_the_run_allows_forks() -> None:
    room = Room(5, may_fork=True)
    few = split(room, 2)
    opened = next(event for event in room.events(few[0]) if isinstance(event, ForkOpened))
    assert opened.members == tuple(sorted(few))
    stage = room.plan.stages[0].replicas
    change = Change(lost=stage, joined=(Joining(few[0], 0, 1),), restored=bytes([1]) * 32, step=4)
    room.wish(few[0], change, FORK_SECONDS)
    room.insist(few[0])
    for me in few:
        head = room.cores[me].head
        assert (head.height, head.roster, head.fork) == (1, tuple(sorted(few)), opened.fork)
        assert (head.restored, head.step) == (change.restored, change.step)
        assert QuorumFound(1) in room.events(me)


def test_a_minority_waits_if_the_run_allows_no_fork() -> None:
    room = Room(5)
    few = split(room, 2)
    for me in few:
        room.wish(me, trains(few[0]), FORK_SECONDS)
        room.wake(me, 10 * FORK_SECONDS)
        assert [type(event) for event in room.events(me)] == [QuorumLost]
    assert set(room.heights()) == {0}


def test_a_majority_does_not_follow_a_fork_made_without_it() -> None:
    room = Room(4, may_fork=True)
    few = split(room, 1)
    (me,) = few
    stage = room.plan.stages[0].replicas
    room.wish(me, Change(lost=stage, joined=(Joining(me, 0, 1),)), FORK_SECONDS)
    assert room.cores[me].head.height == 1
    other = room.seats[0]
    room.deaf.clear()
    room.cores[me].say(head_of(room.cores[me], samples=10))
    room.cores[other].say(head_of(room.cores[other], samples=5))
    room.carry(me, room.cores[me].tell(other))
    room.carry(me, room.cores[me].tell(other))
    assert room.cores[other].head.height == 0
    assert {event.peer for event in room.events(other) if isinstance(event, ForkFound)} == {me}
    assert not any(isinstance(event, ForkFound) for event in room.events(me))


def test_after_healing_only_one_branch_is_told_to_give_up() -> None:
    room = Room(5, may_fork=True)
    few = split(room, 2)
    stage = room.plan.stages[0].replicas
    room.wish(few[0], Change(lost=stage, joined=(Joining(few[0], 0, 1),)), FORK_SECONDS)
    room.insist(few[0])
    many = room.seats[:3]
    room.deaf = set(few)
    room.wish(many[0], trains(many[0]))
    room.deaf.clear()
    one, other = few[0], many[0]
    assert room.cores[one].head.height == room.cores[other].head.height == 1
    room.events(one)
    room.cores[one].say(head_of(room.cores[one], samples=4))
    room.cores[other].say(head_of(room.cores[other], samples=3))
    room.carry(other, room.cores[other].tell(one))
    assert [type(event) for event in room.events(other)][-1] is ForkFound
    assert ForkFound not in [type(event) for event in room.events(one)]
    # The member that gave up resumes at the other member's head; the next plan admits it.
    room.cores[other].rejoin(80.0, room.cores[one].base, room.cores[one].chain)
    assert room.cores[other].head == room.cores[one].head


def test_a_member_that_rejoined_abstains_from_plans_it_voted_on() -> None:
    room = Room(3)
    me, other, _ = room.seats
    core = room.cores[me]
    prepare = Prepare(run=RUN, parent=core.head_hash, ballot=Ballot(1, other))
    assert core.receive(0.0, other, prepare)
    elsewhere = successor(room.plan, trains(other))
    core.rejoin(0.0, elsewhere)
    core.rejoin(0.0, room.plan)
    assert core.receive(0.0, other, prepare) == []
    assert PaxosChain(me, room.plan, Random(0), durable=core.durable).receive(0.0, other, prepare) == []
    link = encode_change(trains(other))
    core.receive(0.0, other, Decided(run=RUN, parent=core.head_hash, links=(link,)))
    asker = next(seat for seat in committee(core.head) if seat != me)
    later = Prepare(run=RUN, parent=core.head_hash, ballot=Ballot(1, asker))
    assert [type(message) for _, message in core.receive(0.0, asker, later)] == [Promised]


heads = st.builds(
    ChainHead,
    run=st.just(RUN),
    parent=st.sampled_from([bytes([number]) * 32 for number in range(4)]),
    height=st.integers(0, 3),
    samples=st.integers(0, 2),
    step=st.integers(0, 2),
)


@given(heads, heads, heads)
def test_exactly_one_of_several_branches_survives(a: ChainHead, b: ChainHead, c: ChainHead) -> None:
    if (a.samples, a.step, a.plan) != (b.samples, b.step, b.plan):
        assert other_branch_wins(a, b) != other_branch_wins(b, a)
    if other_branch_wins(a, b) and other_branch_wins(b, c):
        assert other_branch_wins(a, c)
