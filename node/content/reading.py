"""The reading of a source of samples, that is, how the source was read. It is shown before training, and kept
with the run.

A reading gives the file and its form, separator and encoding; the label column and why it is the label; the
classes with their numbers and counts; the parts left out and why; and examples of samples. A source with more
than one possible reading is refused: `unclear` makes the error that names the readings, with the line of
RUN.toml for each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from node.errors import UsageError
from node.protocols.data_table import DataTable
from node.seams import Seams

Array = np.ndarray[Any, np.dtype[Any]]

READING_NAME = "reading.json"
"""Name of the reading's file, in the folder of the parts that were made from the source."""
READING_BYTES_MAX = 8 << 20
CLASSES_MAX = 65_536
"""Maximum number of different labels that are words: the largest species data sets have this many."""
SHOWN_MAX = 40
"""Maximum number of characters of a value on a screen."""
CLASSES_SHOWN = 10
FEATURES_SHOWN = 6
SAMPLES_SHOWN = 3
_NUMBERS_SHOWN = 6


class ClassCount(msgspec.Struct, frozen=True):
    """A class: its word, its number, and its number of samples in all parts."""

    word: str
    number: int
    samples: int


class ArrayFacts(msgspec.Struct, frozen=True):
    """An array of the training samples: its type, the shape of one sample, and its lowest and highest
    value."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float


@dataclass
class SourceReading:
    """How a source was read.

    `words` are the names of the classes in the order of their numbers, if labels are words. `classes` is
    empty if labels are amounts. `label` describes the labels and why they were chosen, `column` is the label
    column of a table, and `ignored` are the columns that are neither labels nor features. For tokenized text,
    `window` is the number of tokens in a sample, `vocabulary` the size of the tokenizer's vocabulary, and
    `records` describes the records.
    """

    source: str
    form: str = ""
    label: str = ""
    column: str = ""
    label_kind: str = ""
    ignored: list[str] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)
    classes: list[ClassCount] = field(default_factory=list)
    arrays: list[ArrayFacts] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    window: int = 0
    vocabulary: int = 0
    records: str = ""

    def lines(self) -> list[str]:
        """Return the lines of the reading for a screen."""
        counts = ", ".join(f"{count:,} {part}" for part, count in self.parts.items())
        rows = [("data", f"{self.source}: {self.form}"), ("parts", counts), ("label", self.label)]
        if self.classes:
            rows.append(("classes", self._classes_text()))
        if self.features:
            rows.append(("features", _some(list(map(shown, self.features)), FEATURES_SHOWN, ", ")))
        rows += [("left out", each) for each in self.skipped]
        rows += [("note", each) for each in self.notes]
        rows += [("array", _array_text(each)) for each in self.arrays]
        rows += [("sample", each) for each in self.samples]
        return [f"{name:<9} {text}" for name, text in rows if text]

    def _classes_text(self) -> str:
        told = [f"{each.number} {shown(each.word)} {each.samples:,}" for each in self.classes]
        return f"{len(told)} (number word samples): {_some(told, CLASSES_SHOWN, '; ')}"


def _some(texts: Sequence[str], count: int, between: str) -> str:
    if len(texts) <= count + 1:
        return between.join(texts)
    return between.join([*texts[:count], "...", texts[-1]]) + f" ({len(texts)})"


def _array_text(array: ArrayFacts) -> str:
    shape = " x ".join(map(str, array.shape)) or "one number"
    return f"{array.name}: {array.dtype}, {shape}, from {array.low:g} to {array.high:g}"


def shown(value: object) -> str:
    """Return a value from a user's file, quoted and shortened."""
    text = str(value).replace("\n", "\\n")
    return f"'{text[:SHOWN_MAX]}{'...' if len(text) > SHOWN_MAX else ''}'"


def unclear(path: Path, what: str, keys: DataTable, *choices: Mapping[str, Any]) -> UsageError:
    """Return the error for a source with more than one possible reading. Each of `choices`, a few keys of
    `[data]`, selects one reading."""
    lines = " or ".join(keys.line(**choice) for choice in choices)
    return UsageError(f"{path}: {what}", f"in RUN.toml: {lines}")


def describe(reading: SourceReading, parts: Mapping[Any, Mapping[str, Array]]) -> None:
    """Add facts about the arrays of all parts to the reading: counts, classes, ranges, and three samples."""
    train = parts["train"]
    reading.parts = {str(part): len(next(iter(arrays.values()))) for part, arrays in parts.items()}
    reading.arrays = [
        ArrayFacts(name, str(array.dtype), array.shape[1:], float(array.min()), float(array.max()))
        for name, array in train.items()
    ]
    name = "labels" if "labels" in train else "y"
    labels = [arrays[name] for arrays in parts.values() if name in arrays]
    if labels and all(each.ndim == 1 and each.dtype.kind in "iub" for each in labels):
        reading.classes = _classes(np.concatenate(labels), reading.words)
    reading.samples = reading.samples or [
        _sample_text(train, row, reading)
        for row in range(min(SAMPLES_SHOWN, len(next(iter(train.values())))))
    ]


def _classes(labels: Array, words: Sequence[str]) -> list[ClassCount]:
    numbers, counts = np.unique(labels, return_counts=True)
    if len(numbers) > CLASSES_MAX:
        return []
    found = dict(zip(map(int, numbers), map(int, counts), strict=True))
    if words:
        return [ClassCount(word, number, found.get(number, 0)) for number, word in enumerate(words)]
    return [ClassCount(str(number), number, count) for number, count in found.items()]


def _sample_text(arrays: Mapping[str, Array], row: int, reading: SourceReading) -> str:
    told = []
    for name, array in arrays.items():
        value = array[row]
        if name == "y" and value.ndim == 0:
            number = int(value) if value.dtype.kind in "iub" else None
            is_word = number is not None and 0 <= number < len(reading.words)
            told.append(f"y {value:g}" + (f" {shown(reading.words[number or 0])}" if is_word else ""))
        elif value.ndim == 1 and len(value) == len(reading.features):
            pairs = list(zip(reading.features, value, strict=True))[:_NUMBERS_SHOWN]
            told.append(", ".join(f"{column[:SHOWN_MAX]} {number:g}" for column, number in pairs))
            told[-1] += " ..." if len(value) > _NUMBERS_SHOWN else ""
        elif is_picture(value):
            told.append(f"{name} {picture_text(value)}")
        else:
            flat = np.asarray(value).reshape(-1)
            told.append(f"{name} {' '.join(f'{number:g}' for number in flat[:_NUMBERS_SHOWN])}")
            told[-1] += " ..." if flat.size > _NUMBERS_SHOWN else ""
    return "; ".join(told)


def is_picture(value: Array) -> bool:
    """Return whether an array of one sample can be drawn: (H, W), (C, H, W) or (H, W, C)."""
    shape = value.shape
    if len(shape) == 3:
        is_first = min(shape[1:]) >= 4 and shape[0] in (1, 3, 4)
        return is_first or (min(shape[:2]) >= 4 and shape[2] in (1, 3, 4))
    return len(shape) == 2 and min(shape) >= 4


def picture_text(value: Array) -> str:
    """Return a picture as one line of text: the mean brightness of 16 columns, dark to light."""
    pixels = np.asarray(value, np.float64)
    if pixels.ndim == 3:
        pixels = pixels.mean(axis=0 if pixels.shape[0] in (1, 3, 4) else 2)
    low, high = pixels.min(), pixels.max()
    columns = np.array([part.mean() for part in np.array_split(pixels, min(16, pixels.shape[1]), axis=1)])
    scaled = (columns - low) / (high - low) if high > low else np.zeros(len(columns))
    return "|" + "".join(" .:-=+*#%@"[min(9, int(each * 10))] for each in scaled) + "|"


def write_reading(reading: SourceReading, folder: Path) -> None:
    """Write a reading into the folder of the parts. Raises OSError."""
    (folder / READING_NAME).write_bytes(msgspec.json.encode(reading))


def kept_name(run: str) -> str:
    """Return the storage name of the reading of a run's data."""
    return f"readings/{run}"


async def kept_reading(seams: Seams, run: str) -> SourceReading | None:
    """Return the reading of a run's data, if this node requested the run."""
    data = await seams.executor.run(partial(seams.storage.read, kept_name(run)))
    return decode_reading(data) if data else None


def read_reading(folder: Path) -> SourceReading | None:
    """Return the reading in a folder, if there is one."""
    try:
        data = (folder / READING_NAME).read_bytes()
        return decode_reading(data)
    except OSError:
        return None


def reading_document(reading: SourceReading | None) -> dict[str, Any] | None:
    """Return a reading, if there is one, as a `peerloom/data/1` document."""
    if reading is None:
        return None
    found: dict[str, Any] = msgspec.to_builtins(reading)
    return {"schema": "peerloom/data/1", **found}


def decode_reading(data: bytes) -> SourceReading | None:
    """Return the reading in `data`, None if it is malformed."""
    if len(data) > READING_BYTES_MAX:
        return None
    try:
        return msgspec.json.decode(data, type=SourceReading)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
