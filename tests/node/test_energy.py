"""Energy counters of the hardware, read from a folder like the kernel's."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import trio

from crypto.identity import PeerId
from node.events import StepCommitted
from node.runs.metrics import metric_rows
from node.services.energy import POWERCAP, EnergyLog, EnergyMeter, keep_log, nvidia_cards
from node.state import RunView
from partition.run.local_settings import LocalSettings
from sim.executor import SimExecutor
from sim.seams import SimClock
from sim.worlds.scheduling import run_virtually
from tests.stack import manifest, simulate, swarm, train


def zone(root: Path, name: str, microjoules: int) -> None:
    folder = root / POWERCAP / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text("10000000\n")


def test_joules_are_counted_from_the_start_and_across_a_counter_wrap(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 9_000_000)
    zone(tmp_path, "intel-rapl:0:0", 4_000_000)  # the counter of the cores, which is part of the package's
    meter = EnergyMeter(tmp_path)
    zone(tmp_path, "intel-rapl:0", 9_500_000)
    assert meter.read() == pytest.approx({"cpu:0": 0.5})
    zone(tmp_path, "intel-rapl:0", 1_000_000)
    assert meter.read() == pytest.approx({"cpu:0": 2.0})


def test_a_machine_without_energy_counters_reports_no_energy(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path).read() == {}
    zone(tmp_path, "intel-rapl:0", 1)
    (tmp_path / POWERCAP / "intel-rapl:0" / "energy_uj").write_text("no number")
    assert EnergyMeter(tmp_path).read() == {}


def test_a_log_knows_the_energy_only_of_the_time_that_it_covers(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 1_000_000)
    log = EnergyLog(lambda: EnergyMeter(tmp_path))
    assert log.sample(100.0)
    zone(tmp_path, "intel-rapl:0", 3_000_000)
    assert log.sample(101.0)
    assert log.sample(100.5), "a clock that was set back broke the log"
    zone(tmp_path, "intel-rapl:0", 3_500_000)
    assert log.sample(103.0)
    assert log.joules(100.0, 103.0) == pytest.approx(2.5)
    assert log.joules(100.5, 102.0) == pytest.approx(1.0 + 0.25)
    assert log.joules(99.0, 101.0) is None
    assert log.joules(102.0, 104.0) is None


def test_a_log_covers_a_long_run_by_keeping_fewer_samples(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 0)
    log = EnergyLog(lambda: EnergyMeter(tmp_path), samples_max=30)
    at = 0.0
    for number in range(32):
        # one joule per sample; the counter wraps at ten
        zone(tmp_path, "intel-rapl:0", number % 10 * 1_000_000)
        log.sample(at)
        at += log.interval_seconds
    assert log.interval_seconds == 2.0
    assert log.joules(0.0, 30.0) == pytest.approx(30.0)


def test_a_machine_without_counters_is_sampled_only_once(tmp_path: Path) -> None:
    log = EnergyLog(lambda: EnergyMeter(tmp_path))
    asked: list[int] = []

    def is_wanted() -> bool:
        asked.append(1)
        return len(asked) > 2

    async def scenario() -> None:
        with trio.fail_after(10):
            await keep_log(log, SimClock(), SimExecutor(), is_wanted)

    run_virtually(scenario)
    assert len(asked) == 3, "sampling did not begin with the first active run, or did not end"
    assert log.joules(0.0, 1.0) is None


def test_gpus_count_millijoules_and_those_without_a_counter_are_skipped(
    tmp_path: Path,
) -> None:
    """NVIDIA's library is replaced, because this machine may have no card."""
    used = {"first": 5_000, "third": 7_000}

    def energy(card: str) -> int:
        if card not in used:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return used[card]

    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=["first", "second", "third"].__getitem__,
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )
    cards = partial(nvidia_cards, library)
    zone(tmp_path, "intel-rapl:0", 1_000_000)
    log = EnergyLog(lambda: EnergyMeter(tmp_path, cards))
    log.sample(0.0)
    used |= {"first": 6_500, "third": 7_500}
    zone(tmp_path, "intel-rapl:0", 4_000_000)
    log.sample(1.0)
    assert log.joules(0.0, 1.0) == pytest.approx(1.5 + 0.5 + 3.0), (
        "the energy is not the sum of the cards and the processor"
    )
    assert EnergyMeter(tmp_path, cards).read().keys() == {"cpu:0", "gpu:0", "gpu:2"}


def test_rows_of_metrics_have_the_joules_of_their_step_if_known(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 0)
    log = EnergyLog(lambda: EnergyMeter(tmp_path))
    log.sample(10.0)
    zone(tmp_path, "intel-rapl:0", 8_000_000)
    log.sample(14.0)
    view = RunView("r", "m", "d", 9, PeerId(bytes(32)), "running", step=2)
    seen = [
        StepCommitted(at=at, run="r", step=step, loss=1.0, samples=8, seconds=2.0, replicas=1)
        for step, at in enumerate((11.0, 13.5))
    ]
    first, second = metric_rows(view, seen, log.joules)
    assert "joules" not in first, "a step that began before the log has joules"
    assert second["joules"] == pytest.approx(4.0)


def test_rows_of_steps_hold_the_joules_since_the_previous_row(
    tmp_path: Path,
) -> None:
    """As in local mode, each joule that a machine used for its steps belongs to exactly one row."""
    zone(tmp_path, "intel-rapl:0", 0)
    log = EnergyLog(lambda: EnergyMeter(tmp_path))
    for second in range(21):
        zone(tmp_path, "intel-rapl:0", second * 400_000)
        log.sample(10.0 + second)
    view = RunView("r", "m", "d", 30, PeerId(bytes(32)), "running", step=21)
    seen = [
        StepCommitted(at=at, run="r", step=step, loss=1.0, samples=8, seconds=0.5, replicas=1)
        for step, at in ((0, 11.0), (10, 19.0), (11, 20.0), (20, 30.0))
    ]
    found = [row["joules"] for row in metric_rows(view, seen, log.joules) if "joules" in row]
    assert found == pytest.approx([0.2, 3.2, 0.2, 4.0])


def test_a_run_in_local_mode_reports_this_machines_energy(tmp_path: Path) -> None:
    """Run a whole node on a machine that draws 4 W."""
    zone(tmp_path, "intel-rapl:0", 0)
    log, rows = EnergyLog(lambda: EnergyMeter(tmp_path)), list[dict[str, float]]()

    async def count() -> None:
        while True:
            zone(tmp_path, "intel-rapl:0", int(4e6 * trio.current_time()) % 10_000_000)
            await trio.sleep(0.1)

    async def scenario() -> None:
        wanted = manifest(steps=41, stages=1, replicas=0, microbatches=1, local=LocalSettings())
        async with swarm("a") as group, trio.open_nursery() as nursery:
            node = group.nodes["a"]
            nursery.start_soon(count)
            nursery.start_soon(keep_log, log, SimClock(), SimExecutor(), node.runs.known)
            await trio.sleep(2)
            run, events = await train(group, "a", wanted)
            await trio.sleep(2)
            rows.extend(metric_rows(node.state.runs[run.text], events, log.joules))
            nursery.cancel_scope.cancel()
        steps = [event for event in events if isinstance(event, StepCommitted)]
        seconds = steps[-1].at - steps[0].at + steps[0].seconds
        assert sum(row.get("joules", 0.0) for row in rows) == pytest.approx(4 * seconds, rel=0.1)

    simulate(scenario)
    assert [row["step"] for row in rows if "joules" in row] == [1, 11, 21, 31, 41]
