"""The columns of a table: the label, the features, and the kind of labels.

One rule finds the label: the column named label, labels or target; otherwise the last column, if it is named
class or y or is the only column of words. If several columns fit, or none, the user must decide. An index
that a program added is left out, and the reading says so.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unicodedata import normalize

import numpy as np

from node.content.delimited import LABELS, MISSING, NOT_FINITE, NUMBER, WEAK_LABELS
from node.content.reading import CLASSES_MAX, SourceReading, shown, unclear
from node.errors import UsageError
from node.protocols.data_table import DataTable
from node.suggest import did_you_mean

Array = np.ndarray[Any, np.dtype[Any]]
Kind = Literal["numbers", "whole", "words", "names", "empty"]
"""The contents of a column's first rows: numbers, distinct whole numbers, words, distinct words (names), or
nothing."""

DISTINCT_ROWS_MIN = 10
"""Number of rows from which words that are all distinct count as names of samples, not as classes."""
AMOUNTS_REPEAT = 5
"""Decimal numbers that occur at least this often on average may be names of classes."""
_AMOUNT_CLASSES_MAX = 100
_WHOLE = re.compile(r"[+-]?[0-9]+\Z")
_CANONICAL = re.compile(r"(?:0|-?[1-9][0-9]*)\Z")
_UNNAMED = re.compile(r"(?:\(column [0-9]+\)|Unnamed: [0-9]+(?:\.[0-9]+)?|__index_level_[0-9]+__)\Z")
"""Names that this program, pandas' `read_csv` and pandas' `to_parquet` give to an unnamed index."""
_KIND_WORDS = {
    "numbers": "numbers",
    "whole": "whole numbers, each once",
    "words": "words",
    "names": "words, each once",
    "empty": "empty",
}
_COUNTERS = frozenset(
    {"#", "_id", "id", "idx", "index", "no", "nr", "row", "row_id", "row_number", "rowid", "rownames", "uid"}
)
_IDENTIFIER = re.compile(r".*(?:[_ .-]id|[a-z]I[dD])\Z", re.DOTALL)
_UNSEEN = re.compile(r"[\u200b-\u200f\u2060\ufeff\u00ad]")
"""Zero-width characters, which are picked up when text is copied from web pages."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INT64_MAX = 1 << 63


@dataclass
class Schema:
    """The names in the training samples: the columns of a table, and the classes in the order of their
    numbers. The first source fills it in, and later sources must match it."""

    features: list[str] = field(default_factory=list)
    label: str = ""
    words: list[str] = field(default_factory=list)
    needs_labels: bool = True
    """False for prediction: samples without labels are accepted."""
    ignored: list[str] = field(default_factory=list)
    index: str = ""
    """The name of a column that seems to be an index. All rows must confirm it."""
    why: str = ""
    """Why this column is the label."""
    label_kind: Literal["", "words", "numbers", "amounts"] = ""
    window: int = 0
    """Number of tokens in a text sample."""
    order: str = ""
    """Why the classes have their numbers, if the reason is neither the alphabet nor a key."""

    def state(self, reading: SourceReading) -> None:
        """Write the columns into a reading."""
        reading.features, reading.words, reading.column = list(self.features), list(self.words), self.label
        reading.ignored, reading.label_kind = list(self.ignored), self.label_kind
        if self.label:
            told = _LABEL_TEXTS.get(self.label_kind, "")
            if self.label_kind == "words" and self.words != sorted(self.words):
                told = "words, numbered in the order of `classes`"
            told = self.order or told
            reading.label = f"{shown(self.label)}, {self.why}; {told}"


def schema_from(reading: SourceReading) -> Schema:
    """Return the names in a reading, as a schema that further sources must match."""
    kind: Any = reading.label_kind
    return Schema(
        list(reading.features),
        reading.column,
        list(reading.words),
        ignored=list(reading.ignored),
        label_kind=kind,
    )


_LABEL_TEXTS = {
    "words": "words, numbered in alphabetical order",
    "numbers": "numbers of classes, unchanged",
    "amounts": "amounts, as float32",
}


def choose(
    path: Path, kinds: Mapping[str, Kind], rows: int, keys: DataTable, schema: Schema, skipped: list[str]
) -> None:
    """Fill in the columns of a table whose first `rows` have these `kinds`. `skipped` receives the columns
    left out. Raises UsageError if several readings fit, or a key gives a column that does not exist."""
    left = _left_out(path, kinds, keys, schema, skipped)
    if len(left) < 2 and not keys.label:
        only = left[0] if left else next(iter(kinds))
        raise UsageError(f"{path}: only one column, {shown(only)}; want numbers and a column of labels")
    schema.label, schema.why = _label(path, {name: kinds[name] for name in left}, rows, kinds, keys)
    schema.index = "" if schema.index == schema.label else schema.index
    if keys.features:
        _known(path, keys.features, kinds, "features")
        schema.features = list(keys.features)
        if schema.label in schema.features:
            raise UsageError(f"{path}: {shown(schema.label)} is both the label and one of the features")
        unused = [name for name in left if name not in (*keys.features, schema.label)]
        if unused:
            skipped.append(f"not in `features`: {', '.join(map(shown, unused[:8]))}")
        schema.ignored = [name for name in kinds if name not in (*keys.features, schema.label)]
        return
    schema.features = [name for name in left if name != schema.label]
    _check_features(path, kinds, keys, schema.features)
    schema.ignored = [name for name in kinds if name not in (*schema.features, schema.label)]


def _left_out(
    path: Path, kinds: Mapping[str, Kind], keys: DataTable, schema: Schema, skipped: list[str]
) -> list[str]:
    """Return the columns that are neither ignored nor empty nor an index."""
    ignored = set(keys.ignore or ())
    _known(path, ignored, kinds, "ignore")
    if ignored:
        skipped.append(f"by `ignore`: {', '.join(map(shown, sorted(ignored)))}")
    wanted = {*keys.features, keys.label}
    left = []
    for place, (name, kind) in enumerate(kinds.items()):
        if name in ignored:
            continue
        is_unnamed = bool(_UNNAMED.match(name))
        if kind == "empty" and is_unnamed and name not in wanted:
            skipped.append(f"{shown(name)}: no name and no values")
        elif is_unnamed and name not in wanted and keys.ignore is None:
            if place and not name.startswith("__index"):
                raise unclear(
                    path,
                    f"{shown(name)} has no name of its own: it may be an index, or a feature",
                    keys,
                    {"ignore": [name]},
                    {"ignore": []},
                )
            if kind in ("numbers", "words"):
                raise unclear(
                    path,
                    f"{shown(name)} has no name, but its values do not form an index: it may be a feature",
                    keys,
                    {"ignore": [name]},
                    {"ignore": []},
                )
            schema.index = name
            skipped.append(f"{shown(name)}: an unnamed index, with each value once")
        else:
            left.append(name)
    return left


def _known(path: Path, names: Iterable[str], kinds: Mapping[str, Kind], key: str) -> None:
    for name in names:
        if name not in kinds:
            near = did_you_mean(name, list(kinds))
            told = ", ".join(map(shown, list(kinds)[:8])) + (" ..." if len(kinds) > 8 else "")
            raise UsageError(
                f"{path}: {key}: there is no column {shown(name)}{near}", f"its columns are {told}"
            )


def _label(
    path: Path, left: Mapping[str, Kind], rows: int, kinds: Mapping[str, Kind], keys: DataTable
) -> tuple[str, str]:
    """Return the label, and why it is the label."""
    if keys.label:
        _known(path, [keys.label], kinds, "label")
        return keys.label, "by the key `label`"
    lower = {name: name.strip().lower() for name in left}
    last = list(left)[-1]
    strong = [name for name in left if lower[name] in LABELS]
    weak = [name for name in left if lower[name] in WEAK_LABELS]
    words = [name for name in left if left[name] in ("words", "names")]
    if len(strong) == 1 and last not in weak:
        return strong[0], "the column with that name"
    is_coordinate = lower[last] == "y" and "x" in lower.values() and len(left) > 2
    if not strong and weak == [last] and not is_coordinate:
        return last, "the last column, and it has that name"
    are_classes = left[last] == "words" or rows < DISTINCT_ROWS_MIN
    if not strong and not weak and words == [last] and are_classes:
        return last, "the last column, and the only one with words"
    raise _no_label(path, left, keys, [*strong, *weak, *words, last])


def _no_label(path: Path, left: Mapping[str, Kind], keys: DataTable, candidates: Sequence[str]) -> UsageError:
    found = list(dict.fromkeys(candidates))
    if len(found) == 1:
        found.append(next(name for name in left if name not in found))
    told = ", ".join(f"{shown(name)} ({_KIND_WORDS[left[name]]})" for name in found[:4])
    return unclear(
        path,
        f"which column is the label is not clear; it may be {told}",
        keys,
        {"label": found[0]},
        {"label": found[1]},
    )


def _check_features(path: Path, kinds: Mapping[str, Kind], keys: DataTable, features: Sequence[str]) -> None:
    if keys.ignore is not None:
        return
    counters = [name for name in features if kinds[name] in ("whole", "numbers") and is_identifier(name)]
    if counters:
        raise unclear(
            path,
            f"{shown(counters[0])} has the name of an identifier: it may be an index, or a feature",
            keys,
            {"ignore": counters},
            {"ignore": []},
        )


def is_identifier(name: str) -> bool:
    """Return whether a column has the name of an identifier: id, row, PassengerId, user_id."""
    return name.lower() in _COUNTERS or bool(_IDENTIFIER.match(name) or _IDENTIFIER.match(name.lower()))


def kind_of(fields: Sequence[str], is_number: Any) -> Kind:
    """Return the kind of the fields in a column's first rows."""
    held = [each.strip() for each in fields if each.strip()]
    if not held:
        return "empty"
    if not all(is_number(each) or each.lower() in NOT_FINITE for each in held):
        return "names" if len(set(held)) == len(held) else "words"
    is_whole = len(held) == len(fields) and all(map(_WHOLE.match, held)) and len(set(held)) == len(held)
    return "whole" if is_whole else "numbers"


# Labels


def alike(word: str) -> str:
    """Return a form that is equal for words that a person would consider the same: without case, spaces,
    surrounding quotes and invisible characters."""
    bare = _UNSEEN.sub("", normalize("NFKC", word)).strip(" \t\r\n\"'\u2018\u2019\u201c\u201d")
    return " ".join(bare.casefold().split())


class LabelColumn:
    """The labels of a table in the order of the rows: words, or numbers."""

    def __init__(self, path: Path, name: str, keys: DataTable, schema: Schema) -> None:
        self._path, self._name, self._keys, self._schema = path, name, keys, schema
        self._codes: dict[str, int] = {}
        self._blocks: list[Array] = []
        self._numbers: list[Array] | None = None
        self._count = self._known = 0

    def add(self, values: Sequence[str]) -> None:
        """Add the labels of the next rows. Raises UsageError."""
        if self._numbers is not None:
            self._numbers.append(self._amounts(values))
            return
        codes = self._codes
        block = np.fromiter((codes.setdefault(each, len(codes)) for each in values), np.int32, len(values))
        if "" in codes or any(not each.strip() for each in list(codes)[self._known :]):
            raise UsageError(f"{self._path}: column '{self._name}' of labels has an empty field")
        self._known = len(codes)
        self._blocks.append(block)
        self._count += len(values)
        if len(codes) > CLASSES_MAX:
            self._overflow()

    def _overflow(self) -> None:
        """Treat labels as amounts if they are too many for classes. Raises UsageError if some are words."""
        wrong = next((each for each in self._codes if not NUMBER.match(each.strip())), None)
        if wrong is not None or self._schema.words or self._keys.classes in ("words", "numbers"):
            raise UsageError(
                f"{self._path}: column '{self._name}' has more than {CLASSES_MAX:,} different labels",
                "set the column of labels: `[data] label`",
            )
        table = self._amounts(list(self._codes))
        self._numbers = [table[block] for block in self._blocks]
        self._codes, self._blocks = {}, []

    def _amounts(self, values: Sequence[str]) -> Array:
        found = np.empty(len(values), np.float32)
        for row, value in enumerate(values):
            text = value.strip()
            if not NUMBER.match(text):
                if text.lower() in NOT_FINITE:
                    raise self._not_finite()
                raise UsageError(
                    f"{self._path}: column '{self._name}' of labels: {shown(value)} is not a number"
                )
            if abs(float(text)) >= _FLOAT32_MAX:
                raise self._not_finite()
            found[row] = float(text)
        return found

    def _not_finite(self) -> UsageError:
        return UsageError(f"{self._path}: column '{self._name}' of labels has a number that is not finite")

    def finish(self) -> Array:
        """Return all labels as numbers. Raises UsageError if more than one reading fits."""
        if self._numbers is not None:
            self._settle("amounts")
            return np.concatenate(self._numbers)
        found: Array = self._table()[np.concatenate(self._blocks)]
        return found

    def _settle(self, kind: Literal["words", "numbers", "amounts"]) -> None:
        schema = self._schema
        if not schema.label_kind:
            schema.label_kind = kind
        elif schema.label_kind != kind:
            raise UsageError(
                f"{self._path}: column '{self._name}' of labels holds {kind}, but the "
                f"training samples' labels are {schema.label_kind}"
            )

    def _table(self) -> Array:
        """Return the number of each distinct label."""
        values, schema, rule = list(self._codes), self._schema, self._keys.classes
        if not schema.words and isinstance(rule, tuple) and rule:
            schema.words[:] = rule
        are_words = schema.label_kind == "words" or (
            not schema.label_kind and not rule and not self._is_numeric(values)
        )
        if schema.words or rule == "words" or are_words:
            if not schema.words:
                self._check_words(values)
                schema.words[:] = sorted(values)
            self._settle("words")
            return self._by_words(values)
        kind = schema.label_kind or rule or self._kind_of_numbers(values)
        if kind == "amounts":
            self._settle("amounts")
            return self._amounts(values)
        self._settle("numbers")
        return self._class_numbers(values)

    def _is_numeric(self, values: Sequence[str]) -> bool:
        texts = [each.strip() for each in values]
        if not any(map(NUMBER.match, texts)):
            return False
        if all(NUMBER.match(each) or each.lower() in NOT_FINITE for each in texts):
            if not all(map(NUMBER.match, texts)):
                raise self._not_finite()
            return True
        return False

    def _check_words(self, values: Sequence[str]) -> None:
        if isinstance(self._keys.classes, tuple):
            odd = next((each for each in values if each.strip().lower() in MISSING), None)
            if odd is not None:
                raise self._ask(
                    f"has {shown(odd)}: it may be a missing label, whose rows the file must "
                    "leave out, or a class",
                    {"classes": "words"},
                )
            bare: dict[str, str] = {}
            for each in values:
                other = bare.setdefault(alike(each), each)
                if other != each:
                    raise self._ask(
                        f"has {shown(other)} and {shown(each)}, which look alike: they may be "
                        "one class, to be corrected in the file, or two",
                        {"classes": "words"},
                    )

    def _by_words(self, values: Sequence[str]) -> Array:
        index = {word: number for number, word in enumerate(self._schema.words)}
        for value in values:
            if value not in index:
                if self._keys.classes and isinstance(self._keys.classes, tuple):
                    raise UsageError(
                        f"{self._path}: column '{self._name}': {shown(value)} is not one of `classes`"
                    )
                raise UsageError(
                    f"{self._path}: column '{self._name}': no training sample has the label {shown(value)}"
                )
        return np.array([index[value] for value in values], np.int64)

    def _class_numbers(self, values: Sequence[str]) -> Array:
        found = []
        for value in values:
            text = value.strip()
            if not NUMBER.match(text) or not float(text).is_integer() or abs(float(text)) >= _INT64_MAX / 2:
                raise UsageError(
                    f"{self._path}: column '{self._name}' of labels: {shown(value)} is not "
                    "the number of a class"
                )
            found.append(int(text) if _WHOLE.match(text) else int(float(text)))
        return np.array(found, np.int64)

    def _kind_of_numbers(self, values: Sequence[str]) -> Literal["numbers", "amounts"]:
        """Return whether numbers used as labels are names of classes or amounts. Raises UsageError if both
        fit."""
        texts = [each.strip() for each in values]
        if not all(abs(float(each)) < _FLOAT32_MAX for each in texts):
            raise self._not_finite()
        by_value: dict[float, str] = {}
        for each in texts:
            other = by_value.setdefault(float(each), each)
            if other != each or len(set(values)) != len(set(texts)):
                raise self._ask(
                    f"has {shown(other)} and {shown(each)}: they may be one number, or the "
                    "names of two classes",
                    {"classes": "words"},
                    {"classes": "amounts"},
                )
        if all(map(_CANONICAL.match, texts)):
            return self._kind_of_whole(list(map(int, texts)))
        if all(map(_WHOLE.match, texts)):
            odd = next(each for each in texts if not _CANONICAL.match(each))
            raise self._ask(
                f"has {shown(odd)}: it may be the name of a class, or the number {int(odd)}",
                {"classes": "words"},
                {"classes": "numbers"},
            )
        if all(float(each).is_integer() for each in texts):
            raise self._ask(
                f"holds whole numbers written with a point, such as {shown(texts[0])}: "
                "they may be numbers of classes, or amounts",
                {"classes": "numbers"},
                {"classes": "amounts"},
            )
        if self._count >= AMOUNTS_REPEAT * len(texts) > AMOUNTS_REPEAT and len(texts) <= _AMOUNT_CLASSES_MAX:
            raise self._ask(
                f"holds {len(texts)} different numbers such as {shown(texts[0])}: they "
                "may be names of classes, or amounts",
                {"classes": "words"},
                {"classes": "amounts"},
            )
        return "amounts"

    def _kind_of_whole(self, numbers: list[int]) -> Literal["numbers"]:
        low, high = min(numbers), max(numbers)
        if low < 0:
            choices = ({"classes": "words"}, {"classes": "amounts"})
            raise self._ask(f"has the number {low}: it may be the name of a class, or an amount", *choices)
        if self._count > 1 and (low > 1 or high - low + 1 > len(numbers)):
            raise self._ask(
                f"has {len(numbers)} different numbers from {low} to {high}, which do not "
                "count up from 0 or 1: they may be numbers of classes, or amounts",
                {"classes": "numbers"},
                {"classes": "amounts"},
            )
        return "numbers"

    def _ask(self, what: str, *choices: Mapping[str, Any]) -> UsageError:
        return unclear(self._path, f"the label '{self._name}' {what}", self._keys, *choices)
