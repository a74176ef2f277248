"""Tables as arrays: x (N, features) of float32, and y; one sample per row, from text or Parquet.

The table is converted in chunks: only one chunk of rows is in memory as text, in addition to the numbers.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from node.content.columns import Kind, LabelColumn, Schema, choose, kind_of
from node.content.delimited import NOT_FINITE, NUMBER, TableForm, find_form, number_text, rows_of
from node.content.npz import RATIO_FREE_BYTES, RATIO_MAX
from node.content.reading import SourceReading, shown, unclear
from node.errors import UsageError
from node.invocation import install_command
from node.protocols.data_table import COLUMNS_MAX, DataTable

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
Tell = Callable[[str], None]

TABLE_NUMBERS_MAX = 1 << 29
"""Maximum number of values in a Parquet file, because a few bytes of it may stand for many values."""
CHUNK_FIELDS = 1 << 18
"""Number of fields in memory as text at a time: some 15 MB of Python strings."""
_GROWTH = 16
"""A full array of rows grows by one part in this many."""
_ODD = re.compile(r"[^0-9+\-.eE ]")
"""A character that does not occur in plain numbers. Python's `float` accepts more than the numbers that
programs write."""
_ROUNDED = "features above 16,777,216 are rounded: x is float32"
_VANISHED = "features closer to 0 than 1e-45 become 0: x is float32"
_FLOAT32_MIN = float(np.finfo(np.float32).smallest_subnormal)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def read_csv(path: Path, keys: DataTable, schema: Schema, reading: SourceReading, tell: Tell) -> Arrays:
    """Return a table of text as arrays. Raises UsageError, OSError."""
    form = find_form(path, keys, known=tuple(schema.features))
    reading.form = str(form)
    if schema.features:
        _check_columns(path, form.columns, schema)
    else:
        kinds = _kinds(form)
        choose(path, kinds, len(form.sample), keys, schema, reading.skipped)
        _check_words(path, kinds, keys, schema)
    return _Csv(path, form, keys, schema, reading).read(tell)


def _kinds(form: TableForm) -> dict[str, Kind]:
    def is_number(field: str) -> bool:
        return bool(NUMBER.match(number_text(field, form.decimal)))

    rows = [row for row in form.sample if any(field.strip() for field in row)] or form.sample
    return {name: kind_of([row[at] for row in rows], is_number) for at, name in enumerate(form.columns)}


def _check_words(path: Path, kinds: dict[str, Kind], keys: DataTable, schema: Schema) -> None:
    """Refuse all features that hold words in one error, with the key that leaves them out."""
    wrong = [name for name in schema.features if kinds[name] in ("words", "names", "empty")]
    if len(wrong) > 1:
        told = ", ".join(map(shown, wrong[:8])) + (" ..." if len(wrong) > 8 else "")
        ignore = [*(keys.ignore or ()), *wrong]
        raise unclear(
            path,
            f"{len(wrong)} columns do not hold numbers: {told}",
            keys,
            {"ignore": ignore, "label": schema.label},
        )


def _check_columns(path: Path, columns: Sequence[str], schema: Schema) -> None:
    """Check that an additional table has the columns of the training samples. Raises UsageError."""
    known = (*schema.features, schema.label)
    for name in known if schema.needs_labels else schema.features:
        if name not in columns:
            raise UsageError(f"{path}: has no column {shown(name)}, which the training samples have")
    for name in columns:
        if name not in known and name not in schema.ignored:
            raise UsageError(f"{path}: has a column {shown(name)}, which the training samples do not have")


class _Csv:
    """One table of text during its conversion."""

    def __init__(
        self, path: Path, form: TableForm, keys: DataTable, schema: Schema, reading: SourceReading
    ) -> None:
        self._path, self._form, self._schema, self._keys, self._reading = path, form, schema, keys, reading
        places = {name: place for place, name in enumerate(form.columns)}
        self._features = [places[name] for name in schema.features]
        self._label = places.get(schema.label)
        self._index = places.get(schema.index) if schema.index else None
        self._labels = LabelColumn(path, schema.label, keys, schema)
        self._index_seen: set[str] = set()
        self._empty_rows = 0
        self._samples = 0

    def read(self, tell: Tell) -> Arrays:
        take: Callable[[Any], tuple[str, ...]] = itemgetter(*self._features)
        if len(self._features) == 1:
            only = self._features[0]
            take = lambda row: (row[only],)  # noqa: E731 - as itemgetter's
        numbers = _GrowingRows(len(self._features))
        for rows in self._chunks():
            numbers.add(self._numbers([take(row) for row in rows]))
            if self._label is not None:
                column = [row[self._label] for row in rows]
                self._labels.add(
                    [number_text(each, ",") for each in column] if self._form.decimal == "," else column
                )
            self._samples += len(rows)
            tell(f"{self._samples:,} rows")
        if not self._samples:
            raise UsageError(f"{self._path}: want a line of column names, then one row per sample")
        found = {"x": numbers.finish()}
        if self._label is not None:
            found["y"] = self._labels.finish()
        if self._empty_rows:
            self._reading.skipped.append(f"{self._empty_rows} rows of empty fields")
        return found

    def _chunks(self) -> Iterator[list[list[str]]]:
        rows = self._held()
        count = max(1, CHUNK_FIELDS // len(self._form.columns))
        while chunk := list(islice(rows, count)):
            yield chunk

    def _held(self) -> Iterator[list[str]]:
        for number, row in rows_of(self._path, self._form, self._keys):
            if not any(row) or not any(map(str.strip, row)):
                self._empty_rows += 1
                continue
            if self._index is not None:
                self._check_index(row[self._index], number)
            yield row

    def _check_index(self, value: str, number: int) -> None:
        if value in self._index_seen:
            name = self._schema.index
            raise unclear(
                self._path,
                f"{shown(name)} has no name, and row {number} repeats {shown(value)}, so it is not an index",
                self._keys,
                {"ignore": [name]},
                {"ignore": []},
            )
        self._index_seen.add(value)

    def _numbers(self, rows: list[tuple[str, ...]]) -> Array:
        flat = list(chain.from_iterable(rows))
        is_plain = _ODD.search("".join(flat)) is None
        with suppress(ValueError):
            if is_plain:
                found = np.array(list(map(float, flat)), np.float64)
                if np.abs(found).max(initial=0.0) < _FLOAT32_MAX:
                    note_rounded(found, self._reading)
                    return found.astype(np.float32).reshape(len(rows), -1)
        found = np.array([self._number(place, field) for place, field in enumerate(flat)], np.float64)
        note_rounded(found, self._reading)
        return found.astype(np.float32).reshape(len(rows), -1)

    def _number(self, place: int, field: str) -> float:
        text = number_text(field, self._form.decimal)
        if self._form.decimal == "," and "." in field and text == field.strip():
            text = ""  # a thousands separator, because the comma is the decimal mark
        is_number = bool(NUMBER.match(text))
        if is_number and abs(float(text)) < _FLOAT32_MAX:
            return float(text)
        row, column = divmod(place, len(self._features))
        name = self._schema.features[column]
        finite = " finite" if is_number or text.lower() in NOT_FINITE else ""
        raise UsageError(
            f"{self._path}: column '{name}', sample {self._samples + row + 1}: {shown(field)} is no{finite}"
            " number",
            _leave_out(self._keys, name),
        )


def _leave_out(keys: DataTable, name: str) -> str:
    """Return the remedy for a column without numbers."""
    line = keys.line(ignore=[*(keys.ignore or ()), name])
    return f"correct the file, or leave the column out in RUN.toml: {line}"


def note_rounded(numbers: Array, reading: SourceReading) -> None:
    """State in the reading if numbers (such as ids) are too large to be exact in float32, or become 0 in
    it."""
    if np.abs(numbers).max(initial=0.0) > 1 << 24 and _ROUNDED not in reading.notes:
        reading.notes.append(_ROUNDED)
    if np.any((numbers != 0) & (np.abs(numbers) < _FLOAT32_MIN)) and _VANISHED not in reading.notes:
        reading.notes.append(_VANISHED)


class _GrowingRows:
    """Blocks of rows as one array that grows in place. If blocks were collected and joined later, the heap
    would be left with small pieces that cannot be returned to the system."""

    def __init__(self, columns: int) -> None:
        self._array: Array = np.empty((0, columns), np.float32)
        self._count = 0

    def add(self, block: Array) -> None:
        """Append rows."""
        end = self._count + len(block)
        if end > len(self._array):
            self._array.resize((end + end // _GROWTH, self._array.shape[1]), refcheck=False)
        self._array[self._count : end] = block
        self._count = end

    def finish(self) -> Array:
        """Return all rows."""
        self._array.resize((self._count, self._array.shape[1]), refcheck=False)
        return self._array


# Parquet


def read_parquet(path: Path, keys: DataTable, schema: Schema, reading: SourceReading, tell: Tell) -> Arrays:
    """Return a Parquet table as arrays. Raises UsageError, OSError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"{path}: pyarrow, which reads Parquet, is not installed", install_command("pyarrow")
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return _Parquet(path, file, keys, schema, reading).read(tell)
    except MemoryError:
        size = path.stat().st_size
        raise UsageError(
            f"{path}: reading it takes more memory than is allowed for {size:,} bytes of Parquet"
        ) from None
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path}: no Parquet file: {(str(error).splitlines() or [''])[0][:200]}") from None


class _Parquet:
    """One Parquet file during its conversion, a row group at a time."""

    def __init__(
        self, path: Path, file: Any, keys: DataTable, schema: Schema, reading: SourceReading
    ) -> None:
        self._path, self._file, self._keys, self._schema, self._reading = path, file, keys, schema, reading
        told = file.metadata
        self._rows = told.num_rows
        size = 4 * told.num_rows * told.num_columns
        if told.num_columns > COLUMNS_MAX or told.num_rows * told.num_columns > TABLE_NUMBERS_MAX:
            raise UsageError(f"{path}: {told.num_rows} rows of {told.num_columns} columns are too many")
        stored = path.stat().st_size
        if size > max(RATIO_FREE_BYTES, RATIO_MAX * stored):
            raise UsageError(
                f"{path}: {size >> 20} MiB of numbers in a file of {stored >> 10} KiB; at "
                f"most {RATIO_MAX} times its size is unpacked"
            )
        if not told.num_rows:
            raise UsageError(f"{path}: no rows")
        self._arrow = file.schema_arrow
        self._types = {each.name: each.type for each in self._arrow}
        if len(self._types) != len(self._arrow):
            raise UsageError(f"{path}: two columns have the same name")
        self._nested = [
            name
            for name, kind in self._types.items()
            if kind.num_fields or str(kind).startswith(("binary", "large_binary", "fixed_size_binary"))
            if not str(kind).startswith("dictionary")
        ]

    def read(self, tell: Tell) -> Arrays:
        schema, reading = self._schema, self._reading
        reading.form = f"Parquet, {self._rows:,} rows, {len(self._types)} columns"
        if schema.features:
            _check_columns(self._path, [name for name in self._types if not self._is_index(name)], schema)
        else:
            self._choose()
        self._check_types()
        words = self._class_names()
        labels = LabelColumn(self._path, schema.label, self._keys, schema)
        has_labels = schema.label in self._types
        columns = [*schema.features, *([schema.label] if has_labels else [])]
        x = np.empty((self._rows, len(schema.features)), np.float32)
        row = 0
        batch_rows = max(1, CHUNK_FIELDS // max(1, len(columns)))
        for batch in self._file.iter_batches(batch_rows, columns=columns, use_threads=False):
            for place, name in enumerate(schema.features):
                x[row : row + batch.num_rows, place] = self._numbers(batch.column(name), name, row)
            if has_labels:
                labels.add(self._label_texts(batch.column(schema.label)))
            row += batch.num_rows
            tell(f"{row:,} of {self._rows:,} rows")
        found = {"x": x}
        if has_labels:
            found["y"] = labels.finish()
            y = found["y"]
            fits = schema.label_kind == "numbers" and y.min() >= 0 and y.max() < len(words)
            if fits and not schema.words:
                schema.words[:] = words
                reading.notes.append("the classes have the words that the file stores for their numbers")
        return found

    def _choose(self) -> None:
        kinds: dict[str, Kind] = {}
        rows = 0
        usual = [name for name in self._types if not self._is_index(name)]
        head = next(self._file.iter_batches(200, columns=self._flat(usual), use_threads=False), None)
        for name in usual:
            if name in self._nested:
                kinds[name] = "words"
                continue
            assert head is not None
            values = [_text(value) for value in head.column(name).to_pylist()]
            rows = len(values)
            is_bool = str(self._types[name]) == "bool"  # a feature of 0 and 1, or a label of two words
            kinds[name] = kind_of(values, NUMBER.match) if self._is_number(name) else _word_kind(values)
            kinds[name] = "numbers" if is_bool and name != self._keys.label else kinds[name]
        left_out = [name for name in self._types if name not in kinds]
        wanted = {self._keys.label, *self._keys.features}
        for name in left_out:
            if name in wanted:
                kinds[name] = "numbers" if self._is_number(name) else "words"
            else:
                self._reading.skipped.append(f"{shown(name)}: the index that pandas added")
        choose(self._path, kinds, rows, self._keys, self._schema, self._reading.skipped)
        _check_words(self._path, kinds, self._keys, self._schema)
        self._schema.ignored += [name for name in left_out if name not in wanted]

    def _flat(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self._nested]

    def _is_index(self, name: str) -> bool:
        """Return whether pandas marks or names a column as its index."""
        columns = self._told(b"pandas").get("index_columns", [])
        return name.startswith("__index_level_") or (isinstance(columns, list) and name in columns)

    def _told(self, key: bytes) -> dict[str, Any]:
        try:
            found = json.loads((self._arrow.metadata or {}).get(key, b"{}"))
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _class_names(self) -> list[str]:
        """Return the words that Hugging Face's `datasets` stores for the numbers of a class column."""
        try:
            names = self._told(b"huggingface")["info"]["features"][self._schema.label]["names"]
        except (KeyError, TypeError):
            return []
        return names if isinstance(names, list) and all(isinstance(each, str) for each in names) else []

    def _is_number(self, name: str) -> bool:
        kind = str(self._types[name])
        return kind in ("float", "double", "halffloat") or kind.lstrip("u").startswith(("int", "decimal"))

    def _check_types(self) -> None:
        for name in (*self._schema.features, self._schema.label):
            if name in self._nested:
                raise UsageError(
                    f"{self._path}: column {shown(name)} holds {str(self._types[name])[:60]} and not numbers",
                    _leave_out(self._keys, name),
                )

    def _numbers(self, column: Any, name: str, row: int) -> Array:
        if str(column.type) != "bool" and not self._is_number(name):
            values = [_text(value) for value in column.to_pylist()]
            wrong = next((at for at, each in enumerate(values)), 0)
            raise self._no_number(name, row + wrong, values[wrong] if values else "", "")
        if column.null_count:
            wrong = column.to_pylist().index(None)
            raise self._no_number(name, row + wrong, "", "")
        found: Array = column.to_numpy(zero_copy_only=False).astype(np.float64)
        odd = ~(np.abs(found) < _FLOAT32_MAX)
        if odd.any():
            wrong = int(odd.argmax())
            raise self._no_number(name, row + wrong, found[wrong], " finite")
        note_rounded(found, self._reading)
        return found

    def _no_number(self, name: str, row: int, value: object, finite: str) -> UsageError:
        return UsageError(
            f"{self._path}: column '{name}', sample {row + 1}: {shown(value)} is no{finite} number",
            _leave_out(self._keys, name),
        )

    def _label_texts(self, column: Any) -> list[str]:
        if not self._is_number(self._schema.label) and not self._schema.label_kind and not self._keys.classes:
            self._schema.label_kind = "words"
        return [_text(value) for value in column.to_pylist()]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _word_kind(values: Sequence[str]) -> Kind:
    held = [each for each in values if each]
    return "empty" if not held else "names" if len(set(held)) == len(held) else "words"
