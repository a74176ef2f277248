"""Arrays in one file, npz or safetensors: which arrays are inputs and labels of which part.

Their names decide: `x` and `y`; `train_x` or `x_train` (Keras' data sets) and the same for other parts;
`train_images` and `train_labels` (MedMNIST). Arrays with other names are the model's inputs and labels with
those names.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from node.content.fine_tuning import IGNORED
from node.content.npz import BadArchive, arrays_of, read_layouts, unpack
from node.content.reading import SourceReading, shown, unclear
from node.content.shards import PARTS, PartName
from node.errors import UsageError
from node.protocols.data_table import DataTable

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
Parts = dict[PartName, Arrays]

_PART_WORDS: dict[str, PartName] = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
_INPUTS = ("x", "images", "data", "features", "inputs")
_LABELS = ("y", "labels", "label", "target", "targets")
_BEFORE = re.compile(rf"({'|'.join(_PART_WORDS)})[_.](.+)\Z", re.IGNORECASE)
_BEHIND = re.compile(rf"(?:(.+)[_.]|([xy]))({'|'.join(_PART_WORDS)})\Z", re.IGNORECASE)
CHANNELS = (1, 3, 4)


def read_npz(path: Path) -> Arrays:
    """Return the arrays of an npz. Raises UsageError, OSError."""
    try:
        with path.open("rb") as file:
            layouts = read_layouts(file, same_count=False)
            numbers = np.empty(layouts.unpacked_bytes, np.uint8)
            unpack(file, layouts, numbers.data)
            return arrays_of(layouts, numbers)
    except BadArchive as error:
        raise UsageError(f"{path}: is not an archive of plain arrays: {_first_line(error)}") from None


def read_safetensors(path: Path) -> Arrays:
    """Return the arrays of a safetensors file. Raises UsageError, OSError."""
    try:
        return safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{path}: is not a safetensors file with numpy's types: {_first_line(error)}"
        ) from None


def _first_line(error: Exception) -> str:
    # Do not show numpy's message about pickled data: it advises something unsafe.
    text = (str(error).splitlines() or [""])[0]
    return "it holds Python objects" if "pickle" in text.lower() else text[:200]


def parts_of(arrays: Arrays, path: Path, keys: DataTable, reading: SourceReading) -> Parts:
    """Return the parts and names of a file's arrays. Raises UsageError if more than one reading fits."""
    reading.form = f"{path.suffix[1:]}, arrays {', '.join(list(arrays)[:8])}"
    if not arrays or any(not array.ndim for array in arrays.values()):
        names = ", ".join(sorted(arrays)[:8]) or "nothing"
        raise UsageError(f"{path}: holds {names}; want x and y, or arrays named like the model's inputs")
    ignored = set(keys.ignore or ())
    if wrong := ignored - set(arrays):
        raise UsageError(f"{path}: ignore: there is no array {shown(sorted(wrong)[0])}")
    if ignored:
        reading.skipped.append(f"by `ignore`: {', '.join(map(shown, sorted(ignored)))}")
    arrays = {name: array for name, array in arrays.items() if name not in ignored}
    split = _split(arrays, path, keys)
    found: Parts = {}
    for part, named in split.items():
        found[part] = _called(part, named, path, keys, reading)
    for name, array in found["train"].items():
        _check_channels(path, name, array, keys)
    if len(split) > 1 or "train" not in split or split["train"].keys() != arrays.keys():
        told = (f"{part} has {', '.join(named)}" for part, named in split.items())
        reading.notes.append(f"parts by the arrays' names: {'; '.join(told)}")
    return found


def _split(arrays: Arrays, path: Path, keys: DataTable) -> Parts:
    sorted_out: dict[str, tuple[PartName, str]] = {}
    for name in arrays:
        if before := _BEFORE.match(name):
            sorted_out[name] = (_PART_WORDS[before[1].lower()], before[2])
        elif behind := _BEHIND.match(name):
            sorted_out[name] = (_PART_WORDS[behind[3].lower()], behind[1] or behind[2])
    if not sorted_out:
        return {"train": dict(arrays)}
    if len(sorted_out) < len(arrays):
        odd = [name for name in arrays if name not in sorted_out]
        told = [", ".join(map(shown, names[:4])) for names in (list(sorted_out), odd)]
        raise unclear(
            path,
            f"{told[0]} name parts, {told[1]} none",
            keys,
            {"ignore": odd},
            {"ignore": list(sorted_out)},
        )
    parts: Parts = {}
    for name, (part, rest) in sorted_out.items():
        if rest in parts.setdefault(part, {}):
            raise UsageError(f"{path}: two arrays are {rest} of {part}")
        parts[part][rest] = arrays[name]
    if "train" not in parts:
        raise UsageError(f"{path}: holds {', '.join(arrays)}, but no array of training samples")
    return {part: parts[part] for part in PARTS if part in parts}


def _called(part: PartName, arrays: Arrays, path: Path, keys: DataTable, reading: SourceReading) -> Arrays:
    """Return the arrays of a part, renamed to x and y if there are two: input and label."""
    if keys.label and keys.label not in arrays:
        raise UsageError(
            f"{path}: label: there is no array {shown(keys.label)}", f"it has {', '.join(arrays)}"
        )
    lower = {name.lower(): name for name in arrays}
    inputs = [lower[each] for each in _INPUTS if each in lower]
    labels = [keys.label] if keys.label else [lower[each] for each in _LABELS if each in lower]
    if len(arrays) != 2 or len(inputs) != 1 or len(labels) != 1 or inputs == labels:
        if keys.label and len(arrays) == 2:
            inputs = [name for name in arrays if name != keys.label]
        else:
            return arrays
    x, y = arrays[inputs[0]], arrays[labels[0]]
    if part == "train" and (inputs[0], labels[0]) != ("x", "y"):
        reading.notes.append(f"{shown(inputs[0])} is x, {shown(labels[0])} is y")
    if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind in "iub":
        y = y[:, 0]
        reading.notes.append(f"the labels of {part} have the shape (N, 1), and are read as (N,)")
    if part == "train":
        reading.label = f"the array {shown(labels[0])}" + (", by the key `label`" if keys.label else "")
    return {"x": x, "y": y}


def _check_channels(path: Path, name: str, array: Array, keys: DataTable) -> None:
    """Refuse images that may have their channels last, because a model would mistake the channels for rows.
    Raises UsageError."""
    shape = array.shape[1:]
    is_last = len(shape) == 3 and shape[2] in CHANNELS and shape[0] not in CHANNELS and min(shape[:2]) >= 8
    if is_last and not keys.channels:
        raise unclear(
            path,
            f"{name} holds samples of {' x '.join(map(str, shape))}: images with their "
            "channels last, or first",
            keys,
            {"channels": "last"},
            {"channels": "first"},
        )


def channels_first(parts: Parts, keys: DataTable, reading: SourceReading) -> None:
    """Move the channels of images to the front if the user has stated that they are last."""
    if keys.channels != "last":
        return
    moved = set()
    for arrays in parts.values():
        for name, array in arrays.items():
            if array.ndim == 4:
                arrays[name] = np.ascontiguousarray(array.transpose(0, 3, 1, 2))
                moved.add(name)
    reading.notes.append(f"channels last by the key `channels`: {', '.join(sorted(moved)) or 'no images'}")


def check_numbers(path: Path, parts: Parts) -> None:
    """Refuse arrays with values from which nothing can be learnt. Raises UsageError."""
    for part, arrays in parts.items():
        for name, array in arrays.items():
            where = f"{path}: the array {shown(name)} of {part}"
            # `isfinite` on the array would allocate memory. The minimum of values with a NaN is NaN.
            if array.size and array.dtype.kind == "f" and not np.isfinite((array.min(), array.max())).all():
                raise UsageError(
                    f"{where} has numbers that are not finite", "leave out or fill in such samples"
                )
            if name == "y" and array.ndim == 1 and array.dtype.kind == "i" and array.size:
                odd = array[(array < 0) & (array != IGNORED)]
                if odd.size:
                    raise UsageError(
                        f"{where} has the label {odd[0]}: classes are numbered from 0",
                        "number the classes from 0; or, if the labels are amounts, write "
                        "them as floating-point numbers",
                    )
