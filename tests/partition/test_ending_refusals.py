"""How members of a run in local mode end it with one result if some members refuse results, or one lies."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.identity import PeerId
from partition.run.conclusions import (
    Conclusion,
    ConclusionRefused,
    Differs,
    Preferred,
    Said,
    Sends,
    Settled,
    Told,
)
from partition.run.ending import Ending
from partition.run.local_settings import LocalSettings
from partition.run.own_vote import STALEMATE_SECONDS
from partition.run.poll import PATIENCE_SECONDS
from partition.run.sight import GRACE_SECONDS
from partition.run.turns import TURN_SECONDS
from tests.partition.test_ending import RUN, conclusion, peer

TICK_SECONDS = 1.0
"""Only `SAY_SECONDS` is shorter. Members repeat themselves at every tick."""

Judge = Callable[[PeerId, Conclusion], bool]


@dataclass
class World:
    """Members that judge a result before they hold it; the test plays a liar. A message arrives a tick later.
    It is lost with probability `loss`, or if `cut` separates sender and receiver.
    """

    count: int
    accepts: Judge
    rng: Random = field(default_factory=lambda: Random(1))
    loss: float = 0.0
    liar: PeerId | None = None
    lie: Callable[[PeerId, float], Sends] = lambda _peer, _now: []
    requester: PeerId | None = None
    is_at_end: bool = False
    now: float = 0.0
    members: dict[PeerId, Ending] = field(default_factory=dict)
    moving: list[tuple[PeerId, PeerId, Told]] = field(default_factory=list)
    wanted: dict[PeerId, Conclusion] = field(default_factory=dict)
    settled: dict[PeerId, Conclusion] = field(default_factory=dict)
    differs: list[tuple[PeerId, Differs]] = field(default_factory=list)
    cut: frozenset[PeerId] = frozenset()

    def __post_init__(self) -> None:
        for number in range(1, self.count + 1):
            own = peer(number)
            if own != self.liar:
                self.members[own] = Ending(own, RUN, LocalSettings(patience=2), requester=self.requester)
        self.look()

    @property
    def everyone(self) -> list[PeerId]:
        return [*self.members, *([] if self.liar is None else [self.liar])]

    def sees(self, one: PeerId, other: PeerId) -> bool:
        return (one in self.cut) == (other in self.cut)

    def look(self) -> None:
        for own, member in self.members.items():
            near = [
                each
                for each in self.everyone
                if self.sees(own, each) and (each == own or each not in self.settled)
            ]
            self.post(own, member.set_peers(self.now, near, trainers=near))
            if self.is_at_end:
                member.set_end(self.now, self.now)

    def post(self, sender: PeerId, sends: Sends) -> None:
        self.moving += [(sender, receiver, message) for receiver, message in sends]

    def propose(self, author: int, step: int = 10) -> None:
        member = self.members.get(peer(author))
        if member is not None and not member.is_settled:
            self.post(peer(author), member.propose(self.now, conclusion(author, step)))

    def tick(self) -> None:
        self.now += TICK_SECONDS
        self.look()
        moving, self.moving = self.moving, []
        for sender, receiver, message in moving:
            member = self.members.get(receiver)
            if member is not None and self.sees(sender, receiver) and self.rng.random() >= self.loss:
                self.post(receiver, member.receive(self.now, sender, message))
        for own, member in self.members.items():
            if self.liar is not None:
                self.moving += [(self.liar, own, message) for _, message in self.lie(own, self.now)]
            self.post(own, member.wake(self.now))
            self.drain(own, member)
        for own, wanted in list(self.wanted.items()):
            self.judge(own, wanted)

    def judge(self, own: PeerId, wanted: Conclusion) -> None:
        member = self.members[own]
        if member.best != wanted or member.holds:
            del self.wanted[own]
        elif any(self.sees(own, each) for each in member.holders):
            del self.wanted[own]
            if member.is_decided or self.accepts(own, wanted):
                self.post(own, member.hold(self.now, wanted))
            else:
                self.post(own, member.give_up(self.now, wanted))

    def drain(self, own: PeerId, member: Ending) -> None:
        for event in member.events:
            match event:
                case Preferred():
                    self.wanted[own] = event.conclusion
                case Settled():
                    assert own not in self.settled, "a member settled twice"
                    self.settled[own] = event.conclusion
                case Differs():
                    self.differs.append((own, event))
        member.events.clear()

    def run(self, seconds: float, turns: bool = False) -> None:
        """Let time pass. With `turns`, members propose at the end as they are due."""
        until = self.now + seconds
        while self.now < until and len(self.settled) < len(self.members):
            self.tick()
            for own, member in self.members.items() if turns else ():
                others = [each for each in self.everyone if each != own]
                if not member.is_settled and member.best is None and member.turns.is_mine(others, self.now):
                    step = 10 + int(self.now)
                    self.post(own, member.propose(self.now, conclusion(own[0], step)))


def only(*authors: int) -> Judge:
    """Have every member hold its own result and only the results of these authors."""
    return lambda own, found: found.author[0] in authors or found.author == own


def test_an_author_withdraws_a_result_that_most_refuse() -> None:
    world = World(4, only(2))
    world.propose(1)
    world.run(2 * PATIENCE_SECONDS)
    assert world.settled == {}
    assert world.members[peer(1)].best is None, "a member stopped training for a result that most refuse"
    world.propose(2)
    world.run(5)
    assert set(world.settled.values()) == {conclusion(2)}
    assert len(world.settled) == 4


def test_a_member_that_refuses_follows_a_quorum_of_the_others() -> None:
    world = World(4, lambda own, found: own != peer(4))
    world.propose(1)
    world.run(PATIENCE_SECONDS + 10)
    assert world.settled == {peer(number): conclusion(1) for number in range(1, 5)}


@pytest.mark.parametrize("count", [3, 4, 7])
def test_one_member_that_refuses_all_results_cannot_block_the_end(count: int) -> None:
    refusal = [(peer(1), ConclusionRefused(RUN, conclusion(1)))]
    world = World(count, lambda own, found: True, liar=peer(count), lie=lambda _peer, _now: list(refusal))
    world.propose(1)
    world.run(PATIENCE_SECONDS + 5)
    assert len(world.settled) == count - 1
    assert set(world.settled.values()) == {conclusion(1)}


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_a_single_member_cannot_choose_the_result(count: int) -> None:
    lied = conclusion(count, step=1_000)
    world = World(
        count,
        lambda own, found: found != lied,
        liar=peer(count),
        lie=lambda to, _now: [(to, Said(RUN, lied, holds=True, is_settled=True, commits=True))],
        is_at_end=True,
    )
    world.run(2 * STALEMATE_SECONDS, turns=True)
    assert len(world.settled) == count - 1
    assert len(set(world.settled.values())) == 1
    assert lied not in world.settled.values()
    assert {(event.peer, event.other) for _, event in world.differs} == {(peer(count), lied)}


def test_a_requester_breaks_a_tie_between_two_members() -> None:
    world = World(2, only(), requester=peer(1))
    world.propose(1)
    world.run(PATIENCE_SECONDS + 10)
    assert world.settled == {peer(1): conclusion(1), peer(2): conclusion(1)}


def test_two_members_that_refuse_each_others_results_keep_their_own() -> None:
    world = World(2, only(), is_at_end=True)
    world.run(STALEMATE_SECONDS + 6 * TURN_SECONDS, turns=True)
    assert len(set(world.settled.values())) == 2
    for _ in range(100):
        world.tick()
    assert {own for own, _ in world.differs} == {peer(1), peer(2)}


def test_two_parts_of_a_partition_learn_of_each_other_when_it_heals() -> None:
    world = World(4, lambda own, found: True)
    world.cut = frozenset({peer(3), peer(4)})
    for _ in range(int(2 * GRACE_SECONDS / TICK_SECONDS)):
        world.tick()
    world.propose(1)
    world.propose(3)
    world.run(2 * PATIENCE_SECONDS)
    assert len(set(world.settled.values())) == 2
    assert world.differs == []
    world.cut = frozenset()
    for _ in range(100):
        world.tick()
    assert {own for own, _ in world.differs} == set(world.members)
    assert all(event.other != world.settled[own] for own, event in world.differs)


def test_a_member_that_changes_its_settled_claim_counts_once() -> None:
    own, liar = peer(1), peer(2)
    member = Ending(own, RUN, LocalSettings())
    member.set_peers(0.0, [liar, peer(3)])
    member.receive(0.0, liar, Said(RUN, conclusion(2), holds=True, is_settled=True))
    member.receive(0.5, liar, Said(RUN, conclusion(2, step=11), holds=True, is_settled=True))
    assert member.best == conclusion(2)


def test_a_member_left_alone_does_not_trust_a_departed_one() -> None:
    own, liar = peer(1), peer(2)
    member = Ending(own, RUN, LocalSettings())
    member.set_peers(0.0, [liar], trainers=[own, liar])
    for now in (1.0, 1.0 + GRACE_SECONDS):
        member.set_peers(now, [], trainers=[own])
    member.receive(20.0, liar, Said(RUN, conclusion(2), holds=True, is_settled=True, commits=True))
    assert member.best == conclusion(2)
    assert not member.is_decided, "the result was accepted before it was tried"


def test_a_newcomer_learns_of_the_end_from_its_inviter() -> None:
    own, inviter = peer(1), peer(2)
    member = Ending(own, RUN, LocalSettings())
    member.set_peers(0.0, [], trainers=[])
    settled = Said(RUN, conclusion(2), holds=True, is_settled=True, commits=True)
    member.receive(1.0, inviter, settled)
    assert member.best is None, "an unknown peer got an answer"
    member.know(inviter)
    member.receive(2.0, inviter, settled)
    assert member.is_decided
    member.hold(3.0, conclusion(2))
    assert member.is_settled


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 7),
    loss=st.sampled_from([0.0, 0.2, 0.4]),
    refusals=st.sets(st.tuples(st.integers(1, 7), st.integers(1, 7)), max_size=12),
    proposals=st.lists(
        st.tuples(st.floats(0, 100), st.integers(1, 7), st.integers(1, 9)), min_size=1, max_size=4
    ),
)
def test_honest_members_never_settle_two_results_despite_refusals(
    seed: int,
    count: int,
    loss: float,
    refusals: set[tuple[int, int]],
    proposals: list[tuple[float, int, int]],
) -> None:
    world = World(
        count, lambda own, found: (own[0], found.author[0]) not in refusals, rng=Random(seed), loss=loss
    )
    while world.now < 4 * PATIENCE_SECONDS:
        for at, author, step in proposals:
            if world.now <= at < world.now + TICK_SECONDS:
                world.propose(author, step)
        world.tick()
    if world.settled:
        world.run(PATIENCE_SECONDS)
        assert len(world.settled) == count
    assert len(set(world.settled.values())) <= 1


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(3, 7),
    loss=st.sampled_from([0.0, 0.2]),
    proposals=st.lists(
        st.tuples(st.floats(0, 100), st.integers(1, 7), st.integers(1, 9)), min_size=1, max_size=3
    ),
    bad=st.booleans(),
    is_two_faced=st.booleans(),
)
def test_one_liar_among_members_that_agree_causes_no_second_result(
    seed: int, count: int, loss: float, proposals: list[tuple[float, int, int]], bad: bool, is_two_faced: bool
) -> None:
    """The liar claims of any result, even its own, that it holds, refuses, or has settled the result. The
    others may end differently only if the liar tells each of them something else about results that are all
    good. In that case they detect the liar.
    """
    liar, rng = peer(count), Random(seed)
    lies = [conclusion(count, step) for step in (5, 6, 7)]
    honest = [conclusion(author, step) for _, author, step in proposals if author < count]

    def lie(to: PeerId, now: float) -> Sends:
        if not is_two_faced:
            rng.seed(seed + int(now / TICK_SECONDS))
        if rng.random() < 0.5:
            return []
        found = rng.choice([*lies, *honest])
        if rng.random() < 0.3:
            return [(to, ConclusionRefused(RUN, found))]
        return [(to, Said(RUN, found, holds=True, is_settled=rng.random() < 0.3, commits=rng.random() < 0.5))]

    world = World(
        count,
        lambda own, found: not (bad and found in lies),
        rng=Random(seed),
        loss=loss,
        liar=liar,
        lie=lie,
        is_at_end=True,
    )
    while world.now < STALEMATE_SECONDS - 1:
        for at, author, step in proposals:
            if world.now <= at < world.now + TICK_SECONDS and author < count:
                world.propose(author, step)
        world.tick()
    world.run(STALEMATE_SECONDS + 10 * TURN_SECONDS, turns=True)
    assert len(world.settled) == count - 1, "the liar blocked the end for ever"
    if count > 3 and not (is_two_faced and not bad):
        assert len(set(world.settled.values())) == 1
    elif len(set(world.settled.values())) > 1:
        for _ in range(100):
            world.tick()
        assert {own for own, event in world.differs if event.peer != liar} == set(world.members)
    if bad:
        assert not set(world.settled.values()) & set(lies)
