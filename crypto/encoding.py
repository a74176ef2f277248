"""Messages to bytes and back: frozen `msgspec` structs in MessagePack, validated while decoding.

What is signed is always the exact bytes that were sent, so nothing depends on two encoders
agreeing. Decoding is the gate for everything hostile: wrong types, missing fields, broken
MessagePack and oversized input all end in `RemoteProtocolError`, before any field is looked at.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from crypto.errors import RemoteProtocolError

T = TypeVar("T")

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
"""Encode one struct (or builtin value) as MessagePack."""

_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def decode(data: bytes | memoryview, kind: type[T] | Any, *, bytes_max: int) -> T:
    """Decode `data` as `kind`, a struct or a union of tagged structs.

    Raises:
        RemoteProtocolError: longer than `bytes_max`, not MessagePack, or not a valid `kind`.
    """
    if len(data) > bytes_max:
        raise RemoteProtocolError(f"message of {len(data)} bytes, at most {bytes_max} allowed")
    decoder = _decoder(kind)  # outside the try: a type it cannot be built for is our bug
    try:
        message: T = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise RemoteProtocolError(f"not a valid message: {error}") from None
    return message


def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    # Building a decoder costs far more than using it; the kinds are the program's own message types, so few.
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return _decoders[kind]
