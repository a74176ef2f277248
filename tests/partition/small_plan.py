"""A plan of three stages, and what its members say: for tests of one replica or trainer at a time."""

from typing import Any

from crypto.identity import PeerId
from partition.plan.plan import Plan, StagePlan, plan_hash
from partition.steps.frames import FrameHeader, OpenedFrame
from partition.steps.messages import Apply, Synced
from tests.partition.fake_stage import peer
from tests.partition.steps_world import opened

TRAINER, FIRST, LAST = peer("t"), peer("first"), peer("last")
MIDDLES = (peer("middle0"), peer("middle1"))
PLAN = Plan(
    run=bytes(32),
    parent=bytes(32),
    height=2,
    planner=TRAINER,
    trainer=TRAINER,
    requester=TRAINER,
    microbatches=2,
    stages=(
        StagePlan(0, 1, (FIRST,), (1,)),
        StagePlan(1, 2, MIDDLES, (1, 1)),
        StagePlan(2, 3, (LAST,), (1,)),
    ),
)
PLAN_HASH = plan_hash(PLAN)
SENT: Any = object()  # frames are opaque to the core


def frame(
    sender: PeerId, microbatch: int, direction: Any = "input", *, step: int = 0, train: bool = True
) -> OpenedFrame:
    header = FrameHeader(PLAN_HASH, step, microbatch, 1, direction, train, (1,), (), "raw", bytes(32))
    return opened(sender, header)


def synced(step: int, *, reduced: int | None = None, attempt: int = 7) -> Synced:
    applied = Apply(plan=bytes(32), step=step - 1, attempt=attempt, samples=9) if step else None
    return Synced(plan=PLAN_HASH, step=step, reduced=reduced, applied=applied)
