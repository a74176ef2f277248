"""A graph with the values of a run's state dict as initial values: the form in which a checkpoint is served.

The graph alone determines the layout of a state dict's file (`node.content.safetensors`), so the file's
header is not parsed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from blake3 import blake3
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from node.content.safetensors import file_order, state_dict
from partition.model.graph import Graph, StoredValues
from partition.model.safetensors_layout import file_header

_LENGTH_BYTES = 8
_CHUNK_BYTES = 1 << 22


def with_values(graph: Graph, state: Path, target: Path) -> Graph:
    """Return a graph that has the parameters in a run's file `state` as initial values, and write the file of
    those values. Raises RemoteProtocolError if `state` is not a file of this graph; OSError."""
    with state.open("rb") as file:
        places = _places(graph, file, state.stat().st_size)
        offset, rows = 0, []
        for number, row in enumerate(graph.parameters):
            digest = blake3()
            for data in _read(file, *places[number]):
                digest.update(data)
            length = places[number][1]
            rows.append(replace(row, source=StoredValues(offset, length, digest.digest())))
            offset += length
        found = replace(graph, parameters=tuple(rows))
        with target.open("wb") as out:
            out.write(file_header(found))
            for number in range(len(rows)):
                for data in _read(file, *places[number]):
                    out.write(data)
    return found


def _places(graph: Graph, file: IO[bytes], size: int) -> dict[int, tuple[int, int]]:
    """Return the offset and length of each row of the parameter table."""
    begin = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
    entries = state_dict(graph, 0)
    found: dict[int, tuple[int, int]] = {}
    for name in file_order(entries):
        entry = entries[name]
        if isinstance(entry.source, int):
            found.setdefault(entry.source, (begin, entry.size_bytes))
        begin += entry.size_bytes
    if begin != size:
        raise RemoteProtocolError(f"a state of {size} bytes, but its model's has {begin} bytes")
    return found


def _read(file: IO[bytes], begin: int, length: int) -> Iterator[bytes]:
    file.seek(begin)
    while length:
        data = file.read(min(length, _CHUNK_BYTES))
        if not data:
            raise RemoteProtocolError("a state that ends too soon")
        length -= len(data)
        yield data
