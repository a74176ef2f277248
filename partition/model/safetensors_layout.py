"""The safetensors file beside a graph, as a function of the graph alone: the place of each parameter's bytes.

A graph says which bytes the file has (`StoredValues`), so the file's header follows from it, byte for byte. A
reader compares the beginning of the file with the header it must have; nothing of it is parsed. Not here:
reading and writing. `partition.capture.weights` writes, and a node sends and keeps ranges.
"""

import json
from typing import Any

from blake3 import blake3

from crypto.errors import RemoteProtocolError
from partition.model.graph import DataType, Graph, Parameter, Size, StoredValues

SAFETENSORS_TYPES: dict[DataType, str] = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The types' names in safetensors."""
_LENGTH_BYTES = 8
_ALIGNMENT = 8
"""The data begins at a multiple of this, as safetensors' own writer does."""


def stored_parameters(graph: Graph) -> tuple[Parameter, ...]:
    """Return the parameters whose first values are in the file, in the order of their offsets.

    Raises:
        RemoteProtocolError: ranges that overlap or leave gaps.
    """
    found = [row for row in graph.parameters if isinstance(row.source, StoredValues)]
    found.sort(key=_offset)
    end = 0
    for row in found:
        if _offset(row) != end:
            raise RemoteProtocolError(f"the values of {row.names[0]} do not follow those before them")
        end += _range(row).length
    return tuple(found)


def file_header(graph: Graph) -> bytes:
    """Return the bytes before the data. Raises RemoteProtocolError: ranges that overlap or leave gaps."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for row in stored_parameters(graph):
        stored = _range(row)
        table[row.names[0]] = {
            "dtype": SAFETENSORS_TYPES[row.type.dtype],
            "shape": [side for side in row.type.shape if not isinstance(side, Size)],
            "data_offsets": [stored.offset, stored.offset + stored.length],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def file_bytes(graph: Graph) -> int:
    """Return the length of the file. Raises RemoteProtocolError: ranges that overlap or leave gaps."""
    return len(file_header(graph)) + sum(_range(row).length for row in stored_parameters(graph))


def check_range(stored: StoredValues, data: bytes | memoryview) -> None:
    """Check a range. Raises RemoteProtocolError: these are not the bytes that the graph says."""
    if len(data) != stored.length:
        raise RemoteProtocolError(f"{len(data)} bytes of stored values where {stored.length} belong")
    if blake3(data).digest() != stored.digest:
        raise RemoteProtocolError("stored values with another digest than the graph says")


def check_file(graph: Graph, beginning: bytes, length: int) -> None:
    """Check that a file of `length` bytes with this beginning can be the one beside `graph`; ranges come
    later.

    `beginning` has the length of `file_header`. Raises RemoteProtocolError: truncated, or another header.
    """
    header = file_header(graph)
    if length != file_bytes(graph):
        raise RemoteProtocolError(f"a file of {length} bytes where {file_bytes(graph)} belong")
    if beginning != header:
        raise RemoteProtocolError("the safetensors header is not the one of this graph")


def _range(row: Parameter) -> StoredValues:
    if not isinstance(row.source, StoredValues):
        raise RemoteProtocolError(f"the values of {row.names[0]} are not stored")
    return row.source


def _offset(row: Parameter) -> int:
    return _range(row).offset
