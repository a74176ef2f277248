"""The energy that this machine has used since it was first asked, where its hardware counts it.

Intel's and AMD's RAPL counters by way of the kernel (`/sys/class/powercap`; most kernels let only root read
them) and NVIDIA's by way of NVML. They count the whole machine, other programs' work too. Nothing is
estimated: a source that cannot be read is left out.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

POWERCAP = "sys/class/powercap"
SOURCES_MAX = 64
"""Packages and cards of one machine."""
_MICROJOULES = 1e-6
_MILLIJOULES = 1e-3


class EnergyMeter:
    """`root` is another folder in tests. A counter that wraps goes on; call `read` more often than it does,
    which takes a package at 100 W some 40 minutes."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._last: dict[str, float] = {}
        self._joules: dict[str, float] = {}
        self.read()

    def read(self) -> Mapping[str, float]:
        """Return the joules since the meter was made, by source."""
        for name, (joules, wraps_at) in {**self._packages(), **_cards()}.items():
            used = joules - self._last.get(name, joules)
            if used < 0:
                used = used + wraps_at if wraps_at else 0.0
            self._last[name] = joules
            self._joules[name] = self._joules.get(name, 0.0) + max(0.0, used)
        return dict(self._joules)

    def _packages(self) -> dict[str, tuple[float, float]]:
        """Return the counter of each processor package, and where it begins again; its parts are in it."""
        try:
            zones = sorted((self._root / POWERCAP).glob("*-rapl:*"))[:SOURCES_MAX]
        except OSError:
            return {}
        found = {}
        for zone in zones:
            joules, wraps_at = _number(zone / "energy_uj"), _number(zone / "max_energy_range_uj")
            if zone.name.count(":") == 1 and joules is not None:
                found[f"cpu:{zone.name.partition(':')[2]}"] = (
                    joules * _MICROJOULES,
                    (wraps_at or 0.0) * _MICROJOULES,
                )
        return found


def _number(file: Path) -> float | None:
    try:
        return float(int(file.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return None


def _cards() -> dict[str, tuple[float, float]]:
    """Return the counter of each NVIDIA card; none without its library or a driver."""
    import pynvml

    found = {}
    try:
        pynvml.nvmlInit()
        for number in range(min(SOURCES_MAX, pynvml.nvmlDeviceGetCount())):
            with suppress(pynvml.NVMLError):  # a card that does not count it
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) * _MILLIJOULES
                found[f"gpu:{number}"] = joules, 0.0
    except pynvml.NVMLError:
        return {}
    return found
