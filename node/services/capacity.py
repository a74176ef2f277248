"""Measures this machine's offer at the start: device, cores, free memory, and FLOP/s from a short product.

On a CPU numpy multiplies in this process (its BLAS is as fast as torch's). An accelerator needs torch, so a
short-lived process multiplies there. The figure is a first guess for placement, not a promise.
"""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace

import numpy as np
import psutil

from node.config import Resources
from node.events import CapacityMeasured
from node.services.gpus import gpus
from partition.plan.cost import STAGE_BASELINE_BYTES

MATRIX_SIDE = 64
"""The side of a matrix product that BLAS computes on one thread. With larger ones its threads wait for each
other by spinning: with five nodes measuring simultaneously, products of side 512 reached 2 GFLOP/s instead of
90, while these stay at 67."""
PRODUCTS_TIMED = 50
"""Number of products timed together, because a single one takes only some 8 us."""
PRODUCTS_SECONDS = 0.1
"""How long to multiply: long enough for a sleeping core to speed up, short enough not to delay a start."""
DEVICE_SECONDS_MAX = 60.0
MEMORY_USEFUL_BYTES_MIN = 1 << 30
"""Least useful size of a slot. A smaller one holds a stage's process and little of a model."""


@dataclass(frozen=True)
class Capacity:
    """A machine's offer. `memory_free_bytes` is the most that a run may take, within the configured share."""

    device: str
    cores: int
    memory_free_bytes: int
    memory_total_bytes: int
    flops_per_second: float
    location: str
    all_cores: int = 0
    memory_available_bytes: int = 0
    corrected: tuple[str, ...] = ()
    """The owner's declarations that this machine contradicts, each a text for people. The two fields above
    are the measured totals before the owner's limits; 0 if they equal the offer."""

    def measured(self, at: float, slots: int = 1) -> CapacityMeasured:
        """Return the event for this measurement at the Unix time `at`. `slots` share the offer."""
        fields = asdict(self)
        del fields["all_cores"], fields["memory_available_bytes"]
        return CapacityMeasured(at=at, small=small_offers(self, slots), **fields)


def small_offers(capacity: Capacity, slots: int) -> tuple[str, ...]:
    """Return the parts of an offer that are too small to be useful to others, as texts for people."""
    said = []
    shared = f" for each of {slots} slots" if slots > 1 else ""
    memory = capacity.memory_free_bytes // slots
    if memory < MEMORY_USEFUL_BYTES_MIN:
        said.append(
            f"memory {memory / 1e9:.2f} GB{shared}: a stage's process takes "
            f"{STAGE_BASELINE_BYTES / 1e9:.2f} GB before it holds a layer, so few runs fit. Give 1GiB or more"
        )
    if capacity.cores < slots:
        said.append(f"cores {capacity.cores}{shared}: the slots share cores, so their stages delay others")
    return tuple(said)


def measure(resources: Resources) -> Capacity:
    """Measure this machine within what the configuration allows. Call it in a thread."""
    device, why = usable_device(resources.device)
    rate = 0.0 if device == "cpu" else _device_rate(device)
    if device != "cpu" and not rate:
        why = f"device {device}: torch cannot compute on it; the CPU computes"
        device = "cpu"
    all_cores = psutil.cpu_count() or 1
    total, free = device_memory(device)
    found = Capacity(
        device=device,
        cores=all_cores,
        memory_free_bytes=free,
        memory_total_bytes=total,
        flops_per_second=rate or _core_rate() * all_cores,
        location=resources.location,
        all_cores=all_cores,
        memory_available_bytes=free,
    )
    found = within(found, resources)
    return replace(found, corrected=(why, *found.corrected) if why else found.corrected)


def within(capacity: Capacity, resources: Resources) -> Capacity:
    """Return the part of a measured machine that these resources allow. `corrected` names declarations that
    exceed the machine."""
    all_cores = capacity.all_cores or capacity.cores
    free = capacity.memory_available_bytes or capacity.memory_free_bytes
    cores = min(resources.cores or all_cores, all_cores)
    total = capacity.memory_total_bytes
    said = []
    if resources.cores > all_cores:
        said.append(f"cores {resources.cores}: this machine has only {all_cores}, and offers {cores}")
    if resources.memory.bytes > total:
        declared, there = resources.memory.bytes / 1e9, total / 1e9
        said.append(
            f"memory {declared:.1f} GB: this machine has only {there:.1f} GB, of "
            f"which {free / 1e9:.1f} are free"
        )
    rate = capacity.flops_per_second
    if capacity.device == "cpu":
        rate *= cores / capacity.cores
    return replace(
        capacity,
        cores=cores,
        memory_free_bytes=min(resources.memory.of(total), free),
        flops_per_second=rate,
        location=resources.location,
        all_cores=all_cores,
        memory_available_bytes=free,
        corrected=tuple(said),
    )


def find_device(wanted: str) -> str:
    """Return the device that is used if the owner declares `wanted`."""
    return usable_device(wanted)[0]


def usable_device(wanted: str) -> tuple[str, str]:
    """Return the device to compute on, and why it differs from the declared one (empty if it does not).

    `auto` is the first GPU if there is one and torch was built for it, else the CPU. The CPU also replaces a
    missing device.
    """
    kind, _, number = wanted.partition(":")
    if kind == "cpu":
        return "cpu", ""
    if kind == "mps":
        is_there = sys.platform == "darwin" and platform.machine() == "arm64"
        return (
            ("mps", "") if is_there else ("cpu", f"device {wanted}: there is no Apple GPU; the CPU computes")
        )
    found, without = gpus(os.environ)
    if int(number or 0) < len(found):
        return ("cuda:0" if wanted == "auto" else wanted), ""
    if wanted == "auto":
        return "cpu", ""
    return "cpu", f"device {wanted}: {without or f'this machine has {len(found)} GPU'}; the CPU computes"


def device_memory(device: str) -> tuple[int, int]:
    """Return the total and free bytes of the memory that a stage on this device uses: a GPU's own memory,
    else the machine's."""
    if device.startswith("cuda"):
        found, place = gpus(os.environ)[0], int(device.partition(":")[2] or 0)
        if place < len(found):
            return found[place].total_bytes, found[place].free_bytes
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _core_rate() -> float:
    """Return the FLOP/s of one core in the fastest of some rounds. In slower rounds, other work used the core
    too."""
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
    """Return the FLOP/s of a device that only torch can reach; 0 if it fails (the node then takes
    no stage)."""
    command = [sys.executable, "-P", "-m", "partition.measure", device]
    try:
        output = subprocess.run(  # noqa: S603 - our own module, a device name checked by the config
            command, capture_output=True, timeout=DEVICE_SECONDS_MAX, check=True, stdin=subprocess.DEVNULL
        ).stdout
        return float(json.loads(output)["flops_per_second"])
    except (subprocess.SubprocessError, OSError, ValueError, KeyError):
        return 0.0
