"""Hostile values for every message, generated from the types and bounds of the message's struct.

Most values pass the decoder, because a refused message costs the victim little: the limits of a field and
their neighbours, numbers at which arithmetic breaks, and values of the live swarm (`known`). A few fit no
struct. A message may also be a received one with a field or two changed. The content of facts is generated
the same way, and signed by the hostile peer itself.
"""

import math
import re
from collections.abc import Callable
from functools import cache, lru_cache
from random import Random
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from msgspec import inspect as types

from crypto.encoding import encode
from crypto.facts import Fact, Signer
from tests.hostile.known import Known
from tests.hostile.wire import FACTS, INSIDE, PURPOSES, WORDS

INTEGERS = (0, 1, 2, -1, 63, 64, 255, 256, 4_095, 4_096, 2**24, 2**31 - 1, 2**31, 2**32, 2**40, 2**53 - 1,
            2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63))  # fmt: skip
FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-300,
    5e-324,
    1e18,
    1e24,
    1.7e308,
    -1.7e308,
    math.nan,
    math.inf,
    -math.inf,
)
TEXTS = (
    "",
    " ",
    "\n",
    "\x00",
    "a",
    "日本",
    "é" * 40,
    "\x1b[2J",
    "../../etc",
    "a\n",
    "\U0010ffff",
    "0" * 64,
    "9" * 400,
)
WRONG_PART = 0.01
"""Probability that a value is not allowed by its own field."""
KNOWN_PART, LIMIT_PART = 0.6, 0.25
"""Probabilities that a value is a received one, and that it is at a limit; otherwise it is drawn within the
bounds."""
SPECIMEN_PART = 0.5
"""Probability that a struct is a received one, with up to `CHANGES_MAX` fields changed."""
CHANGES_MAX = 2
FULL_PART = 0.04
"""Probability that a list or a text is as long as allowed."""
PLAUSIBLE = (2, 4, 10, 100, 1_000)
"""Factors for received numbers: they give a step ahead, or a weight or a share that nobody would doubt."""
ITEMS_MAX, BYTES_MAX = 3, 80
"""Maximum lengths of other lists and byte strings."""
REPEATED_MAX = 5_000
"""Maximum length of a long list, if its field sets no limit."""
LONG_BYTES_MAX = 1 << 20
"""Maximum length of a long byte string, if its field sets no limit."""
DEPTH_MAX = 6
"""Maximum depth of facts within facts."""

T = TypeVar("T")


class Values:
    """Draws values with `rng`, so that a seed gives a fixed sequence of messages."""

    def __init__(self, rng: Random, known: Known, signer: Signer) -> None:
        self.rng = rng
        self.known = known
        self._signer = signer
        self._protocol = ""
        self._depth = 0
        self._specimen_part = SPECIMEN_PART
        self._fixed: dict[str, bytes] = {}

    def message(self, kind: type, protocol: str, **fixed: bytes) -> bytes:
        """Return an encoded message of this kind; a field named in `fixed` gets the given value.

        The message may be longer than the protocol allows.
        """
        self._protocol, self._fixed = protocol, fixed
        try:
            return encode(self.of(kind))
        finally:
            self._fixed = {}

    def body(self, kind: type) -> bytes:
        """Return a body that could be signed, or be part of another message."""
        return encode(self.of(kind))

    def of(self, kind: Any, name: str = "") -> Any:
        """Return a value of a type for a field of this name: builtins, or an unchanged received struct."""
        return self._make(_described(kind), name)

    def like(self, kind: type) -> Any:
        """Return a received struct with up to `CHANGES_MAX` fields changed."""
        before, self._specimen_part = self._specimen_part, 1.0
        try:
            return self.of(kind)
        finally:
            self._specimen_part = before

    def _make(self, kind: types.Type, name: str) -> Any:
        match kind:
            case types.StructType(cls=cls) if cls is Fact:
                return self.fact()
            case types.StructType():
                return self._struct(kind)
            case types.UnionType():
                return self._make(self.rng.choice(kind.types), name)
            case types.IntType():
                return self._integer(kind, name)
            case types.FloatType():
                return self._float(kind, name)
            case types.StrType():
                return self._text(kind, name)
            case types.BytesType() | types.MemoryViewType():
                return self._bytes(kind, name)
            case types.VarTupleType() | types.ListType():
                return self._items(kind, name)
            case types.TupleType():
                return [self._make(item, name) for item in kind.item_types]
        return self._choice(kind)

    def _choice(self, kind: types.Type) -> Any:
        """Return a value of a type that has few values."""
        match kind:
            case types.LiteralType():
                right: str | int | None = self.rng.choice(kind.values)
                return self._often(right, lambda: self.rng.choice(TEXTS))
            case types.BoolType():
                return 2 if self.rng.random() < WRONG_PART else self.rng.random() < 0.5
            case types.NoneType():
                return None
        raise AssertionError(f"no hostile value is known for a {kind}")

    def _often(self, right: T, wrong: Callable[[], T]) -> T:
        return wrong() if self.rng.random() < WRONG_PART else right

    def _struct(self, kind: types.StructType) -> Any:
        rng = self.rng
        values: dict[str, Any] = {}
        changed = {field.name for field in kind.fields}
        heard = self.known.specimen(kind.cls, rng)
        if heard is not None and rng.random() < self._specimen_part:
            values = {field.name: getattr(heard, field.name) for field in kind.fields}
            changed = set(rng.sample(sorted(changed), min(len(changed), rng.randint(0, CHANGES_MAX))))
        self._depth += 1
        for field in kind.fields:
            if _takes(field, fixed := self._fixed.get(field.name)):
                values[field.name] = fixed
            elif field.name in changed:
                values[field.name] = self._make(field.type, field.name)
        self._depth -= 1
        return _as_sent(kind, values)

    def _integer(self, kind: types.IntType, name: str) -> int:
        rng = self.rng
        low, high = _limits(kind)
        draw = rng.random()
        heard = self.known.named(int, name, rng)
        if draw < KNOWN_PART and isinstance(heard, int):
            value = heard + rng.choice((0, 0, 0, 0, 1, -1, 64, heard * rng.choice(PLAUSIBLE)))
        elif draw < KNOWN_PART + LIMIT_PART:
            value = rng.choice((low, high, low + 1, high - 1, *INTEGERS))
        else:
            value = rng.randint(low, min(high, low + 2 ** rng.randint(1, 63)))
        if not low <= value <= high:
            value = self._often(min(max(value, low), high), lambda: value)
        return min(max(value, -(2**63)), 2**64 - 1)

    def _float(self, kind: types.FloatType, name: str) -> float:
        heard = self.known.named(float, name, self.rng)
        if isinstance(heard, float) and self.rng.random() < LIMIT_PART:
            return heard
        value = self.rng.choice(FLOATS)
        low = -math.inf if kind.ge is None else kind.ge
        high = math.inf if kind.le is None else kind.le
        if (low, high) == (-math.inf, math.inf) or low <= value <= high:
            return value
        return self._often(self.rng.choice((low, high)), lambda: value)

    def _text(self, kind: types.StrType, name: str) -> str:
        rng = self.rng
        if kind.pattern is not None:
            right = [text for text in self.known.texts() if re.search(kind.pattern, text)]
            text = rng.choice([_allowed(kind.pattern), *right])
            return text + rng.choice(("", "", "", "", "", "", "", "\n"))
        heard = self.known.named(str, name, rng)
        if isinstance(heard, str) and rng.random() < KNOWN_PART:
            return heard
        high = 10_000 if kind.max_length is None else kind.max_length
        if rng.random() < FULL_PART:
            return self._often(rng.choice(("a", "日", "\x00")) * high, lambda: "a" * (high + 1))
        return self._often(rng.choice((*TEXTS, *WORDS))[:high], lambda: rng.choice(TEXTS))

    def _bytes(self, kind: types.BytesType | types.MemoryViewType, name: str) -> bytes:
        rng = self.rng
        low, high = kind.min_length or 0, LONG_BYTES_MAX if kind.max_length is None else kind.max_length
        if low == high:
            return self._hash(low, name)
        if (inside := INSIDE.get(name)) is not None and self._depth < DEPTH_MAX and rng.random() < 0.8:
            made = self.body(rng.choice(inside))
            return self._often(made, lambda: made[: len(made) // 2])
        heard = self.known.named(bytes, name, rng)
        if isinstance(heard, bytes) and rng.random() < KNOWN_PART:
            return heard
        if rng.random() < FULL_PART:
            return bytes(high)
        return rng.randbytes(rng.choice((low, low + 1, rng.randint(low, max(low, min(high, BYTES_MAX))))))

    def _hash(self, length: int, name: str) -> bytes:
        rng = self.rng
        if rng.random() < WRONG_PART:
            return rng.randbytes(length + rng.choice((-1, 1)))
        heard = self.known.named(bytes, name, rng)
        if isinstance(heard, bytes) and len(heard) == length and rng.random() < KNOWN_PART:
            return heard
        other = self.known.of_length(length, rng)
        if other is not None and rng.random() < KNOWN_PART:
            return other
        return rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))

    def _items(self, kind: types.VarTupleType | types.ListType, name: str) -> list[Any]:
        rng = self.rng
        low = kind.min_length or 0
        high = REPEATED_MAX if kind.max_length is None else kind.max_length
        if rng.random() < FULL_PART and self._depth < 2:
            few = [self._make(kind.item_type, name) for _ in range(2)]
            length = self._often(high, lambda: high + 1)
            return (few * length)[:length]
        length = min(high, max(low, rng.choice((low, 1, rng.randint(0, ITEMS_MAX)))))
        return [self._make(kind.item_type, name) for _ in range(length)]

    def fact(self) -> Any:
        """Return a fact: a received one, one signed by the hostile peer over possible nonsense, or one with a
        wrong signature."""
        rng = self.rng
        heard = self.known.fact(rng)
        draw = rng.random()
        if heard is not None and draw < 0.25:
            return heard
        if heard is not None and draw < 0.3:
            return [self._signer.peer, heard.body, heard.signature]
        if draw < 0.35 or self._depth >= DEPTH_MAX:
            return [rng.randbytes(rng.choice((0, 31, 32))), rng.randbytes(40), rng.randbytes(64)]
        kinds = FACTS.get(self._protocol, ()) if rng.random() < 0.9 else ()
        kind = rng.choice(kinds or tuple(PURPOSES))
        return self._signer.sign(PURPOSES[kind], self.body(kind))


def _as_sent(kind: types.StructType, values: dict[str, Any]) -> Any:
    """Arrange values as msgspec encodes a struct of this type."""
    if kind.array_like:
        head = [] if kind.tag is None else [kind.tag]
        return [*head, *(values[field.name] for field in kind.fields)]
    head_fields = {} if kind.tag is None else {kind.tag_field: kind.tag}
    return {**head_fields, **{field.encode_name: values[field.name] for field in kind.fields}}


def _takes(field: types.Field, value: bytes | None) -> bool:
    """Return whether a field expects such a value: `plan` is a hash in one message and the whole plan in
    another."""
    if value is None or not isinstance(field.type, types.BytesType):
        return False
    return field.type.min_length == len(value) or (field.type.min_length is None and field.name not in INSIDE)


def _limits(kind: types.IntType) -> tuple[int, int]:
    low = kind.ge if kind.ge is not None else None if kind.gt is None else kind.gt + 1
    high = kind.le if kind.le is not None else None if kind.lt is None else kind.lt - 1
    return -(2**63) if low is None else int(low), 2**64 - 1 if high is None else int(high)


@cache
def _described(kind: Any) -> types.Type:
    return types.type_info(kind)


@lru_cache(maxsize=64)
def _allowed(pattern: str) -> str:
    """Return the first text found that matches the pattern."""
    quiet = settings(
        database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    return find(st.from_regex(pattern), lambda text: True, settings=quiet)
