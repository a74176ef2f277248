"""A check of the first bytes of a file that would be learnt byte by byte: is it text, or something else?

The meaning of a file cannot be detected. So only files with non-text bytes, or with rows of a table, are
refused, until the user states in RUN.toml how to read them.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from node.content.delimited import NUMBER
from node.content.reading import unclear
from node.errors import UsageError
from node.protocols.data_table import DataTable

HEAD_BYTES = 1 << 16
ROWS_LOOKED_AT = 20
_ROWS_MIN = 3
_FIELDS_MAX = 4_096
_CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
"""Bytes that occur neither in UTF-8 texts nor in the old one-byte encodings."""
_SPARSE = re.compile(r"[+-]?[0-9.]+(?:\s+[0-9]+:\S+)+\s*\Z")
"""A row in the format of LIBSVM and XGBoost."""
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")
_SEPARATORS = (("comma", ","), ("semicolon", ";"), ("tab", "\t"), ("bar", "|"), ("space", None))
_BY_FUNCTION = 'give a function that reads it (data = "FILE.py:FUNCTION")'


def check_text(path: Path, keys: DataTable) -> None:
    """Refuse a file whose first bytes are not text, or are rows of numbers, unless the key `form` asks for
    its bytes. Raises UsageError, OSError."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    odd = _CONTROLS.search(head)
    if odd is not None:
        is_wide = head.startswith(_WIDE_MARKS) or not (
            head[:512:2].strip(b"\0") and head[1:512:2].strip(b"\0")
        )
        if is_wide and len(head) > 3:
            raise unclear(
                path,
                "this looks like UTF-16 text: save it as UTF-8, or set `form` to train on its raw bytes",
                keys,
                {"form": "bytes"},
            )
        raise unclear(
            path,
            f"not text: it has the byte {odd[0][0]:#04x}; {_BY_FUNCTION}, or set `form` "
            "to train on its raw bytes",
            keys,
            {"form": "bytes"},
        )
    text = head.decode("latin-1")
    if len(head) == HEAD_BYTES:
        text = text[: text.rfind("\n") + 1]
    rows = [line for line in text.splitlines() if line.strip()][:ROWS_LOOKED_AT]
    if rows and rows[0].strip().lower().startswith("@relation"):
        raise UsageError(f"{path}: a Weka table (ARFF), which is not read", "save it as csv")
    if len(rows) < _ROWS_MIN:
        return
    if all(map(_SPARSE.match, rows)):
        raise UsageError(
            f"{path}: sparse rows in LIBSVM's format, which are not read",
            "convert it to an npz of x and y: sklearn.datasets.load_svmlight_file reads the original file",
        )
    for name, separator in _SEPARATORS:
        if count := _fields(rows, separator):
            raise unclear(
                path,
                f"its lines are rows of {count} fields ({name} between them): a table, or a text",
                keys,
                {"form": "table"},
                {"form": "bytes"},
            )


def _fields(rows: Sequence[str], separator: str | None) -> int:
    """Return the number of fields per row if all rows have the same number and at least half of the fields
    are numbers; otherwise 0."""
    found = [row.split(separator, _FIELDS_MAX) for row in rows]
    count = len(found[0])
    if count < 2 or any(len(row) != count for row in found):
        return 0
    fields = [field.strip() for row in found[1:] for field in row]
    numbers = sum(bool(NUMBER.match(field)) for field in fields)
    return count if 2 * numbers >= len(fields) else 0
