"""Data as people have it, made into a folder of `train.npz` and `test.npz`: the form that a run takes.

The requester's own command does so, in its own process, with files that belong to the person who asks:
what travels afterwards is arrays. Nothing here runs code or unpickles. Read are:

    TABLE.csv, TABLE.parquet    a row a sample: numbers, and one column of labels
    ARRAYS.npz, .safetensors    `x` and `y`, or arrays named as the model's inputs and labels; or all of them
                                as `train_NAME` and `test_NAME`, perhaps `validation_NAME`
    a folder of images          a folder for each class, at the top or under `train`, `test` and `validation`
    a folder of arrays          `train.npz`, and perhaps `test.npz` and `validation.npz`
    a folder of CIFAR-10        `data_batch_*.bin` and `test_batch.bin` (its binary version)
    http(s)://HOST/FILE         one of the files above

`[splits]` of RUN.toml names where the validation and test samples come from: another source, or a share of
the training samples. Where neither it nor the source has a test part, a fixed fifth is held out, the same at
every conversion. Equal sources make equal bytes, so that their hash names them.
"""

import csv
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from node.content.datasets import ORIGINS_NAME
from node.content.images import is_cifar, read_cifar, read_images
from node.content.npz import BadArchive, unpack_here
from node.content.shards import PARTS, PartName
from node.errors import UsageError
from node.invocation import install_command

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
Parts = dict[PartName, Arrays]
"""What a source has of each part; `train` is there always."""

_NUMBER = " number"
SCHEMES = ("http://", "https://")
LABEL_COLUMNS = ("label", "labels", "class", "target", "y")
"""A table's column of labels, by the first of these names that it has; else its last column."""
DOWNLOAD_BYTES_MAX = 1 << 31
DOWNLOAD_SECONDS = 60.0
"""Without a byte."""
HELD_OUT = 5
"""One sample in five is held out where the source does not say which."""
SAMPLES_MIN = 2
TABLE_NUMBERS_MAX = 1 << 29
"""The numbers in a Parquet file, whose few bytes may stand for many."""
SHOWN_MAX = 40
"""Letters of a value in an error."""
_SPLIT_SEED = 20
_VALIDATION_SEED = 21
_CHUNK_BYTES = 1 << 20
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass
class Schema:
    """What the training samples call things: the columns of a table, the classes in the order of their
    numbers. The first source that is read fills it in, and later ones must keep to it."""

    features: list[str] = field(default_factory=list)
    label: str = ""
    words: list[str] = field(default_factory=list)
    needs_labels: bool = True
    """False where samples are predicted from: those without labels will do."""


def is_source(data: str, base: Path) -> bool:
    """Return whether `data` of a RUN.toml in the folder `base` is something to be converted first."""
    if data.startswith(SCHEMES):
        return True
    path = base / Path(data).expanduser()
    if path.is_dir():
        return not (path / "train.npz").exists()
    return path.suffix.lower() in {*_READERS, *_ARCHIVES}


def convert(
    data: str, base: Path, folder: Path, *, test: str | float = "", validation: str | float = ""
) -> None:
    """Write `train.npz` and `test.npz`, and `validation.npz` where there is such a part, into `folder`, which
    exists. `test` and `validation` name another source each, or a share of the training samples.

    Raises:
        UsageError: what is missing, cannot be read or does not fit together, with its file.
    """
    schema = Schema()
    parts = _read_source(data, base, folder, schema)
    parts["train"][_NUMBER] = np.arange(len(next(iter(parts["train"].values()))))
    wanted: tuple[tuple[PartName, str | float], ...] = (("test", test), ("validation", validation))
    for part, source in wanted:
        if source and part in parts:
            raise UsageError(
                f"splits.{part}: {data} has {part} samples of its own", f"leave splits.{part} out"
            )
        if isinstance(source, str) and source:
            other = _read_source(source, base, folder, schema, part=part)
            if len(other) > 1:
                raise UsageError(f"splits.{part}: {source} has several parts of its own")
            parts[part] = other["train"]
    for part, source in wanted:
        if isinstance(source, float) and source:
            parts["train"], parts[part] = hold_out(parts["train"], source, data, part)
    if "test" not in parts:
        parts["train"], parts["test"] = hold_out(parts["train"], 1 / HELD_OUT, data, "test")
    origins = {name: arrays.pop(_NUMBER) for name, arrays in parts.items() if _NUMBER in arrays}
    _check_parts(parts, data)
    try:
        for name, arrays in parts.items():
            np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]  # numpy's own
        if len(origins) > 1:
            np.savez(folder / ORIGINS_NAME, **origins)  # type: ignore[arg-type]  # numpy's own
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}") from None


def schema_of(data: str, base: Path, folder: Path) -> Schema:
    """What a source calls its columns and classes. Raises UsageError."""
    schema = Schema()
    if is_source(data, base):
        _read_source(data, base, folder, schema)
    return schema


def read_new(data: str, base: Path, folder: Path, schema: Schema) -> Arrays:
    """Samples to predict from: a source's test part, or all of one that has no parts. `schema` is that of the
    training samples; labels may be missing. Raises UsageError."""
    parts = _read_source(data, base, folder, replace(schema, needs_labels=False))
    return parts.get("test", parts["train"])


def _read_source(data: str, base: Path, folder: Path, schema: Schema, *, part: str = "") -> Parts:
    is_url = data.startswith(SCHEMES)
    path = _download(data, folder) if is_url else base / Path(data).expanduser()
    if not path.exists():
        where = f"splits.{part}: " if part else ""
        raise UsageError(
            f"{where}{path}: no such file", "data, and what [splits] names, are files or folders"
        )
    parts = _read(path, schema)
    for name, arrays in parts.items():
        _count(arrays, path if len(parts) == 1 else path / name)
    return parts


def _read(path: Path, schema: Schema) -> Parts:
    """Arrays by name for each part."""
    try:
        if path.is_dir():
            if (path / "train.npz").exists():
                return {
                    name: _read_npz(path / f"{name}.npz")
                    for name in PARTS
                    if name == "train" or (path / f"{name}.npz").exists()
                }
            if is_cifar(path):
                return read_cifar(path, schema.words)
            return read_images(path, schema.words, needs_labels=schema.needs_labels)
        suffix = path.suffix.lower()
        if suffix in _ARCHIVES:
            return _from_named(_ARCHIVES[suffix](path), path)
        if suffix not in _READERS:
            raise UsageError(f"{path}: want {', '.join(sorted({*_READERS, *_ARCHIVES}))}, or a folder")
        return {"train": _from_columns(_READERS[suffix](path), path, schema)}
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _check_parts(parts: Parts, where: str) -> None:
    train = parts["train"]
    for name, arrays in parts.items():
        if arrays.keys() != train.keys():
            raise UsageError(f"{where}: train has {', '.join(train)}; {name} has {', '.join(arrays)}")
        for array in arrays:
            shapes = [each[array].shape[1:] for each in (train, arrays)]
            if shapes[0] != shapes[1]:
                raise UsageError(
                    f"{where}: {array} of train holds samples of {shapes[0]}, of {name} {shapes[1]}"
                )


def hold_out(arrays: Arrays, share: float, where: str, part: str) -> tuple[Arrays, Arrays]:
    """Split a fixed share off: what is left, and what is held out. Raises UsageError: too few samples."""
    count = len(next(iter(arrays.values())))
    if count < SAMPLES_MIN:
        raise UsageError(f"{where}: {count} samples; at least {SAMPLES_MIN}, one of them to hold out")
    seed = _VALIDATION_SEED if part == "validation" else _SPLIT_SEED
    order = np.random.default_rng(seed).permutation(count)
    held_out = max(1, int(count * share + 1e-9))
    if held_out >= count:
        raise UsageError(f"{where}: {count} samples are too few to hold out {share:g} of them")
    kept, held = order[held_out:], order[:held_out]
    return {name: array[kept] for name, array in arrays.items()}, {
        name: array[held] for name, array in arrays.items()
    }


# Tables


def _read_csv(path: Path) -> Mapping[str, Sequence[Any]]:
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.reader(file)
            names = next(rows, [])
            table = [row for row in rows if row]
    except csv.Error as error:
        raise UsageError(f"{path}: no table of text: {error}") from None
    if not names or not table:
        raise UsageError(f"{path}: want a line of names and then a row for each sample")
    if len(set(names)) != len(names):
        raise UsageError(f"{path}: two columns of one name in the first line")
    for number, row in enumerate(table):
        if len(row) != len(names):
            raise UsageError(f"{path}: row {number + 2} has {len(row)} fields, the first line {len(names)}")
    return {name: [row[index] for row in table] for index, name in enumerate(names)}


def _read_parquet(path: Path) -> Mapping[str, Sequence[Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"{path}: pyarrow, which reads Parquet, is not installed", install_command("pyarrow")
        ) from None
    try:
        told = pyarrow.parquet.ParquetFile(path).metadata
        if told.num_rows * told.num_columns > TABLE_NUMBERS_MAX:
            raise UsageError(f"{path}: {told.num_rows} rows of {told.num_columns} columns are too many")
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path}: no Parquet file: {(str(error).splitlines() or [''])[0][:200]}") from None
    if not table.num_rows:
        raise UsageError(f"{path}: no rows")
    return {name: table[name].to_pylist() for name in table.column_names}


def _from_columns(columns: Mapping[str, Sequence[Any]], path: Path, schema: Schema) -> Arrays:
    if not schema.features:
        lower = {name.strip().lower(): name for name in columns}
        schema.label = next((lower[name] for name in LABEL_COLUMNS if name in lower), list(columns)[-1])
        schema.features = [name for name in columns if name != schema.label]
    if not schema.features:
        raise UsageError(f"{path}: only one column, '{schema.label}'; want numbers and a column of labels")
    known = (*schema.features, schema.label)
    for name in known if schema.needs_labels else schema.features:
        if name not in columns:
            raise UsageError(f"{path}: no column {_shown(name)}, which the training samples have")
    for name in columns:
        if name not in known:
            raise UsageError(f"{path}: a column {_shown(name)}, which the training samples do not have")
    found = {"x": np.stack([_numbers(columns[name], name, path) for name in schema.features], axis=1)}
    if schema.label in columns:
        found["y"] = _labels(columns[schema.label], schema.label, path, schema.words)
    return found


def _numbers(column: Sequence[Any], name: str, path: Path) -> Array:
    found = np.empty(len(column), np.float32)
    for row, value in enumerate(column):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(
                f"{path}: column '{name}', sample {row + 1}: {_shown(value)} is no number"
            ) from None
        if not np.isfinite(np.float32(number) if abs(number) < _FLOAT32_MAX else np.inf):
            raise UsageError(
                f"{path}: column '{name}', sample {row + 1}: {_shown(value)} is no finite number"
            )
        found[row] = number
    return found


def _shown(value: object) -> str:
    text = str(value)
    return f"'{text[:SHOWN_MAX]}{'...' if len(text) > SHOWN_MAX else ''}'"


def _labels(column: Sequence[Any], name: str, path: Path, words: list[str]) -> Array:
    """Whole numbers as they are, other numbers as float32, words by their alphabetical order."""
    if any(value is None or value == "" for value in column):
        raise UsageError(f"{path}: column '{name}' of labels has an empty field")
    try:
        numbers = [float(value) for value in column] if not words else None
    except (TypeError, ValueError, OverflowError):
        numbers = None
    if numbers is None:
        words[:] = words or sorted({str(value) for value in column})
        index = {word: number for number, word in enumerate(words)}
        for row, value in enumerate(column):
            if str(value) not in index:
                raise UsageError(
                    f"{path}: column '{name}', sample {row + 1}: no training sample has the label "
                    f"{_shown(value)}"
                )
        return np.array([index[str(value)] for value in column], np.int64)
    if not all(abs(number) < _FLOAT32_MAX for number in numbers):
        raise UsageError(f"{path}: column '{name}' of labels has a number that is not finite")
    if all(number.is_integer() and abs(number) < 2**53 for number in numbers):
        return np.array(numbers).astype(np.int64)
    return np.array(numbers, np.float32)


# Arrays


def _read_npz(path: Path) -> Arrays:
    try:
        with path.open("rb") as file, tempfile.TemporaryFile(buffering=0) as out:
            return unpack_here(file, out, same_count=False)
    except BadArchive as error:
        raise UsageError(f"{path}: no archive of plain arrays: {_first_line(error)}") from None


def _read_safetensors(path: Path) -> Arrays:
    try:
        return safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"{path}: no safetensors file of numpy's types: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    # What numpy says of pickled data is advice that nobody should follow.
    text = (str(error).splitlines() or [""])[0]
    return "it holds Python objects" if "pickle" in text.lower() else text[:200]


def _from_named(arrays: Arrays, path: Path) -> Parts:
    """Arrays of one archive, in parts by their names where all have such. Raises UsageError."""
    parts: Parts = {
        part: {
            name.removeprefix(f"{part}_"): array
            for name, array in arrays.items()
            if name.startswith(f"{part}_")
        }
        for part in PARTS
    }
    found = {part: named for part, named in parts.items() if named}
    if {"train", "test"} <= set(found) and sum(map(len, found.values())) == len(arrays):
        return found
    if not arrays or any(not array.ndim for array in arrays.values()):
        names = ", ".join(sorted(arrays)[:8]) or "nothing"
        raise UsageError(f"{path}: holds {names}; want x and y, or arrays as the model's inputs are called")
    return {"train": arrays}


def _count(arrays: Arrays, path: Path) -> int:
    """How many samples they hold. Raises UsageError: each another number, or none."""
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    told = ", ".join(f"{name} {length}" for name, length in list(lengths.items())[:8])
    if len(set(lengths.values())) != 1:
        raise UsageError(f"{path}: arrays of different lengths: {told}")
    if not next(iter(lengths.values())):
        raise UsageError(f"{path}: no samples: {told}")
    return next(iter(lengths.values()))


# From elsewhere


def _download(url: str, folder: Path) -> Path:
    """Fetch a file of a known form into `folder`. Raises UsageError."""
    suffix = Path(urllib.parse.urlsplit(url).path).suffix.lower()
    if suffix not in {*_READERS, *_ARCHIVES}:
        raise UsageError(f"{url}: want a file that ends in {', '.join(sorted({*_READERS, *_ARCHIVES}))}")
    path = folder / f"download{suffix}"
    try:
        with (
            urllib.request.urlopen(url, timeout=DOWNLOAD_SECONDS) as reply,  # noqa: S310 - http(s) alone
            path.open("wb") as out,
        ):
            while chunk := reply.read(_CHUNK_BYTES):
                out.write(chunk)
                if out.tell() > DOWNLOAD_BYTES_MAX:
                    raise UsageError(f"{url}: more than {DOWNLOAD_BYTES_MAX >> 30} GiB")
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UsageError(f"{url}: {reason}") from None
    return path


_ARCHIVES = {".npz": _read_npz, ".safetensors": _read_safetensors}
_READERS = {".csv": _read_csv, ".parquet": _read_parquet}
