"""npz files from other peers: their memory is limited before it is allocated, and no node crashes."""

import gc
import io
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from node.content.npz import (
    ENTRIES_MAX,
    RATIO_FREE_BYTES,
    RATIO_MAX,
    Array,
    ArrayHeader,
    BadArchive,
    Layouts,
    check_layouts,
    read_layouts,
    unpack_here,
)
from node.executor import RealExecutor
from node.quantities import Memory
from node.storage.budget import ScratchBudget
from tests.source import ROOT

X, Y = np.arange(24, dtype=np.float32).reshape(4, 3, 2), np.array([0, 5, 2, 1])


def npy(array: Any, *, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asanyarray(array), allow_pickle=allow_pickle)
    return file.getvalue()


def header(text: str, content: bytes = b"") -> bytes:
    """Return an npy file with any header."""
    data = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(data)) + data + content


def archive(entries: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as whole:
        for name, data in entries.items():
            whole.writestr(f"{name}.npy", data)
    return file.getvalue()


def unpacked(data: bytes) -> tuple[Array, ...]:
    with tempfile.TemporaryFile(buffering=0) as out:
        return tuple(unpack_here(io.BytesIO(data), out).values())


def zeros(count: int) -> bytes:
    """Return an npy file of `count` float64 values."""
    text = repr({"descr": "<f8", "fortran_order": False, "shape": (4, count // 4)})
    return header(text, bytes(8 * count))


def bomb(method: int = zipfile.ZIP_DEFLATED) -> bytes:
    return archive({"x": zeros(RATIO_FREE_BYTES // 8 + 4), "y": npy(Y)}, method)


NO_DATA: dict[str, Callable[[], bytes]] = {
    "labels that are raw bytes": lambda: archive({"x": npy(X), "y": npy(np.array([b"a", b"b", b"c", b"d"]))}),
    "labels that are text": lambda: archive({"x": npy(X), "y": npy(np.array(["a", "b", "c", "d"]))}),
    "objects": lambda: archive({"x": npy(X), "y": npy(np.array([1, None, 2, 3], object), allow_pickle=True)}),
    "records": lambda: archive({"x": npy(X), "y": npy(np.zeros(4, [("a", "i4"), ("b", "i4")]))}),
    "dates": lambda: archive({"x": npy(X), "y": npy(np.zeros(4, "M8[s]"))}),
    "complex inputs": lambda: archive({"x": npy(X.astype(complex)), "y": npy(Y)}),
    "nothing": lambda: archive({"x": npy(X[:0]), "y": npy(Y[:0])}),
    "samples without numbers": lambda: archive({"x": npy(X[:, :0]), "y": npy(Y)}),
    "fewer labels than inputs": lambda: archive({"x": npy(X), "y": npy(Y[:3])}),
    "no arrays": lambda: archive({}),
    "a name that no array may have": lambda: archive({"x": npy(X), "../y": npy(Y)}),
    "one array": lambda: npy(X),
    "no bytes": lambda: b"",
    "a bomb": lambda: bomb(),
    "a bomb in other words": lambda: bomb(zipfile.ZIP_LZMA),
    "many arrays": lambda: archive({"x": npy(X), "y": npy(Y)} | {str(n): b"" for n in range(ENTRIES_MAX)}),
    "a shape without numbers": lambda: archive(
        {"x": header("{'descr': '<f8', 'fortran_order': False, 'shape': (4, 1099511627776)}"), "y": npy(Y)}
    ),
    "a negative shape": lambda: archive(
        {"x": header("{'descr': '<f8', 'fortran_order': False, 'shape': (4, -1)}"), "y": npy(Y)}
    ),
    "a header that is a program": lambda: archive({"x": header("__import__('os').abort()"), "y": npy(Y)}),
    "a header of brackets": lambda: archive({"x": header("(" * 900), "y": npy(Y)}),
    "a header that is too long": lambda: archive({"x": header("{" + " " * 5_000 + "}"), "y": npy(Y)}),
    "more than the header says": lambda: archive({"x": npy(X) + b"1234", "y": npy(Y)}),
    "less than the header says": lambda: archive({"x": npy(X)[:-4], "y": npy(Y)}),
}
"""Return the archive that this maker makes. It is made during the test, because some archives take long."""


@pytest.mark.parametrize("name", NO_DATA)
def test_a_bad_archive_is_refused_with_the_reason(name: str) -> None:
    data = NO_DATA[name]()
    with pytest.raises(BadArchive):
        unpacked(data)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X, Y),
        (np.asfortranarray(X), np.asfortranarray(np.arange(8, dtype=np.uint8).reshape(4, 2))),
        (X.astype(">f8"), Y.astype(">u2")),
        (X > 3, Y.astype(np.int8)),
        (np.arange(300_000, dtype=np.uint16).reshape(100_000, 3), np.arange(100_000, dtype=np.uint32)),
    ],
    ids=["plain", "fortran", "big-endian", "bool", "several chunks"],
)
def test_arrays_are_read_as_numpy_reads_them(x: Array, y: Array, method: int) -> None:
    found_x, found_y = unpacked(archive({"x": npy(x), "y": npy(y)}, method))
    np.testing.assert_array_equal(found_x, x)
    np.testing.assert_array_equal(found_y, y)
    assert (found_x.dtype.str, found_y.dtype.str) == (x.dtype.str, y.dtype.str)
    assert not found_x.flags.writeable


def test_two_arrays_with_one_name_are_refused() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as whole:
        whole.writestr("x.npy", npy(X))
        whole.writestr("y.npy", npy(Y))
        with pytest.warns(UserWarning, match="Duplicate"):
            whole.writestr("x.npy", npy(X))
    with pytest.raises(BadArchive):
        unpacked(file.getvalue())


def test_the_ratio_of_unpacked_to_packed_bytes_is_limited() -> None:
    sides = RATIO_FREE_BYTES // 8
    layouts = Layouts({"x": ArrayHeader("<f8", (4, sides), False), "y": ArrayHeader("<i8", (4,), False)})
    needed = -(-layouts.unpacked_bytes // RATIO_MAX)
    check_layouts(layouts, needed)
    with pytest.raises(BadArchive, match="MiB of numbers"):
        check_layouts(layouts, needed - 1)


GOOD = archive({"x": npy(X), "y": npy(Y)})


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_an_archive_with_changed_bytes_is_read_or_refused(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for place, value in changes:
        data[place] = value
    try:
        layouts = read_layouts(io.BytesIO(bytes(data)))
        found = unpacked(bytes(data))
    except BadArchive:
        return
    assert [array.shape for array in found] == [layout.shape for layout in layouts.arrays.values()]


async def read_fenced(path: Path, data: bytes) -> tuple[Array, ...]:
    await trio.Path(path).write_bytes(data)
    with path.open("rb", buffering=0) as file, tempfile.TemporaryFile(buffering=0) as out:
        return tuple((await RealExecutor().unpack(file, out, allow_unfenced=True)).values())


async def test_a_separate_process_unpacks_arrays_that_this_one_maps(tmp_path: Path) -> None:
    # The arrays are larger than the process may write to a file.
    x = np.random.default_rng(1).random((50_000, 8, 8)).astype(np.float32)
    y = np.arange(50_000)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        found_x, found_y = await read_fenced(tmp_path / "a.npz", archive({"x": npy(x), "y": npy(y)}, method))
        np.testing.assert_array_equal(found_x, x)
        np.testing.assert_array_equal(found_y, y)


@pytest.mark.parametrize("name", ["labels that are raw bytes", "a bomb", "no bytes", "objects"])
async def test_refusals_in_the_sandboxed_process_are_reported(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadArchive) as error:
        await read_fenced(tmp_path / "a.npz", NO_DATA[name]())
    assert str(error.value).isprintable()


@pytest.mark.slow
async def test_an_oversized_archive_directory_crashes_only_that_process(tmp_path: Path) -> None:
    """More than a million entries need gigabytes of objects, but the process has a quarter of a gigabyte."""
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 3, 20, 0, 0, 0, 0, 33, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0)
    count = 1_500_000
    directory = b"".join(entry + b"x" for _ in range(count))
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(directory), 0, 0)
    with pytest.raises(BadArchive):
        await read_fenced(tmp_path / "a.npz", directory + end)


async def test_unpacked_arrays_count_on_disk_until_their_last_view(tmp_path: Path) -> None:
    await trio.Path(tmp_path / "a.npz").write_bytes(GOOD)
    budget = ScratchBudget(Memory(bytes=1 << 20), tmp_path)
    small = ScratchBudget(Memory(bytes=10), tmp_path)
    with (tmp_path / "a.npz").open("rb") as file, tempfile.TemporaryFile(buffering=0) as out:
        x, y = (await RealExecutor(scratch=budget).unpack(file, out, allow_unfenced=True)).values()
        assert budget.held_bytes >= x.nbytes + y.nbytes
        del x
        assert budget.held_bytes
        del y
        await trio.to_thread.run_sync(gc.collect)  # in the file system; the thread holds its last result
        assert not budget.held_bytes
        with pytest.raises(OSError, match="scratch"):
            await RealExecutor(scratch=small).unpack(file, out, allow_unfenced=True)
        assert not small.held_bytes


def test_the_unpacking_process_ends_if_its_node_is_gone(tmp_path: Path) -> None:
    """If its node has died, the process must end without having written anything."""
    (tmp_path / "a.npz").write_bytes(GOOD)
    with (tmp_path / "a.npz").open("rb") as file, tempfile.TemporaryFile() as out:
        descriptors = file.fileno(), out.fileno()
        ended = subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "node.content.unpacking",
                *map(str, descriptors),
                str(os.getpid()),
                "60",
                "1",
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert ended.stdout.count(b"\n") == 1
        assert os.fstat(out.fileno()).st_size == 0
