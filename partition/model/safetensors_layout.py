"""The layout of the safetensors file that accompanies a graph: the position of each parameter's bytes follows
from the graph.

A graph says which bytes the file has (`StoredValues`), so the file's header follows from it, byte for byte. A
reader compares the beginning of the file with the header it must have; nothing of it is parsed. Not here:
reading and writing. `partition.capture.weights` writes, and a node sends and stores ranges.
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
"""The data begins at a multiple of this, as in safetensors' own writer."""


def stored_parameters(graph: Graph) -> tuple[Parameter, ...]:
    """Return the parameters whose first values are in the file, in the order of their offsets.

    Raises:
        RemoteProtocolError: ranges overlap or leave gaps.
    """
    found = [row for row in graph.parameters if isinstance(row.source, StoredValues)]
    found.sort(key=_offset)
    end = 0
    for row in found:
        if _offset(row) != end:
            raise RemoteProtocolError(
                f"the values of {row.names[0]} do not directly follow the previous ones"
            )
        end += _range(row).length
    return tuple(found)


def file_header(graph: Graph) -> bytes:
    """Return the bytes before the data. Raises RemoteProtocolError if ranges overlap or leave gaps."""
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
    """Return the length of the file. Raises RemoteProtocolError if ranges overlap or leave gaps."""
    return len(file_header(graph)) + sum(_range(row).length for row in stored_parameters(graph))


def check_range(stored: StoredValues, data: bytes | memoryview) -> None:
    """Check a range. Raises RemoteProtocolError if these are not the bytes that the graph says."""
    if len(data) != stored.length:
        raise RemoteProtocolError(f"{len(data)} bytes of stored values, but {stored.length} are expected")
    if blake3(data).digest() != stored.digest:
        raise RemoteProtocolError("the digest of stored values differs from the graph's")


def check_file(graph: Graph, beginning: bytes, length: int) -> None:
    """Check that a file of `length` bytes with this beginning can be the one for `graph`; its ranges are
    checked later.

    `beginning` has the length of `file_header`. Raises RemoteProtocolError if the file is truncated or has a
    different header.
    """
    header = file_header(graph)
    if length != file_bytes(graph):
        raise RemoteProtocolError(f"a file of {length} bytes, but {file_bytes(graph)} are expected")
    if beginning != header:
        raise RemoteProtocolError("the safetensors header is not the one for this graph")


def _range(row: Parameter) -> StoredValues:
    if not isinstance(row.source, StoredValues):
        raise RemoteProtocolError(f"the values of {row.names[0]} are not stored")
    return row.source


def _offset(row: Parameter) -> int:
    return _range(row).offset
