"""The committer of a plan measures how long each replica takes per micro-batch. It uses the times at which it
hears that a forward or backward pass ended."""

import pytest

from crypto.identity import PeerId
from partition.plan.plan import NO_HASH, Plan, StagePlan
from partition.steps.messages import Counted, Open, Progress, StageRoutes
from partition.steps.witness import Witness

A, B, C = (PeerId(bytes([number]) * 32) for number in range(1, 4))
PLAN = Plan(
    run=bytes(32),
    parent=NO_HASH,
    height=0,
    roster=(A, B, C),
    trainers=(A,),
    microbatches=4,
    stages=tuple(StagePlan(number, number + 1, (peer,), (1,)) for number, peer in enumerate((A, B, C))),
)
FORWARD, BACKWARD = (0.1, 0.3, 0.0), (0.2, 0.6, 0.3)
"""Duration in seconds of each stage's forward and backward pass. The last stage does both passes together, so
its forward time is 0."""


def opened(step: int) -> Open:
    routes = tuple(StageRoutes(bytes(4)) for _ in PLAN.stages)
    return Open(plan=bytes(32), step=step, attempt=0, train=True, first=4 * step, stages=routes)


def play(witness: Witness, step: int, begun: float) -> float:
    """Play a step of four micro-batches: each replica runs its passes one after another, as soon as
    possible."""
    witness.opened(begun, opened(step))
    free, ready = [begun] * 3, [begun] * 4
    heard: list[tuple[float, PeerId, Progress | Counted]] = []
    for stage, peer in enumerate((A, B)):
        for number in range(4):
            ready[number] = free[stage] = max(free[stage], ready[number]) + FORWARD[stage]
            progress = Progress(plan=bytes(32), step=step, microbatch=4 * step + number, stage=stage)
            heard.append((free[stage], peer, progress))
    for stage, peer in ((2, C), (1, B), (0, A)):
        for number in range(4):
            ready[number] = free[stage] = max(free[stage], ready[number]) + BACKWARD[stage]
            counted = Counted(
                plan=bytes(32), step=step, microbatch=4 * step + number, stage=stage, samples=0, loss=0.0
            )
            heard.append((free[stage], peer, counted))
    for now, sender, said in sorted(heard, key=lambda row: row[0]):
        witness.heard(now, sender, said)
    return max(free)


def test_the_time_of_each_replica_is_measured() -> None:
    witness = Witness(PLAN)
    now = 0.0
    for step in range(3):
        now = play(witness, step, now)
    witness.opened(now, opened(3))
    found = witness.nanoseconds()
    for peer, forward, backward in zip((A, B, C), FORWARD, BACKWARD, strict=True):
        assert found[peer] == pytest.approx(1e9 * (forward + backward), rel=0.01)


def test_repeated_or_foreign_reports_are_ignored() -> None:
    witness = Witness(PLAN)
    witness.opened(0.0, opened(0))
    for now, peer, step, number, stage in (
        (1.0, A, 1, 0, 0),
        (1.0, A, 0, 9, 0),
        (1.0, A, 0, 0, 1),
        (1.0, PeerId(bytes(32)), 0, 0, 0),
        (1.0, A, 0, 0, 0),
        (9.0, A, 0, 0, 0),
    ):
        witness.heard(now, peer, Progress(plan=bytes(32), step=step, microbatch=number, stage=stage))
    witness.opened(10.0, opened(1))
    assert witness.nanoseconds() == {}
