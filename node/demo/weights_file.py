"""A check that a safetensors file contains all of a model, by its header alone (the safetensors format's
README).

It uses only the standard library, to show that the file can be read without any of our code.
"""

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from node.errors import RunFailed

HEADER_BYTES_MAX = 100_000_000
"""The format's own limit."""
_LENGTH = struct.Struct("<Q")
_ITEM_BYTES = {"F32": 4, "F64": 8}


def read_header(path: Path) -> dict[str, Any]:
    """Return `{"dtype", "shape", "data_offsets"}` for each tensor's name, checked against the file's size.

    Raises:
        RunFailed: it is not a safetensors file, or not a complete one.
    """
    with open(path, "rb") as file:
        start = file.read(_LENGTH.size)
        (length,) = _LENGTH.unpack(start) if len(start) == _LENGTH.size else (HEADER_BYTES_MAX + 1,)
        text = file.read(length) if length <= HEADER_BYTES_MAX else b""
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        end = max((row["data_offsets"][1] for row in header.values()), default=0)
    except (ValueError, AttributeError, TypeError, KeyError, IndexError):
        raise RunFailed(f"{path} is not a safetensors file") from None
    if path.stat().st_size != _LENGTH.size + length + end:
        raise RunFailed(f"{path} is not complete: according to its header it has {end} bytes of values")
    return header


def check_weights(path: Path, expected: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of parameter values in the file, which must contain exactly the `expected` names and
    shapes.

    Raises:
        RunFailed: with the missing or unexpected tensors.
    """
    header = read_header(path)
    if missing := sorted(set(expected) - set(header)):
        raise RunFailed(f"{path} lacks {', '.join(missing)}")
    for name, shape in expected.items():
        row = header[name]
        first, last = row["data_offsets"]
        if tuple(row["shape"]) != shape or last - first != prod(shape) * _ITEM_BYTES.get(row["dtype"], 0):
            raise RunFailed(f"{path}: {name} is {row['dtype']} {row['shape']}, not {list(shape)} numbers")
    return sum(prod(shape) for shape in expected.values())
