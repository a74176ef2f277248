"""What this machine offers, measured at the start: device, cores, free memory, FLOP/s by a short product.

On a CPU numpy multiplies, in this process (its BLAS is as fast as torch's); for an accelerator torch
must, so a short process does. The figure is a first guess that placement needs, not a promise.
"""

import importlib.metadata
import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

import numpy as np
import psutil

from node.config import Resources
from node.events import CapacityMeasured

MATRIX_SIDE = 64
"""So small that BLAS multiplies it on one thread. Its threads wait for each other by spinning: where five
nodes measured at once, products of side 512 came out at 2 GFLOP/s instead of 90; these stay at 67."""
PRODUCTS_TIMED = 50
"""Timed together: a single one takes some 8 us."""
PRODUCTS_SECONDS = 0.1
"""Long enough to come out of a sleeping core's clock, short enough not to delay a start."""
DEVICE_SECONDS_MAX = 60.0


@dataclass(frozen=True)
class Capacity:
    """What is offered. `memory_free_bytes` is what a run may take, after the configured share."""

    device: str
    cores: int
    memory_free_bytes: int
    memory_total_bytes: int
    flops_per_second: float
    location: str

    def measured(self, at: float) -> CapacityMeasured:
        """The event that says so, at the unix time `at`."""
        return CapacityMeasured(at=at, **asdict(self))


def measure(resources: Resources) -> Capacity:
    """Measure this machine within what the configuration allows. Call it in a thread."""
    device = find_device(resources.device)
    all_cores = psutil.cpu_count() or 1
    cores = min(resources.cores or all_cores, all_cores)
    total, free = device_memory(device)
    allowed = resources.memory.of(total)
    rate = _core_rate() * cores if device == "cpu" else _device_rate(device)
    return Capacity(
        device=device,
        cores=cores,
        memory_free_bytes=min(allowed, free),
        memory_total_bytes=total,
        flops_per_second=rate,
        location=resources.location,
    )


def find_device(wanted: str) -> str:
    """`auto` is the first GPU where there is one and torch was built for it, else the CPU."""
    if wanted != "auto":
        return wanted
    if importlib.metadata.version("torch").endswith("+cpu"):
        return "cpu"
    import pynvml

    try:
        pynvml.nvmlInit()
        return "cuda:0" if pynvml.nvmlDeviceGetCount() else "cpu"
    except pynvml.NVMLError:
        return "cpu"


def device_memory(device: str) -> tuple[int, int]:
    """(total, free) bytes of what a stage on this device fills: a GPU's own memory, else the machine's."""
    if device.startswith("cuda"):
        import pynvml

        with suppress(pynvml.NVMLError, ValueError):
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(device.partition(":")[2] or 0))
            found = pynvml.nvmlDeviceGetMemoryInfo(handle)
            return int(found.total), int(found.free)
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _core_rate() -> float:
    """FLOP/s of one core in the fastest of some rounds: in slower ones it was shared with something else."""
    matrix = np.ones((MATRIX_SIDE, MATRIX_SIDE), dtype=np.float32)
    product = np.matmul(matrix, matrix)
    best = float("inf")
    until = time.perf_counter() + PRODUCTS_SECONDS
    while (begun := time.perf_counter()) < until or best == float("inf"):
        for _ in range(PRODUCTS_TIMED):
            np.matmul(matrix, matrix, out=product)
        best = min(best, time.perf_counter() - begun)
    return PRODUCTS_TIMED * 2.0 * MATRIX_SIDE**3 / max(best, 1e-9)


def _device_rate(device: str) -> float:
    """FLOP/s of a device that only torch can reach; 0 where it cannot (and says so by taking no stage)."""
    command = [sys.executable, "-m", "partition.measure", device]
    try:
        output = subprocess.run(  # noqa: S603 - our own module, a device name checked by the config
            command, capture_output=True, timeout=DEVICE_SECONDS_MAX, check=True, stdin=subprocess.DEVNULL
        ).stdout
        return float(json.loads(output)["flops_per_second"])
    except (subprocess.SubprocessError, OSError, ValueError, KeyError):
        return 0.0
