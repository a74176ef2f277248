"""When a spare process is loaded before a stage is requested: a node in virtual time."""

import trio
from trio.testing import MockClock

from node.runs.occupancy import TRAINING_SECONDS
from node.runs.readiness import EXPECTED_SECONDS, SpareSettings
from node.runtime import Node
from sim.executor import SimExecutor
from tests.node.simulated import simulated_node
from tests.node.test_measurements import slow_medium

SPARES = SpareSettings()
MARGIN_SECONDS = 2 * SPARES.look_seconds


class Machine(SimExecutor):
    """The state of the machine as the node sees it, and whether a spare process waits."""

    def __init__(self) -> None:
        super().__init__()
        self.is_kept = False
        self.is_allowed = True
        self.free_bytes = SPARES.free_bytes_min

    def keep_stage_ready(self, machine: tuple[int, str] | None) -> None:
        self.is_kept = machine is not None

    async def watch(self, node: Node) -> None:
        """Have the node check the machine."""
        look = node.runs.readiness.run
        await look(lambda: self.is_allowed, lambda: int(self.is_kept), lambda: self.free_bytes)

    async def passes(self, seconds: float, *, is_kept: bool) -> None:
        """Let time pass, and check whether a spare process is kept."""
        await trio.sleep(seconds)
        assert self.is_kept == is_kept


def test_an_idle_node_keeps_a_spare_process_if_owner_and_memory_allow() -> None:
    machine = Machine()

    async def scenario() -> None:
        async with simulated_node(slow_medium(), 1, executor=machine) as node, trio.open_nursery() as nursery:
            nursery.start_soon(machine.watch, node)
            await machine.passes(SPARES.idle_seconds - MARGIN_SECONDS, is_kept=False)
            await machine.passes(2 * MARGIN_SECONDS, is_kept=True)
            machine.free_bytes = SPARES.free_bytes_min - 1
            await machine.passes(MARGIN_SECONDS, is_kept=True)
            machine.free_bytes = SPARES.free_bytes_left_min - 1
            await machine.passes(MARGIN_SECONDS, is_kept=False)
            machine.free_bytes = SPARES.free_bytes_min - 1
            await machine.passes(MARGIN_SECONDS, is_kept=False)
            machine.free_bytes = SPARES.free_bytes_min
            await machine.passes(MARGIN_SECONDS, is_kept=True)
            machine.is_allowed = False
            await machine.passes(MARGIN_SECONDS, is_kept=False)
            machine.is_allowed = True
            part = node.averaging.open("run", b"signature")  # a program of this process trains
            await machine.passes(TRAINING_SECONDS - MARGIN_SECONDS, is_kept=False)
            part.close()
            await machine.passes(SPARES.idle_seconds + MARGIN_SECONDS, is_kept=True)
            node.averaging.open("other", b"signature")
            await machine.passes(MARGIN_SECONDS, is_kept=True)
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_the_process_of_an_expected_stage_is_loaded_at_once() -> None:
    machine = Machine()
    machine.is_allowed = False  # so no spare is kept for unexpected stages, but this one is needed soon
    machine.free_bytes = 0

    async def scenario() -> None:
        async with simulated_node(slow_medium(), 1, executor=machine) as node, trio.open_nursery() as nursery:
            nursery.start_soon(machine.watch, node)
            node.runs.readiness.expect()
            assert machine.is_kept
            await machine.passes(EXPECTED_SECONDS - MARGIN_SECONDS, is_kept=True)
            await machine.passes(2 * MARGIN_SECONDS, is_kept=False)
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
