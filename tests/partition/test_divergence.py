"""Steps with non-finite values in runs that skip such steps, at the committer."""

from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from partition.steps.committer import Committer, StepApplied
from partition.steps.messages import Apply, Diverged, Reduced, Sends
from tests.partition.fake_stage import digest
from tests.partition.small_plan import FIRST, PLAN, PLAN_HASH, START, synced
from tests.partition.test_committer import (
    REPLICAS,
    apply_all,
    committer,
    count,
    counting,
    failed_of,
    opens,
    reduce_all,
)


def diverge(core: Committer, how: str) -> Sends:
    """Report that the open step is not finite."""
    if how == "loss":
        return count(core, 0, loss=float("nan"))
    if how == "stage":
        named: dict[str, Any] = {"plan": core.plan_hash, "step": core.step, "train": True}
        return core.receive(1.0, FIRST, Diverged(microbatch=2 * core.step, reason="it is inf", **named))
    count(core, 2 * core.step, 2 * core.step + 1)
    named = {"plan": core.plan_hash, "step": core.step, "attempt": core.attempt}
    sends: Sends = []
    for who in REPLICAS:
        sends += core.receive(1.0, who, Reduced(digest=digest(PLAN.stage_of(who)), squared_norm=inf, **named))
    return sends


@pytest.mark.parametrize("how", ["loss", "stage", "norm"])
def test_all_members_skip_a_diverged_step_if_the_run_allows_it(how: str) -> None:
    core = counting(skips_diverged=True)
    sends = diverge(core, how)
    assert [(who, message.skipped) for who, message in sends if isinstance(message, Apply)] == [
        (who, 1) for who in REPLICAS
    ]
    assert {row.step for row in opens(apply_all(core))} == {1}
    (event,) = [event for event in core.events if isinstance(event, StepApplied)]
    assert (event.step, event.loss, event.samples) == (0, 0.0, 0)
    assert event.diverged.startswith("step 0: ")
    count(core, 2, 3)
    reduce_all(core)
    apply_all(core)
    last = core.events[-1]
    assert isinstance(last, StepApplied)
    assert last.diverged == ""


def test_a_run_ends_after_eleven_diverging_steps_under_any_committer() -> None:
    core = counting(steps=99, skips_diverged=True)
    for _ in range(4):
        diverge(core, "stage")
        apply_all(core)
    last = Apply(plan=PLAN_HASH, step=3, attempt=START, samples=1, skipped=4)
    # The next committer learns of the skipped steps from the last Apply.
    core = committer(steps=99, skips_diverged=True)
    for who in REPLICAS:
        core.receive(0.0, who, replace(synced(4), applied=last))
    for _ in range(6):
        diverge(core, "stage")
        apply_all(core)
    assert core.step == 10
    assert diverge(core, "stage") == []
    assert "10 steps before it were skipped in a row" in failed_of(core)


def test_the_next_committer_finishes_a_skipped_step() -> None:
    core = committer(skips_diverged=True)
    applied = Apply(plan=PLAN_HASH, step=0, attempt=START, samples=1, skipped=1)
    sends: Sends = []
    for who in REPLICAS:
        row = replace(synced(1), applied=applied) if who == FIRST else synced(0)
        sends += core.receive(0.0, who, row)
    assert [(who, message.skipped) for who, message in sends if isinstance(message, Apply)] == [
        (who, 1) for who in REPLICAS if who != FIRST
    ]
