"""The parts of a simulation of whole nodes: repeatable scheduling by trio, the simulated cost of computing,
and the contents of a stage's sums."""

from random import Random

import pytest
import trio
import trio._core._run as trio_run
from trio.testing import MockClock

from crypto.errors import LocalProtocolError
from crypto.facts import IdentitySigner
from node.errors import StageFailed
from node.placement.admission import Machine, make_specification
from node.protocols.manifest import make_run
from partition import stage as api
from partition.codecs.codec import Payload
from partition.model.cut import cut_layers
from partition.stage_layout import gradient_bytes
from sim.seeds import seeded_identity
from sim.worlds.scheduling import run_repeatably, run_virtually
from sim.worlds.stages import StageCost, WatchedStage
from tests.stack import manifest, simple_cnn

NO_HASH = Payload((), (), "raw", bytes(32), memoryview(b""))
NATURAL_SECONDS, BYTES_PER_SECOND = 0.5, 1e6


async def order() -> list[int]:
    """Return the order in which twelve tasks that are ready at one instant run."""
    turns: list[int] = []

    async def turn(number: int) -> None:
        await trio.sleep(1)
        turns.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(turn, number)
    return turns


def test_the_seed_decides_the_order_of_simultaneous_tasks() -> None:
    before = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r
    first, again, other = (run_repeatably(order, Random(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert sorted(first) == list(range(12))
    assert (trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r) == before


def test_the_scheduling_switch_is_restored_after_a_failure() -> None:
    async def fail() -> None:
        await trio.sleep(1)
        raise ValueError("on purpose")

    before = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r
    with pytest.raises(ValueError, match="on purpose"):
        run_repeatably(fail, Random(1))
    assert (trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r) == before


def test_a_trio_version_without_the_scheduling_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING")
    with pytest.raises(LocalProtocolError, match=f"trio {trio.__version__} .*scheduling"):
        run_repeatably(order, Random(1))


def test_virtual_time_costs_no_real_time() -> None:
    async def sleep() -> float:
        await trio.sleep(80_000)
        return trio.current_time()

    assert run_virtually(sleep) == 80_000


def specifications() -> list[api.StageSpecification]:
    """Return the specifications of both stages of a small model."""
    model = simple_cnn()
    run = make_run(IdentitySigner(seeded_identity(1, 1), "test"), manifest(model))
    graphs = cut_layers(model.graph, model.hash, [(0, 2), (2, len(model.graph.layers))])
    return [make_specification(run, graphs, stage, Machine(1, "cpu", 1 << 40)) for stage in (0, 1)]


def test_a_pass_takes_the_scenarios_time_and_other_work_in_proportion() -> None:
    first, last = (
        StageCost(wanted, NATURAL_SECONDS, 2 * NATURAL_SECONDS, BYTES_PER_SECOND)
        for wanted in specifications()
    )
    forward, backward = api.Forward(0, 0, True, NO_HASH), api.Backward(0, 0, NO_HASH)
    assert (first.seconds(forward), first.seconds(backward)) == (1.0, 2.0)
    assert last.seconds(forward) == 3.0  # forward and backward
    assert last.seconds(api.Forward(0, 0, False, NO_HASH)) == 1.0
    size_bytes = gradient_bytes(specifications()[0])
    assert first.seconds(api.Apply(0, 1)) == pytest.approx(2 * 6 * size_bytes / BYTES_PER_SECOND)
    assert first.seconds(api.Norm()) == pytest.approx(2 * 3 * size_bytes / BYTES_PER_SECOND)
    assert first.seconds(api.Discard()) == 0.0


class Obedient:
    """A stage that accepts everything except micro-batch 13."""

    async def call(self, request: object) -> object:
        await trio.lowlevel.checkpoint()
        if getattr(request, "microbatch", 0) == 13:
            raise StageFailed("not that one")
        return None

    def vector(self, name: str) -> memoryview:
        return memoryview(name.encode())

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("is_last", [False, True])
def test_the_sums_contain_only_microbatches_that_were_not_subtracted(is_last: bool) -> None:
    applied: list[tuple[int, tuple[int, ...]]] = []
    wanted = specifications()[is_last]
    stage = WatchedStage(wanted, Obedient(), lambda _, step, numbers: applied.append((step, numbers)))

    async def play() -> None:
        for number in (3, 1, 2):
            await stage.call(api.Forward(0, number, True, NO_HASH))
        await stage.call(api.Forward(0, 9, False, NO_HASH))
        for number in (3, 1):
            await stage.call(api.Backward(0, number, NO_HASH))
        await stage.call(api.Forward(0, 1, True, NO_HASH, sign=-1))
        await stage.call(api.Backward(0, 1, NO_HASH, sign=-1))
        with pytest.raises(StageFailed):
            await stage.call(api.Forward(0, 13, True, NO_HASH))
        await stage.call(api.Apply(0, 1))
        await stage.call(api.Forward(1, 5, True, NO_HASH))
        await stage.call(api.Backward(1, 5, NO_HASH))
        await stage.call(api.Discard())
        await stage.call(api.Apply(1, 1))

    trio.run(play, clock=MockClock(autojump_threshold=0))
    assert applied == [(0, (2, 3) if is_last else (3,)), (1, ())]
