"""Records of named fields, for language models: JSON lines, a JSON list, or a text table.

Records are read one at a time, so only one is in memory. A JSON list is read as a whole.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from node.content.delimited import find_form, rows_of
from node.content.reading import SourceReading, shown
from node.errors import UsageError
from node.invocation import install_command
from node.protocols.data_table import DataTable

Record = dict[str, Any]

LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".csv", ".tsv", ".parquet")
SUFFIXES = (*LINES, *TABLES)
RECORD_BYTES_MAX = 1 << 24
"""Maximum length of a line of JSON. A whole book takes a few megabytes."""
FIELDS_MAX = 1_024
LIST_BYTES_MAX = 1 << 28
"""Maximum size of a JSON list, because it is parsed as a whole."""
_BATCH_ROWS = 256
_HEAD_BYTES = 4_096


def records_of(path: Path, keys: DataTable, reading: SourceReading) -> Iterator[Record]:
    """Yield the records of a file in order, and put their form into `reading`. Raises UsageError, OSError."""
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return _of_table(path, keys, reading)
    if suffix == ".parquet":
        return _of_parquet(path, reading)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{path}: JSON in UTF-16", "save it as UTF-8")
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        return _of_list(path, reading)
    return _of_lines(path, reading)


def _of_lines(path: Path, reading: SourceReading) -> Iterator[Record]:
    reading.form = "JSON lines"
    with path.open("rb") as file:
        number = 0
        while line := file.readline(RECORD_BYTES_MAX + 1):
            number += 1
            if len(line) > RECORD_BYTES_MAX:
                raise UsageError(f"{path}: line {number} is longer than {RECORD_BYTES_MAX >> 20} MiB")
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield _checked(_parsed(path, line, number), path, f"line {number}")


def _parsed(path: Path, line: bytes, number: int) -> object:
    try:
        return json.loads(line.decode(), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: line {number}: not UTF-8 ({error.object[error.start]:#04x})", "save it as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}: line {number}: no JSON: {str(error)[:120]}",
            'write one record per line, such as {"prompt": "...", "completion": "..."}, or a list of them',
        ) from None


def _once(pairs: list[tuple[str, Any]]) -> Record:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"two fields have the name {next(name for name in names if names.count(name) > 1)!r}"
        )
    return found


def _of_list(path: Path, reading: SourceReading) -> Iterator[Record]:
    reading.form = "a JSON list"
    size = path.stat().st_size
    if size > LIST_BYTES_MAX:
        raise UsageError(
            f"{path}: a JSON list of {size >> 20} MiB; at most {LIST_BYTES_MAX >> 20} MiB are read",
            "write it as JSON lines, one record per line: `jq -c '.[]'`",
        )
    try:
        found = json.loads(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=_once)
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8", "save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: no JSON: {str(error)[:120]}") from None
    for number, record in enumerate(found, 1):
        yield _checked(record, path, f"record {number}")


def _of_table(path: Path, keys: DataTable, reading: SourceReading) -> Iterator[Record]:
    form = find_form(path, keys)
    if not form.has_names:
        raise UsageError(f"{path}: its first line contains no column names", "give it one")
    reading.form = str(form)
    for _, row in rows_of(path, form, keys):
        if any(map(str.strip, row)):
            yield dict(zip(form.columns, row, strict=True))


def _of_parquet(path: Path, reading: SourceReading) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"{path}: pyarrow, which reads Parquet, is not installed", install_command("pyarrow")
        ) from None
    reading.form = "Parquet"
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
                for record in batch.to_pylist():
                    yield _checked(record, path, "a row")
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path}: no Parquet file: {(str(error).splitlines() or [''])[0][:200]}") from None


def _checked(found: object, path: Path, where: str) -> Record:
    if not isinstance(found, dict):
        raise UsageError(
            f"{path}: {where}: is not a record with named fields",
            'write one record per line, such as {"prompt": "...", "completion": "..."}, or a list of them',
        )
    if len(found) > FIELDS_MAX:
        raise UsageError(f"{path}: {where}: {len(found)} fields; at most {FIELDS_MAX:,}")
    return found


def some_names(names: Sequence[str]) -> str:
    """Return the first few field names, as text for an error."""
    return ", ".join(map(shown, names[:8])) + (" ..." if len(names) > 8 else "")
