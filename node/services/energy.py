"""The energy that this machine has used since it was first asked, if its hardware counts energy.

The sources are Intel's and AMD's RAPL counters, read through the kernel (`/sys/class/powercap`; most kernels
let only root read them), and NVIDIA's counters, read through NVML. They count the whole machine, including
other programs' work. Nothing is estimated: a source that cannot be read is left out.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from node.seams import Clock, Executor

POWERCAP = "sys/class/powercap"
SOURCES_MAX = 64
"""Maximum number of processor packages and cards of one machine."""
SAMPLES_MAX = 8_192
"""Maximum number of samples in an energy log: more than two hours, a second apart. At the limit every second
one is dropped, and new ones are taken as far apart as the remaining ones."""
_MICROJOULES = 1e-6
_MILLIJOULES = 1e-3


CardCounters = Callable[[], Mapping[str, tuple[float, float]]]
"""Returns the joules that each card has used, and the value at which its counter wraps (0: never)."""


class EnergyMeter:
    """Reads the hardware's energy counters; `root` is a different folder in tests. Call `read` more often
    than a counter wraps: that of a package at 100 W wraps in some 40 minutes."""

    def __init__(self, root: Path = Path("/"), cards: CardCounters | None = None) -> None:
        """`cards` reads the counters of graphics cards, by default of NVIDIA's."""
        self._root = root
        self._cards = cards or nvidia_cards
        self._last: dict[str, float] = {}
        self._joules: dict[str, float] = {}
        self.read()

    def read(self) -> Mapping[str, float]:
        """Return the joules used since the meter was made, for each source."""
        for name, (joules, wraps_at) in {**self._packages(), **self._cards()}.items():
            used = joules - self._last.get(name, joules)
            if used < 0:
                used = used + wraps_at if wraps_at else 0.0
            self._last[name] = joules
            self._joules[name] = self._joules.get(name, 0.0) + max(0.0, used)
        return dict(self._joules)

    def _packages(self) -> dict[str, tuple[float, float]]:
        """Return the counter of each processor package, and the value at which it wraps. A package includes
        its parts."""
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


class EnergyLog:
    """The readings of a meter over time, from which the energy of any span follows. Times are wall times. The
    meter is first read at the first sample."""

    def __init__(
        self, make_meter: Callable[[], EnergyMeter] = EnergyMeter, samples_max: int = SAMPLES_MAX
    ) -> None:
        self.interval_seconds = 1.0
        self._samples_max = samples_max
        self._make_meter = make_meter
        self._meter: EnergyMeter | None = None
        self._times: list[float] = []
        self._totals: list[float] = []

    def sample(self, at: float) -> bool:
        """Record the meter's reading; return whether this machine's hardware counts anything."""
        self._meter = self._meter or self._make_meter()
        found = self._meter.read()
        if found:
            self._note(at, sum(found.values()))
        return bool(found)

    def _note(self, at: float, total: float) -> None:
        if self._times and at <= self._times[-1]:
            return  # the clock was set back
        self._times.append(at)
        self._totals.append(total)
        if len(self._times) > self._samples_max:
            self._times, self._totals = self._times[::2], self._totals[::2]
            self.interval_seconds *= 2

    def joules(self, begin: float, end: float) -> float | None:
        """Return the machine's energy in a span of time, interpolated between samples; None if samples do not
        cover it."""
        first, last = self._until(begin), self._until(end)
        return None if first is None or last is None else max(0.0, last - first)

    def _until(self, at: float) -> float | None:
        if not self._times or not self._times[0] <= at <= self._times[-1]:
            return None
        place = bisect_left(self._times, at)
        if self._times[place] == at:
            return self._totals[place]
        since, span = at - self._times[place - 1], self._times[place] - self._times[place - 1]
        before, after = self._totals[place - 1], self._totals[place]
        return before + (after - before) * since / span


async def keep_log(log: EnergyLog, clock: Clock, executor: Executor, is_wanted: Callable[[], object]) -> None:
    """Sample while it `is_wanted`; end if no hardware counts energy."""
    while True:
        if is_wanted() and not await executor.run(lambda: log.sample(clock.wall())):
            return
        await trio.sleep(log.interval_seconds)


def _number(file: Path) -> float | None:
    try:
        return float(int(file.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return None


def nvidia_cards(library: Any = None) -> dict[str, tuple[float, float]]:
    """Return the counter of each NVIDIA card, read through `library` (pynvml); none without a driver."""
    import pynvml

    nvml = library or pynvml
    found = {}
    try:
        nvml.nvmlInit()
        for number in range(min(SOURCES_MAX, nvml.nvmlDeviceGetCount())):
            with suppress(pynvml.NVMLError):  # a card that does not count energy
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                joules = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) * _MILLIJOULES
                found[f"gpu:{number}"] = joules, 0.0
    except pynvml.NVMLError:
        return {}
    return found
