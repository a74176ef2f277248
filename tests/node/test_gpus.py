"""The GPUs that torch may use, in torch's order: as the environment permits them, and as Linux lists AMD's
GPUs."""

from functools import partial
from pathlib import Path

import pytest

from node.services.calibration import MeasuringProcesses
from node.services.gpus import KFD, Gpu, gpus, visible


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("0,-1,1", [0]),
        ("1,1", [1]),
        ("0,7,1", [0]),
        ("GPU-bb", [1]),
        ("GPU-", []),
        ("GPU-cc, 0", [2, 0]),
    ],
)
def test_the_environment_selects_and_orders_the_gpus(said: str | None, found: list[int]) -> None:
    assert visible(said, 3, ["GPU-aa11", "GPU-bb22", "GPU-cc33"]) == found


def system_of(folder: Path, gpus_bytes: list[tuple[int, int]]) -> Path:
    """Make a /sys folder as Linux shows one processor and AMD's GPUs, each with (total, used) bytes."""
    for number in range(len(gpus_bytes) + 1):
        node = folder / KFD / str(number)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{number and 40_000 + number}\n")
        (node / "properties").write_text(f"cpu_cores_count 0\ndrm_render_minor {127 + number}\n")
    for number, (total, used) in enumerate(gpus_bytes):
        device = folder / f"class/drm/renderD{128 + number}/device"
        device.mkdir(parents=True)
        (device / "mem_info_vram_total").write_text(f"{total}\n")
        (device / "mem_info_vram_used").write_text(f"{used}\n")
    return folder


def test_amd_gpus_are_found_if_torch_was_built_for_them(tmp_path: Path) -> None:
    system = system_of(tmp_path, [(16 << 30, 1 << 30), (8 << 30, 0)])
    found_by = partial(gpus, version_of=lambda _: "2.13.0+rocm7")
    both = [Gpu(16 << 30, 15 << 30), Gpu(8 << 30, 8 << 30)]
    assert found_by({}, system) == (both, "")
    assert found_by({"HIP_VISIBLE_DEVICES": "1"}, system) == (both[1:], "")
    found, why = found_by({"HIP_VISIBLE_DEVICES": ""}, system)
    assert (found, why) == ([], "there is no such AMD GPU, or this process may not use it")
    assert found_by({}, tmp_path / "nothing")[0] == []


def test_measuring_processes_use_the_nodes_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("PEERLOOM_SECRET", "s")
    process = MeasuringProcesses().spawn(["tests.node.said_environment"])
    said = process.communicate(timeout=60)[0].decode().split()
    assert "CUDA_VISIBLE_DEVICES=1" in said
    assert not any(word.startswith("PEERLOOM_SECRET") for word in said)
