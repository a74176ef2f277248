"""Any module as stages: the models of the zoo, cut at random places and compared with eager, and Llama 3 8B
on meta.

Every model of `tests.zoo` trains three steps with dropout on, as stages and as one process, in float64 at its
small size. Its realistic size is captured for the table. The full run writes docs/models.md.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from _figures import Goal, arguments, leave, report

from partition.capture import Captured
from partition.codecs.codec import Payload, pack, typed
from partition.model.cut import cut_layers
from partition.model.graph import Graph, StageGraph
from partition.model.sizes import evaluate, shape_of
from partition.stage import Forward, Forwarded, StageSpecification, boundary_bytes
from tests.zoo import ZOO
from tests.zoo.equivalence import (
    FLOAT64_MAX,
    Trial,
    captured_case,
    errors,
    random_cut,
    run_module,
    run_stages,
    sizes_of,
    stages_possible,
)

STAGES = (2, 3, 5, 8)
CUT_SETS = 20
QUICK = ("mlp", "unet", "siamese", "gpt", "hf-llama")
DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"

LLAMA_SECONDS_MAX = 20.0
LLAMA_RESIDENT_BYTES_MAX = 1 << 30
LLAMA_STAGES = 8
LLAMA_TOKENS = 64

COLUMNS = {
    "model": "model",
    "parameters": "parameters",
    "nodes": "nodes",
    "layers": "layers",
    "boundary_bytes_least": "boundary bytes, least",
    "boundary_bytes_most": "most",
    "capture_seconds": "capture, s",
    "cut_sets": "cut sets",
    "stages": "stages",
    "forward": "forward",
    "gradients": "gradients",
    "steps": "three steps",
    "evaluation": "evaluation",
    "notes": "contents",
}

INTRODUCTION = """\
# Models that were cut

Made by `python benchmarks/models.py`, which takes some minutes; do not edit.

Each model is captured, cut at random legal places into several stages, and trained for three steps with
dropout on: two micro-batches of unequal size per step, gradients clipped over all stages, SGD with momentum
and weight decay. The module itself does the same in one process with torch.optim. An error is the largest
difference of a value from that of the module, relative to the largest value in its tensor, over all cut sets.
It covers losses and metrics, gradients, parameters and batch statistics after each step, and the evaluation
that follows.

Errors are those of the small size of each model in float64; the goal is 1e-9. The columns before them are for
the realistic size: parameters (tied ones counted once), nodes of the graph, layers between which a plan may
cut, the bytes that cross one boundary in the forward pass of a micro-batch, and the seconds of the capture.
"""


def parameters(graph: Graph) -> int:
    """Return the number of values in the table of parameters; tied parameters count once."""
    count = 0
    for row in graph.parameters:
        size = 1
        for side in shape_of(row.type, ()):
            size *= side
        count += size
    return count


def structure(captured: Captured, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the structure of the realistic size, and the amount of data on its boundaries between layers."""
    graph = captured.graph
    middle = range(1, len(graph.layers))
    carried = [
        crossing(cut_layers(graph, captured.hash, [(0, at), (at, len(graph.layers))])[0], sizes)
        for at in middle
    ]
    return {
        "parameters": parameters(graph),
        "nodes": len(graph.entries[0].nodes),
        "layers": len(graph.layers),
        "boundary_bytes_least": min(carried, default=0),
        "boundary_bytes_most": max(carried, default=0),
    }


def crossing(stage: StageGraph, sizes: Sequence[int]) -> int:
    """Return the bytes that leave a stage in the forward pass of one micro-batch."""
    entry = stage.entries[0]
    values = evaluate(stage.expressions, sizes)
    types = dict(entry.types)
    total = 0
    for number in entry.outputs:
        kind = stage.types[types[number]]
        total += torch.Size(shape_of(kind, values)).numel() * getattr(torch, kind.dtype).itemsize
    return total


def measure(name: str, cut_sets: int) -> dict[str, Any]:
    """Measure one model: capture its realistic size, cut its small size `cut_sets` times, and train both
    ways."""
    large = ZOO[name]("bench")
    begun = time.perf_counter()
    captured = captured_case(large, torch.float32)
    seconds = time.perf_counter() - begun
    row: dict[str, Any] = {"model": name}
    row |= structure(captured, sizes_of(captured.graph, large.data(0, large.batch)))
    row["capture_seconds"] = round(seconds, 2)

    case = ZOO[name]("test")
    small = captured_case(case, torch.float64)
    trial = Trial()
    expected = run_module(case, small.graph, trial)
    counts = [count for count in STAGES if count <= stages_possible(small.graph)]
    worst = dict.fromkeys(("forward", "gradients", "steps", "evaluation"), 0.0)
    for seed in range(cut_sets):
        stages = random_cut(small.graph, small.hash, counts[seed % len(counts)], seed)
        found = errors(run_stages(case, small.graph, stages, trial), expected, trial.dtype)
        for key in worst:
            worst[key] = max(worst[key], getattr(found, key))
    row |= {"cut_sets": cut_sets, "stages": " ".join(map(str, counts[:cut_sets]))}
    row |= {key: float(f"{value:.1e}") for key, value in worst.items()}
    row["notes"] = (ZOO[name].__doc__ or "").strip().removesuffix(".")
    return row


def llama() -> None:
    """Capture and cut Llama 3 8B on meta, then run one of its stages. Prints one JSON object."""
    from partition.capture import capture, skeleton
    from partition.execute import StageExecutor
    from partition.execute.admit import admit
    from partition.stage_layout import arena_bytes
    from tests.zoo.hugging_face import llama_8b, logits_loss

    torch.set_num_threads(1)
    imported = _resident_bytes()
    begun = time.perf_counter()
    ids = torch.zeros(2, LLAMA_TOKENS, dtype=torch.int64)
    with skeleton():
        model = llama_8b()
    captured = capture(model, (ids,), labels=(ids,), loss=logits_loss, name="llama-3-8b")
    layers = len(captured.graph.layers)
    edges = [round(layers * stage / LLAMA_STAGES) for stage in range(LLAMA_STAGES + 1)]
    stages = cut_layers(captured.graph, captured.hash, list(pairwise(edges)))
    row: dict[str, Any] = {
        "model": "Llama 3 8B, captured on meta and cut into 8",
        "parameters": parameters(captured.graph),
        "nodes": len(captured.graph.entries[0].nodes),
        "layers": layers,
        "graph_bytes": len(captured.data),
        "seconds": round(time.perf_counter() - begun, 2),
        "resident_bytes": _resident_bytes(),
        "resident_bytes_of_imports": imported,
    }
    stage = stages[LLAMA_STAGES // 2]
    specification = StageSpecification(b"benchmark", stage, (1,))
    admitted = admit(specification)
    arenas = {name: memoryview(_zeros(size)) for name, size in arena_bytes(specification).items()}
    begun = time.perf_counter()
    executor = StageExecutor(specification, arenas)
    drawn = time.perf_counter() - begun
    begun = time.perf_counter()
    reply = executor.handle(Forward(0, 0, False, _noise(stage, (1,))))
    assert isinstance(reply, Forwarded), reply
    assert reply.output is not None
    row["stage"] = {
        "stage_parameters": sum(torch.Size(shape_of(p.type, ())).numel() for p in stage.parameters),
        "admitted_seconds": round(admitted.seconds, 2),
        "flops": admitted.flops,
        "first_values_seconds": round(drawn, 1),
        "forward_seconds": round(time.perf_counter() - begun, 2),
        "boundary_bytes": boundary_bytes(specification),
        "tokens": LLAMA_TOKENS,
    }
    print(json.dumps(row))


def _resident_bytes() -> int:
    """Return the peak memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LookupError("VmHWM")


def _zeros(size: int) -> Any:
    return np.zeros(size, np.uint8)


def _noise(stage: StageGraph, sizes: Sequence[int]) -> Payload:
    """Return inputs for a middle stage: small random normal values of the right shapes."""
    entry = stage.entries[0]
    values = evaluate(stage.expressions, sizes)
    types = dict(entry.types)
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for number in entry.inputs:
        kind = stage.types[types[number]]
        tensor = torch.randn(shape_of(kind, values), generator=generator)
        tensors.append(typed(tensor.to(getattr(torch, kind.dtype)).numpy()))
    return pack(tensors, "raw", sizes)


def llama_row() -> dict[str, Any]:
    """Run `llama` in a separate process, so that only its memory counts."""
    command = [sys.executable, "-W", "ignore", "-c", "import models; models.llama()"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True, timeout=500
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def document(rows: Sequence[dict[str, Any]], llama_found: dict[str, Any]) -> str:
    """Return docs/models.md."""
    lines = [
        INTRODUCTION,
        "| " + " | ".join(COLUMNS.values()) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row[key]) for key in COLUMNS) + " |")
    stage = llama_found["stage"]
    lines += [
        "",
        "## A model that no single machine here could hold",
        "",
        f"Llama 3 8B, {llama_found['parameters']:,} parameters, captured from its configuration on the meta",
        f"device and cut into {LLAMA_STAGES}: {llama_found['seconds']:.1f} s and at most"
        f" {llama_found['resident_bytes'] / 2**30:.2f} GiB of memory, of which",
        f"{llama_found['resident_bytes_of_imports'] / 2**30:.2f} GiB are imports; the graph has"
        f" {llama_found['nodes']:,} nodes and {llama_found['graph_bytes']:,} bytes.",
        f"One of its stages ({stage['stage_parameters']:,} parameters) was admitted in"
        f" {stage['admitted_seconds']:.2f} s and, its values drawn",
        f"from the recipe in {stage['first_values_seconds']:.0f} s, took {stage['tokens']} tokens forward in"
        f" {stage['forward_seconds']:.1f} s on one core.",
        "",
    ]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if value < 1e-3 else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> int:
    """Measure every model."""
    flags = arguments(__doc__ or "")
    torch.set_num_threads(1)
    names, cut_sets = (QUICK, 2) if flags.quick else (tuple(ZOO), CUT_SETS)
    rows = []
    for name in names:
        rows.append(measure(name, cut_sets))
        print(name, file=sys.stderr)
    worst = max(row[key] for row in rows for key in ("forward", "gradients", "steps", "evaluation"))
    goals = [Goal("worst error in float64, cut against eager", worst, "<=", FLOAT64_MAX)]
    if not flags.quick:
        found = llama_row()
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(document(rows, found))
        stage = found.pop("stage")
        rows += [found, {"model": "its fifth stage", **stage}]
        goals += [
            Goal("Llama 3 8B captured and cut, seconds", found["seconds"], "<=", LLAMA_SECONDS_MAX),
            Goal("resident bytes at most", found["resident_bytes"], "<=", LLAMA_RESIDENT_BYTES_MAX),
        ]
    return report("models", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
