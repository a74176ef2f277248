"""Verdicts on a committer's events: lost peers, and the end of training."""

from partition.plan.plan import NO_HASH, Plan, StagePlan
from partition.run.failures import Failures
from partition.run.verdicts import PeersLost, TrainingOver, Verdicts
from partition.steps.committer_events import ReplicaFailed, StepsPaused, TrainingEvaluated, TrainingFailed
from partition.steps.messages import Synced
from tests.partition.fake_stage import peer

A, B, C = (peer(name) for name in "abc")
STAGES = StagePlan(0, 1, (A, B), (1, 1)), StagePlan(1, 2, (C,), (1,))
PLAN = Plan(NO_HASH, NO_HASH, 0, tuple(sorted((A, B, C))), (A,), 2, STAGES)


def test_only_replicas_that_did_not_sync_in_time_are_lost() -> None:
    verdicts = Verdicts(PLAN, Failures())
    verdicts.heard(B, Synced(plan=NO_HASH, step=0))
    verdicts.heard(C, "something else")
    assert verdicts.late("syncing", 120.0).peers == tuple(sorted((A, C)))
    assert verdicts.late("stepping", 120.0).peers == ()


def test_a_step_that_fails_on_two_peers_ends_training() -> None:
    verdicts = Verdicts(PLAN, failures := Failures())
    assert verdicts.judge(ReplicaFailed(A, 0, "boom", 3)) == PeersLost((A,), "boom")
    assert verdicts.judge(ReplicaFailed(A, 0, "gone")) == PeersLost((A,), "gone"), (
        "a failure outside of a step did not lose exactly its peer"
    )
    over = Verdicts(PLAN, failures).judge(ReplicaFailed(B, 0, "boom", 3))
    assert isinstance(over, TrainingOver), "steps that failed under different plans did not count together"
    assert over.reason is not None
    assert "step 3" in over.reason


def test_a_stage_without_parameters_loses_all_its_replicas() -> None:
    verdicts = Verdicts(PLAN, Failures())
    assert verdicts.judge(TrainingFailed("nobody has them", 0)) == PeersLost((A, B), "nobody has them")
    assert verdicts.judge(TrainingFailed("bad data", None, (3, True))) == TrainingOver("bad data")
    assert verdicts.judge(TrainingEvaluated(4, 1.0, ())) == TrainingOver(None)
    assert verdicts.judge(StepsPaused(4)) is None
