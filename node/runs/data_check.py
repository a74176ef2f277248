"""Checks, before planning, that all values in the data are valid for the model, and names the first invalid
sample.

`node.runs.manifest_builder.bind_data` checks shapes and number types. If the graph does not show the allowed
range of an input (`partition.model.ranges`), an invalid value is only found by the stage that cannot use it,
which ends the run with the reason.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from node.content.datasets import Array, Dataset
from node.errors import UsageError
from node.placement.admission import train_entry
from node.runs.manifest_builder import columns_of
from partition.model.graph import Graph
from partition.model.ranges import Bound, bounds

CHUNK_BYTES = 16 * 1024 * 1024
"""Bytes checked together. The check briefly needs the same amount again, and memory for masks."""


def check_values(
    graph: Graph,
    dataset: Dataset,
    sizes: tuple[int, ...],
    name: str,
    where: str,
    origins: Mapping[str, Array] = MappingProxyType({}),
) -> None:
    """Raise UsageError for the first value that the model cannot take, with its file, sample, position and
    value.

    `name` is the name of RUN.toml in errors, and `where` that of the data. `sizes` are the values of the
    graph's symbols. `origins` has, for each part, the samples' numbers in the original data.
    """
    entry = train_entry(graph)
    found = bounds(graph, entry, sizes)
    inputs, labels = columns_of(graph, dataset, name)
    ports = list(enumerate(zip((*inputs, *labels), (*entry.inputs, *entry.labels), strict=True)))
    for part, arrays in dataset.parts.items():
        for number, (what, port) in ports:
            origin = origins.get(part)
            file = where if dataset.window or origin is not None else f"{where}/{part}.npz"
            held_out = " held out" if dataset.window and part != "train" else ""
            kind = graph.types[port.type].dtype
            _check(arrays[what], kind, found.get(number), f"{name}: {file}: {what}", held_out, origin)


def _check(
    array: Array, dtype: str, bound: Bound | None, what: str, held_out: str, origin: Array | None
) -> None:
    if array.dtype.kind == "f" and not dtype.startswith("float"):
        raise UsageError(f"{what} are {array.dtype}; the model takes {dtype}")
    step = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    for first in range(0, len(array), step):
        chunk = array[first : first + step]
        wrong, want = _wrong(chunk, dtype, bound)
        if wrong is None or not wrong.any():
            continue
        place = np.unravel_index(int(wrong.argmax()), chunk.shape)
        inner = f" at {[int(side) for side in place[1:]]}" if len(place) > 1 else ""
        row = first + int(place[0])
        # The sample's number in the original file; samples are assigned to parts at random.
        sample = row if origin is None else f"{origin[row]} (from 0)"
        raise UsageError(
            f"{what} of sample {sample}{held_out}{inner} is {chunk[place]}; {want}",
            "correct the data, or leave that sample out",
        )


def _wrong(chunk: Array, dtype: str, bound: Bound | None) -> tuple[Array | None, str]:
    """Return a mask of the values that the model cannot take (None if all are valid), and a text about valid
    values."""
    if dtype.startswith("float"):
        if chunk.dtype.kind != "f":
            return None, ""
        with np.errstate(over="ignore"):
            return ~np.isfinite(chunk.astype(dtype)), f"want finite numbers that fit {dtype}"
    if dtype == "bool":
        return None, ""
    if bound is None:
        limits = np.iinfo(dtype)
        return (chunk < limits.min) | (chunk > limits.max), f"want numbers that fit {dtype}"
    wrong = (chunk < 0) | (chunk >= bound.count)
    if bound.ignored is not None:
        wrong &= chunk != bound.ignored
    place = f" of {bound.owner}" if bound.owner else ""
    operator = bound.operator.removeprefix("aten.").partition(".")[0]
    return wrong, f"the model takes 0 to {bound.count - 1} ({operator}{place})"
