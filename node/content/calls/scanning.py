"""JSON that arrives in pieces: one object with the name and arguments of a call."""

import json
from enum import Enum, auto

NAME_KEYS = frozenset({"name", "function"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
OTHER_KEYS = frozenset({"type", "id", "call_id", "index"})
"""Additional keys that some models write."""
NAME_LENGTH_MAX = 256
_SPACE = " \t\r\n"


class _At(Enum):
    BEGIN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    INSIDE = auto()
    NEXT = auto()
    END = auto()


class ValueEnd:
    """Finds the end of a JSON value. `take` returns whether a character still belongs to the value."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_begun = False

    def take(self, letter: str) -> bool:
        """Read the next character; return False if the value ended with the previous one."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif letter == "\\":
                self._is_escaped = True
            elif letter == '"':
                self._in_string = False
                self.is_over = not self._depth
            return True
        if not self._depth and self._is_begun and letter in ",]}" + _SPACE:
            self.is_over = True
            return False
        self._is_begun = True
        if letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            self.is_over = self._depth <= 0
        return True


class CallObject:
    """One call as an object. `take` reads more text. `new_arguments` are the characters of the arguments that
    arrived since they were last read; they are reported once the name is known."""

    def __init__(self, name: str = "") -> None:
        """With a `name`, the text contains only the arguments."""
        self.name = name
        self.is_over = False
        self.is_broken = False
        """Whether the text is not a call, because its keys or its form differ."""
        self._is_alone = bool(name)
        self._at = _At.VALUE if name else _At.BEGIN
        self._value = ValueEnd()
        self._key = "arguments" if name else ""
        self._text: list[str] = []
        self._arguments: list[str] = []
        self._has_arguments = False

    @property
    def is_begun(self) -> bool:
        """Return whether the call's name is known and its arguments have begun, or the call is complete."""
        return bool(self.name) and (self._has_arguments or self.is_over)

    def new_arguments(self) -> str:
        found = "".join(self._arguments)
        self._arguments.clear()
        return found

    def take(self, text: str) -> int:
        """Read more text; return how many of its characters belong to the object."""
        for place, letter in enumerate(text):
            if self.is_over or self.is_broken:
                return place
            self._take(letter)
        return len(text)

    def _take(self, letter: str) -> None:
        if self._at is _At.INSIDE:
            if self._take_value(letter):
                return
        elif letter in _SPACE:
            return
        match self._at, letter:
            case _At.BEGIN, "{":
                self._at = _At.KEY
            case ((_At.KEY | _At.NEXT), "}"):
                self._finish()
            case _At.NEXT, ",":
                self._at = _At.KEY
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.KEY, '"':
                self._key, self._at = "", _At.INSIDE
                self._begin_value(letter)
            case _At.VALUE, _ if letter == "{" or not self._is_alone:
                self._at = _At.INSIDE
                self._begin_value(letter)
            case _:
                self.is_broken = True

    def _begin_value(self, letter: str) -> None:
        self._value, self._text = ValueEnd(), []
        if self._streams and letter == "{":
            self._has_arguments = True
        self._take_value(letter)

    @property
    def _streams(self) -> bool:
        return self._key in ARGUMENT_KEYS

    def _take_value(self, letter: str) -> bool:
        """Read a character of a key or a value; return False if the character comes after it."""
        belongs = self._value.take(letter)
        if belongs:
            if self._streams and self._has_arguments:
                self._arguments.append(letter)
            else:
                self._text.append(letter)
        if self._value.is_over:
            self._end_value()
        return belongs

    def _end_value(self) -> None:
        if not self._key:
            self._key, self._at = str(_decoded("".join(self._text))), _At.COLON
            self.is_broken = self._key not in NAME_KEYS | ARGUMENT_KEYS | OTHER_KEYS
            return
        value = _decoded("".join(self._text))
        if self._key in NAME_KEYS:
            self.name = value if isinstance(value, str) else ""
            self.is_broken = not 0 < len(self.name) <= NAME_LENGTH_MAX
        elif self._streams and not self._has_arguments:
            written = "{}" if value is None else "".join(self._text)
            self._arguments.append(value if isinstance(value, str) else written)  # an object within a string
            self._has_arguments = True
        self._key, self._at = "", _At.NEXT
        self.is_over = self._is_alone

    def _finish(self) -> None:
        self._at, self.is_over = _At.END, True
        self.is_broken = not self.name
        if not self._has_arguments:
            self._arguments.append("{}")


def _decoded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
