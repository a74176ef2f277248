"""Messages to bytes and back: frozen `msgspec` structs in MessagePack, validated while decoding.

Signatures always cover the exact bytes that were sent, so nothing depends on two encoders agreeing. All
hostile input passes through decoding: wrong types, missing fields, broken MessagePack and oversized input
raise `RemoteProtocolError` before any field is used. Text from peers is stripped of control characters,
escape sequences and direction marks. So it cannot control a terminal, no matter where it is shown (screens,
logs, files, the environment of a command).
"""

import unicodedata
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from crypto.errors import RemoteProtocolError

T = TypeVar("T")

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
"""Encode one struct (or builtin value) as MessagePack."""

_decoders: dict[Any, tuple[msgspec.msgpack.Decoder[Any], bool]] = {}
_text_fields: dict[type, tuple[str, ...]] = {}
_UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of characters that act as instructions: control characters, direction marks, line
breaks."""


def clean_text(text: str) -> str:
    """Return a peer's text made safe to print: each unprintable character becomes `?`, each line break a
    space."""
    if text.isprintable():
        return text
    return "".join(
        letter if unicodedata.category(letter) not in _UNSHOWN else " " if letter.isspace() else "?"
        for letter in text
    )


def decode(data: bytes | memoryview, kind: type[T] | Any, *, bytes_max: int, cleans_text: bool = True) -> T:
    """Decode `data` as `kind`, a struct or a union of tagged structs.

    Text whose type has no pattern is cleaned. `cleans_text=False` disables this for this node's own text,
    which must come back unchanged.

    Raises:
        RemoteProtocolError: longer than `bytes_max`, not MessagePack, or not a valid `kind`.
    """
    if len(data) > bytes_max:
        raise RemoteProtocolError(f"message of {len(data)} bytes, at most {bytes_max} allowed")
    # outside the try: a type for which no decoder can be built is our bug
    decoder, holds_text = _decoder(kind)
    try:
        message: T = decoder.decode(data)
        return _cleaned(message) if holds_text and cleans_text else message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise RemoteProtocolError(f"not a valid message: {clean_text(str(error))}") from None


def _decoder(kind: Any) -> tuple[msgspec.msgpack.Decoder[Any], bool]:
    # Building a decoder costs far more than using it. `kind` is always one of the program's own message
    # types, so the cache stays small.
    if kind not in _decoders:
        holds_text = _holds_text(inspect.type_info(kind), set())
        _decoders[kind] = msgspec.msgpack.Decoder(kind), holds_text
    return _decoders[kind]


def _holds_text(kind: inspect.Type, above: set[type]) -> bool:
    """Return whether the type may hold text without a pattern; `above` are the structs that contain it."""
    match kind:
        case inspect.Metadata(type=inner):
            return _holds_text(inner, above)
        case inspect.StrType():
            return kind.pattern is None
        case inspect.UnionType(types=types):
            return any(_holds_text(each, above) for each in types)
        case inspect.DictType(key_type=key, value_type=value):
            return _holds_text(key, above) or _holds_text(value, above)
        case inspect.TupleType(item_types=types):
            return any(_holds_text(each, above) for each in types)
        case inspect.CollectionType(item_type=item):
            return _holds_text(item, above)
        case inspect.StructType(cls=struct):
            # The result for a struct that contains itself is not known yet, so it counts as a struct with
            # text here.
            return struct in above or bool(_fields_with_text(struct, above))
        case inspect.AnyType():
            return True
        case _:
            return False


def _fields_with_text(struct: type, above: set[type]) -> tuple[str, ...]:
    if struct not in _text_fields:
        kind = inspect.type_info(struct)
        assert isinstance(kind, inspect.StructType)
        inner = above | {struct}
        _text_fields[struct] = tuple(each.name for each in kind.fields if _holds_text(each.type, inner))
    return _text_fields[struct]


def _cleaned(value: Any) -> Any:
    """Return the value with its text cleaned; structs are changed in place, since they are not shared yet."""
    kind = type(value)
    if kind is str:
        return clean_text(value)
    if isinstance(value, msgspec.Struct):
        for name in _fields_with_text(kind, set()):
            before = getattr(value, name)
            after = _cleaned(before)
            if after is not before:
                msgspec.structs.force_setattr(value, name, after)
    elif kind in (tuple, list, frozenset, set):
        items = [_cleaned(item) for item in value]
        if any(after is not before for after, before in zip(items, value, strict=True)):
            return kind(items)
    elif kind is dict:
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    return value
