"""Images as arrays, for `node.content.sources`: a folder for each class, and CIFAR-10's binary version."""

import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from node.content.shards import PARTS, PartName
from node.errors import UsageError
from node.invocation import install_command

Array = np.ndarray[Any, np.dtype[Any]]
Parts = dict[PartName, dict[str, Array]]

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
IMAGE_PIXELS_MAX = 1 << 24
CIFAR_SHAPE = (3, 32, 32)
CIFAR_CLASSES = 10
_CIFAR_TEST = "test_batch.bin"


def is_cifar(folder: Path) -> bool:
    """Return whether a folder has the batches of CIFAR-10."""
    return (folder / _CIFAR_TEST).exists()


def read_images(folder: Path, words: list[str], *, needs_labels: bool = True) -> Parts:
    """Read images as float32 (N, 3, H, W) from 0 to 1. `words` are the classes in the order of their numbers,
    found where there are none yet. Raises UsageError."""
    parts: dict[PartName, Path] = {name: folder / name for name in PARTS if (folder / name).is_dir()}
    if parts and not {"train", "test"} <= set(parts):
        missing = " and no ".join(f"'{name}'" for name in ("train", "test") if name not in parts)
        raise UsageError(f"{folder}: has a folder '{next(iter(parts))}' and no {missing}")
    parts = parts or {"train": folder}
    classes = sorted({each.name for part in parts.values() for each in part.iterdir() if each.is_dir()})
    if not classes and not needs_labels and (images := _images_in(folder)):
        return {"train": {"x": _read_pixels(images)}}
    if len(classes) < 2 and not words:
        raise UsageError(
            f"{folder}: no train.npz, no data_batch_1.bin, and fewer than two folders of images",
            "a folder for each class, such as cats/ and dogs/, with the images in it",
        )
    unknown = [name for name in classes if words and name not in words]
    if unknown:
        raise UsageError(f"{folder}: no training sample is of the class '{unknown[0]}'")
    words[:] = words or classes
    return {name: dict(zip("xy", _read_classes(part, words), strict=True)) for name, part in parts.items()}


def _read_classes(folder: Path, classes: Sequence[str]) -> tuple[Array, Array]:
    found = [_images_in(folder / name) for name in classes]
    if not any(found):
        raise UsageError(f"{folder}: no images ({', '.join(IMAGE_SUFFIXES)}) in the folders of its classes")
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(paths) for paths in found])
    return _read_pixels([path for paths in found for path in paths]), labels


def _images_in(folder: Path) -> list[Path]:
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES]


def _read_pixels(paths: Sequence[Path]) -> Array:
    """Images of one size as float32 (N, 3, H, W) from 0 to 1. Raises UsageError."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UsageError(
            f"{paths[0]}: Pillow, which reads images, is not installed", install_command("pillow")
        ) from None
    images: list[Array] = []
    first: tuple[Path, tuple[int, int]] | None = None
    for path in paths:
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
    return _scaled(np.stack(images).transpose(0, 3, 1, 2))


def _scaled(pixels: Array) -> Array:
    """Bytes (N, C, H, W) as float32 from 0 to 1."""
    return np.ascontiguousarray(pixels, np.float32) / np.float32(255)


def read_cifar(folder: Path, words: list[str]) -> Parts:
    """Read CIFAR-10's binary version: of each sample a byte of label, then 3,072 bytes of pixels, C first.
    `words` are as `read_images` has them. Raises UsageError."""
    batches = sorted(folder.glob("data_batch_*.bin"))
    if not batches:
        raise UsageError(f"{folder}: {_CIFAR_TEST} is there and no data_batch_1.bin")
    with suppress(OSError, UnicodeDecodeError):
        names = (folder / "batches.meta.txt").read_text().split()
        words[:] = words or (names if len(names) == CIFAR_CLASSES else [])
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
