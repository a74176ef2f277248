"""Timing of classes of operators, in a process that is prepared like a stage's.

Each class runs forward and backward at a few shapes. Then the prices of a call, a FLOP and a byte are fitted
to the times by their relative error; no price is negative. With one thread, the thread's own clock is used,
so that other processes' work does not count. The share of a processor that this process gets is measured
separately, for long enough that a CPU quota takes effect.
"""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from blake3 import blake3
from torch import Tensor

from partition.calibrate.fit import fit
from partition.calibrate.samples import Sample, Samples
from partition.execute.optimize import parts
from partition.execute.process import keep_freed_memory, load_operators, prepare_process
from partition.plan.operations import Amount, Kind
from partition.plan.rates import Calibration, KindPace, OperatorPace

REPETITIONS_MIN, REPETITIONS_MAX = 3, 200
HELD_BYTES_MAX = 48 << 20
"""Maximum size of results that are kept while more are made: more than a cache holds, less than the heap
keeps when memory is freed."""
ENGINE_VIEWS = 32
CALL_FACTOR_MAX = 3.0
"""Maximum cost of a call among other operators, relative to a call alone. A larger ratio is a disturbance."""
HEAP_BYTES = 48 << 20
"""The memory that a stage's heap keeps in fragments, and that convolutions use for packing. The models of
benchmarks/costs.py needed up to 41 MiB more than their formulas say."""
OWN_SHARE_MIN = 0.1
"""Minimum share of a backward pass, timed alone, that counts as the operator's own time."""
SHARE_SECONDS = 1.0
"""How long to measure the share of a processor: ten periods of a CPU quota."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class _Clock:
    """Measures computing time in seconds: this thread's CPU time if there is one thread, else the wall
    time."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._is_wall = device.type != "cpu" or threads > 1
        self._device = device

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() if self._is_wall else time.thread_time()


def _typical(times: list[float]) -> float:
    """Return the time at the end of the lower third, because slower runs were disturbed."""
    return sorted(times)[len(times) // 3]


def _engine(device: torch.device, clock: _Clock, seconds: float) -> float:
    """Return the time that autograd takes to begin and end a pass. An operator timed alone includes it; a
    model has it only once.

    It is the time of a chain of views that the views themselves do not explain.
    """

    def passing(count: int) -> float:
        leaf = torch.ones(8, 8, device=device, requires_grad=True)

        def chain() -> Tensor:
            found: Tensor = leaf
            for _ in range(count):
                found = found.view(8, 8)
            return found

        return _timed(Sample("view", chain, (leaf,), Amount(), Amount()), clock, seconds, 0.0)[1]

    one, many = passing(1), passing(1 + ENGINE_VIEWS)
    return max(0.0, one - max(0.0, many - one) / ENGINE_VIEWS)


def _timed(sample: Sample, clock: _Clock, seconds: float, engine: float) -> tuple[float, float]:
    """Return (forward, backward) seconds, without the time `engine` of each backward pass, which does not
    belong to the operator."""
    out = sample.run()
    gradient = torch.ones_like(out)
    torch.autograd.grad(out, sample.leaves, gradient)
    forwards: list[float] = []
    backwards: list[float] = []
    held: list[object] = []
    held_bytes = 0
    until = time.perf_counter() + seconds
    while len(forwards) < REPETITIONS_MAX:
        if held_bytes > HELD_BYTES_MAX:
            held.clear()
            held_bytes = 0
        begun = clock.now()
        out = sample.run()
        middle = clock.now()
        gradients = torch.autograd.grad(out, sample.leaves, gradient)
        ended = clock.now()
        # In a model the tensors are kept until the backward pass, so later tensors are in memory that is not
        # cached.
        held += [out, gradients]
        held_bytes += sum(tensor.numel() * tensor.element_size() for tensor in (out, *gradients))
        forwards.append(middle - begun)
        backwards.append(ended - middle)
        if time.perf_counter() >= until and len(forwards) >= REPETITIONS_MIN:
            break
    back = _typical(backwards)
    return _typical(forwards), max(OWN_SHARE_MIN * back, back - engine)


def calibrate(device: str, dtype: str, threads: int, seconds: float) -> Calibration:
    """Time every class within about `seconds`. If `seconds` is 0, only measure the share of a processor.

    Raises RuntimeError: torch has no such device.
    """
    keep_freed_memory()
    prepare_process(threads)
    torch.manual_seed(0)
    where, clock = torch.device(device), _Clock(torch.device(device), threads)
    load_operators(where)
    # Not ru_maxrss, which also counts the process that started this one (getrusage(2), across execve).
    baseline = psutil.Process().memory_info().rss + HEAP_BYTES
    here = Calibration(
        hardware=hardware(device)[:64],
        torch=torch.__version__[:64],
        device=device,
        dtype=dtype,
        threads=threads,
        kinds=(),
        baseline_bytes=baseline,
        frame=OperatorPace(0, 0, 0),
        step=OperatorPace(0, 0, 0),
        share_permille=_share() if device == "cpu" else 1000,
    )
    if not seconds:
        return here
    samples = list(Samples(DTYPES[dtype], where).all())
    each = max(0.004, (seconds - SHARE_SECONDS - 1.0) / (len(samples) + 8))
    engine = _engine(where, clock, each)
    found: dict[Kind, list[tuple[Sample, float, float]]] = {}
    for sample in samples:
        found.setdefault(sample.kind, []).append((sample, *_timed(sample, clock, each, engine)))
    kinds = [
        KindPace(
            kind,
            fit([sample.forward for sample, _, _ in rows], [max(1e-9, forward) for _, forward, _ in rows]),
            fit([sample.backward for sample, _, _ in rows], [max(1e-9, back) for _, _, back in rows]),
        )
        for kind, rows in found.items()
    ]
    kinds = _as_in_a_model(kinds, samples, clock, 8 * each, engine)
    kinds.append(
        KindPace("accumulate", OperatorPace(0, 0, 0), _accumulate(where, DTYPES[dtype], clock, each))
    )
    return msgspec.structs.replace(
        here, kinds=tuple(kinds), frame=_frames(clock, each), step=_steps(where, clock, each)
    )


def _as_in_a_model(
    kinds: Sequence[KindPace], samples: Sequence[Sample], clock: _Clock, seconds: float, engine: float
) -> list[KindPace]:
    """Return the paces, adjusted for the extra time that operators take among others in a full forward and
    backward pass.

    A repeated operator finds its weights in the cache and its memory allocated; how much this helps differs
    from class to class.
    """
    turns: list[tuple[dict[str, float], dict[str, float]]] = []
    until = time.perf_counter() + seconds
    while len(turns) < 2 or (time.perf_counter() < until and len(turns) < 20):
        forward: dict[str, float] = dict.fromkeys((row.kind for row in samples), 0.0)
        backward = dict.fromkeys(forward, 0.0)
        for group in _groups(samples):
            made = []
            for sample in group:
                begun = clock.now()
                out = sample.run()
                forward[sample.kind] += clock.now() - begun
                made.append((sample, out, torch.ones_like(out)))
            for sample, out, gradient in reversed(made):
                begun = clock.now()
                torch.autograd.grad(out, sample.leaves, gradient)
                spent = clock.now() - begun
                backward[sample.kind] += max(OWN_SHARE_MIN * spent, spent - engine)
        turns.append((forward, backward))
    found = []
    calls = [1.0, 1.0]
    # Views first: a view is nothing but a call, so how much slower its call becomes applies to the other
    # classes.
    for row in sorted(kinds, key=lambda row: row.kind != "view"):
        own = [sample for sample in samples if sample.kind == row.kind]
        ways = (
            (row.forward, [sample.forward for sample in own]),
            (row.backward, [sample.backward for sample in own]),
        )
        paces = []
        for way, (pace, amounts) in enumerate(ways):
            seconds = _typical([turn[way][row.kind] for turn in turns])
            if row.kind == "view":
                alone = sum(pace.picoseconds(amount) for amount in amounts) / 1e12
                calls[way] = min(CALL_FACTOR_MAX, max(1.0, seconds / max(1e-12, alone)))
            paces.append(_beside(pace, amounts, seconds, calls[way]))
        found.append(KindPace(row.kind, *paces))
    return found


def _groups(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Yield the samples in order, in groups whose results may be held together. If they exceeded what the
    heap keeps, pages would be freed and allocated again, which would multiply an operator's time."""
    group: list[Sample] = []
    held_bytes = 0
    for sample in samples:
        size = 2 * sample.forward.touched_bytes
        if group and held_bytes + size > HELD_BYTES_MAX:
            yield group
            group, held_bytes = [], 0
        group.append(sample)
        held_bytes += size
    if group:
        yield group


def _beside(pace: OperatorPace, amounts: Sequence[Amount], seconds: float, factor: float) -> OperatorPace:
    """Return the pace at which these amounts together take `seconds`. A call takes `factor` times as long as
    alone; the work takes the rest of the time."""
    call = min(2**53, round(pace.call * factor))
    rest = sum(pace.picoseconds(amount) - pace.call * amount.calls for amount in amounts)
    if rest <= 0:
        return OperatorPace(call, pace.megaflop, pace.mebibyte)
    slower = max(1.0, (seconds * 1e12 - sum(call * amount.calls for amount in amounts)) / rest)
    megaflop, mebibyte = (min(2**53, round(value * slower)) for value in (pace.megaflop, pace.mebibyte))
    return OperatorPace(call, megaflop, mebibyte)


def _repeated(run: Callable[[], object], clock: _Clock, seconds: float) -> float:
    run()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < REPETITIONS_MIN or (time.perf_counter() < until and len(times) < REPETITIONS_MAX):
        begun = clock.now()
        run()
        times.append(clock.now() - begun)
    return max(1e-9, _typical(times))


def _accumulate(device: torch.device, dtype: torch.dtype, clock: _Clock, seconds: float) -> OperatorPace:
    """Measure the time to add a parameter's gradient to its sum."""
    amounts: list[Amount] = []
    times: list[float] = []
    for size in (1 << 8, 1 << 14, 1 << 18, 1 << 21):
        total, gradient = (torch.ones(size, dtype=dtype, device=device) for _ in range(2))
        amounts.append(Amount(1, 0, size * total.element_size()))
        times.append(_repeated(lambda a=total, b=gradient: a.add_(b), clock, seconds))  # type: ignore[misc]  # called at once
    return fit(amounts, times)


def _frames(clock: _Clock, seconds: float) -> OperatorPace:
    """Measure the time of a bundle on its way in or out: a copy, and a check that all of it is finite."""
    amounts: list[Amount] = []
    times: list[float] = []
    for size in (1 << 10, 1 << 16, 1 << 20):
        tensor = torch.ones(size)

        def cross(given: Tensor = tensor) -> object:
            return given.clone(), bool(torch.isfinite(given).all())

        amounts.append(Amount(1, 0, 4 * size))
        times.append(_repeated(cross, clock, seconds))
    return fit(amounts, times)


def _steps(device: torch.device, clock: _Clock, seconds: float) -> OperatorPace:
    """Measure the time, per byte, to apply a step to a parameter, as `StageExecutor` does: check and divide
    the total, step the optimizer, zero the sums, and hash the result."""
    amounts: list[Amount] = []
    times: list[float] = []
    for size in (1 << 10, 1 << 16, 1 << 21):
        value, total, gradient = (torch.ones(size, device=device) for _ in range(3))
        blocks = parts(value)
        for block, own in zip(blocks, parts(gradient), strict=True):
            block.grad = own
        optimizer = torch.optim.Adam(blocks, foreach=False)

        def apply(optimizer: Any = optimizer, value: Tensor = value, sums: Any = (total, gradient)) -> None:
            bool(torch.isfinite(sums[0]).all())
            torch.div(sums[0], 2, out=sums[1])
            optimizer.step()
            for each in sums:
                each.zero_()
            blake3(value.cpu().numpy().view(np.uint8).data).digest()

        amounts.append(Amount(1, 0, 4 * size))
        times.append(_repeated(apply, clock, seconds))
    return fit(amounts, times)


def _share() -> int:
    """Return the share of a processor that this process gets, in thousandths, while it computes
    continuously."""
    matrix = torch.ones(192, 192)
    begun, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() - begun < SHARE_SECONDS:
        torch.mm(matrix, matrix)
    wall, busy = time.perf_counter() - begun, time.thread_time() - used
    return max(1, min(1000, round(1000 * busy / wall)))


def hardware(device: str) -> str:
    """Return the device's own name."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
