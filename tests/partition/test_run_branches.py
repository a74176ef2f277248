"""Which member leaves a branch of the run, and which claims about a branch are believed."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, short_peer
from partition.plan.change import Change, successor
from partition.plan.learner import Branch
from partition.plan.paxos import ForkBehind, ForkFound, LeftBehind, PaxosChain
from partition.plan.paxos_messages import ChainHead
from partition.plan.plan import NO_HASH, Plan, StagePlan, plan_hash
from partition.run.branch_pace import FASTER_MAX, STEPS_SPARE
from partition.run.branches import Branches, Verdict
from partition.run.messages import Absent, Checkpointed, GivenUp, Leaving, Recut, check_sender
from partition.run.progress import RunProgress
from partition.run.settings import RunSettings

SETTINGS = RunSettings()
PEERS = tuple(PeerId(bytes([number]) * 32) for number in range(1, 5))
COMMITTER, SECOND, THIRD, STRANGER = PEERS
PLAN = Plan(
    run=bytes(32),
    parent=NO_HASH,
    height=0,
    roster=PEERS[:3],
    trainers=(COMMITTER,),
    microbatches=4,
    stages=(StagePlan(0, 1, (SECOND, THIRD), (1, 1)),),
)
SAMPLES = 8


def head(step: int) -> ChainHead:
    return ChainHead(run=bytes(32), parent=bytes([9]) * 32, height=1, step=step, samples=step * SAMPLES)


def member(me: PeerId, *, may_fork: bool = True, step: int = 5) -> tuple[PaxosChain, RunProgress, Branches]:
    chain, progress = PaxosChain(me, PLAN, Random(1), may_fork=may_fork), RunProgress(SAMPLES)
    progress.note(step)
    progress.claim(chain, hosts=True)
    return chain, progress, Branches(me, chain, progress, SETTINGS, may_fork=may_fork)


def judged(me: PeerId, event: ForkFound | LeftBehind, **changes: object) -> Verdict:
    may_fork = bool(changes.pop("may_fork", True))
    known = {"live": PEERS, "committed": None, "hosts": True, **changes}
    _, _, branches = member(me, may_fork=may_fork)
    return branches.judge(0.0, event, PLAN, **known)  # type: ignore[arg-type]  # fields by name


def test_only_the_committer_of_the_shorter_branch_abandons_it() -> None:
    assert judged(COMMITTER, ForkFound(STRANGER, head(7)), committed=6) is Verdict.ABANDON
    assert judged(COMMITTER, ForkFound(STRANGER, head(7)), committed=8) is Verdict.STAY
    assert judged(SECOND, ForkFound(STRANGER, head(99))) is Verdict.STAY


def test_a_member_whose_committer_died_leaves_on_its_own() -> None:
    assert judged(SECOND, ForkFound(STRANGER, head(99)), live=(THIRD,)) is Verdict.LEAVE


def test_a_member_left_behind_by_its_committer_leaves_on_its_own() -> None:
    assert judged(SECOND, ForkFound(COMMITTER, head(99))) is Verdict.LEAVE
    assert judged(SECOND, ForkFound(THIRD, head(99))) is Verdict.STAY


def test_a_committer_whose_replicas_are_not_synced_waits() -> None:
    assert judged(COMMITTER, ForkFound(STRANGER, head(99)), committed=None) is Verdict.STAY


def test_a_member_that_missed_too_much_leaves_but_a_committer_compares_first() -> None:
    assert judged(SECOND, LeftBehind(STRANGER, head(1))) is Verdict.LEAVE
    assert judged(COMMITTER, LeftBehind(STRANGER, head(1)), committed=6) is Verdict.STAY
    assert judged(COMMITTER, LeftBehind(STRANGER, head(1)), may_fork=False) is Verdict.LEAVE


@given(st.lists(st.one_of(st.integers(0, 50), st.integers(-50, -1)), max_size=30))
def test_claims_of_a_branch_never_decrease(moves: list[int]) -> None:
    chain, progress, _ = member(COMMITTER, step=0)
    said, shown = 0, -1
    for move in moves:
        if move < 0:
            back = max(0, progress.step + move)
            assert progress.restored(back) >= 0
            shown = min(shown, back - 1)
        elif progress.show(move):
            assert move > shown
            shown = move
        progress.claim(chain, hosts=False)
        ((_, claimed),) = chain.tell(SECOND)
        assert isinstance(claimed, ChainHead)
        assert claimed.samples >= said
        said = claimed.samples
    assert progress.furthest * SAMPLES == said


def test_an_abandoned_branch_reports_its_steps_since_the_fork() -> None:
    _, progress, branches = member(COMMITTER, step=5)
    forked = successor(PLAN, Change(lost=(THIRD,), fork=bytes([3]) * 32))
    branches.decided(0.0, forked, (THIRD,))
    progress.note(9)
    branches.decided(1.0, successor(forked, Change(admitted=(STRANGER,))))
    assert branches.farewell().endswith("4 steps that were committed here are discarded")


# The plausible number of steps of a branch


def measured(*, step: int = 100) -> tuple[Branches, Plan]:
    """Return a committer that saw the run make ten steps a second for ten seconds. Then it lost the third
    member, and continued alone for ten seconds.
    """
    chain, progress = PaxosChain(COMMITTER, PLAN, Random(1), may_fork=True), RunProgress(SAMPLES)
    branches = Branches(COMMITTER, chain, progress, SETTINGS, may_fork=True)
    branches.look(0.0, PLAN, PLAN.members)
    progress.note(100)
    branches.look(10.0, PLAN, PLAN.members)
    own = successor(PLAN, Change(lost=(THIRD,), fork=bytes([3]) * 32))
    branches.decided(20.0, own, (THIRD,))
    progress.note(step)
    return branches, own


def claimed(step: int, *, samples: int | None = None, at: float = 20.0, step_here: int = 101) -> Verdict:
    """Return the verdict on a branch that the third member alone made, with half of the rates, and that
    claims this many steps.
    """
    branches, plan = measured(step=step_here)
    claim = ChainHead(
        run=bytes(32),
        parent=bytes([9]) * 32,
        height=1,
        step=step,
        samples=step * SAMPLES if samples is None else samples,
    )
    found = ForkFound(THIRD, claim, Branch(PLAN, (THIRD,)))
    return branches.judge(at, found, plan, live=PEERS, committed=step_here, hosts=True)


def test_a_branch_is_believed_up_to_the_speed_of_its_machines() -> None:
    possible = 100 + STEPS_SPARE + int(FASTER_MAX * 10 / 2 * 10)
    assert claimed(possible) is Verdict.ABANDON
    assert claimed(possible + 1) is Verdict.REFUSE
    assert claimed(possible + 1, at=30.0) is Verdict.ABANDON
    assert claimed(100, step_here=150) is Verdict.STAY


def test_claims_of_samples_beyond_the_steps_are_refused() -> None:
    assert claimed(101, samples=10**12) is Verdict.REFUSE


def test_a_branch_gains_nothing_from_machines_that_it_names() -> None:
    branches, plan = measured()
    crowd = tuple(PeerId(bytes([number]) * 32) for number in range(5, 60))
    claim = ForkFound(THIRD, head(10_000), Branch(PLAN, (THIRD, *crowd)))
    assert branches.judge(20.0, claim, plan, live=PEERS, committed=101, hosts=True) is Verdict.REFUSE


def test_an_impossible_claim_is_reported_once_per_peer() -> None:
    branches, plan = measured()
    claim = ForkFound(THIRD, head(10_000), Branch(PLAN, (THIRD,)))
    assert "claims a branch of 10000 steps, but its machines can have made at most 302" in branches.refusal(
        20.0, claim, plan
    )
    assert branches.refusal(21.0, claim, plan) == ""


def test_a_branch_reports_since_when_it_is_alone() -> None:
    branches, own = measured(step=140)
    assert branches.said.startswith(f"alone since step 100, without {short_peer(THIRD)}. ")
    branches.outlives(30.0, ForkBehind(THIRD, head(120), Branch(PLAN, (THIRD,))))
    assert branches.look(40.0, own, PEERS) == "", (
        "the branch was reported as ended although it may still progress"
    )
    gave_way = branches.look(30.0 + SETTINGS.left_seconds, own, PEERS)
    assert gave_way.startswith(f"the branch of {short_peer(THIRD)} gave way: about 20 of its steps ")
    branches.outlives(200.0, ForkBehind(THIRD, head(120), Branch(PLAN, (THIRD,))))
    together = successor(own, Change(admitted=(THIRD,)))
    branches.decided(210.0, together)
    assert "gave way" in branches.look(210.0, together, PEERS)
    assert branches.said == "", "the report of the branch remains although no member is missing any more"
    assert branches.look(211.0, together, PEERS) == ""


def test_a_branch_that_is_kept_reports_that_it_is_back_together() -> None:
    branches, own = measured(step=140)
    together = successor(own, Change(admitted=(THIRD,)))
    branches.decided(210.0, together)
    back = branches.look(210.0, together, PEERS)
    assert back.startswith(f"back together with {short_peer(THIRD)}: the 40 steps of this branch ")


NAME = plan_hash(PLAN)


def test_the_run_is_reported_by_its_committer_and_members_by_themselves() -> None:
    recut, saved = Recut(NAME, 3, bytes(32), (1,)), Checkpointed(NAME, 3, bytes(32))
    for message in (GivenUp(NAME), saved, recut, Absent(NAME, (SECOND, THIRD), "dead")):
        check_sender(PLAN, COMMITTER, message)
        with pytest.raises(RemoteProtocolError, match="only the run's committer"):
            check_sender(PLAN, SECOND, message)
    for own in (Absent(NAME, (SECOND,), "restarted"), Leaving(NAME), Leaving(NAME, at_once=True)):
        check_sender(PLAN, SECOND, own)
        with pytest.raises(RemoteProtocolError, match="only members"):
            check_sender(PLAN, STRANGER, own)
    with pytest.raises(RemoteProtocolError):
        check_sender(PLAN, SECOND, Absent(NAME, (THIRD,), "another"))
