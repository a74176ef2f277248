"""A model's state dict as a safetensors file, written piece by piece, so the whole model is never in memory.

The graph defines its content: parameters and statistics under all their names, named constants, and how many
micro-batches each batch norm has seen. The caller provides the tensor values. The safetensors package is not
used, because it needs whole arrays, and numpy has no bfloat16.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

from partition.model.graph import ITEM_BYTES, Graph
from partition.model.safetensors_layout import SAFETENSORS_TYPES
from partition.model.sizes import shape_of

TURN_BYTES = 64 << 20
"""`writing` yields after this many bytes, so that its caller can leave the worker thread in between."""
_ITEM_BYTES = {name: ITEM_BYTES[dtype] for dtype, name in SAFETENSORS_TYPES.items()}
_ALIGNMENT = 8
_HALF = ".half"

Read = Callable[[int], Iterable[bytes | memoryview]]
"""Returns the bytes of a row of `Graph.parameters`, in pieces."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a state dict. `dtype` is safetensors' name for its type. The bytes come from a row of
    `Graph.parameters`, or are given."""

    dtype: str
    shape: tuple[int, ...]
    source: int | bytes

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


def state_dict(graph: Graph, microbatches: int) -> dict[str, TensorEntry]:
    """Return the state dict of a whole model after this many micro-batches."""
    entries: dict[str, TensorEntry] = {}
    for number, row in enumerate(graph.parameters):
        entry = TensorEntry(SAFETENSORS_TYPES[row.type.dtype], shape_of(row.type, ()), number)
        entries |= dict.fromkeys(row.names, entry)
    for constant in graph.constants:
        kind = constant.type
        entry = TensorEntry(SAFETENSORS_TYPES[kind.dtype], shape_of(kind, ()), constant.data)
        entries |= dict.fromkeys(constant.names, entry)
    for name in graph.counters:
        entries[name] = TensorEntry(SAFETENSORS_TYPES["int64"], (), microbatches.to_bytes(8, "little"))
    return entries


def file_metadata(run: bytes, model: str) -> dict[str, str]:
    """Return the metadata for the file of a run's result."""
    return {"format": "pt", "peerloom.run": run.hex(), "peerloom.model": model}


def file_pieces(
    entries: Mapping[str, TensorEntry], metadata: Mapping[str, str], read: Read
) -> Iterator[bytes | memoryview]:
    """Yield the contents of a safetensors file: the length of a JSON header, the header, the data (as in the
    format's README)."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    order = file_order(entries)
    offset = 0
    for name in order:
        entry = entries[name]
        end = offset + entry.size_bytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        source = entries[name].source
        if isinstance(source, bytes):
            yield source
        else:
            yield from read(source)


def file_order(entries: Mapping[str, TensorEntry]) -> list[str]:
    """Return the names of tensors in file order: the types with the most bytes per value first, so that all
    are aligned."""
    return sorted(entries, key=lambda name: (-_ITEM_BYTES[entries[name].dtype], name))


def file_bytes(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> int:
    """Return the length of the file that `file_pieces` yields."""
    header = next(iter(file_pieces(entries, metadata, lambda _: ())))
    return len(header) + sum(entry.size_bytes for entry in entries.values())


def writing(path: Path, pieces: Iterable[bytes | memoryview]) -> Iterator[int | None]:
    """Write a file that gets its name only when it is complete. Yield None after every `TURN_BYTES`, and
    finally its length.

    Raises OSError.
    """
    half = path.with_name(path.name + _HALF)
    size, turn = 0, TURN_BYTES
    try:
        with half.open("wb") as file:
            for piece in pieces:
                size += file.write(piece)
                if size >= turn:
                    turn = size + TURN_BYTES
                    yield None
        half.replace(path)
    except BaseException:
        with suppress(OSError):  # the error being raised already explains the failure
            half.unlink(missing_ok=True)
        raise
    yield size
