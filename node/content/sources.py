"""Data as people have it, made into a folder of `train.npz` and `test.npz`: the form that a run takes.

The requester's own command does so, in its own process, with files that belong to the person who asks:
what travels afterwards is arrays. Nothing here runs code or unpickles. Read are:

    TABLE.csv, TABLE.parquet    a row a sample: numbers, and one column of labels
    ARRAYS.npz, .safetensors    `x` and `y`, or arrays named as the model's inputs and labels; or all of them
                                as `train_NAME` and `test_NAME`
    a folder of images          a folder for each class, at the top or under `train` and `test`
    a folder of CIFAR-10        `data_batch_*.bin` and `test_batch.bin` (its binary version)
    http(s)://HOST/FILE         one of the files above

Where the source has no test part, a fixed fifth of the samples is held out, the same at every conversion.
Equal sources make equal bytes, so that their hash names them.
"""

import csv
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from node.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
Split = tuple[Array, Array, Array, Array]
"""x and y for training, x and y held out."""

SCHEMES = ("http://", "https://")
LABEL_COLUMNS = ("label", "labels", "class", "target", "y")
"""A table's column of labels, by the first of these names that it has; else its last column."""
IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
IMAGE_PIXELS_MAX = 1 << 24
DOWNLOAD_BYTES_MAX = 1 << 31
DOWNLOAD_SECONDS = 60.0
"""Without a byte."""
HELD_OUT = 5
"""One sample in five is held out where the source does not say which."""
SAMPLES_MIN = 2
CIFAR_SHAPE = (3, 32, 32)
_SPLIT_SEED = 20
_CHUNK_BYTES = 1 << 20
_CIFAR_TEST = "test_batch.bin"
_EXTRA = "pip install 'peerloom[data]'"


def is_source(data: str, base: Path) -> bool:
    """Return whether `data` of a RUN.toml in the folder `base` is something to be converted first."""
    if data.startswith(SCHEMES):
        return True
    path = base / Path(data).expanduser()
    if path.is_dir():
        return not (path / "train.npz").exists()
    return path.suffix.lower() in {*_READERS, *_ARCHIVES}


def convert(data: str, base: Path, folder: Path) -> None:
    """Write `train.npz` and `test.npz` into `folder`, which exists.

    Raises:
        UsageError: what is missing, cannot be read or does not fit together, with its file.
    """
    is_url = data.startswith(SCHEMES)
    path = _download(data, folder) if is_url else base / Path(data).expanduser()
    for name, arrays in zip(("train.npz", "test.npz"), _read(path), strict=True):
        try:
            np.savez(folder / name, **arrays)  # type: ignore[arg-type]  # numpy's own
        except OSError as error:
            raise UsageError(f"{folder / name}: {error.strerror or error}") from None


def _read(path: Path) -> tuple[Arrays, Arrays]:
    """Arrays by name for training, and held out."""
    if path.is_dir():
        return _paired(_read_cifar(path) if (path / _CIFAR_TEST).exists() else _read_images(path), path)
    try:
        if path.suffix.lower() in _ARCHIVES:
            return _from_named(_ARCHIVES[path.suffix.lower()](path), path)
        return _paired(_READERS[path.suffix.lower()](path), path)
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _paired(found: Split, path: Path) -> tuple[Arrays, Arrays]:
    parts = []
    for x, y in (found[:2], found[2:]):
        if len(x) != len(y):
            raise UsageError(f"{path}: {len(x)} samples and {len(y)} labels")
        parts.append({"x": x, "y": y})
    return parts[0], parts[1]


def split(x: Array, y: Array, where: str) -> Split:
    """Hold a fixed fifth out: x (N, ...) and y (N, ...) in a fixed order. Raises UsageError: too few."""
    if len(x) != len(y):
        raise UsageError(f"{where}: {len(x)} samples and {len(y)} labels")
    train, test = _rows(len(x), where)
    return x[train], y[train], x[test], y[test]


def _rows(count: int, where: str) -> tuple[Array, Array]:
    """Which samples are for training, and which are held out. Raises UsageError: too few."""
    if count < SAMPLES_MIN:
        raise UsageError(f"{where}: {count} samples; at least {SAMPLES_MIN}, one of them to hold out")
    order = np.random.default_rng(_SPLIT_SEED).permutation(count)
    held_out = max(1, count // HELD_OUT)
    return order[held_out:], order[:held_out]


# Tables


def _read_csv(path: Path) -> Split:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(file)
        names = next(rows, [])
        table = [row for row in rows if row]
    if not names or not table:
        raise UsageError(f"{path}: want a line of names and then a row for each sample")
    for number, row in enumerate(table):
        if len(row) != len(names):
            raise UsageError(f"{path}: row {number + 2} has {len(row)} fields, the first line {len(names)}")
    columns = {name: [row[index] for row in table] for index, name in enumerate(names)}
    return _from_columns(columns, path)


def _read_parquet(path: Path) -> Split:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"{path}: pyarrow, which reads Parquet, is not installed", _EXTRA) from None
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path}: no Parquet file: {str(error).splitlines()[0]}") from None
    return _from_columns({name: table[name].to_pylist() for name in table.column_names}, path)


def _from_columns(columns: Mapping[str, Sequence[Any]], path: Path) -> Split:
    names = list(columns)
    lower = {name.strip().lower(): name for name in names}
    label = next((lower[name] for name in LABEL_COLUMNS if name in lower), names[-1])
    features = [name for name in names if name != label]
    if not features:
        raise UsageError(f"{path}: only one column, '{label}'; want numbers and a column of labels")
    x = np.stack([_numbers(columns[name], name, path) for name in features], axis=1)
    return split(x, _labels(columns[label], label, path), str(path))


def _numbers(column: Sequence[Any], name: str, path: Path) -> Array:
    found = np.empty(len(column), np.float32)
    for row, value in enumerate(column):
        try:
            found[row] = float(value)
        except (TypeError, ValueError):
            raise UsageError(f"{path}: column '{name}', sample {row + 1}: '{value}' is no number") from None
    return found


def _labels(column: Sequence[Any], name: str, path: Path) -> Array:
    """Whole numbers as they are, other numbers as float32, words by their alphabetical order."""
    if any(value is None or value == "" for value in column):
        raise UsageError(f"{path}: column '{name}' of labels has an empty field")
    try:
        numbers = [float(value) for value in column]
    except (TypeError, ValueError):
        words = sorted({str(value) for value in column})
        index = {word: number for number, word in enumerate(words)}
        return np.array([index[str(value)] for value in column], np.int64)
    if all(number.is_integer() for number in numbers):
        return np.array(numbers).astype(np.int64)
    return np.array(numbers, np.float32)


# Arrays


def _read_npz(path: Path) -> Arrays:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, EOFError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"{path}: no archive of plain arrays: {_first_line(error)}") from None


def _read_safetensors(path: Path) -> Arrays:
    try:
        return safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: no safetensors file of numpy's types: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    # What numpy says of pickled data is advice that nobody should follow.
    text = (str(error).splitlines() or [""])[0]
    return "it holds Python objects" if "pickle" in text.lower() else text[:200]


def _from_named(arrays: Arrays, path: Path) -> tuple[Arrays, Arrays]:
    """Arrays of one archive: split by their names, else a fixed fifth held out. Raises UsageError."""
    parts = [
        {name.removeprefix(head): array for name, array in arrays.items() if name.startswith(head)}
        for head in ("train_", "test_")
    ]
    if all(parts) and parts[0].keys() == parts[1].keys() and sum(map(len, parts)) == len(arrays):
        for part in parts:
            _count(part, path)
        return parts[0], parts[1]
    if not arrays or any(not array.ndim for array in arrays.values()):
        names = ", ".join(sorted(arrays)[:8]) or "nothing"
        raise UsageError(f"{path}: holds {names}; want x and y, or arrays as the model's inputs are called")
    train, test = _rows(_count(arrays, path), str(path))
    return {name: array[train] for name, array in arrays.items()}, {
        name: array[test] for name, array in arrays.items()
    }


def _count(arrays: Arrays, path: Path) -> int:
    """How many samples they hold. Raises UsageError: each another number."""
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        told = ", ".join(f"{name} {length}" for name, length in list(lengths.items())[:8])
        raise UsageError(f"{path}: arrays of different lengths: {told}")
    return next(iter(lengths.values()))


# Images


def _read_images(folder: Path) -> Split:
    parts = [folder / name for name in ("train", "test") if (folder / name).is_dir()]
    if len(parts) == 1:
        missing = "test" if parts[0].name == "train" else "train"
        raise UsageError(f"{folder}: has a folder '{parts[0].name}' and no '{missing}'")
    classes = sorted({each.name for part in parts or [folder] for each in part.iterdir() if each.is_dir()})
    if len(classes) < 2:
        raise UsageError(
            f"{folder}: no train.npz, no data_batch_1.bin, and fewer than two folders of images",
            "a folder for each class, such as cats/ and dogs/, with the images in it",
        )
    found = [_read_classes(part, classes) for part in parts or [folder]]
    if parts:
        (train_x, train_y), (test_x, test_y) = found
        return train_x, train_y, test_x, test_y
    return split(*found[0], str(folder))


def _read_classes(folder: Path, classes: Sequence[str]) -> tuple[Array, Array]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UsageError(f"{folder}: Pillow, which reads images, is not installed", _EXTRA) from None
    images: list[Array] = []
    labels: list[int] = []
    first: tuple[Path, tuple[int, int]] | None = None
    for number, name in enumerate(classes):
        paths = sorted((folder / name).iterdir()) if (folder / name).is_dir() else []
        for path in paths:
            if path.suffix.lower() not in IMAGE_SUFFIXES:
                continue
            try:
                with Image.open(path) as image:
                    if image.width * image.height > IMAGE_PIXELS_MAX:
                        raise UsageError(f"{path}: {image.width} x {image.height} pixels are too many")
                    first = first or (path, image.size)
                    if image.size != first[1]:
                        raise UsageError(
                            f"{path}: {image.width} x {image.height} pixels, but {first[0].name} has "
                            f"{first[1][0]} x {first[1][1]}",
                            "scale all images to one size first",
                        )
                    images.append(np.asarray(image.convert("RGB"), np.uint8))
            except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
                raise UsageError(f"{path}: no image that can be read: {_first_line(error)}") from None
            labels.append(number)
    if not images:
        raise UsageError(f"{folder}: no images ({', '.join(IMAGE_SUFFIXES)}) in the folders of its classes")
    pixels = np.stack(images).transpose(0, 3, 1, 2)
    return _scaled(pixels), np.array(labels, np.int64)


def _scaled(pixels: Array) -> Array:
    """Bytes (N, C, H, W) as float32 from 0 to 1."""
    return np.ascontiguousarray(pixels, np.float32) / np.float32(255)


def _read_cifar(folder: Path) -> Split:
    """CIFAR-10's binary version: of each sample a byte of label, then 3,072 bytes of pixels, C first."""
    batches = sorted(folder.glob("data_batch_*.bin"))
    if not batches:
        raise UsageError(f"{folder}: {_CIFAR_TEST} is there and no data_batch_1.bin")
    train = [_read_batch(path) for path in batches]
    test_x, test_y = _read_batch(folder / _CIFAR_TEST)
    return np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]), test_x, test_y


def _read_batch(path: Path) -> tuple[Array, Array]:
    try:
        raw = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    size = 1 + int(np.prod(CIFAR_SHAPE))
    if not len(raw) or len(raw) % size:
        raise UsageError(f"{path}: {len(raw)} bytes are no whole number of samples of {size}")
    rows = raw.reshape(-1, size)
    return _scaled(rows[:, 1:].reshape(-1, *CIFAR_SHAPE)), rows[:, 0].astype(np.int64)


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
