"""Reads how this machine is used apart from the node: input, load, power and the time of day. Unknown values
are None."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from node.placement.permission import Reading

INPUTS = "/dev/input"
TERMINALS = "/dev/pts"
POWER = "/sys/class/power_supply"


class MachineState:
    """Reads one machine's state; tests pass a different `root` folder. Call `read` in a thread."""

    def __init__(self, *, root: Path = Path("/"), wall: Callable[[], float] = time.time) -> None:
        self._root = root
        self._wall = wall
        self._busy_before: tuple[float, float, float] | None = None

    def read(self) -> Reading:
        """Return the machine's state now; the load is the average since the previous reading."""
        at = time.localtime(self._wall())
        return Reading(
            minute=at.tm_hour * 60 + at.tm_min,
            idle_seconds=self._idle_seconds(),
            load_percent=self._load_percent(),
            on_mains=self._on_mains(),
            battery_percent=self._battery_percent(),
        )

    def _idle_seconds(self) -> float | None:
        """Return the seconds since a person did something, from the newest access to a terminal or input
        device."""
        newest = None
        for folder in (TERMINALS, INPUTS):
            for path in self._names(folder):
                try:
                    at = path.stat().st_atime
                except OSError:
                    continue
                newest = at if newest is None else max(newest, at)
        return None if newest is None else max(0.0, self._wall() - newest)

    def _names(self, folder: str) -> Iterable[Path]:
        place = self._root / folder.lstrip("/")
        try:
            return [path for path in place.iterdir() if path.name != "ptmx" and not path.is_dir()]
        except OSError:
            return []

    def _load_percent(self) -> float | None:
        """Return the share of all cores used by processes other than this node and its child processes."""
        try:
            times = psutil.cpu_times()
            busy = times.user + times.system + getattr(times, "nice", 0.0)
            own = self._own_seconds()
        except (psutil.Error, OSError):
            return None
        before, self._busy_before = self._busy_before, (time.monotonic(), busy, own)
        if before is None:
            return None
        seconds = self._busy_before[0] - before[0]
        others = (busy - before[1]) - max(0.0, own - before[2])
        return max(0.0, min(100.0, 100 * others / max(1e-3, seconds * (psutil.cpu_count() or 1))))

    @staticmethod
    def _own_seconds() -> float:
        me, total = psutil.Process(), 0.0
        for process in (me, *me.children(recursive=True)):
            try:
                spent = process.cpu_times()
            except psutil.Error:
                continue
            total += spent.user + spent.system
        return total

    def _on_mains(self) -> bool | None:
        """Return whether an adapter is online; None if the machine has neither adapter nor battery."""
        found: bool | None = None
        for supply in self._names_of_supplies():
            kind = _text(supply / "type")
            if kind == "Mains" or kind.startswith("USB"):
                if _text(supply / "online") == "1":
                    return True
                found = False
            elif kind == "Battery" and found is None and _text(supply / "status") == "Discharging":
                found = False
        return found

    def _battery_percent(self) -> float | None:
        """Return the mean charge of all batteries of the machine; None if it reports none."""
        texts = [
            _text(supply / "capacity")
            for supply in self._names_of_supplies()
            if _text(supply / "type") == "Battery"
        ]
        charges = [min(100.0, float(text)) for text in texts if text.isascii() and text.isdigit()]
        return sum(charges) / len(charges) if charges else None

    def _names_of_supplies(self) -> list[Path]:
        """Return the supplies that power the machine. A mouse or a headset has its own battery, with the
        scope Device."""
        try:
            found = sorted((self._root / POWER.lstrip("/")).iterdir())
        except OSError:
            return []
        return [supply for supply in found if _text(supply / "scope") != "Device"]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
