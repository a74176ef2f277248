"""Measures once how fast this machine's device computes each class of operators, in a process like a stage's.

Only one node of a machine measures at a time, in the background and at low priority. The result is cached in
the user's folder, and is valid as long as hardware, torch, device, type and threads stay the same. Only a
stage's share of a processor is measured at every start. Without a result, the estimate of
`node.services.capacity` stays in use.

Measuring gives way to the node's own computing, such as a stage. The measuring processes are ended, which
also frees their memory, and the missing part is measured once the node has been idle for a moment.
"""

import fcntl
import importlib.metadata
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
from blake3 import blake3

from crypto.errors import RemoteProtocolError
from node.forks import keep_from_children
from node.services.arithmetic import arithmetic_settings
from node.services.capacity import Capacity
from node.services.energy import EnergyMeter
from partition.plan.rates import Calibration, OperatorPace, decode_calibration, encode_calibration

CALIBRATION_PURPOSE = "calibration"
"""The purpose of the signed record in the DHT."""
FORMAT = "5"
"""The format of the cache. 2 added the node's own work. 3 was measured with a stage's heap, and without
autograd's cost of each pass. 4 has the node's own work by parts, and the part for a step. 5 has a baseline
with torch's code in memory, and the whole cost of applying a step."""
MILLIWATTS_MAX = 2**31 - 1
BESIDE_FACTOR = 1.5
"""Factor by which the processes of other slots measure longer, so that they are busy until the end."""
LOOK_SECONDS = 0.1
"""How often a measuring or waiting thread checks whether the result is still wanted."""

T = TypeVar("T")

_SOURCE_ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class CalibrationSettings:
    """The settings of calibration. Raises ValueError if they contradict each other."""

    measure_seconds: float = 8.0
    """How long to measure all classes of operators together. Below `process_seconds_max`. Default: 8."""

    share_seconds: float = 2.0
    """How long other slots are kept busy while the share of a processor is measured. Default: 2."""

    idle_seconds: float = 1.0
    """How long to measure the machine's power while a stage waits. Default: 1."""

    process_seconds_max: float = 300.0
    """Time limit of a measuring process. On a busy machine, importing torch alone takes many seconds.
    Default: 300."""

    quiet_seconds: float = 3.0
    """How long a node that has computed must be idle before it measures, because runs often follow each
    other. Default: 3."""

    niceness: int = 5
    """Niceness of a measuring process, 0-19: the same as for a stage's process, because the share of a
    processor that a stage gets depends on it. Default: 5."""

    def __post_init__(self) -> None:
        bounds = (
            (0 < self.measure_seconds < self.process_seconds_max, "measure below process"),
            (0 < self.share_seconds < self.process_seconds_max, "share below process"),
            (self.idle_seconds > 0, "idle above 0"),
            (self.quiet_seconds >= 0, "quiet at least 0"),
            (0 <= self.niceness <= 19, "niceness is 0-19"),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"calibration settings: {rule}")


class SteppedAside(Exception):
    """The node began to compute during a measurement."""


class MeasuringTurn:
    """Tells a thread when it may measure. Other threads set `is_busy` and call `give_up`."""

    def __init__(self, quiet_seconds: float = CalibrationSettings.quiet_seconds) -> None:
        self.is_busy = False
        """Whether this node computes."""
        self._quiet_seconds = quiet_seconds
        self._given_up = threading.Event()

    @property
    def is_given_up(self) -> bool:
        """Whether the result is no longer wanted."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """End the measuring soon."""
        self._given_up.set()

    def wait(self) -> bool:
        """Wait until this node is idle and, if it was busy, has been idle for `quiet_seconds`. Return False
        if given up."""
        until = 0.0
        while not self.is_given_up:
            if self.is_busy:
                until = time.monotonic() + self._quiet_seconds
            elif time.monotonic() >= until:
                return True
            self._given_up.wait(LOOK_SECONDS)
        return False


@dataclass(frozen=True)
class CalibrationWish:
    """The parameters of a calibration. An earlier result with equal parameters is reused."""

    device: str
    dtype: str
    threads: int
    slots: int = 1
    """The number of stages that compute here simultaneously, each with `threads` threads."""

    @property
    def key(self) -> str:
        """The name of the cache file, derived from hardware, torch and all parameters."""
        parts = [
            FORMAT,
            _processor(),
            importlib.metadata.version("torch"),
            self.device,
            self.dtype,
            str(self.threads),
        ]
        if self.slots > 1:
            parts.append(f"{self.slots} at once")
        return blake3("\0".join(parts).encode()).hexdigest(16)


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def calibrate(
    wanted: CalibrationWish,
    folder: Path,
    meter: EnergyMeter | None = None,
    turn: MeasuringTurn | None = None,
    processes: "MeasuringProcesses | None" = None,
) -> Calibration | None:
    """Return the calibration of this machine, from the cache or measured; None if it cannot be measured.

    This blocks for some seconds, as long as another node of this machine measures, and while this node
    computes, so call it in a thread. `meter` reads the machine's power; by default from its hardware
    counters, if they are readable. `processes` do the measuring. Once `turn` is given up, this soon returns
    None, and leaves no process behind.
    """
    turn = turn or MeasuringTurn()
    work = _Work(wanted, folder, meter or EnergyMeter(), processes or MeasuringProcesses())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while turn.wait():
            # Take the lock, because two concurrent measurements would disturb each other.
            with suppress(SteppedAside), _lock(folder / "calibration.lock", turn) as is_locked:
                return work.run(turn) if is_locked else None
    except OSError:
        return None
    return None


class _Work:
    """The measurements of one calibration, part by part. An interrupted part is started again."""

    def __init__(
        self, wanted: CalibrationWish, folder: Path, meter: EnergyMeter, processes: "MeasuringProcesses"
    ) -> None:
        self._wanted = wanted
        self._file = folder / wanted.key
        self._meter = meter
        self._processes = processes
        self._kinds: Calibration | None = None

    def run(self, turn: MeasuringTurn) -> Calibration | None:
        """Do the remaining measurements while holding the lock. Raises SteppedAside, OSError."""
        known = _read(self._file)
        if known is not None:
            found = self._processes.measure_now(self._wanted, 0.0, turn)
            share = known.share_permille if found is None else found.share_permille
            return msgspec.structs.replace(known, share_permille=share)
        if self._kinds is None:
            self._kinds = self._measure_kinds(turn)
        if self._kinds is None:
            return None
        found = self._processes.with_own_work(self._kinds, turn)
        _write(self._file, msgspec.structs.replace(found, share_permille=1000))
        return found

    def _measure_kinds(self, turn: MeasuringTurn) -> Calibration | None:
        """Measure every class of operators. If the machine's power is counted, also measure it before and
        during that."""
        processes, settings = self._processes, self._processes.settings
        if not self._meter.read():
            return processes.measure_now(self._wanted, settings.measure_seconds, turn)
        idle, _ = self._milliwatts(lambda: processes.sleep(settings.idle_seconds))
        busy, found = self._milliwatts(
            lambda: processes.measure_now(self._wanted, settings.measure_seconds, turn)
        )
        if found is None:
            return None
        # Both figures include the power of other programs, which may have ended in between.
        return msgspec.structs.replace(found, busy_milliwatts=max(idle, busy), idle_milliwatts=idle)

    def _milliwatts(self, run: Callable[[], T]) -> tuple[int, T]:
        """Return the machine's power while a function runs, and the function's result."""
        meter, now = self._meter, self._processes.now
        before, begun = sum(meter.read().values()), now()
        given = run()
        seconds, joules = now() - begun, sum(meter.read().values()) - before
        return min(MILLIWATTS_MAX, round(1_000 * joules / max(1e-3, seconds))), given


def _read(file: Path) -> Calibration | None:
    try:
        return decode_calibration(file.read_bytes())
    except (OSError, RemoteProtocolError):
        return None


def _write(file: Path, calibration: Calibration) -> None:
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_bytes(encode_calibration(calibration))
    draft.replace(file)


@contextmanager
def _lock(path: Path, turn: MeasuringTurn) -> Iterator[bool]:
    """Take the machine's lock once no other node has it; yield False if given up before. Raises
    SteppedAside."""
    with path.open("w") as lock:
        keep_from_children(lock)
        while not turn.is_given_up:
            if turn.is_busy:
                raise SteppedAside
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                return
            time.sleep(LOOK_SECONDS)
        yield False


class MeasuringProcesses:
    """Processes that measure; each ends with the call that started it. It is called in a thread, where trio's
    clock is not available, so `now` and `sleep` are the machine's."""

    def __init__(self, settings: CalibrationSettings | None = None) -> None:
        self.settings = settings or CalibrationSettings()
        self.now: Callable[[], float] = time.monotonic
        self.sleep: Callable[[float], None] = time.sleep

    def measure_now(self, wanted: CalibrationWish, seconds: float, turn: MeasuringTurn) -> Calibration | None:
        """Measure in a process; None if that fails. If `seconds` is 0, only the share is measured. Meanwhile
        the other slots are kept equally busy: each measures too, for longer, and its result is discarded.
        Raises SteppedAside."""
        with ExitStack() as stack:
            try:
                for _ in range(wanted.slots - 1):
                    beside_seconds = (seconds or self.settings.share_seconds) * BESIDE_FACTOR
                    stack.callback(_end, self.begin(wanted, beside_seconds))
                own = self.begin(wanted, seconds)
                stack.callback(_end, own)
                said = self._said(own, turn)
                return None if own.returncode else decode_calibration(bytes.fromhex(said.decode().strip()))
            except (subprocess.SubprocessError, OSError, ValueError, RemoteProtocolError):
                return None

    def with_own_work(self, calibration: Calibration, turn: MeasuringTurn) -> Calibration:
        """Add to a calibration the cost of the node's own work for a stage, measured in a separate process.
        If that fails, return the calibration unchanged. Raises SteppedAside."""
        process = self.spawn(["node.calibration.own_work"])
        try:
            said = self._said(process, turn)
            microbatch, mebibyte, step = (min(2**53, 1_000 * int(word)) for word in said.split())
        except (subprocess.SubprocessError, ValueError):
            return calibration
        finally:
            _end(process)
        return msgspec.structs.replace(
            calibration, node=OperatorPace(microbatch, 0, mebibyte), node_step=step
        )

    def begin(self, wanted: CalibrationWish, seconds: float) -> "subprocess.Popen[bytes]":
        """Start a measuring process. If `seconds` is 0, it measures only the share."""
        arguments = [wanted.device, wanted.dtype, str(wanted.threads), str(seconds)]
        return self.spawn(["partition.calibrate", *arguments], wanted.threads)

    def _said(self, process: "subprocess.Popen[bytes]", turn: MeasuringTurn) -> bytes:
        """Read a process's output until it ends.

        Raises:
            subprocess.TimeoutExpired: it takes too long, or was given up.
            SteppedAside: the node computes.
        """
        seconds_max = self.settings.process_seconds_max
        until = self.now() + seconds_max
        while True:
            try:
                return process.communicate(timeout=min(LOOK_SECONDS, seconds_max))[0]
            except subprocess.TimeoutExpired:
                if turn.is_given_up or self.now() > until:
                    raise
                if turn.is_busy:
                    raise SteppedAside from None

    def spawn(self, module: Sequence[str], threads: int = 1) -> "subprocess.Popen[bytes]":
        """Start one of Peerloom's modules, with the environment of a stage."""
        environment = {
            **arithmetic_settings(os.environ),
            **{key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LD_LIBRARY_PATH")},
            "PYTHONPATH": _SOURCE_ROOT,
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        niceness = self.settings.niceness
        process = subprocess.Popen(  # noqa: S603 - our own modules, a device name checked by the config
            [sys.executable, "-P", "-m", *module],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env=environment,
            preexec_fn=lambda: os.nice(niceness),
        )
        assert process.stdout is not None
        keep_from_children(process.stdout)
        return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def corrected(capacity: Capacity, calibration: Calibration, slots: int = 1) -> Capacity:
    """Return the capacity with the rate that was measured under a stage's conditions, in each of the
    slots."""
    return replace(capacity, flops_per_second=float(calibration.flops_per_second * slots))
