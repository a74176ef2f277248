"""Converts values of the cores (messages, plans, addresses, generators) to MessagePack and back, without any
code.

A value that is not plain becomes a list: a tag, then its parts. Types have full names, which are looked up
among the loaded modules of this program, and only dataclasses, structs and enums are made, so an unknown
person's file cannot run code. Tensors (buffers and arrays), and fields that a type names in `UNREAD`, are
stored only as their lengths. They are read back as zeros, which no core reads.
"""

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from random import Random
from types import FunctionType
from typing import Any

import msgspec
import numpy as np

PACKAGES = ("crypto", "dht", "gossip", "partition", "node")
"""The packages that define types of values."""
DEPTH_MAX = 64
PAYLOAD_BYTES_MAX = 1 << 32
"""Maximum length of a buffer, as for frames; longer ones are rejected."""
INTEGER_BITS_MAX = 64

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder().decode


class Unrecordable(Exception):
    """A value that cannot be written, or a file that names a type unknown to this program."""


Refer = Callable[[object], list[Any] | None]
"""Returns a numbered reference to a core, or to an object that a core asks; None for other values."""
Resolve = Callable[[list[Any]], object]


def _no_reference(value: object) -> list[Any] | None:
    del value
    return None


def written(value: Any, refer: Refer = _no_reference, depth: int = 0) -> Any:
    """Return a value in MessagePack types. Raises Unrecordable."""
    if value is None or isinstance(value, bool | float | str | bytes):
        return value.value if isinstance(value, Enum) else value
    if depth > DEPTH_MAX:
        raise Unrecordable("a value that is nested too deeply")
    referred = refer(value)
    if referred is not None:
        return referred
    if isinstance(value, Enum):
        return ["enum", _name(type(value)), value.name]
    if isinstance(value, int):
        return value if value.bit_length() < INTEGER_BITS_MAX else ["int", str(value)]
    if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct):
        kind: Any = type(value)
        found = [written(each, refer, depth + 1) for each in _looked_at(value, kind)]
        return ["of", _name(kind), *found]
    if isinstance(value, memoryview | bytearray):
        return ["payload", len(value) * value.itemsize if isinstance(value, memoryview) else len(value)]
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.str, list(value.shape)]
    if isinstance(value, np.generic):
        return written(value.item(), refer, depth)
    if isinstance(value, Random):
        version, state, gauss = value.getstate()
        return ["random", version, list(state), gauss]
    return _collection(value, refer, depth)


def _looked_at(value: Any, kind: Any) -> Iterator[Any]:
    """Yield the parts of a value; for parts that no core reads, only their lengths."""
    unread = getattr(kind, "UNREAD", ())
    for name in fields(kind):
        found = getattr(value, name)
        yield bytearray(len(found)) if name in unread else found


def _collection(value: Any, refer: Refer, depth: int) -> Any:
    if isinstance(value, dict):
        pairs = [[written(each, refer, depth + 1) for each in pair] for pair in value.items()]
        return ["dict", *pairs]
    if isinstance(value, set | frozenset):
        items = sorted((written(each, refer, depth + 1) for each in value), key=encode)
        return ["set" if isinstance(value, set) else "frozenset", *items]
    if isinstance(value, Collection):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(written(each, refer, depth + 1) for each in value)]
    raise Unrecordable(f"a {type(value).__qualname__}")


def read(value: Any, resolve: Resolve) -> Any:
    """Return the value that `written` has written. Raises Unrecordable."""
    if not isinstance(value, list):
        return value
    try:
        tag, rest = value[0], value[1:]
        match tag:
            case "core" | "asked" | "handed":
                return resolve(value)
            case "tuple" | "list" | "set" | "frozenset":
                return _MAKE[tag](read(each, resolve) for each in rest)
            case "dict":
                return {read(key, resolve): read(each, resolve) for key, each in rest}
            case "of":
                kind = find_type(rest[0])
                found = [read(each, resolve) for each in rest[1:]]
                return kind(**dict(zip(fields(kind), found, strict=True)))
            case "enum":
                return find_type(rest[0])[rest[1]]
            case "int":
                return int(rest[0])
            case "payload":
                return memoryview(bytes(_bounded(rest[0]))).toreadonly()
            case "array":
                _bounded(int(np.prod(rest[1])) * np.dtype(rest[0]).itemsize)
                return np.zeros(rest[1], np.dtype(rest[0]))
            case "random":
                made = Random()  # noqa: S311 - choices, not keys
                made.setstate((rest[0], tuple(rest[1]), rest[2]))
                return made
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Unrecordable(f"a value that this version cannot construct: {str(error)[:120]}") from None
    raise Unrecordable(f"a value of the unknown kind {str(tag)[:40]!r}")


_MAKE: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}


def _bounded(length: int) -> int:
    if not 0 <= length <= PAYLOAD_BYTES_MAX:
        raise Unrecordable(f"a buffer of {length} bytes")
    return length


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def find_type(name: str) -> Any:
    """Return the dataclass, struct or enum of this program that a file names. Raises Unrecordable."""
    found = find_class(name)
    if not (dataclasses.is_dataclass(found) or issubclass(found, msgspec.Struct | Enum)):
        raise Unrecordable(f"{name[:80]} is not a type of value")
    return found


def find_class(name: str) -> type[Any]:
    """Return a loaded class of this program. Raises Unrecordable."""
    place, _, path = name.partition(":")
    found: Any = sys.modules.get(place) if place.split(".")[0] in PACKAGES else None
    for part in path.split("."):
        found = None if isinstance(found, FunctionType) else getattr(found, part, None)
    if not isinstance(found, type) or _name(found) != name:
        raise Unrecordable(f"this version does not have {name[:80]}")
    return found


_fields: dict[Any, tuple[str, ...]] = {}


def fields(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass or a struct."""
    names = _fields.get(kind)
    if names is None:
        if issubclass(kind, msgspec.Struct):
            names = tuple(kind.__struct_fields__)
        else:
            names = tuple(each.name for each in dataclasses.fields(kind) if each.init)
        _fields[kind] = names
    return names
