"""The arrays of an npz file, read as untrusted bytes: first the entries and headers, then the numbers.

An npz is a zip of npy files (numpy.lib.format, NEP 1; APPNOTE.TXT of PKWARE). Its directory and short headers
give its unpacked size, which is checked first. Only then are the numbers unpacked, outside the heap, into a
mapped file. Nothing is unpickled.

A file from a stranger is read in a sandboxed process (`node.content.unpacking`).
"""

import mmap
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import IO, Annotated, Any

import msgspec
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/:@-]{0,255}\Z")
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+/:@-]{0,255}\Z")]

ENTRIES_MAX = 64
"""Maximum number of arrays in one archive."""
DIMENSIONS_MAX = 8
HEADER_LENGTH_MAX = 1_024
"""Maximum length of an npy header. For numbers, numpy writes 128 bytes."""
ITEM_BYTES_MAX = 16
UNPACKED_BYTES_MAX = 1 << 38
"""Maximum size of all arrays on disk."""
RATIO_MAX = 64
"""Maximum ratio of unpacked to archive size. Images and texts shrink to a half or a tenth. Data that shrinks
more is almost constant, and should be generated instead."""
RATIO_FREE_BYTES = 64 << 20
"""Bytes that any archive may unpack to, whatever its ratio."""
CHUNK_BYTES = 1 << 20
_ALIGNMENT = 64
_READABLE = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class BadArchive(ValueError):
    """An archive that is malformed or too large. The message is for a person."""


class ArrayHeader(msgspec.Struct, frozen=True):
    """One array according to its header; `dtype` is numpy's text."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
    is_fortran: bool

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.count * np.dtype(self.dtype).itemsize


class Layouts(msgspec.Struct, frozen=True):
    """The arrays of an archive by name. In the unpacked file they are stored in this order, each at a
    multiple of 64 bytes."""

    arrays: Annotated[dict[Name, ArrayHeader], msgspec.Meta(max_length=ENTRIES_MAX)]

    @property
    def begins(self) -> dict[str, int]:
        """Return the offset at which each array begins."""
        found, place = {}, 0
        for name, layout in self.arrays.items():
            found[name] = place
            place += -(-layout.size_bytes // _ALIGNMENT) * _ALIGNMENT
        return found

    @property
    def unpacked_bytes(self) -> int:
        return sum(-(-layout.size_bytes // _ALIGNMENT) * _ALIGNMENT for layout in self.arrays.values())


def read_layouts(file: IO[bytes], *, same_count: bool = True) -> Layouts:
    """Return the checked layout of an archive. If `same_count`, all arrays must have the same number of
    samples. Raises BadArchive."""
    with _understood():
        archive_bytes = file.seek(0, 2)
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if len(entries) > ENTRIES_MAX:
                raise BadArchive(f"{len(entries)} arrays; at most {ENTRIES_MAX} are read")
            names = [entry.filename.removesuffix(".npy") for entry in entries]
            if len(set(names)) != len(names) or not all(map(_NAME.match, names)):
                raise BadArchive("arrays without a name of their own")
            layouts = Layouts({name: _read_layout(archive, name) for name in names})
    check_layouts(layouts, archive_bytes, same_count=same_count)
    return layouts


def check_layouts(layouts: Layouts, archive_bytes: int, *, same_count: bool = True) -> None:
    """Raise BadArchive if arrays do not hold data, or take more room than is allowed for an archive of this
    length."""
    if not layouts.arrays:
        raise BadArchive("want arrays x and y")
    for name, layout in layouts.arrays.items():
        try:
            kind = np.dtype(layout.dtype)
        except TypeError:
            raise BadArchive("numbers of an unknown type") from None
        if kind.hasobject or kind.itemsize > ITEM_BYTES_MAX or kind.kind not in "biuf":
            raise BadArchive(f"want numbers in {name}")
        if any(not 0 <= side < 2**48 for side in layout.shape):
            raise BadArchive("a dimension with an impossible length")
    counts = {layout.shape[:1] for layout in layouts.arrays.values()}
    if (
        (same_count and len(counts) != 1)
        or () in counts
        or not all(layout.count for layout in layouts.arrays.values())
    ):
        shapes = ", ".join(f"{name} {layout.shape}" for name, layout in list(layouts.arrays.items())[:8])
        raise BadArchive(f"want arrays with equal numbers of samples (N, ...), got {shapes}")
    size = layouts.unpacked_bytes
    if size > UNPACKED_BYTES_MAX:
        raise BadArchive(f"{size} bytes of numbers; at most {UNPACKED_BYTES_MAX} are read")
    if size > max(RATIO_FREE_BYTES, RATIO_MAX * archive_bytes):
        raise BadArchive(
            f"{size >> 20} MiB of numbers in a file of {archive_bytes >> 20} MiB; at "
            f"most {RATIO_MAX} times its size is unpacked (numpy.savez does not "
            "compress)"
        )


def unpack(file: IO[bytes], layouts: Layouts, target: memoryview) -> None:
    """Unpack the arrays into `target`, which has `unpacked_bytes` bytes. Raises BadArchive."""
    with _understood(), zipfile.ZipFile(file) as archive:
        for name, begin in layouts.begins.items():
            place = begin
            for chunk in _chunks(archive, name, layouts.arrays[name]):
                target[place : place + len(chunk)] = chunk
                place += len(chunk)


def unpack_into(file: IO[bytes], layouts: Layouts, out: IO[bytes]) -> None:
    """Unpack the arrays into a file that already has the right length."""
    with mmap.mmap(out.fileno(), layouts.unpacked_bytes) as mapping, memoryview(mapping) as target:
        unpack(file, layouts, target)


def unpack_here(file: IO[bytes], out: IO[bytes], *, same_count: bool = True) -> Arrays:
    """Unpack the arrays in this process, without a fence, and return them. `out` is an empty file. Raises
    BadArchive."""
    layouts = read_layouts(file, same_count=same_count)
    out.truncate(layouts.unpacked_bytes)
    unpack_into(file, layouts, out)
    return map_arrays(layouts, out)


def map_arrays(layouts: Layouts, out: IO[bytes]) -> Arrays:
    """Return the arrays of an unpacked file, read-only. They remain valid after `out` is closed."""
    mapping = mmap.mmap(out.fileno(), layouts.unpacked_bytes, access=mmap.ACCESS_READ)
    return arrays_of(layouts, mapping)


def arrays_of(layouts: Layouts, mapping: mmap.mmap | Array) -> Arrays:
    """Return the arrays in a mapped file, or in bytes in memory."""
    found = {}
    for name, begin in layouts.begins.items():
        layout = layouts.arrays[name]
        flat: Array = np.frombuffer(mapping, np.dtype(layout.dtype), layout.count, begin)
        found[name] = flat.reshape(layout.shape, order=_order(layout))
    return found


def _order(layout: ArrayHeader) -> Any:
    return "F" if layout.is_fortran else "C"


def _read_layout(archive: zipfile.ZipFile, name: str) -> ArrayHeader:
    found = [entry for entry in archive.infolist() if entry.filename == f"{name}.npy"]
    if len(found) != 1:
        raise BadArchive("want arrays x and y")
    if found[0].compress_type not in _READABLE:
        raise BadArchive(f"{name} is compressed in a way that numpy does not write")
    with archive.open(found[0]) as stream:
        layout, header_bytes = _read_header(stream)
    if header_bytes + layout.size_bytes != found[0].file_size:
        raise BadArchive(f"{name} does not have the length that its header gives")
    return layout


def _read_header(stream: IO[bytes]) -> tuple[ArrayHeader, int]:
    """Return an array's layout, and the length of its header."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    elif version == (2, 0):
        read = np.lib.format.read_array_header_2_0
    else:
        raise BadArchive("an array of an unknown version")
    shape, is_fortran, kind = read(stream, max_header_size=HEADER_LENGTH_MAX)
    if kind.hasobject or kind.subdtype or kind.names or len(shape) > DIMENSIONS_MAX:
        raise BadArchive("want plain numbers")
    return ArrayHeader(kind.str, tuple(map(int, shape)), bool(is_fortran)), stream.tell()


def _chunks(archive: zipfile.ZipFile, name: str, layout: ArrayHeader) -> Iterator[bytes]:
    """Yield the stored numbers in chunks of whole elements."""
    with archive.open(f"{name}.npy") as stream:
        _read_header(stream)
        left, item_bytes = layout.size_bytes, np.dtype(layout.dtype).itemsize
        while left:
            chunk = stream.read(min(left, CHUNK_BYTES // item_bytes * item_bytes))
            if not chunk or len(chunk) % item_bytes:
                raise BadArchive(f"{name} ends too early")
            left -= len(chunk)
            yield chunk
        if stream.read(1):  # at the end, zipfile also compares the checksum
            raise BadArchive(f"{name} is longer than its header says")


@contextmanager
def _understood() -> Iterator[None]:
    """Convert the errors that zipfile, zlib and numpy raise for malformed archives to BadArchive."""
    try:
        yield
    except BadArchive:
        raise
    except (
        ArithmeticError,
        EOFError,
        KeyError,
        MemoryError,
        OSError,
        RuntimeError,
        SyntaxError,
        TypeError,
        ValueError,
        struct.error,
        tokenize.TokenError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise BadArchive(f"want arrays x and y ({error})") from None
