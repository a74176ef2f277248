"""What the hardware counts of energy, from a folder like the kernel's."""

from pathlib import Path

import pytest

from node.services.energy import POWERCAP, EnergyMeter


def zone(root: Path, name: str, microjoules: int) -> None:
    folder = root / POWERCAP / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text("10000000\n")


def test_joules_are_counted_from_the_start_and_over_the_wrap(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 9_000_000)
    zone(tmp_path, "intel-rapl:0:0", 4_000_000)  # the cores, which are in the package
    meter = EnergyMeter(tmp_path)
    zone(tmp_path, "intel-rapl:0", 9_500_000)
    assert meter.read() == pytest.approx({"cpu:0": 0.5})
    zone(tmp_path, "intel-rapl:0", 1_000_000)
    assert meter.read() == pytest.approx({"cpu:0": 2.0})


def test_a_machine_that_does_not_tell_has_no_figure(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path).read() == {}
    zone(tmp_path, "intel-rapl:0", 1)
    (tmp_path / POWERCAP / "intel-rapl:0" / "energy_uj").write_text("no number")
    assert EnergyMeter(tmp_path).read() == {}
