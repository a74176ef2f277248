"""The planner's predictions for stages compared with measurements: the time of both passes, and peak memory.

The node's own code calibrates the device in a separate process. Every model of `tests.zoo` at its realistic
size is then cut into three stages of about equally many layers. Executors in this process, set up like a
stage's, run them with one thread; the processor time of that thread counts. Peak memory is measured on a real
stage process (`StageHost`) that holds a whole model with Adam, and handles two micro-batches and a step.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio

sys.path.insert(0, str(Path(__file__).parents[1]))

from _figures import Goal, arguments, leave, report

from crypto.encoding import encode
from node.services.calibration import CalibrationWish, calibrate
from node.stages.host import StageHost
from partition.capture import Captured
from partition.execute.process import keep_freed_memory, prepare_process
from partition.model.cut import cut, cut_layers
from partition.plan.layer_costs import layer_costs
from partition.plan.operations import layer_operations
from partition.plan.problem import PeerCost, Problem
from partition.plan.rates import Calibration, OperatorPace
from partition.plan.tables import Tables
from partition.stage import (
    Apply,
    Backward,
    BackwardDone,
    Forward,
    Forwarded,
    OptimizerSettings,
    StageSpecification,
)
from tests.zoo import ZOO, Case
from tests.zoo.equivalence import Chain, Trial, captured_case, payloads, sizes_of

MEDIAN_GOAL, WORST_GOAL = 0.08, 0.25
MEMORY_GOAL = 1.25
STAGES = 3
SECONDS, SECONDS_QUICK = 1.5, 0.5
REPETITIONS_MIN = 5
QUICK = ("simple-cnn", "mobilenet", "gpt", "hf-llama", "lstm")
MEMORY_QUICK = ("resnet18", "gpt")


def calibrated() -> Calibration:
    """Return this machine's calibration, measured now."""
    with tempfile.TemporaryDirectory() as folder:
        found = calibrate(CalibrationWish("cpu", "float32", 1), Path(folder))
    if found is None:
        raise RuntimeError("this machine cannot be calibrated")
    return found


def stage_times(case: Case, captured: Captured, seconds: float) -> tuple[list[tuple[int, int]], list[float]]:
    """Return the layers of each stage, and for each stage the seconds of both passes of a micro-batch."""
    layers = len(captured.graph.layers)
    count = min(STAGES, layers)
    ends = [round(layers * number / count) for number in range(count + 1)]
    ranges = list(pairwise(ends))
    stages = cut_layers(captured.graph, captured.hash, ranges)
    data = case.data(0, case.batch)
    sizes = sizes_of(captured.graph, data)
    chain = Chain(stages, sizes, Trial(dtype=torch.float32, batches=(case.batch,)))
    chain.load(dict(case.model().state_dict()))
    inputs, labels = payloads(captured.graph, data)
    taken: list[list[float]] = [[] for _ in stages]
    until = time.perf_counter() + seconds
    number = 0
    while number < REPETITIONS_MIN + 2 or time.perf_counter() < until:
        spent = [0.0] * count
        bundle: Any = inputs
        gradient: Any = None
        for stage in range(count):
            request = Forward(0, number, True, bundle, labels if stage + 1 == count else None)
            begun = time.thread_time()
            reply: Forwarded = chain.ask(stage, request, Forwarded)
            spent[stage] += time.thread_time() - begun
            bundle, gradient = reply.output, reply.gradient
        for stage in range(count - 2, -1, -1):
            if gradient is None:
                break
            begun = time.thread_time()
            back: BackwardDone = chain.ask(stage, Backward(0, number, gradient), BackwardDone)
            spent[stage] += time.thread_time() - begun
            gradient = back.gradient
        number += 1
        if number > 2:
            for row, value in zip(taken, spent, strict=True):
                row.append(value)
    return ranges, [statistics.median(row) for row in taken]


def time_row(name: str, calibration: Calibration, seconds: float) -> dict[str, Any]:
    """Return the ratio of predicted to measured time for a model's stages, and for all of them together."""
    case = ZOO[name]("bench")
    captured = captured_case(case, torch.float32)
    ranges, measured = stage_times(case, captured, seconds)
    predicted = predictions(case, captured, calibration, ranges)
    return {
        "model": name,
        "measured_ms": round(1e3 * sum(measured), 2),
        "predicted": round(sum(predicted) / sum(measured), 3),
        "stages": [round(a / b, 3) for a, b in zip(predicted, measured, strict=True)],
    }


def predictions(
    case: Case, captured: Captured, calibration: Calibration, ranges: Sequence[tuple[int, int]]
) -> list[float]:
    """Return the processor seconds for each stage according to the planner's tables, without a node's own
    work."""
    alone = msgspec.structs.replace(calibration, node=OperatorPace(0, 0, 0), share_permille=1000)
    data = case.data(0, case.batch)
    sizes = sizes_of(captured.graph, data)
    layers = tuple(layer_costs(captured.graph, sizes))
    forward, backward = alone.model_nanoseconds(layer_operations(captured.graph, sizes))
    peer = PeerCost("one", 1 << 40, forward, backward, node_nanoseconds=alone.node_nanoseconds)
    inputs, _ = payloads(captured.graph, data)
    table = Tables(Problem(layers, (peer,), input_bytes=inputs.size_bytes)).segment(0)
    return [int(table[first, last]) / 1e9 for first, last in ranges]


async def memory_row(name: str, calibration: Calibration) -> dict[str, Any]:
    """Return the ratio of predicted to measured peak memory for a stage process that holds the whole
    model."""
    case = ZOO[name]("bench")
    captured = captured_case(case, torch.float32)
    data = case.data(0, case.batch)
    sizes = sizes_of(captured.graph, data)
    (whole,) = cut(captured.graph, captured.hash, ())
    settings = OptimizerSettings(kind="adam", learning_rate=1e-4)
    specification = StageSpecification(b"costs", whole, sizes, microbatches=2, optimizer=settings)
    inputs, labels = payloads(captured.graph, data)
    host = await StageHost.open(encode(specification))
    try:
        for number in range(2):
            await host.call(Forward(0, number, True, inputs, labels))
        await host.call(Apply(0, 2 * case.batch))
        peak = peak_bytes(host.pid)
    finally:
        with trio.CancelScope(shield=True):
            await host.aclose()
    layers = tuple(layer_costs(captured.graph, sizes))
    zeros = (0,) * len(layers)
    peer = PeerCost("one", 1 << 40, zeros, zeros, calibration.baseline_bytes)
    problem = Problem(layers, (peer,), microbatches=2, input_bytes=inputs.size_bytes)
    predicted = int(Tables(problem).memory(1)[0, len(layers)]) + peer.baseline_bytes
    return {
        "model": name,
        "peak_mib": peak >> 20,
        "predicted_mib": predicted >> 20,
        "memory": round(predicted / peak, 3),
    }


def peak_bytes(process: int) -> int:
    """Return the peak memory of a process."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LookupError("VmHWM")


def times(calibration: Calibration, *, is_quick: bool) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Compare predicted with measured time of both passes."""
    names, seconds = (QUICK, SECONDS_QUICK) if is_quick else (tuple(ZOO), SECONDS)
    rows = []
    for name in names:
        rows.append(time_row(name, calibration, seconds))
        print(rows[-1], file=sys.stderr)
    errors = [abs(row["predicted"] - 1) for row in rows]
    stages = [abs(each - 1) for row in rows for each in row["stages"]]
    rows.append(
        {
            "stages": len(stages),
            "median error": round(statistics.median(stages), 3),
            "worst error": round(max(stages), 3),
        }
    )
    return rows, [
        Goal("time of a model, median error", statistics.median(errors), "<=", MEDIAN_GOAL),
        Goal("time of a model, worst error", max(errors), "<=", WORST_GOAL),
    ]


def memory(calibration: Calibration, *, is_quick: bool) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Compare predicted with measured peak memory."""
    rows = []
    for name in MEMORY_QUICK if is_quick else tuple(ZOO):
        rows.append(trio.run(memory_row, name, calibration))
        print(rows[-1], file=sys.stderr)
    ratios = [row["memory"] for row in rows]
    return rows, [
        Goal("peak memory, lowest ratio of predicted to measured", min(ratios), ">=", 1.0),
        Goal(
            "peak memory, median ratio of predicted to measured", statistics.median(ratios), "<=", MEMORY_GOAL
        ),
    ]


def main() -> int:
    """Measure time and memory, or only the requested one."""
    flags = arguments(__doc__ or "", times="only the times", memory="only the memory")
    keep_freed_memory()
    prepare_process(1)
    calibration = calibrated()
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for part, is_left_out in ((times, flags.memory), (memory, flags.times)):
        if not is_left_out:
            more, further = part(calibration, is_quick=flags.quick)
            rows, goals = rows + more, goals + further
    return report("costs", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
