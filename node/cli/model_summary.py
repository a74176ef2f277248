"""A summary of a captured model: a document made from its graph, and the lines of its screen. No torch.

Everything is computed from the graph: no tensor is made, and the file of initial values is not opened.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from crypto.errors import RemoteProtocolError
from node.cli.render import bytes_text, labelled, seconds_text, table
from node.errors import RunFailed, UsageError
from node.text import counted
from partition.model.check import check_graph
from partition.model.cut import crossings, cut_layers, reference_sizes
from partition.model.dataflow import flow_of
from partition.model.graph import (
    GRAPH_BYTES_MAX,
    ITEM_BYTES,
    Entry,
    Graph,
    Port,
    StoredValues,
    decode_graph,
    graph_hash,
)
from partition.model.safetensors_layout import file_bytes
from partition.model.sizes import check_sizes
from partition.model.work import EntryWork
from partition.plan.cost import (
    NANOSECONDS,
    LayerCost,
    PeerResources,
    stage_memory_bytes,
    stage_nanoseconds,
    transfer_nanoseconds,
)
from partition.plan.layer_costs import layer_costs
from partition.plan.problem import Constraints, Infeasible, Link, Problem, uniform_peers

SCHEMA = "peerloom/model/1"
EXAMPLE = PeerResources(flops_per_second=50_000_000_000, memory_bytes=1 << 60)
"""The machine that `--stages` assumes for each stage: a laptop's processor with unlimited memory."""
EXAMPLE_LINK_BYTES_PER_SECOND = 125_000_000
BAR_WIDTH = 16
NAME_WIDTH_MAX = 44


def read_graph(file: Path) -> tuple[Graph, bytes]:
    """Read and check a captured model. Return its graph and its hash.

    Raises:
        UsageError: no such file, or it is not a model.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(GRAPH_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from None
    try:
        graph = decode_graph(data)
        check_graph(graph)
    except RemoteProtocolError as error:
        raise UsageError(
            f"{file}: not a captured model: {error}", "`peerloom model capture` makes one"
        ) from None
    return graph, graph_hash(data)


def sizes_of(graph: Graph, batch: int) -> tuple[int, ...]:
    """Return the values of symbolic sizes for which a graph is shown. If `batch` is 0, it is chosen here.
    Raises UsageError."""
    sizes = reference_sizes(graph)
    if batch:
        sizes = (batch, *sizes[1:])
    try:
        check_sizes(graph.symbols, sizes)
    except RemoteProtocolError as error:
        raise UsageError(f"--batch: {error}") from None
    return sizes


def portrait(file: Path, graph: Graph, name: bytes, *, batch: int = 0, stages: int = 0) -> dict[str, Any]:
    """Return the `peerloom/model/1` document of a checked graph.

    Raises:
        UsageError: sizes are out of bounds or do not fit.
        RunFailed: there are more stages than layers.
    """
    sizes = sizes_of(graph, batch)
    entry = graph.entries[0]
    try:
        costs = layer_costs(graph, sizes)
        sent = crossings(graph, entry.boundaries)
        work = EntryWork(graph, entry, sizes)
    except (ValueError, RemoteProtocolError) as error:
        raise UsageError(f"{file}: {error}") from None
    return {
        "schema": SCHEMA,
        "file": str(file),
        "name": graph.name,
        "hash": name.hex(),
        "graph_bytes": file.stat().st_size,
        "values_bytes": file_bytes(graph)
        if any(isinstance(row.source, StoredValues) for row in graph.parameters)
        else 0,
        "parameters": _parameters(graph),
        "sizes": [
            {"name": symbol.name, "minimum": symbol.minimum, "maximum": symbol.maximum, "shown": size}
            for symbol, size in zip(graph.symbols, sizes, strict=True)
        ],
        "entries": [_entry(graph, entry) for entry in graph.entries],
        "layers": _layers(graph, costs, sent),
        "skips": _skips(sent, work),
        "tied": _tied(graph),
        "stages": _stages(graph, name, costs, stages) if stages else [],
    }


def _parameters(graph: Graph) -> dict[str, int]:
    sizes = [prod(side for side in row.type.shape if isinstance(side, int)) for row in graph.parameters]
    return {
        "count": sum(sizes),
        "bytes": sum(
            size * ITEM_BYTES[row.type.dtype] for size, row in zip(sizes, graph.parameters, strict=True)
        ),
        "tensors": len(graph.parameters),
        "frozen": sum(row.kind == "frozen" for row in graph.parameters),
        "statistics": sum(row.kind == "statistic" for row in graph.parameters),
    }


def _entry(graph: Graph, entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "inputs": [_port(graph, port) for port in entry.inputs],
        "labels": [_port(graph, port) for port in entry.labels],
        "loss": entry.loss is not None,
        "metrics": [metric.name for metric in entry.metrics],
        "outputs": len(entry.outputs),
        "states": len(entry.updates),
        "nodes": len(entry.nodes),
    }


def _port(graph: Graph, port: Port) -> dict[str, Any]:
    kind = graph.types[port.type]
    shape = [
        side
        if isinstance(side, int)
        else (graph.symbols[side.row].name if side.row < len(graph.symbols) else "?")
        for side in kind.shape
    ]
    return {"name": port.name, "dtype": kind.dtype, "shape": shape}


def _layers(graph: Graph, costs: Sequence[LayerCost], sent: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    ends = (*graph.entries[0].boundaries, len(graph.entries[0].nodes))
    starts = (0, *graph.entries[0].boundaries)
    tensors = [len(values) for values in sent] + [0]
    return [
        {
            "index": index,
            "name": name,
            "nodes": end - start,
            "parameter_bytes": cost.parameter_bytes,
            "forward_flops": cost.forward_flops,
            "saved_bytes": cost.saved_bytes,
            "output_bytes": cost.output_bytes,
            "output_tensors": count,
        }
        for index, (name, start, end, cost, count) in enumerate(
            zip(graph.layers, starts, ends, costs, tensors, strict=True)
        )
    ]


def _skips(sent: Sequence[Sequence[int]], work: EntryWork) -> list[dict[str, Any]]:
    """Return the values that cross more than one boundary in a row: made in `first`, last used in `last`."""
    found = []
    begun: dict[int, int] = {}
    for boundary, values in enumerate((*sent, ())):
        for value in sorted(set(begun) - set(values)):
            first = begun.pop(value)
            if boundary - first > 1:
                found.append({"first": first, "last": boundary, "bytes": work.value_bytes(value)})
        for value in values:
            begun.setdefault(value, boundary)
    return sorted(found, key=lambda skip: (skip["first"], skip["last"]))


def _tied(graph: Graph) -> list[dict[str, Any]]:
    """Return the parameters that more than one layer uses."""
    ends = (*graph.entries[0].boundaries, len(graph.entries[0].nodes))
    layers: dict[int, list[int]] = {}
    layer = 0
    for number, keys in enumerate(flow_of(graph, graph.entries[0]).keys):
        while number >= ends[layer]:
            layer += 1
        for kind, row in keys:
            if kind == "p" and layer not in layers.setdefault(row, []):
                layers[row].append(layer)
    return [
        {"names": list(graph.parameters[row].names), "layers": used}
        for row, used in sorted(layers.items())
        if len(used) > 1
    ]


def _stages(graph: Graph, name: bytes, costs: Sequence[LayerCost], stages: int) -> list[dict[str, Any]]:
    """Return how equal machines would share the model."""
    from partition.plan.solver import solve  # needs numpy, which the rest of this file does not

    try:
        offers = [(f"{n:04}", EXAMPLE.flops_per_second, EXAMPLE.memory_bytes) for n in range(stages)]
        split = solve(
            Problem(
                tuple(costs),
                uniform_peers(costs, offers),
                microbatches=1_000_000,
                default_link=Link(EXAMPLE_LINK_BYTES_PER_SECOND, 0),
                constraints=Constraints(stages=stages, replicas=1),
                hides_links=True,
            )
        )
        cut = cut_layers(graph, name, split.ranges)
    except (Infeasible, ValueError) as error:
        raise RunFailed(f"--stages {stages}: {error}", f"at most {len(graph.layers)} stages") from None
    found = []
    for stage, (first, last) in zip(cut, split.ranges, strict=True):
        layers = costs[first:last]
        entry = stage.entries[0]
        found.append(
            {
                "index": stage.index,
                "first": first,
                "last": last - 1,
                "parameter_bytes": sum(layer.parameter_bytes for layer in layers),
                "forward_flops": sum(layer.forward_flops for layer in layers),
                "memory_bytes": stage_memory_bytes(layers, stages - stage.index),
                "seconds": stage_nanoseconds(layers, EXAMPLE.flops_per_second) / NANOSECONDS,
                "transfer_seconds": 0.0
                if stage.is_last
                else transfer_nanoseconds(layers[-1], EXAMPLE_LINK_BYTES_PER_SECOND) / NANOSECONDS,
                "output_bytes": 0 if stage.is_last else layers[-1].output_bytes,
                "output_tensors": 0 if stage.is_last else len(entry.outputs),
                "gradient_tensors": len(entry.backward_outputs),
                "tied": len(stage.tied),
            }
        )
    return found


# Lines


def count_text(count: float, unit: str = "") -> str:
    """Return `1.3 G`, in powers of ten; a whole number below a thousand."""
    for prefix in ("", "k", "M", "G", "T"):
        if count < 1000:
            number = f"{count:.0f}" if not prefix else f"{count:.1f}"
            return f"{number} {prefix}{unit}".rstrip()
        count /= 1000
    return f"{count:.1f} P{unit}"


def short_name(name: str) -> str:
    """Return the end of a long module path, which is the part that distinguishes modules."""
    return name if len(name) <= NAME_WIDTH_MAX else "..." + name[3 - NAME_WIDTH_MAX :]


def portrait_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the screen of a `peerloom/model/1` document."""
    parameters = document["parameters"]
    values = document["values_bytes"]
    values_text = (
        f"first values {bytes_text(values)} beside it" if values else "first values drawn from a seed"
    )
    extra = "".join(
        f", {parameters[key]} {word}"
        for key, word in (("frozen", "frozen"), ("statistics", "batch statistics"))
        if parameters[key]
    )
    lines = [
        f"{document['name'] or 'model'}  {document['hash'][:16]}  "
        f"graph {bytes_text(document['graph_bytes'])}, {values_text}",
        labelled(
            "parameters",
            f"{count_text(parameters['count'])} in {parameters['tensors']} tensors, "
            f"{bytes_text(parameters['bytes'])}{extra}",
        ),
        labelled(
            "sizes",
            ", ".join(
                f"{size['name']} {size['shown']} ({size['minimum']} to {size['maximum']})"
                for size in document["sizes"]
            ),
        ),
        *(labelled(entry["name"], _entry_text(entry)) for entry in document["entries"]),
        *(
            labelled("tied", f"{' = '.join(tie['names'])}: layers {', '.join(map(str, tie['layers']))}")
            for tie in document["tied"]
        ),
        "",
        *_layer_lines(document["layers"]),
    ]
    if document["stages"]:
        lines += ["", *_stage_lines(document["stages"])]
    return lines


def _entry_text(entry: Mapping[str, Any]) -> str:
    ports = ", ".join(
        f"{port['name']} {port['dtype']} ({', '.join(map(str, port['shape']))})"
        for port in (*entry["inputs"], *entry["labels"])
    )
    outputs = f"{entry['outputs']} output{'s' if entry['outputs'] != 1 else ''}"
    made = ["loss", *entry["metrics"]] if entry["loss"] else [outputs]
    states = f", {entry['states']} states" if entry["states"] else ""
    return f"{ports} -> {', '.join(made)}; {counted(entry['nodes'], 'node')}{states}"


def _bar(share: float) -> str:
    return "#" * round(BAR_WIDTH * share)


def _sends_text(row: Mapping[str, Any]) -> str:
    if not row["output_bytes"]:
        return "-"
    count = row["output_tensors"]
    return bytes_text(row["output_bytes"]) + (f" in {count} tensors" if count > 1 else "")


def _layer_lines(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    most = max(1, *(layer["forward_flops"] for layer in layers), 1)
    rows = [
        (
            str(layer["index"]),
            short_name(layer["name"]),
            bytes_text(layer["parameter_bytes"]),
            f"{count_text(layer['forward_flops'], 'FLOP'):<11}{_bar(layer['forward_flops'] / most)}",
            bytes_text(layer["saved_bytes"]),
            _sends_text(layer),
        )
        for layer in layers
    ]
    total = (
        "",
        "all",
        bytes_text(sum(layer["parameter_bytes"] for layer in layers)),
        count_text(sum(layer["forward_flops"] for layer in layers), "FLOP"),
        bytes_text(sum(layer["saved_bytes"] for layer in layers)),
        "",
    )
    return table(("LAYER", "NAME", "PARAMETERS", "FORWARD", "KEPT", "SENDS"), [*rows, total])


def _stage_lines(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the stages' lines. `<` marks the slowest part of the pipeline: the computing or the sending of
    one stage."""
    longest = max(stage["seconds"] for stage in stages) or 1.0
    slowest = max(max(stage["seconds"], stage["transfer_seconds"]) for stage in stages)
    rows = [
        (
            str(stage["index"] + 1),
            f"{stage['first']}-{stage['last']}" if stage["last"] > stage["first"] else str(stage["first"]),
            bytes_text(stage["parameter_bytes"]),
            f"{seconds_text(stage['seconds']):<9}{_bar(stage['seconds'] / longest)}"
            + (" <" if stage["seconds"] == slowest else ""),
            bytes_text(stage["memory_bytes"]),
            _sends_text(stage)
            + (f", {seconds_text(stage['transfer_seconds'])}" if stage["output_bytes"] else "")
            + (" <" if stage["transfer_seconds"] == slowest else ""),
        )
        for stage in stages
    ]
    machine = (
        f"each a machine of {count_text(EXAMPLE.flops_per_second, 'FLOP/s')}, "
        f"over links of {8 * EXAMPLE_LINK_BYTES_PER_SECOND / 1e9:.0f} Gbit/s:"
    )
    header = ("STAGE", "LAYERS", "PARAMETERS", "TIME/MICROBATCH", "MEMORY", "SENDS")
    return [f"{counted(len(stages), 'stage')}, {machine}", *table(header, rows)]
