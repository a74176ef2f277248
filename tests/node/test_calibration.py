"""Measuring the speed of operators on this machine: done once, stored for the machine, and harmless if it is
impossible."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import pytest

from node.config import Config
from node.offering import Offering
from node.paths import cache_folder
from node.placement.provider import Provider
from node.services.calibration import (
    CalibrationSettings,
    CalibrationWish,
    MeasuringProcesses,
    MeasuringTurn,
    calibrate,
    corrected,
)
from node.services.capacity import Capacity, device_memory
from node.services.energy import EnergyMeter
from partition.plan.operations import KINDS
from partition.plan.rates import (
    REFERENCE,
    Calibration,
    KindPace,
    OperatorPace,
    decode_calibration,
    encode_calibration,
)
from sim.seams import SimClock
from tests.node.test_energy import zone
from tests.slowdown import slowdown

HERE = CalibrationWish("cpu", "float32", 1)
WAITING_SECONDS = 60
IS_COMPARED = os.environ.get("PEERLOOM_PROCESSES") == "1"
MEASURE_SECONDS = 2.0 if IS_COMPARED else 0.3
"""Only a comparison of two measurements needs the longer time."""
HURRIED = MeasuringProcesses(
    CalibrationSettings(measure_seconds=0.005, share_seconds=0.005, process_seconds_max=0.01)
)
"""A measurement whose process does not end within its time limit."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for the measurements of this file's tests."""
    return tmp_path_factory.mktemp("cache")


@contextmanager
def on_one_core() -> Iterator[MeasuringProcesses]:
    """Yield measuring processes that all share one core: each of two processes gets half of it, whatever the
    load of the machine.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        # Processes with a positive niceness would wait for a long time while other tests run.
        yield MeasuringProcesses(CalibrationSettings(measure_seconds=MEASURE_SECONDS, niceness=0))
    finally:
        os.sched_setaffinity(0, before)


class Known(MeasuringProcesses):
    """Measuring processes that return a known result."""

    def __init__(self, found: Callable[[], Calibration]) -> None:
        super().__init__()
        self._found = found

    def measure_now(self, *_: object) -> Calibration:
        return self._found()

    def with_own_work(self, calibration: Calibration, _turn: MeasuringTurn) -> Calibration:
        return calibration


@pytest.fixture(scope="module")
def alone(cache: Path) -> Calibration:
    """Return the calibration that one short process measures while no other measures."""
    held = np.ones(100_000_000)  # memory of this process must not count as the stage's
    with on_one_core() as processes:
        found = calibrate(HERE, cache, processes=processes)
    assert found is not None
    assert found.baseline_bytes < held.nbytes
    return found


def test_every_operator_class_is_measured_and_stored(alone: Calibration, cache: Path) -> None:
    assert {row.kind for row in alone.kinds} == set(KINDS)
    assert alone.flops_per_second > 10**8
    assert 1 <= alone.share_permille <= 1000
    assert alone.baseline_bytes > 50 << 20
    assert alone.device == "cpu"
    assert 50 < alone.node_nanoseconds[0] / 1_000 < 50_000, "implausible time of the node per micro-batch"
    assert alone.node_step_nanoseconds < 50_000_000
    kept = decode_calibration((cache / HERE.key).read_bytes())
    assert (kept.kinds, kept.node) == (alone.kinds, alone.node)
    assert len(encode_calibration(alone)) <= 900, "the calibration does not fit a record"


@pytest.mark.skipif(
    os.environ.get("PEERLOOM_PROCESSES") != "1",
    reason=("runs three measuring processes: set PEERLOOM_PROCESSES=1"),
)
def test_several_slots_are_measured_while_busy_and_stored_separately(alone: Calibration, cache: Path) -> None:
    with on_one_core() as processes:
        beside = calibrate(CalibrationWish("cpu", "float32", 1, slots=2), cache, processes=processes)
    assert beside is not None
    assert slowdown(alone, beside) > 1.2
    assert len({path.name for path in cache.iterdir()}) == 3, (
        "the cache does not hold two measurements and the lock"
    )


def test_a_short_measurement_yields_only_the_share(alone: Calibration) -> None:
    found = MeasuringProcesses().measure_now(HERE, 0.0, MeasuringTurn())
    assert found is not None
    assert (found.kinds, found.hardware) == ((), alone.hardware)
    assert 1 <= found.share_permille <= 1000


def test_a_stored_calibration_is_reused_except_for_its_share(
    tmp_path: Path,
) -> None:
    (tmp_path / HERE.key).write_bytes(encode_calibration(REFERENCE))
    half = msgspec.structs.replace(REFERENCE, kinds=(), share_permille=500)
    found = calibrate(HERE, tmp_path, processes=Known(lambda: half))
    assert found is not None
    assert found.kinds == REFERENCE.kinds
    assert found.share_permille == 500
    assert corrected(capacity(), found).flops_per_second == found.flops_per_second


def test_power_is_measured_if_the_hardware_has_energy_counters(
    tmp_path: Path,
) -> None:
    now, joules = [0.0], [0.0]

    def passes(seconds: float, watts: float) -> None:
        now[0] += seconds
        joules[0] += seconds * watts
        zone(tmp_path, "intel-rapl:0", int(joules[0] * 1e6))

    def measure(*_: object) -> Calibration:
        passes(8.0, 35.0)
        return REFERENCE

    zone(tmp_path, "intel-rapl:0", 0)
    known = Known(measure)
    known.now, known.sleep = lambda: now[0], lambda seconds: passes(seconds, 9.0)
    found = calibrate(HERE, tmp_path / "cache", EnergyMeter(tmp_path), processes=known)
    assert found is not None
    assert (found.busy_milliwatts, found.idle_milliwatts) == (35_000, 9_000)
    again = calibrate(HERE, tmp_path / "cache", EnergyMeter(tmp_path), processes=known)
    assert again == found
    without = EnergyMeter(tmp_path / "none")
    other = calibrate(CalibrationWish("cpu", "float32", 2), tmp_path / "cache", without, processes=known)
    assert other == REFERENCE


def test_the_initial_estimate_stays_if_measuring_is_impossible(
    tmp_path: Path,
) -> None:
    assert calibrate(HERE, tmp_path, processes=HURRIED) is None
    (tmp_path / "file").write_text("")
    assert calibrate(HERE, tmp_path / "file" / "folder") is None


def test_a_node_that_stops_leaves_no_measuring_process(
    tmp_path: Path,
) -> None:
    turn = MeasuringTurn()
    started: list[subprocess.Popen[bytes]] = []

    class GivenUp(MeasuringProcesses):
        def begin(self, wanted: CalibrationWish, seconds: float) -> "subprocess.Popen[bytes]":
            started.append(super().begin(wanted, seconds))
            turn.give_up()
            return started[-1]

    assert calibrate(HERE, tmp_path, turn=turn, processes=GivenUp()) is None
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.lock"]


def test_a_node_that_stops_does_not_wait_for_a_measuring_process(tmp_path: Path) -> None:
    turn = MeasuringTurn()
    found: list[Calibration | None] = []
    with (tmp_path / "calibration.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: found.append(calibrate(HERE, tmp_path, turn=turn)))
        waiting.start()
        assert found == []
        turn.give_up()
        waiting.join(30)
        assert found == [None]


def test_a_measurement_interrupted_by_computation_is_repeated(
    tmp_path: Path,
) -> None:
    turn = MeasuringTurn(quiet_seconds=0.2)
    started: list[subprocess.Popen[bytes]] = []
    ended_at: list[float] = []
    words = [f"import time; time.sleep({WAITING_SECONDS})", f"print('{encode_calibration(REFERENCE).hex()}')"]

    class Slow(MeasuringProcesses):
        def begin(self, wanted: CalibrationWish, seconds: float) -> "subprocess.Popen[bytes]":
            process = subprocess.Popen([sys.executable, "-c", words[len(started)]], stdout=subprocess.PIPE)
            started.append(process)
            return process

        def with_own_work(self, calibration: Calibration, turn: MeasuringTurn) -> Calibration:
            return calibration

    slow = Slow()
    found: list[Calibration | None] = []
    measuring = threading.Thread(
        target=lambda: found.append(calibrate(HERE, tmp_path, turn=turn, processes=slow))
    )
    measuring.start()
    try:
        _until(lambda: len(started) == 1)
        turn.is_busy = True
        _until(lambda: started[0].returncode is not None)
        assert started[0].returncode == -signal.SIGKILL
        with (tmp_path / "calibration.lock").open("w") as lock:
            # Meanwhile other nodes of the machine may measure.
            _until(lambda: _is_locked_by(lock))
        assert (len(started), found) == (1, [])
        ended_at.append(time.monotonic())
        turn.is_busy = False
        measuring.join(30)
    finally:
        turn.give_up()
        measuring.join(30)
    assert found == [REFERENCE]
    assert time.monotonic() - ended_at[0] >= 0.2
    assert len(started) == 2


def _until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        threading.Event().wait(0.01)


def _is_locked_by(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_a_failed_measurement_of_the_nodes_own_work_adds_no_cost() -> None:
    assert HURRIED.with_own_work(REFERENCE, MeasuringTurn()) == REFERENCE


def test_a_damaged_calibration_file_is_measured_again(tmp_path: Path) -> None:
    (tmp_path / HERE.key).write_bytes(b"\x93damaged")
    assert calibrate(HERE, tmp_path, processes=Known(lambda: REFERENCE)) == REFERENCE
    assert decode_calibration((tmp_path / HERE.key).read_bytes()) == REFERENCE


def test_each_thread_count_and_device_has_its_own_calibration() -> None:
    keys = {
        CalibrationWish(device, "float32", threads).key for device in ("cpu", "cuda:0") for threads in (1, 2)
    }
    assert len(keys) == 4


def test_the_cache_folder_is_inside_the_users_cache_folder() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x"}, Path("/y")) == Path("/x/peerloom")
    assert cache_folder({"XDG_CACHE_HOME": "x"}, Path("/y")) == Path.home() / ".cache" / "peerloom"


def test_memory_of_the_cpu_device_is_the_machines_memory() -> None:
    total, free = device_memory("cpu")
    assert 0 < free <= total


def capacity() -> Capacity:
    return Capacity("cpu", 1, 1 << 30, 1 << 30, 1e9, "")


def paced(picoseconds: int, share_permille: int = 1000) -> Calibration:
    """Return a calibration in which each operator call takes this long and nothing else takes time."""
    rows = tuple(KindPace(row.kind, OperatorPace(picoseconds, 0, 0), row.backward) for row in REFERENCE.kinds)
    return msgspec.structs.replace(REFERENCE, kinds=rows, share_permille=share_permille)


def test_the_slowdown_of_a_busy_slot_compares_equal_work() -> None:
    assert slowdown(paced(100), paced(100)) == pytest.approx(1.0)
    assert slowdown(paced(100), paced(150)) == pytest.approx(1.5)
    assert slowdown(paced(100), paced(100, share_permille=500)) == pytest.approx(2.0)
    assert slowdown(paced(100, share_permille=500), paced(200, share_permille=500)) == pytest.approx(2.0)
    unlike = msgspec.structs.replace(paced(100), kinds=())
    assert slowdown(unlike, paced(100)) == 1.0


def test_each_slot_offers_the_rate_measured_on_one() -> None:
    whole = corrected(capacity(), REFERENCE, 2)
    provider = Provider(Config(offer=Offering(slots=2)), SimClock())
    assert provider.of_a_slot(whole).flops_per_second == REFERENCE.flops_per_second
