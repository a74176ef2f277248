"""One member's core: its messages, requests and actions when plans change, members depart and answers
arrive."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.change import Change, Joining, encode_change, successor
from partition.plan.paxos import PaxosChain, QuorumFound, QuorumLost
from partition.plan.paxos_messages import Decided
from partition.plan.plan import FIRST_VALUES, NO_HASH, Plan, StagePlan, committee, plan_hash
from partition.run.asks import (
    Ask,
    Declined,
    Done,
    EndRun,
    HoldStage,
    OpenStage,
    ReleaseStage,
    RenewRun,
    StartRun,
    Unanswered,
)
from partition.run.completion import DECLINES_MAX, answer_end
from partition.run.events import (
    NewestChanged,
    PauseWanted,
    PlanEntered,
    RolesGiven,
    RunLeft,
    RunOver,
    StateChanged,
)
from partition.run.hosting import StageWanted
from partition.run.member import Member
from partition.run.messages import Absent, Checkpointed, GivenUp, Leaving, Recut
from partition.run.parts import Parts
from partition.run.proposals import Surroundings
from partition.run.settings import RunSettings
from partition.run.states import NEXT, State
from tests.partition.quiet_chain import Quiet

Event = TypeVar("Event")
SETTINGS = RunSettings()
PEERS = tuple(PeerId(bytes([number]) * 32) for number in range(1, 8))
REQUESTER, ONE, TWO, THREE, FOUR, SPARE, OTHER = PEERS
PLAN = Plan(
    run=bytes(32),
    parent=NO_HASH,
    height=0,
    roster=PEERS[:5],
    trainers=(REQUESTER,),
    microbatches=4,
    stages=(StagePlan(0, 1, (ONE, TWO), (1, 1)), StagePlan(1, 2, (THREE, FOUR), (1, 1))),
)


@dataclass
class Node:
    """A member with the roles that a test gives it. The `free` peers have a slot."""

    me: PeerId = REQUESTER
    plan: Plan = PLAN
    live: list[PeerId] = field(default_factory=lambda: list(PEERS))
    gone: list[PeerId] = field(default_factory=list)
    free: list[tuple[PeerId, int]] = field(default_factory=list)
    committed: int | None = None
    restorable: tuple[bytes, int] | None = None
    best: tuple[bytes, int] | None = None
    can_tell: bool = True
    now: float = 0.0
    save_every: int = 0
    proposals: list[Change | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        around = Surroundings(lambda: self.live, lambda: self.gone, lambda: self.free)
        self.core = Member(
            self.me,
            requester=REQUESTER,
            samples_per_step=8,
            may_fork=False,
            around=around,
            roles=self,
            save_every=self.save_every,
            newest=self.restorable,
            parts=Parts(chain=self._quiet),  # type: ignore[arg-type]  # it is called as the type is
        )
        self.chain = PaxosChain(self.me, self.plan, Random(1))

    def holds(self, checkpoint: tuple[bytes, int]) -> bool:
        return checkpoint in (self.restorable, self.best)

    def _quiet(self, chain: PaxosChain) -> Quiet:
        quiet = Quiet(chain)
        quiet.proposals = self.proposals
        return quiet

    def begin(self, **how: Any) -> "Node":
        self.core.begin(self.now, self.chain, PLAN, **how)
        return self.open_stage()

    def open_stage(self) -> "Node":
        """Open the stage of the newest roles, if it is due."""
        for event in self.of(RolesGiven):
            if isinstance(event.stage, StageWanted):
                self.core.hosting.opened(event.stage)
        return self

    def die(self, *peers: PeerId) -> None:
        self.live = [peer for peer in self.live if peer not in peers]
        self.gone += peers
        self.core.members_changed(self.now)

    def at(self, now: float) -> "Node":
        """Discard everything that is due before this time."""
        self.now = now
        self.core.wake(now)
        return self

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.core.events if isinstance(event, kind)]

    def decided(self, change: Change) -> Plan:
        """Report that another member's change was decided."""
        parent = self.chain.head
        link = Decided(run=parent.run, parent=self.chain.head_hash, links=(encode_change(change),))
        self.chain.receive(self.now, next(peer for peer in parent.members if peer != self.me), link)
        events, self.chain.events[:] = list(self.chain.events), []
        for event in events:
            self.core.on_chain(self.now, event)
        return self.open_stage().chain.head

    def asked(self) -> list[Ask]:
        return list(self.core.asks.take())

    def reply(self, ask: Ask, reply: Done | Declined | Unanswered) -> None:
        self.core.replied(self.now, ask.number, reply)

    def proposed(self) -> Change | None:
        """Return its current proposal."""
        self.core.events.clear()
        self.core.members_changed(self.now)
        self.core.wake(self.now)
        return self.proposals[-1]


def test_the_first_plan_assigns_roles_and_starts_the_run() -> None:
    node = Node().begin()
    assert [type(event).__name__ for event in node.core.events[:4]] == [
        "PlanFollowed",
        "PlanEntered",
        "StateChanged",
        "RolesGiven",
    ]
    assert node.core.state == "running"
    assert node.of(PlanEntered)[0].is_first


def test_a_dead_member_is_proposed_as_lost() -> None:
    node = Node().begin()
    node.die(TWO)
    assert node.proposed() == Change(lost=(TWO,))
    node.decided(Change(lost=(TWO,)))
    assert node.core.state == "degraded"


def short_of_a_replica() -> tuple[Node, Plan]:
    """Return the first member of the committee, which asks others after TWO was lost and while SPARE has
    room."""
    plan = successor(PLAN, Change(lost=(TWO,)))
    node = Node(committee(plan)[0], free=[(SPARE, 9), (OTHER, 5)]).begin()
    node.die(TWO)
    node.decided(Change(lost=(TWO,)))
    node.at(SETTINGS.refill_seconds + 1)
    return node, plan


def test_a_newcomer_leases_then_opens_and_only_then_is_proposed() -> None:
    node, _ = short_of_a_replica()
    (lease,) = node.asked()
    assert isinstance(lease.request, HoldStage)
    assert (lease.peer, lease.request.stage) == (SPARE, 0)
    assert node.proposed() is None
    node.reply(lease, Done())
    (opening,) = node.asked()
    assert isinstance(opening.request, OpenStage)
    assert node.proposed() is None
    node.reply(opening, Done())
    assert node.proposed() == Change(joined=(Joining(SPARE, 0, 9),))


def test_a_newcomer_without_an_answer_is_released_and_another_asked() -> None:
    node, _ = short_of_a_replica()
    (lease,) = node.asked()
    node.reply(lease, Unanswered("timeout"))
    (release,) = node.asked()
    assert isinstance(release.request, ReleaseStage)
    assert release.peer == SPARE
    node.at(node.now)
    (other,) = node.asked()
    assert other.peer == OTHER
    node.reply(lease, Done())  # late: it has no effect
    assert node.asked() == []


def test_newcomers_are_released_when_another_plan_is_decided() -> None:
    node, _ = short_of_a_replica()
    (lease,) = node.asked()
    node.reply(lease, Done())
    (opening,) = node.asked()
    node.die(THREE)
    node.at(node.now)
    assert [(ask.peer, type(ask.request)) for ask in node.asked()] == [(SPARE, ReleaseStage)]
    node.reply(opening, Done())
    assert node.proposed() == Change(lost=(THREE,))


def test_a_member_without_a_quorum_releases_its_requests() -> None:
    node, plan = short_of_a_replica()
    (lease,) = node.asked()
    node.reply(lease, Done())
    (opening,) = node.asked()
    assert isinstance(opening.request, OpenStage)
    node.die(*[peer for peer in plan.members if peer != node.me])
    node.at(node.now)
    assert [(ask.peer, type(ask.request)) for ask in node.asked()] == [(SPARE, ReleaseStage)]
    node.at(node.now + 2 * SETTINGS.refill_seconds)
    assert not [ask for ask in node.asked() if isinstance(ask.request, HoldStage)]


def test_a_refusing_provider_is_asked_again_after_growing_pauses() -> None:
    node, _ = short_of_a_replica()
    node.free = [(SPARE, 9)]
    waits, refused_at = [], node.now
    (lease,) = node.asked()
    for _ in range(6):
        node.reply(lease, Declined("busy"))
        node.asked()
        asked: list[Ask] = []
        while not asked:
            node.core.members_changed(node.now)
            node.at(node.now + 1.0)
            asked = [ask for ask in node.asked() if isinstance(ask.request, HoldStage)]
        (lease,) = asked
        waits.append(node.now - refused_at)
        refused_at = node.now
    assert waits == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


TWO_MEMBERS = replace(PLAN, roster=(REQUESTER, ONE), stages=(StagePlan(0, 1, (ONE,), (1,)),))


def test_in_a_run_of_two_members_a_witness_must_agree_first() -> None:
    node = Node(committee(TWO_MEMBERS)[0], plan=TWO_MEMBERS, free=[(ONE, 1), (SPARE, 9), (OTHER, 5)])
    node.core.begin(0.0, node.chain, TWO_MEMBERS)
    node.at(0.0)
    (lease,) = node.asked()
    assert isinstance(lease.request, HoldStage)
    assert (lease.peer, lease.request.stage) == (SPARE, None)
    node.reply(lease, Declined("busy"))
    assert [type(ask.request) for ask in node.asked()] == [ReleaseStage]
    node.at(node.now)
    (lease,) = node.asked()
    assert lease.peer == OTHER
    node.reply(lease, Done())
    (opening,) = node.asked()
    assert isinstance(opening.request, OpenStage)
    node.reply(opening, Done())
    assert node.proposed() == Change(admitted=(OTHER,))
    assert node.decided(Change(admitted=(OTHER,))).witnesses == (OTHER,)
    assert node.proposed() is None, "a further witness was proposed although three votes are enough"


def test_a_witness_that_dies_is_replaced() -> None:
    plan = successor(TWO_MEMBERS, Change(admitted=(OTHER,)))
    first = committee(successor(plan, Change(lost=(OTHER,))))[0]
    node = Node(first, plan=plan, free=[(SPARE, 9)])
    node.core.begin(0.0, node.chain, TWO_MEMBERS)
    node.die(OTHER)
    assert node.proposed() == Change(lost=(OTHER,))
    node.decided(Change(lost=(OTHER,)))
    node.at(node.now)
    asked = [ask for ask in node.asked() if isinstance(ask.request, HoldStage)]
    assert [(ask.peer, ask.request.stage) for ask in asked] == [(SPARE, None)]  # type: ignore[union-attr]  # all are of this kind


def test_only_the_first_of_the_committee_asks_others() -> None:
    plan = successor(PLAN, Change(lost=(TWO,)))
    for me in committee(plan)[1:]:
        node = Node(me, free=[(SPARE, 9)]).begin()
        node.die(TWO)
        node.decided(Change(lost=(TWO,)))
        node.at(SETTINGS.refill_seconds + 1)
        assert node.asked() == []


def test_a_committer_excludes_a_member_that_forgot_the_run() -> None:
    node = Node().begin().at(SETTINGS.renew_seconds)
    renewals = [ask for ask in node.asked() if isinstance(ask.request, RenewRun)]
    assert [ask.peer for ask in renewals] == [ONE, TWO, THREE, FOUR]
    node.core.sends.clear()
    node.reply(renewals[0], Unanswered("timeout"))
    node.reply(renewals[1], Done())
    assert node.core.sends == []
    node.reply(renewals[2], Declined("no such run here"))
    told = Absent(plan_hash(PLAN), (THREE,), "it has forgotten the run")
    assert node.core.sends == [(peer, told) for peer in (ONE, TWO, THREE, FOUR)]


def test_a_member_without_messages_excludes_the_committer_then_gives_up() -> None:
    node = Node(ONE).begin()
    beats = int(SETTINGS.silence_seconds_max / SETTINGS.renew_seconds)
    for beat in range(1, beats):
        node.at(beat * SETTINGS.renew_seconds)
    assert node.proposed() == Change(lost=(REQUESTER,))
    assert not node.of(RunOver)
    node.at(beats * SETTINGS.renew_seconds)
    assert node.of(RunOver)[0].outcome == "failed"


def test_a_leaving_member_is_waited_for_between_two_steps() -> None:
    node = Node().begin()
    node.core.receive(0.0, TWO, Leaving(plan_hash(PLAN)))
    assert node.of(PauseWanted)
    assert node.proposed() is None, "the leaving member was excluded while it still works"
    node.core.between.paused(0.0, 7)
    assert node.proposed() == Change(lost=(TWO,))


def test_a_leaving_last_replica_is_replaced_first() -> None:
    node, _ = short_of_a_replica()
    node.asked()
    node.core.receive(node.now, ONE, Leaving(plan_hash(node.chain.head)))
    node.core.events.clear()
    node.core.between.paused(node.now, 7)
    assert ONE not in (node.proposed() or Change()).lost


def test_a_restarted_member_reports_that_its_stage_is_lost() -> None:
    node = Node(THREE).begin(is_restart=True)
    told = [message for _, message in node.core.sends if isinstance(message, Absent)]
    assert len(told) == len(PLAN.roster) - 1
    assert {message.peers for message in told} == {(THREE,)}
    assert node.core.state == "paused"
    assert not node.of(RolesGiven)


def test_an_absent_member_informs_peers_that_may_have_forgotten_it() -> None:
    """If it did not, each of two members could take the other for the proposer."""
    node = Node(ONE).begin()
    plan = plan_hash(PLAN)
    node.core.receive(0.0, REQUESTER, Absent(plan, (ONE,), "no answer"))
    node.core.sends.clear()
    node.core.receive(1.0, REQUESTER, Absent(plan, (REQUESTER,), "it was restarted"))
    mine = Absent(plan, (ONE,), "no answer")
    assert node.core.sends == [(REQUESTER, mine)]
    node.core.sends.clear()
    node.core.receive(1.0, REQUESTER, Absent(plan, (REQUESTER,), "it was restarted"))
    assert node.core.sends == [], "two absent members would answer each other for ever"
    node.at(SETTINGS.renew_seconds + 1)
    told = {peer for peer, message in node.core.sends if message == mine}
    assert told == {peer for peer in PLAN.roster if peer != ONE}, "the answer was not repeated to every peer"


def test_a_member_off_the_roster_leaves_and_is_silent() -> None:
    node = Node(TWO).begin()
    node.decided(Change(lost=(TWO,)))
    assert node.of(RunLeft) == [RunLeft(is_branch=False)]
    node.core.sends.clear()
    node.core.receive(1.0, REQUESTER, Absent(plan_hash(PLAN), (ONE,), "late"))
    node.at(1_000.0)
    assert node.core.sends == []
    assert node.asked() == []
    assert node.core.deadline == float("inf")


def test_a_lost_stage_pauses_the_run_and_finally_ends_it() -> None:
    me = committee(PLAN)[0]
    one, other = (ONE, TWO) if me not in (ONE, TWO) else (THREE, FOUR)
    node = Node(me).begin()
    node.die(one, other)
    for second in range(int(SETTINGS.lost_seconds_max + 2 * SETTINGS.refill_seconds)):
        node.at(float(second))
    assert node.core.state == "paused"
    ends = [ask for ask in node.asked() if isinstance(ask.request, EndRun)]
    assert {ask.peer for ask in ends} == set(PLAN.members) - {me, one, other}
    assert "no checkpoint holds its parameters" in str(ends[0].request)
    for ask in ends:
        node.reply(ask, Done())
    node.at(node.now + SETTINGS.retry_seconds)
    assert [over.outcome for over in node.of(RunOver)] == ["failed"]


def finishing() -> tuple[Node, dict[PeerId, Ask]]:
    """Return a committer that announces the end to the others, and its requests to them."""
    node = Node().begin()
    node.asked()
    node.core.end.finish(0.0, "done", "", "ab" * 32)
    return node, {ask.peer: ask for ask in node.asked()}


def test_the_end_is_repeated_to_a_silent_member() -> None:
    node, asked = finishing()
    assert set(asked) == {ONE, TWO, THREE, FOUR}
    for peer in (ONE, TWO, THREE):
        node.reply(asked[peer], Done())
    node.reply(asked[FOUR], Unanswered("timeout"))
    assert not node.of(RunOver)
    node.at(SETTINGS.retry_seconds)
    (again,) = node.asked()
    assert again.peer == FOUR
    node.reply(again, Done())
    node.at(node.now)
    assert node.of(RunOver) == [RunOver("done", "", "ab" * 32)]


def test_the_end_is_announced_under_a_newer_plan() -> None:
    node, asked = finishing()
    plan = node.decided(Change(lost=(TWO,)))
    assert node.core.plan == plan
    assert not node.of(RolesGiven)[1:], "a stage got a role after the end of training"
    node.reply(asked[ONE], Declined("no such plan here"))
    node.at(SETTINGS.retry_seconds)
    (again,) = node.asked()
    assert isinstance(again.request, EndRun)
    assert (again.peer, again.request.plan) == (ONE, plan_hash(plan))


def test_the_end_does_not_wait_for_dead_or_forgetful_members() -> None:
    node, asked = finishing()
    node.reply(asked[ONE], Done())
    node.reply(asked[TWO], Done())
    node.die(THREE)
    for _ in range(DECLINES_MAX):
        node.reply(asked[FOUR], Declined("no such plan here"))
        node.at(node.now + SETTINGS.retry_seconds)
        asked |= {ask.peer: ask for ask in node.asked()}
    assert node.of(RunOver)


def test_only_a_voter_ends_a_run_and_only_the_committer_renews_it() -> None:
    node = Node(ONE).begin()
    assert isinstance(answer_end(node.core.plan, REQUESTER, bytes(32)), Declined)
    assert answer_end(node.core.plan, REQUESTER, plan_hash(PLAN)) is None
    with pytest.raises(RemoteProtocolError, match="no vote"):
        answer_end(node.core.plan, SPARE, plan_hash(PLAN))
    assert node.core.on_renew(0.0, REQUESTER, plan_hash(PLAN)) == Done()
    assert isinstance(node.core.on_renew(0.0, TWO, plan_hash(PLAN)), Declined)
    assert node.core.on_renew(0.0, TWO, bytes(32)) == Done(), (
        "a renewal under another plan was not left to the chain"
    )


def test_every_outcome_ends_an_active_run() -> None:
    outcomes: tuple[tuple[str, State], ...] = (("done", "done"), ("failed", "failed"), ("stopped", "stopped"))
    for outcome, state in outcomes:
        node = Node().begin()
        node.core.ended(outcome)
        assert node.core.state == state
        node.core.ended("failed")
        assert node.core.state == state, "a later report changed the state"


NAME = plan_hash(PLAN)
MESSAGES = (
    Absent(NAME, (ONE,), "gone"),
    Absent(NAME, (THREE,), "gone"),
    Leaving(NAME),
    Leaving(NAME, at_once=True),
    Checkpointed(NAME, 4, bytes(32)),
    GivenUp(NAME),
    Recut(NAME, 4, bytes([4]) * 32, (1,)),
    Recut(NAME, 4, bytes([4]) * 32, (99,)),
)
REPLIES = (Done(), Declined("no"), Unanswered("silence"))


@given(me=st.sampled_from(PLAN.members), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_random_calls_cause_only_state_changes_in_the_table(me: PeerId, seed: int) -> None:
    rng = Random(seed)
    node = Node(me, free=[(SPARE, 9), (OTHER, 5)]).begin()
    open_asks: list[Ask] = []
    calls: list[Callable[[], object]] = [
        lambda: node.at(node.now + rng.choice((0.0, 1.0, 10.0, 60.0))),
        lambda: node.die(rng.choice(PLAN.members)) if rng.random() < 0.1 else None,
        lambda: node.core.receive(node.now, rng.choice(PEERS), rng.choice(MESSAGES)),
        lambda: node.core.between.leave(node.now),
        lambda: node.core.between.paused(node.now, 3),
        lambda: node.core.between.recut(Change(cuts=(1,))),
        lambda: node.core.checkpoints.saved(rng.choice(PLAN.members), 4, rng.randrange(2), None),
        lambda: node.core.checkpoints.sealed(node.now, 4, bytes([4]) * 32),
        lambda: node.core.checkpoints.stored(node.core.checkpoints.newest),
        lambda: node.reply(rng.choice(open_asks), rng.choice(REPLIES)) if open_asks else None,
        lambda: node.core.on_chain(node.now, QuorumLost(0, 1, 3)),
        lambda: node.core.on_chain(node.now, QuorumFound(0)),
        lambda: decide(node, rng),
        lambda: node.core.show_step(rng.randrange(20)),
        lambda: node.core.end.finish(node.now, "failed", "enough") if rng.random() < 0.2 else None,
    ]
    for _ in range(60):
        was_over = node.core.is_over
        node.core.sends.clear()
        with suppress(RemoteProtocolError):
            rng.choice(calls)()
        open_asks += node.asked()
        for _ in range(4):
            node.core.wake(node.now)
        assert node.core.deadline > node.now, (
            "the deadline is never later than now, so the driver would call the core for ever"
        )
        assert node.core.state in get_args(State)
        for event in node.of(StateChanged):
            assert event.state in NEXT
        assert not (was_over and node.core.sends), "the member sent a message after its end"


def decide(node: Node, rng: Random) -> None:
    """Decide this member's proposal, or a different change."""
    found = [change for change in node.proposals if change is not None]
    plan = node.core.plan
    if plan is None or node.core.is_over:
        return
    change = found[-1] if found and rng.random() < 0.8 else Change(lost=(rng.choice(plan.roster),))
    node.core.events.clear()
    node.decided(change)


def test_a_member_learns_of_a_checkpoint_from_the_committer() -> None:
    node = Node(ONE).begin()
    node.core.receive(0.0, REQUESTER, Checkpointed(NAME, 4, bytes(32)))
    assert node.of(NewestChanged) == [NewestChanged((bytes(32), 4))]
    assert node.core.checkpoints.restorable == (bytes(32), 4)


def test_a_newcomer_learns_the_restorable_checkpoint() -> None:
    node = Node(save_every=4).begin()
    newcomer = Change(joined=(Joining(SPARE, 0, 9),))
    node.decided(Change(lost=(TWO,)))
    plan = node.decided(newcomer)
    assert plan.committer == node.me
    (start,) = [ask for ask in node.asked() if ask.peer == SPARE]
    node.core.sends.clear()
    node.reply(start, Done())
    assert node.core.sends == [(SPARE, Checkpointed(plan_hash(plan), 0, FIRST_VALUES))]


def test_the_newest_checkpoint_is_repeated_to_all() -> None:
    node = Node(restorable=(bytes(32), 4)).begin()
    node.core.sends.clear()
    node.at(SETTINGS.renew_seconds)
    told = [peer for peer, message in node.core.sends if message == Checkpointed(NAME, 4, bytes(32))]
    assert sorted(told) == sorted(peer for peer in PLAN.members if peer != REQUESTER)


def brought(node: Node) -> list[PeerId]:
    """Return the members to which this member sends a plan."""
    return [ask.peer for ask in node.asked() if isinstance(ask.request, StartRun)]


def test_members_spread_the_first_plan_if_its_requester_dies() -> None:
    node = Node(ONE).begin()
    node.die(REQUESTER)
    node.at(1.0)
    assert sorted(brought(node)) == [TWO, THREE, FOUR]
    node.core.members_changed(2.0)
    node.at(2.0)
    assert brought(node) == [], "the first plan was spread twice"


def test_other_members_do_not_spread_the_first_plan() -> None:
    node = Node(ONE).begin()
    node.die(TWO)
    node.at(1.0)
    assert brought(node) == []
    node.at(SETTINGS.new_member_grace_seconds)
    node.die(REQUESTER)
    node.at(SETTINGS.new_member_grace_seconds)
    assert brought(node) == []


def test_a_new_committer_starts_newcomers_of_the_last_plan() -> None:
    node = Node(ONE).begin()
    node.decided(Change(lost=(TWO,)))
    node.decided(Change(joined=(Joining(SPARE, 0, 9),)))
    assert brought(node) == [], "a member started newcomers although the committer does so"
    plan = node.decided(Change(lost=(REQUESTER,)))
    assert plan.committer == node.me
    assert brought(node) == [SPARE]
