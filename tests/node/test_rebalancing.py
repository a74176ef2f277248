"""Rebalancing the stage borders of a live run while one plan follows the other."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import trio
from msgspec.structs import replace

from crypto.facts import IdentitySigner
from crypto.identity import Identity, PeerId
from node.protocols.manifest import Run, make_run
from node.runs.rebalancing import PAUSE_NANOSECONDS, Rebalancing, pause_nanoseconds
from partition.plan.observed import NOTHING, Knowledge
from partition.plan.plan import Plan, StagePlan
from partition.plan.rates import REFERENCE
from partition.run.rate_watch import LOOK_STEPS
from tests.partition.fake_stage import peer
from tests.stack import manifest, simple_cnn

A, B, C = (peer(name) for name in "abc")
RATE = 5_000_000_000


def plan_of(run: Run, layers: int, *holders: PeerId, height: int) -> Plan:
    rows = ((0, 1), (1, layers))
    return Plan(
        run=run.id,
        parent=bytes([height]) * 32,
        height=height,
        roster=tuple(sorted(holders)),
        trainers=(holders[0],),
        microbatches=4,
        stages=tuple(
            StagePlan(first, last, (holder,), (RATE,))
            for (first, last), holder in zip(rows, holders, strict=True)
        ),
    )


def test_a_rebalancing_that_ends_under_a_later_plan_is_discarded() -> None:
    """While the rebalancing of the first plan is being computed, a second plan takes effect. The second plan
    has a peer that does not occur in the first placement problem.
    """
    model = simple_cnn()
    run = make_run(IdentitySigner(Identity(bytes(32)), "home"), manifest(model))
    layers = len(model.graph.layers)
    first, second = (plan_of(run, layers, A, B, height=0), plan_of(run, layers, A, C, height=1))
    tasks: list[Callable[[], Awaitable[None]]] = []
    found: list[dict[PeerId, int]] = []
    is_first = True

    async def compute(work: Callable[[], Any], apart: bool = False) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            rebalancing.begin(second)
        return work()

    async def get(name: bytes, holders: list[PeerId]) -> Any:
        return model.graph

    async def learn(peers: list[PeerId]) -> Any:
        return NOTHING

    def start_task(task: Callable[..., Awaitable[None]], *arguments: Any, of: Run | None) -> None:
        tasks.append(lambda: task(*arguments))

    service = SimpleNamespace(
        models=SimpleNamespace(get=get),
        offers=tuple,
        seams=SimpleNamespace(executor=SimpleNamespace(run=compute)),
        measurements=SimpleNamespace(learn=learn, stages_found=found.append),
        publish=lambda event: None,
        start_task=start_task,
    )
    rebalancing = Rebalancing(cast(Any, service), run, lambda plan, wanted: None, list)
    rebalancing.begin(first)
    for plan in (first, second):
        said = {PeerId(row.replicas[0]): 1_000_000 for row in plan.stages}
        for step in range(LOOK_STEPS):
            rebalancing.stepped(plan, step, 0.01, said, {})
        trio.run(tasks.pop())
    assert [set(rates) for rates in found] == [{A, B}, {A, C}]


def test_a_rebalancing_pauses_the_run_until_its_slowest_replica_has_loaded() -> None:
    run = make_run(IdentitySigner(Identity(bytes(32)), "home"), manifest(simple_cnn()))
    plan = plan_of(run, 3, A, B, height=0)
    shares = {A: 600, B: 150, C: 50}  # C holds no stage
    devices = {name: replace(REFERENCE, share_permille=share) for name, share in shares.items()}
    assert pause_nanoseconds(plan, Knowledge(A, devices, {})) == PAUSE_NANOSECONDS * 1000 // 150
    assert pause_nanoseconds(plan, NOTHING) == PAUSE_NANOSECONDS
