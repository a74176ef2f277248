"""The cost of lease requests: each is small, checks run one at a time, and a repeated request needs no
check."""

import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from crypto.identity import Identity, PeerId
from node.executor import RealExecutor
from node.placement.admission import Machine
from node.placement.lease_checks import BURST, BUSY, RATE, LeaseChecks
from node.protocols import calls
from node.protocols import runs as wire
from node.protocols.manifest import Run
from node.runtime import Node
from node.seams import RealClock
from partition.plan.plan import NO_HASH, Plan, StagePlan, encode_plan, plan_hash
from partition.run.asks import Declined
from sim.executor import SimExecutor
from tests.stack import manifest, prepare, simple_cnn, simulate, swarm

LAYERS = len(simple_cnn().graph.layers)
ALICE, BOB, CAROL = (Identity(bytes([number]) * 32).peer for number in (1, 2, 3))
MACHINE = Machine(1, "cpu", 8 << 30)
T = TypeVar("T")


class CountingExecutor(SimExecutor):
    """Count the checks that are computed in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.apart = 0

    async def run(self, function: Callable[[], T], *, seconds: float = 0.0, apart: bool = False) -> T:
        self.apart += apart
        return await super().run(function, seconds=seconds, apart=apart)


def plan_of(run: Run, holder: PeerId, microbatches: int | None = None) -> Plan:
    stage = StagePlan(0, LAYERS, (holder,), (1,))
    roster = tuple(sorted({holder, run.requester}))
    wanted = run.manifest.microbatches if microbatches is None else microbatches
    return Plan(run.id, NO_HASH, 0, roster, (run.requester,), wanted, (stage,))


def with_node(test: Callable[[Node, Node, Node], Awaitable[None]]) -> None:
    async def main() -> None:
        async with swarm("abc") as group:
            await test(*(group.nodes[name] for name in "abc"))

    simulate(main)


async def lease(sender: Node, receiver: Node, number: int) -> wire.Reply:
    """Request a lease for a new manifest, and give the slot back."""
    run = prepare(sender, manifest(microbatches=number))
    plan = plan_of(run, receiver.peer)
    reply = await calls.ask(
        sender.network, receiver.peer, wire.LeaseRequest(run.fact, encode_plan(plan), 0), seconds=30
    )
    await calls.ask(sender.network, receiver.peer, wire.Release(run.id, plan_hash(plan)), seconds=30)
    return reply


def test_only_a_peer_that_floods_lease_requests_is_delayed() -> None:
    async def test(a: Node, b: Node, c: Node) -> None:
        began = trio.current_time()
        replies = [await lease(b, a, number) for number in range(1, BURST + 12)]
        computed = BURST + RATE * (trio.current_time() - began)
        assert sum(isinstance(reply, wire.Leased) for reply in replies) <= computed
        assert replies[-1] == Declined(BUSY)
        assert isinstance(await lease(c, a, 40), wire.Leased)
        await trio.sleep(1 / RATE)
        assert isinstance(await lease(b, a, 41), wire.Leased)

    with_node(test)


def test_a_repeated_lease_request_is_not_checked_again() -> None:
    async def test(a: Node, _b: Node, _c: Node) -> None:
        executor = CountingExecutor()
        checks = LeaseChecks(ALICE, executor, RealClock(), lambda: MACHINE)
        run = prepare(a, manifest())
        plan, graph = plan_of(run, ALICE), simple_cnn().graph
        for _ in range(3 * BURST):
            assert await checks.rejection_reason(BOB, run, graph, plan, 0) is None
        huge = prepare(a, manifest(microbatch=4_096, microbatches=64, pipeline="gpipe"))
        for _ in range(3 * BURST):
            reason = await checks.rejection_reason(BOB, huge, graph, plan_of(huge, ALICE), 0)
            assert reason is not None
            assert "memory" in reason
        assert executor.apart == 2
        assert checks.known(huge, plan_of(huge, ALICE), 0) == reason

    with_node(test)


async def test_slow_checks_for_unknown_peers_run_one_at_a_time() -> None:
    executor = RealExecutor(threads=1)
    running, go_on = threading.Semaphore(0), threading.Semaphore(0)
    at_once: list[int] = []
    inside = 0

    def work() -> None:
        nonlocal inside
        inside += 1
        at_once.append(inside)
        running.release()
        go_on.acquire()
        inside -= 1

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(lambda: executor.run(work, apart=True))
        await trio.to_thread.run_sync(running.acquire)
        assert await executor.run(lambda: "read") == "read"
        for _ in range(3):
            go_on.release()
    assert at_once == [1, 1, 1]
