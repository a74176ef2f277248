"""Images as arrays, for `node.content.sources`: a folder for each class, or CIFAR-10's binary version.

Pillow reads the images, with conversions that the reading states. Folders are read as documented for
torchvision's `ImageFolder` and Keras' `image_dataset_from_directory`: classes are in the order of their
names.
"""

import os
import re
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from node.content.columns import alike
from node.content.reading import SourceReading, shown, unclear
from node.content.shards import PartName
from node.errors import UsageError
from node.invocation import install_command
from node.protocols.data_table import DataTable

Array = np.ndarray[Any, np.dtype[Any]]
Parts = dict[PartName, dict[str, Array]]
Tell = Callable[[str], None]

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_SAMPLE_SUFFIXES = frozenset(
    (".avif", ".dcm", ".dng", ".heic", ".heif", ".jp2", ".nii", ".npy", ".psd", ".svg", ".cr2", ".nef",
     ".wav", ".mp3", ".flac", ".ogg", ".m4a", ".mp4", ".avi", ".mov", ".mkv")
)  # fmt: skip
"""Suffixes of files that their owner considers samples. None of them is skipped silently among images."""
IMAGE_PIXELS_MAX = 1 << 24
_PART_NAMES: dict[PartName, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_PART_TOKENS = frozenset(word for words in _PART_NAMES.values() for word in words)
_NO_CLASSES = frozenset({"annotations", "image", "images", "imgs", "labels", "mask", "masks"})
"""Folder names of data sets whose labels are stored elsewhere. They are hardly names of classes."""
_PROGRAMS_OWN = ("__MACOSX", "__pycache__", "lost+found", "System Volume Information", "$RECYCLE.BIN")
_FILES_OF_SYSTEMS = ("Thumbs.db", "desktop.ini")
_ORIENTATION = 0x0112
"""The EXIF tag in which a camera stores its orientation."""
CIFAR_SHAPE = (3, 32, 32)
CIFAR_CLASSES = 10
_CIFAR_TEST = "test_batch.bin"


def is_cifar(folder: Path) -> bool:
    """Return whether a folder has the batches of CIFAR-10."""
    return (folder / _CIFAR_TEST).exists()


def read_images(
    folder: Path,
    words: list[str],
    reading: SourceReading,
    keys: DataTable,
    *,
    needs_labels: bool = True,
    tell: Tell,
) -> Parts:
    """Read images as float32 (N, 3, H, W) from 0 to 1. `words` are the names of the classes in the order of
    their numbers; if it is empty, it is filled in. Raises UsageError."""
    reading.form = "folders of images, a class each"
    for table in ("metadata.csv", "metadata.jsonl", "metadata.parquet", "labels.csv"):
        if (folder / table).exists():
            raise UsageError(
                f"{folder / table}: a list beside images is not read; the labels are the folders' names",
                "a folder for each class, such as cats/ and dogs/, with the images in it",
            )
    parts = _parts(folder, reading)
    found = {part: _classes_in(each, keys, reading) for part, each in parts.items()}
    classes = sorted({name for names in found.values() for name in names})
    if not classes and not needs_labels and (images := _images_in(folder, reading)):
        return {"train": {"x": _read_pixels(images, reading, tell)}}
    if len(classes) < 2 and not words:
        only = f"; the one folder is {shown(classes[0])}" if classes else ""
        raise UsageError(
            f"{folder}: no train.npz, no data_batch_1.bin, and fewer than two folders of images{only}",
            "a folder for each class, such as cats/ and dogs/, with the images in it",
        )
    if isinstance(keys.classes, tuple) and keys.classes and not words:
        if missing := [name for name in classes if name not in keys.classes]:
            raise UsageError(f"{folder}: the folder {shown(missing[0])} is not one of `classes`")
        words[:] = keys.classes
    unknown = [name for name in classes if words and name not in words]
    if unknown:
        raise UsageError(f"{folder}: no training sample is of the class '{unknown[0]}'")
    _check_classes(folder, [] if words or keys.classes else classes, parts, keys)
    words[:] = words or classes
    _check_numbered(folder, words, keys, reading)
    files = {part: [_images_in(each / name, reading) for name in words] for part, each in parts.items()}
    empty = [
        name for at, name in enumerate(words) if (parts["train"] / name).is_dir() and not files["train"][at]
    ]
    for part, each in parts.items():
        if not any(files[part]):
            raise UsageError(
                f"{each}: no images ({', '.join(IMAGE_SUFFIXES)}) in the folders of its classes",
                'other samples by a function that reads them: data = "FILE.py:FUNCTION"',
            )
    if empty and not keys.classes:
        raise unclear(
            parts["train"] / empty[0],
            "a folder without images: no class, or one without samples",
            keys,
            {"ignore": [*(keys.ignore or ()), *empty]},
            {"classes": words},
        )
    _state_strays((folder, *parts.values()), reading)
    reading.label = "the name of each image's folder"
    return {part: _labelled(files[part], reading, tell) for part in parts}


def _parts(folder: Path, reading: SourceReading) -> dict[PartName, Path]:
    """Return the folders of parts, found by the names that torchvision's, fastai's and Hugging Face's readers
    know."""
    parts: dict[PartName, Path] = {}
    for name, words in _PART_NAMES.items():
        there = [each for each in folder.iterdir() if each.is_dir() and each.name.lower() in words]
        if len(there) > 1:
            raise UsageError(
                f"{folder}: {there[0].name} and {there[1].name} are both folders of {name} samples"
            )
        if there:
            parts[name] = there[0]
            if there[0].name != name:
                reading.notes.append(f"{there[0].name}/ holds the {name} samples")
    if parts and ("train" not in parts or len(parts) < 2):
        missing = " and no ".join(f"'{name}'" for name in ("train", "test") if name not in parts)
        raise UsageError(f"{folder}: has a folder '{next(iter(parts.values())).name}' and no {missing}")
    if parts:
        others = [each.name for each in folder.iterdir() if each.is_dir() and each not in parts.values()]
        if others := sorted(name for name in others if not _is_hidden(name)):
            raise UsageError(
                f"{folder}: has parts ({', '.join(each.name for each in parts.values())}) and a folder"
                f" {shown(others[0])}, which is none",
                "move it elsewhere; or, if all folders are classes, rename the parts",
            )
    return parts or {"train": folder}


def _classes_in(folder: Path, keys: DataTable, reading: SourceReading) -> list[str]:
    """Return the names of the class folders. Hidden folders are left out, and the reading says so."""
    found = []
    for each in sorted(folder.iterdir()):
        if not each.is_dir():
            continue
        if _is_hidden(each.name):
            reading.skipped.append(f"{each.relative_to(folder)}/: a hidden folder of a program's own")
        elif each.name in (keys.ignore or ()):
            reading.skipped.append(f"{each.name}/: by `ignore`")
        else:
            found.append(each.name)
    return found


def _check_classes(
    folder: Path, classes: Sequence[str], parts: dict[PartName, Path], keys: DataTable
) -> None:
    """Refuse folders that may not be the classes. Raises UsageError."""
    by_look: dict[str, str] = {}
    for name in classes:
        other = by_look.setdefault(alike(name), name)
        if other != name:
            raise unclear(
                folder,
                f"its folders {shown(other)} and {shown(name)} look alike: one class, to be mended there, or"
                " two",
                keys,
                {"classes": classes},
            )
    odd = [name for name in classes if name.lower() in _NO_CLASSES]
    odd += [
        name for name in classes if len(parts) == 1 and _PART_TOKENS & set(re.split(r"[_\-. ]", name.lower()))
    ]
    if odd:
        raise unclear(
            folder,
            f"its folder {shown(odd[0])} may be a class, or not: parts are called train and test, and labels"
            " are the folders' names",
            keys,
            {"ignore": [*(keys.ignore or ()), *odd]},
            {"classes": classes},
        )
    held = [each / name for each in parts.values() for name in classes if (each / name).is_dir()]
    if held and all(_holds_folders_alone(each) for each in held):
        raise unclear(
            folder,
            f"{shown(held[0].name)} and all others hold folders of images and no image: each is a class with"
            " all that lies in it, or the folders within are the classes, which then must lie at the top",
            keys,
            {"classes": classes},
        )


def _holds_folders_alone(folder: Path) -> bool:
    """Return whether a folder contains several folders but no image."""
    within = [each for each in folder.iterdir() if not _is_hidden(each.name)]
    has_image = any(each.suffix.lower() in IMAGE_SUFFIXES for each in within if not each.is_dir())
    return not has_image and sum(each.is_dir() for each in within) > 1


def _state_strays(folders: Sequence[Path], reading: SourceReading) -> None:
    """State in the reading which images are outside all class folders."""
    strays = [
        each.name
        for folder in dict.fromkeys(folders)
        for each in folder.iterdir()
        if each.suffix.lower() in IMAGE_SUFFIXES and not each.is_dir() and not _is_hidden(each.name)
    ]
    if strays:
        told = f"{len(strays)} images beside the folders of classes, such as {shown(min(strays))}"
        reading.skipped.append(told)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _PROGRAMS_OWN


def _check_numbered(folder: Path, words: list[str], keys: DataTable, reading: SourceReading) -> None:
    """State in the reading if folders that are named by numbers get other class numbers, because 10 sorts
    before 2."""
    if all(word.isdecimal() for word in words) and [int(word) for word in words] != list(range(len(words))):
        reading.notes.append("the folders are called by numbers, which are not those of their classes")
        counted = sorted(words, key=int)
        if not keys.classes and words != counted:
            at = next(at for at, word in enumerate(words) if word != counted[at])
            raise unclear(
                folder,
                f"its folders are numbers, and {shown(words[at])} comes before {shown(counted[at])} by the"
                " alphabet: the classes are numbered by the alphabet, or as they count",
                keys,
                {"classes": words},
                {"classes": counted},
            )


def _labelled(files: Sequence[Sequence[Path]], reading: SourceReading, tell: Tell) -> dict[str, Array]:
    labels = np.repeat(np.arange(len(files), dtype=np.int64), [len(paths) for paths in files])
    return {"x": _read_pixels([path for paths in files for path in paths], reading, tell), "y": labels}


def _images_in(folder: Path, reading: SourceReading) -> list[Path]:
    """Return all images in a folder and its subfolders, as torchvision reads them, ordered by path."""
    found: list[Path] = []
    others: dict[str, int] = {}
    deeper = 0
    seen = {os.path.realpath(folder)}
    for at, names, files in os.walk(folder, followlinks=True):
        names[:] = sorted(name for name in names if not _is_hidden(name))
        for name in [name for name in names if os.path.islink(os.path.join(at, name))]:
            real = os.path.realpath(os.path.join(at, name))
            if real in seen:
                names.remove(name)  # a link in a circle
            seen.add(real)
        for name in sorted(files):
            path = Path(at) / name
            if path.suffix.lower() in IMAGE_SUFFIXES and not name.startswith("."):
                found.append(path)
                deeper += Path(at) != folder
            elif not _is_hidden(name) and name not in _FILES_OF_SYSTEMS:
                others[path.suffix.lower() or name] = others.get(path.suffix.lower() or name, 0) + 1
    if deeper:
        reading.notes.append(f"{folder.name}/: {deeper} images lie in folders within, and are of its class")
    if others:
        told = ", ".join(f"{count} {name}" for name, count in sorted(others.items())[:4])
        if lost := sorted(_SAMPLE_SUFFIXES & others.keys()):
            raise UsageError(
                f"{folder}: {others[lost[0]]} files are {lost[0]}, which is not read",
                f"convert them to one of {', '.join(IMAGE_SUFFIXES)}; or"
                ' a function that reads them: data = "FILE.py:FUNCTION"',
            )
        reading.skipped.append(f"{folder.name}/: files that are no images ({told})")
    return found


class _Conversions:
    """Collects the images converted in each way, and makes one line for each way."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def note(self, way: str) -> None:
        self._counts[way] = self._counts.get(way, 0) + 1

    def lines(self) -> list[str]:
        return [f"{count:,} images: {way}" for way, count in self._counts.items()]


def _read_pixels(paths: Sequence[Path], reading: SourceReading, tell: Tell) -> Array:
    """Return images of one size as float32 (N, 3, H, W) from 0 to 1. Raises UsageError."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UsageError(
            f"{paths[0]}: Pillow, which reads images, is not installed", install_command("pillow")
        ) from None
    found: Array | None = None
    first: tuple[Path, tuple[int, int]] | None = None
    ways = _Conversions()
    for number, path in enumerate(paths):
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
                if found is None:
                    found = np.empty((len(paths), 3, image.height, image.width), np.float32)
                found[number] = _pixels(image, path, ways)
                tell(f"{number + 1:,} of {len(paths):,} images")
        except (
            UnidentifiedImageError,
            OSError,
            SyntaxError,
            ValueError,
            EOFError,
            struct.error,
            Image.DecompressionBombError,
            Image.DecompressionBombWarning,
        ) as error:
            raise UsageError(
                f"{path}: no image that can be read: {(str(error).splitlines() or [''])[0][:200]}"
            ) from None
    reading.notes += ways.lines()
    assert found is not None
    return found


def _pixels(image: Any, path: Path, ways: _Conversions) -> Array:
    """Return one image as (3, H, W) from 0 to 1, with a stated conversion. Raises UsageError if there is
    none."""
    if getattr(image, "n_frames", 1) > 1:
        ways.note("several frames, of which the first is read")
    if image.getexif().get(_ORIENTATION, 1) != 1:
        ways.note("a tag of orientation, which is not applied")
    mode = image.mode
    if mode.startswith("I;16"):
        ways.note("16-bit grey, divided by 65,535, the same in red, green and blue")
        levels = np.asarray(image, np.float32) / np.float32(65_535)
        return np.broadcast_to(levels, (3, *levels.shape))
    if mode in ("I", "F"):
        levels = np.asarray(image)
        if mode == "I" and image.format == "PNG" and levels.min() >= 0 and levels.max() <= 65_535:
            ways.note("16-bit grey, divided by 65,535, the same in red, green and blue")
            return np.broadcast_to(levels.astype(np.float32) / np.float32(65_535), (3, *levels.shape))
        raise UsageError(
            f"{path}: pixels of {'32-bit' if mode == 'I' else 'floating-point'} numbers, whose black and"
            " white are not known",
            "convert the images to 8 or 16 bits first",
        )
    if mode not in ("RGB", "L", "1"):
        if "A" in mode or "transparency" in image.info:
            ways.note(f"{mode} with transparency, which is dropped")
        else:
            ways.note(f"{mode}, converted to RGB")
    elif mode == "L":
        ways.note("8-bit grey, the same in red, green and blue")
    bytes_ = np.asarray(image.convert("RGB"), np.uint8)
    return (bytes_.transpose(2, 0, 1) / np.float32(255)).astype(np.float32, copy=False)


def _scaled(pixels: Array) -> Array:
    """Return bytes (N, C, H, W) as float32 from 0 to 1."""
    found = np.ascontiguousarray(pixels, np.float32)
    found /= np.float32(255)
    return found


def read_cifar(folder: Path, words: list[str], reading: SourceReading) -> Parts:
    """Read CIFAR-10's binary version. Each sample is one byte of label and 3,072 bytes of pixels, channels
    first. `words` is used as in `read_images`. Raises UsageError."""
    batches = sorted(folder.glob("data_batch_*.bin"))
    if not batches:
        raise UsageError(f"{folder}: {_CIFAR_TEST} is there and no data_batch_1.bin")
    with suppress(OSError, UnicodeDecodeError):
        names = (folder / "batches.meta.txt").read_text().split()
        words[:] = words or (names if len(names) == CIFAR_CLASSES else [])
    reading.form = "CIFAR-10's binary version"
    reading.label = "the first byte of each sample"
    train = [_read_batch(path) for path in batches]
    test_x, test_y = _read_batch(folder / _CIFAR_TEST)
    x, y = np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train])
    return {"train": {"x": x, "y": y}, "test": {"x": test_x, "y": test_y}}


def _read_batch(path: Path) -> tuple[Array, Array]:
    try:
        raw = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    size = 1 + int(np.prod(CIFAR_SHAPE))
    if not len(raw) or len(raw) % size:
        raise UsageError(f"{path}: {len(raw)} bytes are no whole number of samples of {size}")
    rows = raw.reshape(-1, size)
    if rows[:, 0].max() >= CIFAR_CLASSES:
        wrong = int((rows[:, 0] >= CIFAR_CLASSES).argmax())
        raise UsageError(
            f"{path}: sample {wrong} has the label {rows[wrong, 0]}; want 0 to {CIFAR_CLASSES - 1}"
        )
    return _scaled(rows[:, 1:].reshape(-1, *CIFAR_SHAPE)), rows[:, 0].astype(np.int64)
