"""The cost of a stage compared with its module: the interpreter, the process around it, and admission.

The interpreter runs whole models of `tests.zoo` at their realistic size, in turns with the module itself. The
process is `StageHost` under trio with GPT blocks, in turns with an executor in this process; meanwhile a task
measures how late the event loop wakes it.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import trio
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from _figures import Goal, arguments, leave, report

from crypto.encoding import encode
from node.stages.host import StageHost
from partition.capture import capture
from partition.capture.models.gpt import GPT, GPTConfiguration, next_token_loss
from partition.codecs.codec import Payload, pack, typed
from partition.execute import StageExecutor
from partition.execute.admit import admit
from partition.execute.interpret import compile_entry
from partition.model.cut import cut, cut_layers
from partition.model.graph import Graph, StageGraph
from partition.stage import Backward, Forward, StageSpecification
from partition.stage_layout import arena_bytes
from tests.zoo import ZOO, Case
from tests.zoo.equivalence import captured_case, random_cut, sizes_of, stages_possible

MEDIAN_GOAL = 0.95
WORST_GOAL = 0.9
HOST_COST_MAX = 0.03
STALL_SECONDS_MAX = 0.010
ADMISSION_SECONDS_MAX = 0.3
HEARTBEAT_SECONDS = 0.002
TURN_SECONDS = 0.05
BATCH, TOKENS, WIDTH = 4, 256, 768
UNROLLED = ("lstm", "gru")
"""Models that miss the goal for the worst case. Their graphs have cells of plain operators, one per position,
instead of torch's one fused operator. So the worst case of the other models is shown too."""
QUICK = ("mlp", "unet", "gpt", "hf-llama")


def in_turns(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each function, alternating, after a warm-up round; short ones run several times
    per turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    times = 1
    for number in range(rounds + 1):
        for name, run in runs.items():
            begun = time.perf_counter()
            for _ in range(times):
                run()
            seconds[name].append((time.perf_counter() - begun) / times)
        if number == 0:
            times = max(1, round(TURN_SECONDS / max(found.pop() for found in seconds.values())))
    return seconds


def interpreter(name: str, rounds: int) -> dict[str, Any]:
    """Return the ratio of eager time to the interpreter's time, for forward alone and with backward."""
    case = ZOO[name]("bench")
    captured = captured_case(case, torch.float32)
    inputs, labels = case.data(0, case.batch)
    sizes = sizes_of(captured.graph, (inputs, labels))
    program = compile_entry(
        cut(captured.graph, captured.hash, [])[0], "train", train=True, device=torch.device("cpu")
    )
    parameters, constants = values_of(case, captured.graph)
    model = case.model()

    def eager() -> Tensor:
        output = model(*inputs)
        loss, _ = case.sums(output, inputs, labels)
        for metric in case.metrics.values():
            metric(output, *labels)
        return loss

    def interpreted() -> Tensor:
        loss = program.run(parameters, constants, {}, inputs, labels, sizes).loss
        assert loss is not None
        return loss

    row: dict[str, Any] = {"model": name}
    forward = in_turns({"eager": lambda: drop(eager()), "interpreter": lambda: drop(interpreted())}, rounds)
    both = in_turns(
        {"eager": lambda: backward(eager()), "interpreter": lambda: backward(interpreted())}, rounds
    )
    for kind, found in (("forward", forward), ("forward_backward", both)):
        middle = {side: statistics.median(values) for side, values in found.items()}
        row[f"eager_{kind}_ms"] = round(1e3 * middle["eager"], 1)
        row[f"interpreter_{kind}_ms"] = round(1e3 * middle["interpreter"], 1)
        pairs = zip(found["eager"], found["interpreter"], strict=True)
        row[f"{kind}_ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
    return row


def drop(_: object) -> None:
    """Free the result, and with it autograd's saved tensors."""


def backward(loss: Tensor) -> None:
    """Compute the gradients of the leaves."""
    loss.backward()  # type: ignore[no-untyped-call]  # so in torch


def values_of(case: Case, graph: Graph) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return the module's own initial values, keyed by rows of the graph's tables."""
    state = case.model().state_dict()
    parameters = {}
    for row, parameter in enumerate(graph.parameters):
        value = state[parameter.names[0]].clone()
        parameters[row] = value.requires_grad_(parameter.kind == "parameter")
    constants = {}
    for row, constant in enumerate(graph.constants):
        dtype = getattr(torch, constant.type.dtype)
        shape = [side for side in constant.type.shape if isinstance(side, int)]
        constants[row] = torch.frombuffer(bytearray(constant.data), dtype=dtype).reshape(shape)
    return parameters, constants


def blocks() -> tuple[StageSpecification, Payload, Payload]:
    """Return two blocks of a GPT as the middle stage, with an input and a gradient of shape 4x256x768."""
    model = GPT(GPTConfiguration(512, TOKENS, layers=4, heads=12, width=WIDTH, dropout=0.1))
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    captured = capture(model, (ids,), labels=(ids,), loss=next_token_loss, name="blocks")
    layers = captured.graph.layers
    first = next(place for place, name in enumerate(layers) if "h.1" in name)
    last = next(place for place, name in enumerate(layers) if "h.3" in name)
    stage = cut_layers(captured.graph, captured.hash, [(0, first), (first, last), (last, len(layers))])[1]
    sizes = sizes_of(captured.graph, ((ids,), (ids,)))
    generator = np.random.default_rng(0)
    ports = [generator.standard_normal((BATCH, TOKENS, WIDTH), np.float32) for _ in range(2)]
    bundle, gradient = (pack([typed(port)], "raw", sizes) for port in ports)
    return StageSpecification(b"benchmark", stage, sizes), bundle, gradient


async def process(rounds: int) -> dict[str, Any]:
    """Compare `StageHost` with an executor in this process, and measure the lateness of a heartbeat while the
    host works."""
    specification, bundle, gradient = blocks()
    arenas = {name: memoryview(bytearray(size)) for name, size in arena_bytes(specification).items()}
    executor = StageExecutor(specification, arenas)
    seconds: dict[str, list[float]] = {"here": [], "host": []}
    late: list[float] = []
    busy: list[float] = []
    processor: dict[str, float] = {}
    host = await StageHost.open(encode(specification))
    child = psutil.Process(host.pid)
    try:
        for number in range(rounds + 1):
            if number == 1:
                processor = {"here": 0.0, "host": -_processor_seconds(child)}
            requests = (Forward(0, number, True, bundle), Backward(0, number, gradient))
            used, begun = time.process_time(), time.perf_counter()
            for request in requests:
                executor.handle(request)
            used, middle = time.process_time() - used, time.perf_counter()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(heartbeat, late, busy)
                for request in requests:
                    await host.call(request)
                nursery.cancel_scope.cancel()
            ended = time.perf_counter()
            if number:
                seconds["here"].append(middle - begun)
                seconds["host"].append(ended - middle)
                processor["here"] += used
        processor["host"] += _processor_seconds(child)
    finally:
        with trio.CancelScope(shield=True):
            await host.aclose()
    pairs = zip(seconds["host"], seconds["here"], strict=True)
    return {
        "stage": f"two GPT blocks, {BATCH}x{TOKENS}x{WIDTH}",
        "in_process_ms": round(1e3 * statistics.median(seconds["here"]), 1),
        "host_ms": round(1e3 * statistics.median(seconds["host"]), 1),
        "cost": round(statistics.median(host / here for host, here in pairs) - 1, 4),
        # A busy machine slows the stage's process, which has a high niceness, but it does not affect this
        # figure.
        "processor_cost": round(processor["host"] / processor["here"] - 1, 4),
        "heartbeats": len(late),
        "worst_stall_ms": round(1e3 * max(late), 2),
        # Excludes the time that other programs on a busy machine took.
        "worst_stall_processor_ms": round(1e3 * max(busy), 2),
    }


def _processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def heartbeat(late: list[float], busy: list[float]) -> None:
    """Append how late each wake-up is and how long this thread computed, until cancelled."""
    while True:
        due, used = trio.current_time() + HEARTBEAT_SECONDS, time.thread_time()
        await trio.sleep_until(due)
        late.append(trio.current_time() - due)
        busy.append(time.thread_time() - used)


def admission(name: str) -> dict[str, Any]:
    """Return the longest admission of a model's stages, cut into three."""
    case = ZOO[name]("bench")
    captured = captured_case(case, torch.float32)
    sizes = sizes_of(captured.graph, case.data(0, case.batch))
    stages = random_cut(captured.graph, captured.hash, min(3, stages_possible(captured.graph)), 0)
    found = [seconds_of_admission(stage, sizes) for stage in stages]
    return {"model": name, "stages": len(stages), "admission_ms": round(1e3 * max(found), 1)}


def seconds_of_admission(stage: StageGraph, sizes: tuple[int, ...]) -> float:
    """Return the median of three admissions, after torch has loaded everything for the first."""
    specification = StageSpecification(b"benchmark", stage, sizes)
    return statistics.median(in_turns({"": lambda: drop(admit(specification))}, 3)[""])


def main() -> int:
    """Measure interpreter, process and admission."""
    flags = arguments(__doc__ or "")
    torch.set_num_threads(1)
    names, rounds = (QUICK, 3) if flags.quick else (tuple(ZOO), 15)
    rows = []
    for name in names:
        row = interpreter(name, rounds)
        row |= admission(name)
        rows.append(row)
        print(name, file=sys.stderr)
    kinds = ("forward_ratio", "forward_backward_ratio")
    ratios = [row[key] for row in rows for key in kinds]
    fused = [row[key] for row in rows if row["model"] not in UNROLLED for key in kinds]
    slowest = max(row["admission_ms"] for row in rows) / 1e3
    found = trio.run(process, rounds)
    rows.append(found)
    goals = [
        Goal("interpreter against eager, median", statistics.median(ratios), ">=", MEDIAN_GOAL),
        Goal("interpreter against eager, worst", min(ratios), ">=", WORST_GOAL),
        Goal("interpreter against eager without lstm and gru, worst", min(fused), ">=", WORST_GOAL),
        Goal("cost of the process around a stage", found["cost"], "<=", HOST_COST_MAX),
        Goal("event loop's worst stall, seconds", found["worst_stall_ms"] / 1e3, "<=", STALL_SECONDS_MAX),
        Goal("slowest admission, seconds", slowest, "<=", ADMISSION_SECONDS_MAX),
    ]
    return report("stage", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
