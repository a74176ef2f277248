"""Text from peers is sanitized when it is decoded, in every field of every message and fact."""

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as types
import pytest

from crypto.encoding import clean_text, decode, encode
from crypto.errors import RemoteProtocolError
from gossip.averaging.messages import Chunk
from node.content.shards import DataManifest, SampleColumn
from node.protocols.manifest import Manifest, PlaceWish
from tests.hostile.wire import everything

STEERING = "\x1b]0;a\x07\u202e\r\n\x9b\x7f\u2066\u2028"
"""Control characters that set a terminal's title, reverse the direction of text, break lines, or begin escape
sequences in two other ways."""
BYTES_MAX = 1 << 24
SAMPLES = ("", "done", "digits", "float32", "a", "0" * 16, "0" * 64)
"""For every pattern of a message's field, at least one of these texts matches."""
CHECKED = {Chunk, DataManifest, Manifest}
"""Structs that refuse generated values, because they check their numbers against each other. Their parts are
tested instead."""


class Known(msgspec.Struct, tag="known"): ...


class Other(msgspec.Struct, tag="other"): ...


KINDS: frozenset[type] = (everything() | {SampleColumn, PlaceWish}) - CHECKED


def fields(kind: types.StructType, depth: int) -> Any:
    """Return a struct as its decoder expects it, with a value in each field."""
    found = {field.encode_name: value(field.type, depth + 1) for field in kind.fields}
    tag = [] if kind.tag is None else [kind.tag]
    if kind.array_like:
        return tag + list(found.values())
    return found if kind.tag is None else {kind.tag_field: kind.tag} | found


def value(kind: types.Type, depth: int = 0) -> Any:  # noqa: C901 - a case for each kind of type
    """Return a value of the type with as many control characters as the type allows."""
    match kind:
        case types.Metadata(type=inner):
            return value(inner, depth)
        case types.StrType():
            if kind.pattern is not None:
                return next(sample for sample in SAMPLES if re.search(kind.pattern, sample))
            return (STEERING * 8)[: 32 if kind.max_length is None else kind.max_length]
        case types.BytesType():
            return bytes(kind.min_length or 0)
        case types.IntType() | types.FloatType():
            least = kind.ge if kind.ge is not None else 1 if kind.gt is None else kind.gt + 1
            return int(least) if isinstance(kind, types.IntType) else float(least)
        case types.BoolType():
            return False
        case types.LiteralType(values=values):
            return values[0]
        case types.EnumType(cls=enum):
            return next(iter(enum)).value
        case types.UnionType(types=others):
            first = next((each for each in others if not isinstance(each, types.NoneType)), others[0])
            return value(first, depth) if depth < 6 else value(others[-1], depth)
        case types.DictType(key_type=key, value_type=item):
            return {value(key, depth + 1): value(item, depth + 1)}
        case types.TupleType(item_types=items):
            return tuple(value(item, depth + 1) for item in items)
        case types.CollectionType(item_type=item):
            count = max(kind.min_length or 0, int(depth < 6 and kind.max_length != 0))
            return [value(item, depth + 1) for _ in range(count)]
        case types.StructType():
            return fields(kind, depth)
    return None


def texts(value: Any) -> Iterator[str]:
    """Yield all text in a decoded value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from texts(getattr(value, name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (*texts(key), *texts(item))
    elif isinstance(value, tuple | list | set | frozenset):
        for item in value:
            yield from texts(item)


def is_clean(text: str) -> bool:
    return not any(unicodedata.category(letter) in {"Cc", "Cf", "Zl", "Zp"} for letter in text)


@pytest.mark.parametrize("kind", sorted(KINDS, key=repr))
def test_every_text_of_a_message_is_sanitized_when_decoded(kind: type) -> None:
    data = encode(value(types.type_info(kind)))
    decoded: Any = decode(data, kind, bytes_max=BYTES_MAX)
    assert [text for text in texts(decoded) if not is_clean(text)] == []


def test_the_samples_contain_text_to_sanitize() -> None:
    """A type without text is skipped. Every other type must contain text that would steer a terminal if it
    were not sanitized."""
    steering = [
        kind
        for kind in KINDS
        if not all(map(is_clean, texts(msgspec.msgpack.decode(encode(value(types.type_info(kind)))))))
    ]
    assert len(steering) > 30


def test_errors_quote_only_sanitized_text_of_messages() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(encode({"type": STEERING}), Known | Other, bytes_max=1_000)
    assert is_clean(str(caught.value))


def test_text_in_all_languages_is_unchanged() -> None:
    for text in ("lab-1", "Übung \u00a0 mit", "日本語", "кириллица", "عربي", "a\U0001f600"):
        assert clean_text(text) == text
    assert clean_text("two\nlines\tand \x1b[31mred\u202e") == "two lines and ?[31mred?"


def test_text_of_this_node_is_not_sanitized() -> None:
    data = encode({"a\tb": "c\nd"})
    assert decode(data, dict[str, str], bytes_max=100, cleans_text=False) == {"a\tb": "c\nd"}
