"""Text tables (csv, tsv) as programs write them: their form and their rows.

Encoding, separator, decimal mark and the presence of a header are detected if only one reading fits.
Otherwise the user must set the key. The rows are parsed by Python's `csv` (RFC 4180, strict about quotes).
Sources: Excel's "sep=" line and byte-order marks, pandas' `to_csv`, R's `write.csv`, numpy's `savetxt`.
"""

import codecs
import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from node.content.reading import shown, unclear
from node.errors import UsageError
from node.protocols.data_table import COLUMNS_MAX, DataTable

NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z")
"""The format in which programs write numbers. Python's `float` is too permissive: it also reads 1_1 as 11,
and accepts digits of other scripts."""
COMMA_NUMBER = re.compile(r"[+-]?[0-9]*,[0-9]+(?:[eE][+-]?[0-9]+)?\Z")
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+\Z")
_POINT_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:\.[0-9]{3})+\Z")
NOT_FINITE = frozenset({"nan", "inf", "+inf", "-inf", "infinity", "-infinity"})
MISSING = frozenset(
    {"na", "n/a", "n.a.", "#n/a", "#na", "<na>", "nan", "-nan", "nat", "null", "(null)", "nil", "none",
     "missing", "?", "\\n", "-", "--", ".", "#value!", "#ref!", "#div/0!", "#name?", "#num!", "#null!"}
)  # fmt: skip
"""Words that programs write for a missing value, in lower case. A class may also have such a name."""
LABELS = ("label", "labels", "target")
WEAK_LABELS = ("class", "y")
"""Weaker names for a label column: a feature often has such a name too."""

SAMPLE_CHARACTERS = 1 << 18
SAMPLE_ROWS = 200
"""Number of rows from which the form is detected. All later rows must match that form."""
HEAD_BYTES_MAX = 1 << 24
"""Maximum number of bytes read for detection if lines are long: enough for three lines of 65,536 columns with
long names."""
_LINES_MIN = 4
_SEPARATORS = ",;\t|"
_SEPARATOR_NAMES = {"\t": "tab", " ": "space"}
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_GUESSES = ("cp1252", "mac_roman", "cp1251", "shift_jis", "latin-1")
"""Encodings that a file may have if it is not UTF-8. An error shows how the first ones that fit would read
the file."""
_OTHER_FILES = (
    (b"\x1f\x8b", "packed by gzip", "unpack it first"),
    (b"PK\x03\x04", "a zip archive, or an Excel sheet", "unpack it first, or save the sheet as csv"),
    (b"PAR1", "Parquet", "call it .parquet"),
    (b"version https://git-lfs", "a pointer that Git LFS left in place of the file", "git lfs pull"),
)
"""Other file types that may have a table's suffix: their first bytes, their name, and how to get a text table
from them."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")


@dataclass(frozen=True)
class TableForm:
    """The form of a text table. `columns` are the names, generated if the first line has none."""

    encoding: str
    separator: str
    decimal: str
    has_names: bool
    skipped_lines: int
    columns: tuple[str, ...]
    sample: tuple[tuple[str, ...], ...]
    """The first rows, without the header."""
    is_marked: bool

    def __str__(self) -> str:
        encoding = self.encoding.removesuffix("-sig") + (" with a byte-order mark" if self.is_marked else "")
        names = "first line is names" if self.has_names else "no line of names"
        decimal = f", decimal {self.decimal!r}" if self.decimal != "." else ""
        told = _SEPARATOR_NAMES.get(self.separator, f"'{self.separator}'")
        return f"csv, separator {told}{decimal}, {encoding}, {names}"


def find_form(path: Path, keys: DataTable, *, known: tuple[str, ...] = ()) -> TableForm:
    """Return the form of a table. `known` are names of columns that it should have.

    Raises:
        UsageError: it is not a table, or several forms fit.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(4 * SAMPLE_CHARACTERS)
        if head.count(b"\n") < _LINES_MIN:
            head += file.read(HEAD_BYTES_MAX - len(head))
        is_whole = not file.read(1)
    for begin, what, do in _OTHER_FILES:
        if head.startswith(begin):
            raise UsageError(f"{path}: no table of text: it is {what}", do)
    encoding, is_marked = _encoding(path, head, keys)
    text = _decoded(path, head, encoding, keys, is_whole=is_whole)
    if _UNPRINTABLE.search(text):
        raise UsageError(f"{path}: no table of text: it holds bytes that are not text")
    if len(text) > SAMPLE_CHARACTERS and text.count("\n", 0, SAMPLE_CHARACTERS) >= _LINES_MIN:
        text, is_whole = text[:SAMPLE_CHARACTERS], False
    _check_width(path, text, keys)
    stated, skipped = _stated_separator(text)
    body = text.split("\n", 1)[1] if skipped else text
    separator, rows = _separator(path, body, keys, stated, is_whole=is_whole)
    if len(rows[0]) > COLUMNS_MAX:
        raise UsageError(f"{path}: {len(rows[0]):,} columns; at most {COLUMNS_MAX:,}")
    decimal = _decimal(path, rows, keys, separator)
    has_names = _has_names(path, rows, keys, decimal, known)
    columns = _names(path, rows[0]) if has_names else tuple(f"column_{n}" for n in range(1, len(rows[0]) + 1))
    sample = tuple(map(tuple, rows[1:] if has_names else rows))
    if not sample:
        raise UsageError(f"{path}: want a line of column names, then one row per sample")
    return TableForm(encoding, separator, decimal, has_names, skipped, columns, sample, is_marked)


def _check_width(path: Path, text: str, keys: DataTable) -> None:
    """Refuse a file with too many columns before it is parsed. Raises UsageError."""
    first = text[: text.find("\n")] if "\n" in text else text
    count = 1 + max(first.count(each) for each in keys.separator or _SEPARATORS)
    if count > COLUMNS_MAX and '"' not in first:
        raise UsageError(f"{path}: {count:,} columns; at most {COLUMNS_MAX:,}")


def rows_of(path: Path, form: TableForm, keys: DataTable) -> Iterator[tuple[int, list[str]]]:
    """Yield each row with its line number, from 1. Raises UsageError, OSError."""
    width = len(form.columns)
    try:
        with path.open(encoding=form.encoding, newline="") as file:
            for _ in range(form.skipped_lines):
                file.readline()
            rows = csv.reader(file, delimiter=form.separator, strict=True)
            number = form.skipped_lines
            awaits_names = form.has_names
            for row in rows:
                if not row:
                    continue
                number += 1
                if awaits_names:
                    awaits_names = False
                    continue
                if len(row) != width:
                    raise _ragged(path, number, row, width, form.separator)
                yield number, row
    except csv.Error as error:
        raise UsageError(f"{path}: no table of text: line {rows.line_num}: {error}") from None
    except UnicodeDecodeError as error:
        raise _not_in(path, error, form.encoding, keys) from None


def _ragged(path: Path, number: int, row: list[str], width: int, separator: str) -> UsageError:
    told = _SEPARATOR_NAMES.get(separator, f"'{separator}'")
    return UsageError(
        f"{path}: row {number} has {len(row)} fields, the first line {width} (separator {told})",
        "write one line per sample, with as many fields as the first line; or set "
        "another separator: `[data] separator`",
    )


# Encoding


def _encoding(path: Path, head: bytes, keys: DataTable) -> tuple[str, bool]:
    """Return the name of the encoding, and whether a byte-order mark states it."""
    mark = next((name for start, name in _MARKS if head.startswith(start)), "")
    if keys.encoding:
        try:
            wanted = codecs.lookup(keys.encoding)
        except LookupError:
            raise UsageError(
                f"{path}: encoding {shown(keys.encoding)} is not known",
                'for example encoding = "cp1252", "utf-8" or "utf-16"',
            ) from None
        if not getattr(wanted, "_is_text_encoding", True):
            raise UsageError(f"{path}: encoding {shown(keys.encoding)} is not a text encoding")
        if not mark:
            return wanted.name, False
        if not wanted.name.startswith(mark.removesuffix("-sig")):
            raise UsageError(
                f"{path}: begins with the byte-order mark of {mark.removesuffix('-sig')}, "
                f"but encoding is {shown(keys.encoding)}",
                "leave encoding out",
            )
    if mark:
        return mark, True
    if (
        b"\0" in head[:1024]
        and len(head) > 3
        and not (head[:1024:2].strip(b"\0") and head[1:1024:2].strip(b"\0"))
    ):
        raise unclear(
            path,
            "every second byte is 0: text in UTF-16 without its byte-order mark",
            keys,
            {"encoding": "utf-16-le" if head[1] == 0 else "utf-16-be"},
        )
    return "utf-8", False


def _decoded(path: Path, head: bytes, encoding: str, keys: DataTable, *, is_whole: bool) -> str:
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head, is_whole)
    except UnicodeDecodeError as error:
        raise _not_in(path, error, encoding, keys) from None


def _not_in(path: Path, error: UnicodeDecodeError, encoding: str, keys: DataTable) -> UsageError:
    """Return the error for bytes that do not fit the encoding; it shows them as text in two other
    encodings."""
    data = bytes(error.object)
    start = max(data.rfind(b"\n", 0, error.start), error.start - 12) + 1
    odd = data[min(start, error.start) : error.start + 8].split(b"\n")[0].split(b"\r")[0]
    readings: list[tuple[str, str]] = []
    for name in _GUESSES:
        try:
            text = odd.decode(name)
        except UnicodeDecodeError:
            continue
        if name != encoding and text not in (known for _, known in readings):
            readings.append((name, text))
    told = " or ".join(f"{shown(text)} in {name}" for name, text in readings[:2])
    return unclear(
        path,
        f"not {encoding.removesuffix('-sig')}: there are bytes that would be {told or 'no text known here'}",
        keys,
        *({"encoding": name} for name, _ in readings[:2]),
    )


# Separator, decimals, names


def _stated_separator(text: str) -> tuple[str, int]:
    """Return the separator that Excel's first line `sep=;` states, and the number of lines that this
    statement takes."""
    first = text.split("\n", 1)[0].rstrip("\r").strip('"')
    is_stated = first.startswith("sep=") and len(first) == 5
    return (first[4], 1) if is_stated else ("", 0)


def _parsed(text: str, separator: str, *, is_whole: bool) -> list[list[str]]:
    """Return the first rows, or none if quotes do not match."""
    rows: list[list[str]] = []
    cut = text if is_whole else text[: text.rfind("\n") + 1]
    try:
        for row in csv.reader(io.StringIO(cut, newline=""), delimiter=separator, strict=True):
            if row:
                rows.append(row)
            if len(rows) == SAMPLE_ROWS:
                break
    except csv.Error:
        return rows if not is_whole and len(rows) > 1 else []
    return rows


def _separator(
    path: Path, text: str, keys: DataTable, stated: str, *, is_whole: bool
) -> tuple[str, list[list[str]]]:
    wanted = keys.separator or stated
    found = {each: _parsed(text, each, is_whole=is_whole) for each in (wanted or _SEPARATORS + " ")}
    fits = [
        each for each, rows in found.items() if len(rows) > 1 and {len(row) for row in rows} == {len(rows[0])}
    ]
    many = [each for each in fits if len(found[each][0]) > 1]
    if len(many) > 1 and " " in many:
        many.remove(" ")
    if len(many) > 1:
        first, second = many[:2]
        told = [
            f"{_SEPARATOR_NAMES.get(each, each)!r} makes {len(found[each][0])} columns"
            for each in (first, second)
        ]
        raise unclear(
            path, f"two separators fit: {', '.join(told)}", keys, {"separator": first}, {"separator": second}
        )
    if many:
        return many[0], found[many[0]]
    for each, rows in found.items():
        if len(rows) > 1 and {len(row) for row in rows[1:]} == {len(rows[0]) + 1} and len(rows[0]) > 1:
            error = _ragged(path, 2, rows[1], len(rows[0]), each)
            raise UsageError(
                f"{error.written[0]}: the rows have names, but their column has none, as R writes it",
                f"use R's write.csv, or col.names = NA. If R did not write this table: {error.written[1]}",
            )
    # No separator fits. Judge the rows by the separator that gives the first line the most fields, so that
    # the error shows what is wrong with them.
    best = max(found, key=lambda each: len(found[each][0]) if found[each] and each != " " else 0)
    rows = found[best]
    if not rows or not text.strip():
        _refuse_unparsed(path, text, best)
    if len(rows) == 1 and is_whole:
        raise UsageError(f"{path}: want a line of column names, then one row per sample")
    width = len(rows[0])
    for number, row in enumerate(rows, 1):
        if len(row) != width:
            raise _ragged(path, number, row, width, best)
    return best, rows


def _refuse_unparsed(path: Path, text: str, separator: str) -> None:
    if not text.strip():
        raise UsageError(f"{path}: want a line of column names, then one row per sample")
    reason = "a quoted field does not end"
    try:
        for _ in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True):
            pass
    except csv.Error as error:
        reason = str(error)
    raise UsageError(f"{path}: no table of text: {reason}")


def _decimal(path: Path, rows: list[list[str]], keys: DataTable, separator: str) -> str:
    if keys.decimal:
        return keys.decimal
    fields = [field.strip() for row in rows[1:] for field in row]
    commas = [field for field in fields if "," in field and COMMA_NUMBER.match(field)]
    if not commas:
        pointed = [field for field in fields if "." in field and NUMBER.match(field)]
        # In files whose decimal mark is the comma, the separator is usually `;`.
        if separator == ";" and pointed and all(map(_POINT_THOUSANDS.match, pointed)):
            raise unclear(
                path,
                f"{shown(pointed[0])} is {pointed[0]} or {pointed[0].replace('.', '')}: "
                "the point may be a decimal mark or a thousands separator, which the "
                "file must leave out",
                keys,
                {"decimal": "."},
            )
        return "."
    points = next((field for field in fields if "." in field and NUMBER.match(field)), "")
    if points:
        raise unclear(
            path,
            f"some numbers have a decimal point, others a comma: {shown(points)}, {shown(commas[0])}",
            keys,
            {"decimal": "."},
            {"decimal": ","},
        )
    if all(_THOUSANDS.match(field) for field in commas):
        raise unclear(
            path,
            f"{shown(commas[0])} is {commas[0].replace(',', '.')} or "
            f"{commas[0].replace(',', '')}: the comma may be a decimal mark or a "
            "thousands separator, which the file must leave out",
            keys,
            {"decimal": ","},
        )
    return ","


def number_text(field: str, decimal: str) -> str:
    """Return a field as a number with a decimal point, if it is a number."""
    text = field.strip()
    return text.replace(",", ".") if decimal == "," and COMMA_NUMBER.match(text) else text


def _is_number(field: str, decimal: str) -> bool:
    return bool(NUMBER.match(number_text(field, decimal)))


def _has_names(
    path: Path, rows: list[list[str]], keys: DataTable, decimal: str, known: tuple[str, ...]
) -> bool:
    if keys.header is not None:
        return keys.header
    first = rows[0]
    if known and set(known) <= {each.strip() for each in first}:
        return True
    numbers = [column for column, field in enumerate(first) if _is_number(field, decimal)]
    missing = [field for field in first if field.strip().lower() in MISSING]
    if not numbers and not missing:
        return True
    counted = [first[column].strip() for column in numbers]
    is_counted = counted in (
        [str(n) for n in range(len(counted))],
        [str(n) for n in range(1, len(counted) + 1)],
    )
    rest = [column for column in range(len(first)) if column not in numbers]
    named = [
        column
        for column in rest
        if first[column].strip().lower() in (*LABELS, *WEAK_LABELS)
        or (len(rows) > 1 and all(_is_number(row[column], decimal) for row in rows[1:]))
    ]
    if is_counted and not missing and named and len(named) == len(rest):
        return True  # pandas names unnamed columns by their numbers
    odd = shown((missing or counted)[0])
    raise unclear(
        path,
        f"the first line holds {odd}: it may be a sample (no line of names), or the names of the columns",
        keys,
        {"header": False, **({} if keys.label else {"label": f"column_{len(first)}"})},
        {"header": True},
    )


def _names(path: Path, row: list[str]) -> tuple[str, ...]:
    """Return the names in the first line; a column without one is named by its position."""
    names = [field.strip() for field in row]
    taken = {name for name in names if name}
    if len(taken) != len([name for name in names if name]):
        twice = next(name for name in names if name and names.count(name) > 1)
        raise UsageError(f"{path}: two columns have the same name in the first line: {shown(twice)}")
    return tuple(name or unnamed(place) for place, name in enumerate(names, 1))


def unnamed(place: int) -> str:
    """Return the name of an unnamed column at this position, counted from 1."""
    return f"(column {place})"
