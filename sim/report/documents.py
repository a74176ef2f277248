"""Events as JSON and as lines of text. Peers appear with their short names (n17), other bytes in
hexadecimal."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from crypto.contact import Address
from crypto.identity import PeerId
from sim.observers import Observation

Name = Callable[[PeerId], str]
_BYTES_SHOWN_MAX = 32
"""Maximum number of bytes shown: all of a hash, but only the beginning of a value or a signature."""
_ADDRESSES_KEPT_MAX = 4_096
_FIELD_NAMES: dict[type, tuple[str, ...]] = {}
"""The field names of each type of event seen so far; there are only a few types."""
_HEX_SHOWN_MAX = 12
_LINE_LENGTH_MAX = 160


class ShortNames:
    """Short names of all peers, each looked up once. Bytes that are not a peer id become hexadecimal."""

    def __init__(self, name: Name, peers: Mapping[PeerId, int]) -> None:
        self._name = name
        self._peers = peers
        self._known: dict[bytes, str] = {}

    def text(self, data: bytes) -> str:
        if data not in self._peers:
            return data.hex() if len(data) <= _BYTES_SHOWN_MAX else data[:8].hex() + f"... {len(data)} bytes"
        if data not in self._known:
            self._known[data] = self._name(PeerId(data))
        return self._known[data]


def event_document(observed: Observation, names: ShortNames) -> dict[str, Any]:
    """Return an event as a dict: `time_seconds`, `peer` (None: the whole world), `kind`, and the event's own
    fields. A field with one of these three names is prefixed with the name of the event."""
    event = observed.event
    document: dict[str, Any] = {
        "time_seconds": round(observed.time, 6),
        "peer": names.text(observed.peer) if observed.peer is not None else None,
        "kind": type(event).__name__,
    }
    for name, value in _fields(event):
        document[f"of_{name}" if name in document else name] = _plain(value, names)
    return document


def event_line(observed: Observation, names: ShortNames) -> str:
    """Return an event as text: `  412.310 s  n17     MemberDown n4  accuser n9  reason no ack for 1.1 s`."""
    event = observed.event
    peer = names.text(observed.peer) if observed.peer is not None else "all"
    parts = [f"{name} {_short(value, names)}" for name, value in _fields(event) if value not in ("", ())]
    line = f"{observed.time:>11.3f} s  {peer:<6}  {type(event).__name__}  {'  '.join(parts)}".rstrip()
    return line if len(line) <= _LINE_LENGTH_MAX else line[: _LINE_LENGTH_MAX - 3] + "..."


def _fields(event: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(event, name)) for name in _field_names(type(event))] or [("text", str(event))]


def _field_names(kind: type) -> tuple[str, ...]:
    names = _FIELD_NAMES.get(kind)
    if names is None:
        names = ()
        if issubclass(kind, msgspec.Struct):
            names = kind.__struct_fields__
        elif dataclasses.is_dataclass(kind):
            names = tuple(field.name for field in dataclasses.fields(kind))
        _FIELD_NAMES[kind] = names
    return names


def _plain(value: Any, names: ShortNames) -> Any:
    # The most common types come first, because this runs for every field of every event.
    if type(value) in (int, str, bool, type(None)):
        return value
    match value:
        case bytes():
            return names.text(value)
        case Address():
            return _address_text(value)
        case enum.Enum():
            return value.value
        case float():
            return round(value, 6) if value - value == 0 else None  # JSON has neither inf nor nan
        case int() | str():
            return value
        case tuple() | list() | set() | frozenset():
            items = [_plain(item, names) for item in value]
            return sorted(items, key=str) if isinstance(value, set | frozenset) else items
        case Mapping():
            return {str(_plain(key, names)): _plain(item, names) for key, item in value.items()}
        case _:
            return {name: _plain(item, names) for name, item in _fields(value)}


@lru_cache(_ADDRESSES_KEPT_MAX)
def _address_text(address: Address) -> str:
    return str(address.of(None))  # the peer is shown in a separate field


def _short(value: Any, names: ShortNames) -> str:
    match _plain(value, names):
        case dict() | [dict(), *_] as many:
            return f"{len(many)} of them"
        case list() as items:
            shown = " ".join(_cut(str(item)) for item in items[:4])
            return f"[{shown}{f' and {len(items) - 4} more' if len(items) > 4 else ''}]"
        case float() as number:
            return f"{number:g}"
        case str() as text if isinstance(value, bytes):
            return _cut(text)
        case other:
            return str(other)


def _cut(text: str) -> str:
    hexadecimal = len(text) > _HEX_SHOWN_MAX and all(letter in "0123456789abcdef" for letter in text)
    return text[:8] + "..." if hexadecimal else text
