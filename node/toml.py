"""Strict TOML: a file becomes a frozen `msgspec` struct, or one error that names file, line and key.

It is not a TOML parser (`tomllib` parses), and does not merge sources (`node.config` does). It serves the
node's config and the RUN.toml of a run: any struct of structs, tuples, literals and bounded numbers.
`tomllib` keeps no positions, so a small scanner that follows TOML v1.0 goes through the (already valid) text
again and notes the line of every table, key and array item.
"""

import json
import math
import re
import tomllib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect as shapes

from node.errors import UsageError, split_place
from node.suggest import did_you_mean

T = TypeVar("T")
TomlPath = tuple[str | int, ...]

FILE_BYTES_MAX = 1 << 20
"""Maximum size of a file. Nobody writes a megabyte of settings, and if a path to a data file is given by
mistake, the file should not be read whole."""
_SHOWN_LENGTH_MAX = 60


@dataclass(frozen=True)
class Document(Generic[T]):
    """A checked file: its struct, and the line of each part for later errors."""

    value: T
    name: str
    lines: Mapping[TomlPath, int]

    def where(self, *path: str | int) -> str:
        """Return `node.toml:7` for a key or array item; if it has no line, that of the nearest enclosing
        part."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}"
        return self.name


def load(path: Path, kind: type[T]) -> T:
    """Return the struct in the file at `path`. Raises UsageError."""
    return read(path, kind).value


def read(path: Path, kind: type[T]) -> Document[T]:
    """Return the document in the file at `path`, with line numbers. Raises UsageError."""
    return parse(read_text(path), kind, name=str(path))


def read_text(path: Path) -> str:
    """Return the text of a file that a person named, of bounded size. Raises UsageError."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(f"{path}: more than {FILE_BYTES_MAX} bytes; is it the right file?")
    try:
        return data.decode("utf-8-sig")  # an editor may put a byte order mark at the beginning of a file
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: not UTF-8 text{_other_encoding(data)}") from None


def _other_encoding(data: bytes) -> str:
    return "; it is UTF-16: save it as UTF-8" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else ""


def parse(text: str, kind: type[T], *, name: str) -> Document[T]:
    """Check TOML `text` against the struct `kind`; errors call the text `name`. Raises UsageError."""
    return convert(tree(text, name=name), kind, name=name, lines=line_numbers(text))


def tree(text: str, *, name: str) -> dict[str, Any]:
    """Return the content of TOML `text`, unchecked; errors call the text `name`. Raises UsageError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(_syntax_error(name, text, str(error))) from None
    except RecursionError:
        raise UsageError(f"{name}: nested too deeply") from None


def convert(found: Any, kind: type[T], *, name: str, lines: Mapping[TomlPath, int]) -> Document[T]:
    """Check parsed dicts and lists against `kind`; errors call the source `name`. Raises UsageError."""
    places = Document[None](None, name, lines)
    _check(found, kind, (), places)
    try:
        return Document(msgspec.convert(found, kind), name, lines)
    except msgspec.ValidationError as error:
        raise UsageError(_broken_rule(str(error), places)) from None


def _broken_rule(message: str, places: Document[None]) -> str:
    """Return a struct's error about inconsistent values, with its line."""
    what, place = split_place(message)
    path = [int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", place)]
    table = f"[{_dotted(tuple(path))}] " if path else ""
    return f"{places.where(*path)}: {table}{what}"


def _syntax_error(name: str, text: str, message: str) -> str:
    # tomllib says "... (at line 3, column 7)" or "... (at end of document)".
    what, _, place = message.rpartition(" (at ")
    if place.startswith("line "):
        line, _, column = place.removeprefix("line ").rstrip(")").partition(", ")
        return f"{name}:{line}: not TOML: {what} ({column})"
    return f"{name}:{text.count(chr(10)) + 1}: not TOML: {what or message}"


def _check(value: Any, kind: Any, path: TomlPath, places: Document[None]) -> None:
    """Raise UsageError with the line of the first fault of `value`, in reading order."""
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(bare) in (Union, UnionType):
        # TOML has no null, so an optional table is simply a table.
        kinds = [each for each in get_args(bare) if each is not NoneType]
        tables = [each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)]
        if isinstance(value, dict) and len(tables) == 1:
            kinds = tables
        bare = kinds[0] if len(kinds) == 1 else bare
    if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
        _check_table(value, bare, path, places)
        return
    if get_origin(bare) in (tuple, list) and isinstance(value, list):
        item_kind = get_args(bare)[0]
        for index, item in enumerate(value):
            _check(item, item_kind, (*path, index), places)
    elif get_origin(bare) is dict and isinstance(value, dict):
        for key, item in value.items():
            _check(item, get_args(bare)[1], (*path, key), places)
    try:
        msgspec.convert(value, kind)
        finite = not isinstance(value, float) or math.isfinite(value)
    except msgspec.ValidationError:
        finite = False
    if not finite:
        want = describe(shapes.type_info(kind))
        raise UsageError(f"{places.where(*path)}: {_named(path)} = {shown(value)}: want {want}")


def _check_table(value: Any, kind: type[msgspec.Struct], path: TomlPath, places: Document[None]) -> None:
    if not isinstance(value, dict):
        raise UsageError(
            f"{places.where(*path)}: {_named(path)} = {shown(value)}: want a table, [{path[-1]}]"
        )
    hints = get_type_hints(kind, include_extras=True)
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key, item in value.items():
        if key not in fields:
            table = f" in [{_dotted(path)}]" if path else ""
            renamed: Mapping[str, str] = getattr(kind, "RENAMED", {})
            hint = f": it is '{renamed[key]}' now" if key in renamed else did_you_mean(key, list(fields))
            raise UsageError(f"{places.where(*path, key)}: unknown key '{_cut(key)}'{table}{hint}")
        _check(item, hints[fields[key].name], (*path, key), places)
    for key, field in fields.items():
        if field.required and key not in value:
            table = f"[{_dotted(path)}] " if path else ""
            raise UsageError(f"{places.where(*path)}: {table}lacks the key '{key}'")


def shown(value: object) -> str:
    """Return a value as a person typed it, on one line and cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = str(value)
    return _cut(text)


def _cut(text: str) -> str:
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    return printable if len(printable) <= _SHOWN_LENGTH_MAX else printable[:_SHOWN_LENGTH_MAX] + "..."


def _dotted(path: TomlPath) -> str:
    return ".".join(str(part) for part in path if isinstance(part, str))


def _named(path: TomlPath) -> str:
    """Return the last key of `path`, with the table that contains it: `cores in [resources]`, `seeds[2] in
    [join]`."""
    keys = [index for index, part in enumerate(path) if isinstance(part, str)]
    last = keys[-1]
    name = str(path[last]) + "".join(f"[{part}]" for part in path[last + 1 :])
    return f"{_dotted(path[:last])}.{name}" if last else name


def describe(kind: shapes.Type) -> str:
    """Return the values that a type allows, in words: `a whole number, 0 to 1024`."""
    match kind:
        case shapes.IntType():
            return "a whole number" + _range(kind)
        case shapes.FloatType():
            return "a finite number" + _range(kind)
        case shapes.BoolType():
            return "true or false"
        case shapes.StrType():
            return "text" + _length(kind, "letters")
        case shapes.LiteralType():
            return "one of " + ", ".join(shown(value) for value in kind.values)
        case shapes.VarTupleType() | shapes.ListType():
            return f"a list of {describe(kind.item_type)}" + _length(kind, "items")
        case shapes.TupleType():
            return f"a list of {len(kind.item_types)}: " + ", ".join(map(describe, kind.item_types))
        case shapes.UnionType():
            # TOML has no null, so an optional value is simply its type.
            known = [describe(item) for item in kind.types if not isinstance(item, shapes.NoneType)]
            return " or ".join(known)
        case shapes.StructType() | shapes.DictType():
            return "a table"
    return "another kind of value"


def _range(kind: shapes.IntType | shapes.FloatType) -> str:
    low = kind.ge if kind.ge is not None else kind.gt
    high = kind.le if kind.le is not None else kind.lt
    if kind.ge is not None and kind.le is not None:
        return f", {low} to {high}"
    parts = []
    if low is not None:
        parts.append(f"{low} or more" if kind.ge is not None else f"more than {low}")
    if high is not None:
        parts.append(f"at most {high}" if kind.le is not None else f"less than {high}")
    return ", " + " and ".join(parts) if parts else ""


def _length(kind: shapes.StrType | shapes.VarTupleType | shapes.ListType, unit: str) -> str:
    low, high = kind.min_length, kind.max_length
    if low is not None and high is not None:
        return f", {low} to {high} {unit}"
    if low == 1:
        return ", not empty"
    if low is not None:
        return f", at least {low} {unit}"
    return f", at most {high} {unit}" if high is not None else ""


def line_numbers(text: str) -> dict[TomlPath, int]:
    """Return the line (from 1) of every table header, key and array item of valid TOML `text`.

    Keys inside an inline table have no entry; `Document.where` uses the table's key for them.
    """
    scanner = _Scanner(text)
    scanner.scan()
    return scanner.lines


class _Scanner:
    """Scans TOML that `tomllib` has already accepted, so it never needs to report an error."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.line = 1
        self.table: TomlPath = ()
        self.lines: dict[TomlPath, int] = {}
        self._array_sizes: dict[TomlPath, int] = {}

    def scan(self) -> None:
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in " \t\n":
                self._step()
            elif letter == "#":
                self._skip_comment()
            elif letter == "[":
                self._header()
            else:
                path = (*self.table, *self._key("="))
                self._note(path)
                self._value(path)

    def _note(self, path: TomlPath) -> None:
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], self.line)

    def _step(self, count: int = 1) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _header(self) -> None:
        is_array = self.text.startswith("[[", self.at)
        self._step(2 if is_array else 1)
        path = self._real(self._key("]"))
        if is_array:
            self._step()
            index = self._array_sizes.get(path, 0)
            self._array_sizes[path] = index + 1
            self._note(path)
            path = (*path, index)
        self.table = path
        self._note(path)

    def _real(self, path: TomlPath) -> TomlPath:
        """Return a header's path with the index of the last item after each array of tables on the way."""
        real: TomlPath = ()
        for part in path[:-1]:
            real = (*real, part)
            if real in self._array_sizes:
                real = (*real, self._array_sizes[real] - 1)
        return (*real, path[-1])

    def _key(self, end: str) -> TomlPath:
        """Read a dotted key up to and including `end`."""
        start = self.at
        while self.text[self.at] != end:
            if self.text[self.at] in "\"'":
                self._string()
            else:
                self._step()
        key_text = self.text[start : self.at]
        self._step()
        path: list[str | int] = []
        tree: Any = tomllib.loads(f"{key_text} = 0")
        while isinstance(tree, dict):
            key, tree = next(iter(tree.items()))
            path.append(key)
        return tuple(path)

    def _value(self, path: TomlPath) -> None:
        """Skip a value to the end of its line, and note the lines of the items of the outermost array."""
        depth = 0
        index = 0
        in_array = False
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "\n" and depth == 0:
                return
            if letter == "#":
                self._skip_comment()
                continue
            if in_array and depth == 1 and letter not in " \t\n,]":
                self.lines.setdefault((*path, index), self.line)
            if letter in "\"'":
                self._string()
                continue
            if letter in "[{":
                in_array = in_array or (depth == 0 and letter == "[")
                depth += 1
            elif letter in "]}":
                depth -= 1
            elif letter == "," and depth == 1:
                index += 1
            self._step()

    def _string(self) -> None:
        quote = self.text[self.at]
        triple = self.text.startswith(quote * 3, self.at)
        ending = quote * 3 if triple else quote
        self._step(len(ending))
        while not self.text.startswith(ending, self.at):
            self._step(2 if quote == '"' and self.text[self.at] == "\\" else 1)
        self._step(len(ending))
        while triple and self.at < len(self.text) and self.text[self.at] == quote:
            self._step()  # up to two more quotes may belong to the text, before the closing three
