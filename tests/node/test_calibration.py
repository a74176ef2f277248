"""Measuring what operators take here: once, kept for the machine, and without harm where it cannot be."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from node.services import calibration
from node.services.calibration import Wanted, cache_folder, calibrate, corrected
from node.services.capacity import Capacity, device_memory
from partition.plan.operations import KINDS
from partition.plan.rates import REFERENCE, decode_calibration, encode_calibration

HERE = Wanted("cpu", "float32", 1)


def test_every_class_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "CALIBRATION_SECONDS", 2.0)
    monkeypatch.setattr(calibration, "NICENESS", 0)  # beside other tests it would wait for long
    held = np.ones(100_000_000)  # what this process holds is none of the stage's
    found = calibrate(HERE, tmp_path)
    assert found is not None
    assert found.baseline_bytes < held.nbytes
    assert {row.kind for row in found.kinds} == set(KINDS)
    assert found.flops_per_second > 10**8
    assert 1 <= found.share_permille <= 1000
    assert found.baseline_bytes > 50 << 20
    assert found.device == "cpu"
    kept = decode_calibration((tmp_path / HERE.key).read_bytes())
    assert kept.kinds == found.kinds
    assert len(encode_calibration(found)) <= 900, "does not fit a record"


def test_a_kept_one_is_used_as_it_is_but_for_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / HERE.key).write_bytes(encode_calibration(REFERENCE))
    half = msgspec.structs.replace(REFERENCE, kinds=(), share_permille=500)
    monkeypatch.setattr(calibration, "_measure", lambda wanted, seconds: half)
    found = calibrate(HERE, tmp_path)
    assert found is not None
    assert found.kinds == REFERENCE.kinds
    assert found.share_permille == 500
    assert corrected(capacity(), found).flops_per_second == found.flops_per_second


def test_where_nothing_can_be_measured_the_first_guess_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "PROCESS_SECONDS_MAX", 0.01)
    assert calibrate(HERE, tmp_path) is None
    (tmp_path / "file").write_text("")
    assert calibrate(HERE, tmp_path / "file" / "folder") is None


def test_a_damaged_file_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / HERE.key).write_bytes(b"\x93damaged")
    monkeypatch.setattr(calibration, "_measure", lambda wanted, seconds: REFERENCE)
    assert calibrate(HERE, tmp_path) == REFERENCE
    assert decode_calibration((tmp_path / HERE.key).read_bytes()) == REFERENCE


def test_other_threads_and_devices_are_other_calibrations() -> None:
    keys = {Wanted(device, "float32", threads).key for device in ("cpu", "cuda:0") for threads in (1, 2)}
    assert len(keys) == 4


def test_the_cache_is_where_the_user_keeps_caches() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/peerloom")
    assert cache_folder({"XDG_CACHE_HOME": "x"}) == Path.home() / ".cache" / "peerloom"


def test_memory_of_the_processor_is_that_of_the_machine() -> None:
    total, free = device_memory("cpu")
    assert 0 < free <= total


def capacity() -> Capacity:
    return Capacity("cpu", 1, 1 << 30, 1 << 30, 1e9, "")
