"""When a spare process is loaded before a stage is requested: a node in virtual time."""

from types import SimpleNamespace

import psutil
import pytest
import trio
from trio.testing import MockClock

from node.runs.readiness import EXPECTED_SECONDS, SpareSettings
from node.runs.runs import TRAINING_SECONDS
from sim.executor import SimExecutor
from tests.node.simulated import simulated_node
from tests.node.test_measurements import slow_medium

SPARES = SpareSettings()
MARGIN_SECONDS = 2 * SPARES.look_seconds


class Machine:
    """The node's view of the machine, and whether a spare process waits."""

    def __init__(self) -> None:
        self.is_kept = False
        self.is_allowed = True
        self.free_bytes = SPARES.free_bytes_min

    def keep(self, machine: tuple[int, str] | None) -> None:
        self.is_kept = machine is not None

    async def passes(self, seconds: float, *, is_kept: bool) -> None:
        """Let time pass, and return whether a process is kept."""
        await trio.sleep(seconds)
        assert self.is_kept == is_kept


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The readiness of the test's node."""
    found = Machine()
    monkeypatch.setattr(SimExecutor, "keep_stage_ready", lambda _, wanted: found.keep(wanted))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=found.free_bytes))
    return found


def test_an_idle_node_keeps_a_process_where_owner_and_memory_allow_it(machine: Machine) -> None:
    async def scenario() -> None:
        async with simulated_node(slow_medium(), 1) as node, trio.open_nursery() as nursery:
            watch = node.runs.readiness.run
            nursery.start_soon(watch, lambda: machine.is_allowed, lambda: int(machine.is_kept))
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


def test_an_expected_stages_process_loads_at_once_and_waits(machine: Machine) -> None:
    machine.is_allowed = False  # this spare is needed soon, and none is kept for unexpected stages
    machine.free_bytes = 0

    async def scenario() -> None:
        async with simulated_node(slow_medium(), 1) as node, trio.open_nursery() as nursery:
            watch = node.runs.readiness.run
            nursery.start_soon(watch, lambda: machine.is_allowed, lambda: int(machine.is_kept))
            node.runs.readiness.expect()
            assert machine.is_kept
            await machine.passes(EXPECTED_SECONDS - MARGIN_SECONDS, is_kept=True)
            await machine.passes(2 * MARGIN_SECONDS, is_kept=False)
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
