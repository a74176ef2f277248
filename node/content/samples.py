"""Samples from a user's own objects, written as `train.npz` and `test.npz` in a folder: the form that a run
reads.

A source has length and items (`torch.utils.data.Dataset`), is iterable, is a mapping of whole arrays, or is a
pair of such sources (training and held-out). A sample is a mapping keyed by the names of the model's inputs
and labels, a pair of input and label (arrays x and y), or a tuple in the order of the inputs and labels. Its
values are arrays, tensors, numbers or images. All this runs in the requester's own process, and only arrays
leave it. Samples are written as they arrive, so only one is in memory. If the source has no held-out samples,
every fifth sample is held out.
"""

import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from node.content.sources import HELD_OUT, SAMPLES_MIN
from node.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]

SAMPLES_BYTES_MAX = 1 << 32
"""Maximum size of all arrays together. The user should prepare and keep larger data instead."""
COLUMNS_MAX = 64
ITEM = "item_"
"""Name prefix for samples that are tuples: item_n is the n-th of the model's inputs and labels."""
_PARTS = ("train", "test")


def write_samples(source: Any, folder: Path, where: str, bytes_max: int = SAMPLES_BYTES_MAX) -> None:
    """Write a source's samples into the existing folder `folder`, at most `bytes_max` for each file. Errors
    call the source `where`.

    Raises:
        UsageError: there are no samples, or one (given by number) differs from the first.
    """
    with ExitStack() as stack:
        parts = {name: stack.enter_context(_Part(name, where, bytes_max)) for name in _PARTS}
        if isinstance(source, tuple) and len(source) == 2 and all(map(_is_source, source)):
            for part, each in zip(parts.values(), source, strict=True):
                for sample in _samples(each, where):
                    part.add(sample)
        else:
            _dealt(_samples(source, where), parts)
        train, test = parts["train"], parts["test"]
        if not train.count or not test.count:
            count = train.count + test.count
            raise UsageError(
                f"{where}: {count} samples; at least {SAMPLES_MIN} are needed, one of them to hold out"
            )
        told = [", ".join(map(str, part.columns.values())) for part in (train, test)]
        if told[0] != told[1]:
            raise UsageError(
                f"{where}: training samples have {told[0]}, held-out samples {told[1]}",
                "pad or cut all to one shape",
            )
        for name, part in parts.items():
            try:
                part.write(folder / f"{name}.npz")
            except OSError as error:
                raise UsageError(f"{folder / name}.npz: {error.strerror or error}") from None


def _dealt(samples: Iterator[Any], parts: "Mapping[str, _Part]") -> None:
    """Deal every fifth sample to the held-out part; if there are fewer than five, deal the last one to it."""
    waiting: list[Any] = []
    for number, sample in enumerate(samples):
        for each in waiting:
            parts["train"].add(each)
        waiting = []
        if number % HELD_OUT == HELD_OUT - 1:
            parts["test"].add(sample)
        elif parts["test"].count:
            parts["train"].add(sample)
        else:
            waiting = [sample]
    for sample in waiting:
        parts["test"].add(sample)


def _is_source(value: Any) -> bool:
    """Return whether a value yields samples rather than being a sample itself."""
    return not hasattr(value, "__array__") and not isinstance(value, int | float | str | bytes)


def _samples(source: Any, where: str) -> Iterator[Any]:
    """Yield samples in order. Raises UsageError if the source has none or raises an error."""
    if hasattr(source, "batch_sampler") and hasattr(source, "dataset"):
        raise UsageError(
            f"{where}: is a DataLoader, which gives batches; a run wants samples", "return its dataset"
        )
    if isinstance(source, Mapping):
        yield from _rows(source, where)
        return
    is_sized = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if not is_sized and not hasattr(source, "__iter__"):
        raise UsageError(
            f"{where}: is {type(source).__name__}, which gives no samples",
            "return a Dataset, an iterator, a mapping of arrays, or a pair of these (training and held-out)",
        )
    number = 0
    iterator = (source[place] for place in range(len(source))) if is_sized else iter(source)
    while True:
        try:
            sample = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # the user's own code may raise anything
            text = " ".join(str(error).split())[:200]
            raise UsageError(f"{where}: sample {number}: {type(error).__name__}: {text}") from error
        yield sample
        number += 1


def _rows(columns: Mapping[Any, Any], where: str) -> Iterator[dict[str, Array]]:
    arrays = {str(name): _array(value, where, str(name), 0) for name, value in columns.items()}
    lengths = {name: len(array) if array.ndim else -1 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or -1 in lengths.values():
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UsageError(f"{where}: arrays of different lengths: {told}")
    for row in range(next(iter(lengths.values()))):
        yield {name: array[row] for name, array in arrays.items()}


class _Part:
    """The samples of one file, with a temporary file for each array."""

    def __init__(self, name: str, where: str, bytes_max: int) -> None:
        self.count = 0
        self.columns: dict[str, _Column] = {}
        self._bytes_max = bytes_max
        self._where = where if name == "train" else f"{where} (held out)"
        self._bytes = 0
        self._stack = ExitStack()

    def __enter__(self) -> "_Part":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, sample: Any) -> None:
        """Append a sample. Raises UsageError."""
        arrays = dict(self._named(sample))
        if not self.columns:
            if not 0 < len(arrays) <= COLUMNS_MAX:
                raise UsageError(f"{self._where}: samples of {len(arrays)} arrays; want 1 to {COLUMNS_MAX}")
            for name, array in arrays.items():
                file: IO[bytes] = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - on the stack
                self.columns[name] = _Column(name, file, array.dtype, array.shape)
        if arrays.keys() != self.columns.keys():
            has, had = ", ".join(arrays) or "nothing", ", ".join(self.columns)
            raise UsageError(f"{self._where}: sample {self.count} has {has}, but earlier samples have {had}")
        for name, array in arrays.items():
            column = self.columns[name]
            if array.shape != column.shape:
                raise UsageError(
                    f"{self._where}: sample {self.count}: {name} has shape {array.shape}, "
                    f"but in earlier samples {column.shape}",
                    "pad or cut all samples to one shape",
                )
            if not np.can_cast(array.dtype, column.dtype, "same_kind"):
                raise UsageError(
                    f"{self._where}: sample {self.count}: {name} is {array.dtype}, before {column.dtype}",
                    "use one number type for all samples",
                )
            self._bytes += column.file.write(np.ascontiguousarray(array, column.dtype).tobytes())
        self.count += 1
        if self._bytes > self._bytes_max:
            raise UsageError(
                f"{self._where}: more than {self._bytes_max >> 30} GiB after {self.count} samples",
                "if this iterator never ends, take only some samples: itertools.islice(samples, 10_000)",
            )

    def _named(self, sample: Any) -> Iterator[tuple[str, Array]]:
        leaves = list(_leaves(sample, ""))
        is_tuple = isinstance(sample, tuple | list)
        if is_tuple and len(sample) == 2 and not any(map(_is_tree, sample)):
            # (x, y), or a mapping of inputs together with a label.
            leaves = [
                (name.removeprefix("0.").removeprefix("1.") if "." in name else "xy"[int(name)], value)
                for name, value in leaves
            ]
        elif is_tuple:
            leaves = [(f"{ITEM}{place}", value) for place, (_, value) in enumerate(leaves)]
        for name, value in leaves:
            yield name or "x", _array(value, self._where, name or "x", self.count)

    def write(self, path: Path) -> None:
        """Write the samples the way numpy writes an npz. Equal samples make equal bytes."""
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, column in self.columns.items():
                entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
                with archive.open(entry, "w", force_zip64=True) as out:
                    header = {
                        "descr": np.lib.format.dtype_to_descr(column.dtype),
                        "fortran_order": False,
                        "shape": (self.count, *column.shape),
                    }
                    np.lib.format.write_array_header_1_0(out, header)
                    column.file.seek(0)
                    shutil.copyfileobj(column.file, out)


class _Column:
    """The bytes of one array, sample after sample."""

    def __init__(self, name: str, file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.name, self.file, self.dtype, self.shape = name, file, dtype, shape

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


def _leaves(sample: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a sample, each with its dotted name."""
    pairs: Sequence[tuple[Any, Any]]
    if isinstance(sample, Mapping):
        pairs = list(sample.items())
    elif _is_tree(sample):
        pairs = list(enumerate(sample))
    else:
        yield name, sample
        return
    for key, value in pairs:
        yield from _leaves(value, f"{name}.{key}" if name else str(key))


def _is_tree(value: Any) -> bool:
    return isinstance(value, tuple | list) and not _is_numbers(value)


def _is_numbers(value: Sequence[Any]) -> bool:
    """Return whether a list consists of numbers, as a tokenizer returns them, so that it is one array."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, int | float) for each in value)


def _array(value: Any, where: str, name: str, number: int) -> Array:
    """Return a tensor, an array, a number or an image as an array. Raises UsageError for other values."""
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor, without importing torch
        tensor = value.detach().cpu()
        value = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    elif hasattr(value, "getbands") and hasattr(value, "convert"):  # a Pillow image
        pixels = np.asarray(value.convert("RGB"), np.float32) / np.float32(255)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{where}: sample {number}: {name}: {str(error)[:200]}") from None
    if found.dtype.kind == "f" and not hasattr(value, "dtype"):
        found = found.astype(np.float32)
    if found.dtype.kind not in "biuf":
        kind = "text" if found.dtype.kind in "US" else type(value).__name__
        raise UsageError(
            f"{where}: sample {number}: {name} is {kind}, which is not numeric",
            "convert it to numbers in the dataset: use a tokenizer for text, an index for a class",
        )
    return found
