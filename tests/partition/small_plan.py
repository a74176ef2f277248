"""A plan of three stages and its members' messages, for tests of one core at a time."""

from typing import Any

from crypto.identity import PeerId
from partition.plan.plan import NO_HASH, Plan, StagePlan, plan_hash
from partition.steps.frames import FrameHeader, OpenedFrame
from partition.steps.messages import Apply, Open, Sends, StageCommit, StageRoutes, StepCommit, Synced
from partition.steps.replica import BackwardReady, ForwardReady, Replica
from partition.steps.routes import attempts
from tests.partition.fake_stage import peer
from tests.partition.steps_machine import opened

TRAINER, SECOND, FIRST, LAST = peer("t"), peer("second"), peer("first"), peer("last")
MIDDLES = (peer("middle0"), peer("middle1"))
PLAN = Plan(
    run=bytes(32),
    parent=bytes([1]) * 32,
    height=2,
    roster=tuple(sorted((TRAINER, SECOND, FIRST, *MIDDLES, LAST))),
    trainers=(TRAINER, SECOND),
    microbatches=2,
    stages=(
        StagePlan(0, 1, (FIRST,), (1,)),
        StagePlan(1, 2, MIDDLES, (1, 1)),
        StagePlan(2, 3, (LAST,), (1,)),
    ),
)
PLAN_HASH = plan_hash(PLAN)
START = attempts(PLAN).start
SENT: Any = object()  # frames are opaque to the core


def frame(
    sender: bytes,
    microbatch: int,
    direction: Any = "input",
    *,
    step: int = 0,
    train: bool = True,
    **other: Any,
) -> OpenedFrame:
    """Return a message for the middle stage, or for `stage` if it is given."""
    named = {"plan": PLAN_HASH, "attempt": START, "stage": 1, **other}
    header = FrameHeader(
        step=step,
        microbatch=microbatch,
        direction=direction,
        train=train,
        sizes=(1,),
        tensors=(),
        codec="raw",
        digest=bytes(32),
        **named,
    )
    return opened(PeerId(sender), header)


def opening(
    middles: tuple[int, ...] = (0, 1),
    *,
    step: int = 0,
    attempt: int = 0,
    counted: tuple[tuple[int, ...], ...] = ((), (), ()),
    train: bool = True,
    first: int | None = None,
) -> Open:
    """Return an Open message in which `middles` own the middle stage's micro-batches; each other stage has
    one holder.
    """
    owners = (bytes(len(middles)), bytes(middles), bytes(len(middles)))
    return Open(
        plan=PLAN_HASH,
        step=step,
        attempt=START + attempt,
        train=train,
        first=step * PLAN.microbatches if first is None else first,
        stages=tuple(StageRoutes(*row) for row in zip(owners, counted, strict=True)),
    )


def commit(first: tuple[int, ...], second: tuple[int, ...], *, attempt: int = 0, step: int = 0) -> StepCommit:
    """Return the commit, in which each of the two holders of the middle stage counts its own
    micro-batches."""
    everything = tuple(range(2 * step, 2 * step + 2))
    rows = ((0, FIRST, everything), (1, MIDDLES[0], first), (1, MIDDLES[1], second), (2, LAST, everything))
    return StepCommit(
        plan=PLAN_HASH,
        step=step,
        attempt=START + attempt,
        replicas=tuple(StageCommit(*row) for row in rows),
    )


def synced(step: int | None, *, reduced: int | None = None, attempt: int = 7, **other: Any) -> Synced:
    applied = Apply(plan=NO_HASH, step=step - 1, attempt=attempt, samples=9, loss=18.0) if step else None
    return Synced(plan=PLAN_HASH, step=step, reduced=reduced, applied=applied, **other)


def bring(replica: Replica, *microbatches: int, step: int = 0) -> None:
    """Deliver the inputs of these micro-batches, and the gradients of their outputs, to the replica."""
    for number in microbatches:
        replica.receive(0.0, FIRST, frame(FIRST, number, step=step))
        replica.receive(0.0, LAST, frame(LAST, number, "gradient", step=step))


def forward(replica: Replica, work: Any) -> Sends:
    """Report that a micro-batch of one sample was computed."""
    assert isinstance(work, ForwardReady)
    return replica.forwarded(work, output=SENT, gradient=None, samples=1, loss=0.0, metrics=())


def compute(replica: Replica) -> list[Any]:
    """Compute everything that is ready, and return the work items."""
    done: list[Any] = []
    while isinstance(work := replica.next(0.0), ForwardReady | BackwardReady):
        done.append(work)
        if isinstance(work, ForwardReady):
            forward(replica, work)
        else:
            replica.backwarded(work, gradient=SENT)
    if work is not None:
        done.append(work)
    return done
