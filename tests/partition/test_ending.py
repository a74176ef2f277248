"""How members of a run in local mode agree on its end, despite message loss and deaths."""

from dataclasses import dataclass, field
from math import inf
from random import Random

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.run.conclusions import (
    Conclusion,
    ModelEvaluated,
    Preferred,
    Said,
    Sends,
    Settled,
    Told,
    Voided,
)
from partition.run.convergence import SeriesProgress, advance, has_converged
from partition.run.ending import Ending
from partition.run.endings import RUNS_MAX, Endings
from partition.run.local_settings import LocalSettings
from partition.run.poll import PATIENCE_SECONDS
from partition.run.sight import GRACE_SECONDS
from partition.run.turns import TURN_SECONDS

RUN = bytes(32)
TICK_SECONDS = 0.25


def peer(number: int) -> PeerId:
    return PeerId(bytes([number]) * 32)


def conclusion(author: int, step: int = 10) -> Conclusion:
    return Conclusion(RUN, "done", "", step, f"{author:032x}{step:032x}", peer(author))


@dataclass
class World:
    """Members that see one another. Each message arrives a tick later, or is lost with probability `loss`."""

    count: int
    rng: Random
    loss: float = 0.0
    now: float = 0.0
    members: dict[PeerId, Ending] = field(default_factory=dict)
    moving: list[tuple[PeerId, PeerId, Told]] = field(default_factory=list)
    fetches: list[tuple[PeerId, Conclusion]] = field(default_factory=list)
    settled: dict[PeerId, Conclusion] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in range(1, self.count + 1):
            self.members[peer(number)] = Ending(peer(number), RUN, LocalSettings(patience=2))
        self.look()

    def look(self) -> None:
        for own, member in self.members.items():
            self.post(own, member.set_peers(self.now, list(self.members)))

    def post(self, sender: PeerId, sends: Sends) -> None:
        self.moving += [(sender, receiver, message) for receiver, message in sends]

    def propose(self, author: int, step: int = 10) -> None:
        member = self.members.get(peer(author))
        if member is not None:
            self.post(peer(author), member.propose(self.now, conclusion(author, step)))

    def kill(self, number: int) -> None:
        self.members.pop(peer(number), None)

    def tick(self) -> None:
        self.now += TICK_SECONDS
        moving, self.moving = self.moving, []
        for sender, receiver, message in moving:
            member = self.members.get(receiver)
            if member is not None and self.rng.random() >= self.loss:
                self.post(receiver, member.receive(self.now, sender, message))
        for own, member in self.members.items():
            self.post(own, member.wake(self.now))
            self.drain(own, member)
        fetches, self.fetches = self.fetches, []
        for own, wanted in fetches:
            member = self.members.get(own)
            if member is None or member.best != wanted or member.holds:
                continue
            if any(other.holds and other.best == wanted for other in self.members.values()):
                self.post(own, member.hold(self.now, wanted))
            else:
                self.fetches.append((own, wanted))

    def drain(self, own: PeerId, member: Ending) -> None:
        for event in member.events:
            match event:
                case Preferred():
                    self.fetches.append((own, event.conclusion))
                case Settled():
                    assert own not in self.settled, "a member settled twice"
                    assert member.holds
                    self.settled[own] = event.conclusion
        member.events.clear()


def test_all_members_settle_a_proposal_once_they_all_hold_its_result() -> None:
    world = World(4, Random(1))
    world.propose(2)
    while len(world.settled) < 4:
        world.tick()
        assert world.now < 5
    assert set(world.settled.values()) == {conclusion(2)}


def test_a_lone_member_settles_immediately() -> None:
    world = World(1, Random(1))
    world.propose(1)
    world.tick()
    assert world.settled == {peer(1): conclusion(1)}


def test_the_proposal_with_more_steps_wins() -> None:
    world = World(3, Random(1))
    world.propose(1, step=10)
    world.propose(3, step=12)
    while len(world.settled) < 3:
        world.tick()
        assert world.now < 5
    assert set(world.settled.values()) == {conclusion(3, 12)}


def test_a_conclusion_whose_holders_all_died_is_void() -> None:
    world = World(3, Random(1))
    member = world.members[peer(1)]
    member.receive(0.0, peer(2), Said(RUN, conclusion(2), holds=True, is_settled=False))
    world.kill(2)
    world.look()
    assert member.best is not None, "the conclusion was dropped although its holder may only be slow"
    world.now += GRACE_SECONDS
    world.look()
    assert any(isinstance(event, Voided) for event in member.events)
    assert member.best is None


def test_a_silent_member_delays_the_end_only_by_the_patience() -> None:
    world = World(3, Random(1))
    world.members.pop(peer(3))  # dead, but not yet noticed
    world.propose(1)
    while len(world.settled) < 2:
        world.tick()
        assert world.now < PATIENCE_SECONDS + 2
    assert world.now >= PATIENCE_SECONDS


def test_a_returning_member_adopts_the_settled_conclusion() -> None:
    world = World(3, Random(1))
    away = world.members.pop(peer(3))
    world.look()
    world.propose(1)
    while len(world.settled) < 2:  # they wait a moment for a member that is out of sight
        world.tick()
        assert world.now < GRACE_SECONDS + 2
    world.members[peer(3)] = away
    world.look()
    world.post(peer(3), away.evaluate(20, 1, 0.5, ()))
    for _ in range(20):
        world.tick()
    assert world.settled[peer(3)] == conclusion(1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(2, 5),
    loss=st.sampled_from([0.0, 0.2, 0.4]),
    proposals=st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=3
    ),
    deaths=st.dictionaries(st.integers(1, 5), st.integers(0, 12), max_size=3),
)
def test_members_that_see_each_other_settle_one_conclusion(
    seed: int,
    count: int,
    loss: float,
    proposals: list[tuple[int, int, int]],
    deaths: dict[int, int],
) -> None:
    world = World(count, Random(seed), loss)
    for tick in range(100):
        for at, author, step in proposals:
            if at == tick:
                world.propose(author, step)
        for number, at in deaths.items():
            if at == tick:
                world.kill(number)
        if tick % 2 == 0:
            world.look()
        world.tick()
    assert len({found for own, found in world.settled.items()}) <= 1
    if world.members and (world.settled.keys() & world.members.keys()):
        assert all(member.is_settled for member in world.members.values())


def test_a_non_finite_evaluation_is_refused() -> None:
    member = World(2, Random(1)).members[peer(1)]
    with pytest.raises(RemoteProtocolError):
        member.receive(0.0, peer(2), ModelEvaluated(RUN, 1, 1, inf, (), 1.0, 0))
    with pytest.raises(RemoteProtocolError):
        member.receive(
            0.0, peer(2), Said(RUN, Conclusion(bytes([1]) * 32, "done", "", 1, "", peer(2)), True, False)
        )


def test_the_next_evaluator_continues_the_series_of_the_previous_one() -> None:
    world = World(3, Random(1))
    first, second = world.members[peer(1)], world.members[peer(2)]
    for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5)):
        for receiver, message in first.evaluate(step, 5, loss, ()):
            world.members[receiver].receive(0.0, peer(1), message)
    assert not second.series.has_converged
    second.evaluate(4, 5, 1.2, ())
    assert second.series.has_converged


def test_exactly_one_of_the_visible_members_evaluates() -> None:
    world = World(5, Random(1))
    assert (
        sum(
            member.turns.is_first(p for p in world.members if p != own)
            for own, member in world.members.items()
        )
        == 1
    )


@given(
    losses=st.lists(st.floats(0, 10), min_size=1, max_size=30),
    patience=st.integers(1, 5),
    improvement=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_a_series_has_converged_after_evaluations_without_an_improvement(
    losses: list[float], patience: int, improvement: float
) -> None:
    progress, best, since = SeriesProgress(), inf, 0
    for step, loss in enumerate(losses):
        progress = advance(progress, step, loss, improvement)
        is_better = best == inf or (loss < best and loss <= best - improvement)
        best, since = (loss, 0) if is_better else (best, since + 1)
        assert (progress.best, progress.since) == (best, since)
        assert has_converged(progress, patience) == (since >= patience)
        assert not has_converged(progress, 0)


def test_finished_runs_make_room_for_new_ones() -> None:
    endings = Endings()
    for number in range(2 * RUNS_MAX):
        run = number.to_bytes(32, "big")
        ending = Ending(peer(1), run, LocalSettings())
        endings.open(float(number), ending)
        ending.propose(float(number), Conclusion(run, "failed", "", 0, "", peer(1)))
        assert ending.is_settled
    for number in range(RUNS_MAX):
        endings.open(1e3, Ending(peer(1), number.to_bytes(32, "big"), LocalSettings()))
    with pytest.raises(ValueError, match="unfinished runs"):
        endings.open(1e3, Ending(peer(1), b"o" * 32, LocalSettings()))


def test_an_unavailable_result_does_not_block_a_run() -> None:
    own, liar, honest = (peer(number) for number in (1, 2, 3))
    member = Ending(own, RUN, LocalSettings())
    member.set_peers(0.0, [liar, honest])
    lie, other = conclusion(2, step=2**53 - 1), conclusion(2, step=2**53 - 2)
    member.receive(0.0, liar, Said(RUN, lie, holds=False, is_settled=True))
    assert member.events == []
    member.receive(0.0, liar, Said(RUN, lie, holds=True, is_settled=True))
    assert member.events == [Preferred(RUN, lie)]
    member.give_up(0.5, lie, is_missing=True)
    member.receive(1.0, liar, Said(RUN, other, holds=True, is_settled=False))
    member.receive(1.0, honest, Said(RUN, lie, holds=False, is_settled=False))
    assert member.events[1:] == [Voided(RUN)]
    member.receive(2.0, honest, Said(RUN, conclusion(3), holds=True, is_settled=False))
    assert member.events[2:] == [Preferred(RUN, conclusion(3))]


@pytest.mark.parametrize("can_go_on", [True, False])
def test_a_failure_elsewhere_ends_only_a_member_that_cannot_continue(can_go_on: bool) -> None:
    member = Ending(peer(1), RUN, LocalSettings())
    member.set_peers(0.0, [peer(2)])
    member.can_go_on = can_go_on
    failed = Conclusion(RUN, "failed", "so it says", 3, "", peer(2))
    member.receive(0.0, peer(2), Said(RUN, failed, holds=True, is_settled=True))
    assert member.best == (None if can_go_on else failed)


def test_members_make_up_for_a_missing_evaluation_in_turn() -> None:
    peers = [peer(number) for number in range(5)]
    members = [Ending(own, RUN, LocalSettings()) for own in peers]

    def evaluators(seconds: float) -> int:
        return sum(
            member.turns.is_mine([other for other in peers if other != own], seconds)
            for own, member in zip(peers, members, strict=True)
        )

    assert [evaluators(turn * TURN_SECONDS) for turn in range(7)] == [1, 2, 3, 4, 5, 5, 5]
    assert evaluators(TURN_SECONDS - 1) == 1


def test_an_evaluation_counts_only_from_the_member_whose_turn_it_is() -> None:
    peers = [peer(number) for number in range(1, 5)]
    own = peers[0]
    member = Ending(own, RUN, LocalSettings(patience=2))
    order = sorted(peers, key=lambda each: blake3(RUN + each).digest())
    order.remove(own)
    ranks = {each: member.turns.place(each, peers) for each in order}
    first = next((each for each in order if ranks[each] == 0), None)
    last = order[-1]
    member.set_peers(0.0, peers[1:], trainers=peers)
    member.receive(0.0, last, ModelEvaluated(RUN, 5, 1, -1e9, (), -1e9, 99))
    assert member.series.progress == SeriesProgress()
    if first is not None:
        member.receive(0.0, first, ModelEvaluated(RUN, 5, 1, 1.0, (), 1.0, 0))
        assert member.series.progress.best == 1.0
    member.set_due(100.0, ranks[last] * TURN_SECONDS)
    member.receive(100.0, last, ModelEvaluated(RUN, 6, 1, 0.5, (), 0.5, 0))
    assert member.series.progress.best == 0.5, (
        "an evaluation was accepted from a member whose turn it was not"
    )


def test_a_series_can_be_continued_from_the_reported_loss_alone() -> None:
    member = Ending(peer(1), RUN, LocalSettings(patience=2))
    member.set_peers(0.0, [peer(2)])
    member.receive(0.0, peer(2), ModelEvaluated(RUN, 1, 1, 2.0, (), 2.0, 0))
    member.receive(0.0, peer(2), ModelEvaluated(RUN, 2, 1, 1.0, (), 0.0, 50))
    assert member.series.progress == SeriesProgress(2, 1.0, 0)
    assert not member.series.has_converged


def test_impossible_steps_are_refused() -> None:
    member = Ending(peer(1), RUN, LocalSettings(), steps=10)
    member.set_peers(0.0, [peer(2)])
    for message in (
        ModelEvaluated(RUN, 11, 1, 1.0, (), 1.0, 0),
        Said(RUN, conclusion(2, step=11), holds=True, is_settled=True),
    ):
        with pytest.raises(RemoteProtocolError):
            member.receive(0.0, peer(2), message)


def test_a_fetched_result_survives_its_author_until_it_is_tried() -> None:
    member = Ending(peer(1), RUN, LocalSettings())
    member.set_peers(0.0, [peer(2)])
    member.receive(0.0, peer(2), Said(RUN, conclusion(2), holds=True, is_settled=True))
    member.fetched(conclusion(2))
    for now in (0.0, GRACE_SECONDS + 1):
        member.set_peers(now, [])
    assert member.best == conclusion(2)
    member.give_up(GRACE_SECONDS + 1, conclusion(2))
    assert member.best is None
