"""Bad input gives the requester one clear error with the name of its file, before any peer computes."""

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from node.content.datasets import load_folder
from node.content.samples import write_samples
from node.content.sources import convert
from node.errors import UsageError
from node.protocols.run_file import PlanTable, RunFile, SplitsTable, TrainTable
from node.toml import parse
from tests.node.test_npz import archive, bomb, header, npy
from tests.node.test_sources import gray, png

X, Y = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6) % 3
GOOD_CSV = "a,b,label\n" + "".join(f"{row},{row + 1},{row % 2}\n" for row in range(8))
CIFAR = (b"\1" + bytes(3072)) * 4


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def safetensor_head(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def compressed(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("x.npy", data)
        out.writestr("y.npy", npy(Y))
    return file.getvalue()


GOOD_SAFETENSORS = safetensors.numpy.save({"x": X, "y": Y})

# Each case: the file's name, its content (or a function that makes it), and part of the error.
BAD: dict[str, tuple[str, bytes | Callable[[], bytes], str]] = {
    "npz: truncated": ("d.npz", npz(x=X, y=Y)[:-200], "not an archive"),
    "npz: not one": ("d.npz", b"hello", "not an archive"),
    "npz: empty": ("d.npz", b"", "not an archive"),
    "npz: lengths": ("d.npz", npz(x=X, y=Y[:3]), "different lengths"),
    "npz: no dimension": ("d.npz", npz(x=np.float32(1), y=Y), "d.npz"),
    "npz: no samples": ("d.npz", npz(x=X[:0], y=Y[:0]), "d.npz"),
    "npz: objects": ("d.npz", archive({"x": npy(np.array([None] * 6, object), allow_pickle=True)}), "d.npz"),
    "npz: text": ("d.npz", npz(x=np.array(["a"] * 6), y=Y), "want numbers in x"),
    "npz: complex": ("d.npz", npz(x=X.astype(complex), y=Y), "want"),
    "npz: dates": ("d.npz", npz(x=np.zeros(6, "M8[s]"), y=Y), "want"),
    "npz: a bomb": ("d.npz", bomb, "MiB of numbers"),
    "npz: a bomb that is compressed": (
        "d.npz",
        compressed(header("{'descr': '<f8', 'fortran_order': False, 'shape': (6, 99999999)}", bytes(10**6))),
        "d.npz",
    ),
    "npz: a path": ("d.npz", archive({"../../x": npy(X), "y": npy(Y)}), "without a name"),
    "npz: an absolute path": ("d.npz", archive({"/etc/x": npy(X), "y": npy(Y)}), "without a name"),
    "npz: one part of two": ("d.npz", npz(train_x=X, train_y=Y, test_x=X, test_y=Y[:2]), "different lengths"),
    "npz: parts of two shapes": (
        "d.npz",
        npz(train_x=X, train_y=Y, test_x=X[:, :1], test_y=Y),
        "x of train holds samples of (2,)",
    ),
    "csv: empty": ("d.csv", b"", "a line of column names"),
    "csv: no rows": ("d.csv", b"a,b\n", "one row per sample"),
    "csv: one column": ("d.csv", b"label\n1\n2\n", "only one column"),
    "csv: a short row": ("d.csv", GOOD_CSV.encode() + b"1,2\n", "row 10 has 2 fields"),
    "csv: cut off": ("d.csv", GOOD_CSV.encode()[:-3], "row 9 has 2 fields"),
    "csv: words": ("d.csv", b"a,label\nx,1\ny,2\n", "'x' is no number"),
    "csv: NaN": ("d.csv", b"a,label\n1,1\nnan,2\n", "sample 2: 'nan' is no finite"),
    "csv: infinite": ("d.csv", b"a,label\n1,1\n1e999,2\n", "no finite number"),
    "csv: too large for float32": ("d.csv", b"a,label\n1,1\n1e300,2\n", "no finite number"),
    "csv: a label that is NaN": ("d.csv", b"a,label\n1,1\n2,nan\n", "labels has a number that is not finite"),
    "csv: no label": ("d.csv", b"a,label\n1,1\n2,\n", "empty field"),
    "csv: a field without an end": ("d.csv", b'a,label\n"' + b"x" * 200_000 + b"\n", "d.csv"),
    "csv: bytes": ("d.csv", b"a,b\n\x00\x01,\x02\n", "d.csv"),
    "csv: one name twice": ("d.csv", b"a,a,label\n1,2,3\n1,2,3\n", "two columns have the same name"),
    "safetensors: truncated": ("d.safetensors", GOOD_SAFETENSORS[:-4], "not a safetensors file"),
    "safetensors: a head without an end": ("d.safetensors", b"\xff" * 16, "not a safetensors file"),
    "safetensors: beyond the file": (
        "d.safetensors",
        safetensor_head('{"x":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4000000]}}'),
        "not a safetensors file",
    ),
    "safetensors: another length than its shape": (
        "d.safetensors",
        safetensor_head('{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}}') + bytes(4),
        "not a safetensors file",
    ),
    "safetensors: lengths": (
        "d.safetensors",
        safetensors.numpy.save({"x": X, "y": Y[:2]}),
        "different lengths",
    ),
    "cifar: truncated": ("data_batch_1.bin", CIFAR[:-1], "no whole number of samples"),
    "cifar: empty": ("data_batch_1.bin", b"", "no whole number"),
    "cifar: a label": ("data_batch_1.bin", CIFAR + b"\x0a" + bytes(3072), "sample 4 has the label 10"),
    "image: truncated": ("cats/1.png", b"\x89PNG\r\n\x1a\n" + bytes(9), "no image"),
    "image: text": ("cats/1.png", b"hello", "no image"),
    "image: a bomb": (
        "cats/1.png",
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 60_000, 60_000, 8, 2, 0, 0, 0)
        + bytes(4),
        "cats/1.png",
    ),
}


def place(folder: Path, name: str, data: bytes) -> Path:
    """Put the bad file where its loader looks for it, and return the value for RUN.toml."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if name.startswith("data_batch"):
        (folder / "test_batch.bin").write_bytes(CIFAR)
        return folder
    if name.startswith("cats"):
        png(folder / "dogs" / "1.png", gray(3))
        return folder
    return path


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_gives_one_error_with_its_name(case: str, tmp_path: Path) -> None:
    name, held, words = BAD[case]
    data = held() if callable(held) else held
    source, out = place(tmp_path / "in", name, data), tmp_path / "out"
    out.mkdir()
    with pytest.raises(UsageError) as caught:
        convert(str(source), tmp_path, out)
    text = str(caught.value)
    assert words in text
    assert Path(name).name in text
    assert len(text) < 1_000
    assert not list(out.glob("*.npz"))


def test_a_damaged_or_hugely_compressed_parquet_file_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    zeros = pyarrow.array(np.zeros(1_000_000))
    parquet.write_table(pyarrow.table({f"c{n}": zeros for n in range(3)}), tmp_path / "d.parquet")
    data = (tmp_path / "d.parquet").read_bytes()
    for bad, words in ((data[:-9], "no Parquet"), (b"PAR1", "no Parquet"), (data[4:], "no Parquet")):
        (tmp_path / "d.parquet").write_bytes(bad)
        with pytest.raises(UsageError, match=words):
            convert("d.parquet", tmp_path, tmp_path)
    (tmp_path / "d.parquet").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("node.content.tables.TABLE_NUMBERS_MAX", 1_000_000)
        with pytest.raises(UsageError, match="too many"):
            convert("d.parquet", tmp_path, tmp_path)


@pytest.mark.parametrize("data", ["none.csv", "../none.npz", "nowhere", "no.parquet"])
def test_a_missing_file_is_reported_with_its_path(data: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such file"):
        convert(data, tmp_path, tmp_path)


def test_samples_that_are_not_finite_or_not_numeric_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sample 0: x is text"):
        write_samples([("a", 2), ("a", 3)], tmp_path, "d.py:f")


# Splits


def table(path: Path, rows: int, labels: str = "ab") -> None:
    lines = "".join(f"{row},{labels[row % len(labels)]}\n" for row in range(rows))
    path.write_text(f"n,label\n{lines}")


def parts_of(folder: Path) -> dict[str, int]:
    found = load_folder(folder)
    return {name: len(arrays["y"]) for name, arrays in found.parts.items()}


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ({}, {"train": 80, "test": 20}),
        ({"test": 0.5}, {"train": 50, "test": 50}),
        ({"test": "test.csv"}, {"train": 100, "test": 7}),
        ({"validation": 0.1}, {"train": 72, "validation": 10, "test": 18}),
        ({"test": "test.csv", "validation": "val.csv"}, {"train": 100, "validation": 5, "test": 7}),
    ],
    ids=str,
)
def test_splits_are_read_from_the_sources_given_for_them(
    splits: dict[str, Any], expected: dict[str, int], tmp_path: Path
) -> None:
    for name, rows in (("train.csv", 100), ("test.csv", 7), ("val.csv", 5)):
        table(tmp_path / name, rows)
    out = tmp_path / "out"
    out.mkdir()
    convert("train.csv", tmp_path, out, **splits)
    assert parts_of(out) == expected


def test_words_get_the_same_label_numbers_in_all_splits(tmp_path: Path) -> None:
    table(tmp_path / "train.csv", 9, "abc")
    table(tmp_path / "test.csv", 4, "cb")
    out = tmp_path / "out"
    out.mkdir()
    convert("train.csv", tmp_path, out, test="test.csv")
    assert load_folder(out).test["y"].tolist() == [2, 1, 2, 1]
    table(tmp_path / "test.csv", 4, "cd")
    with pytest.raises(UsageError, match="no training sample has the label 'd'"):
        convert("train.csv", tmp_path, out, test="test.csv")


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"test": "none.csv"}, "splits.test: .*none.csv: no such file"),
        ({"validation": "none.csv"}, "splits.validation: .*no such file"),
        ({"test": "wide.csv"}, "no column 'n', which the training samples have"),
        ({"test": "wide.npz"}, "x of train holds samples of"),
        ({"test": 0.9, "validation": 0.9}, "1 samples; want at least 2"),
        ({"test": "parts.npz"}, "itself has several parts"),
    ],
    ids=str,
)
def test_a_missing_split_is_an_error(splits: dict[str, Any], words: str, tmp_path: Path) -> None:
    table(tmp_path / "train.csv", 3)
    (tmp_path / "wide.csv").write_text("a,b,label\n1,2,a\n")
    np.savez(tmp_path / "wide.npz", x=X, y=Y)
    np.savez(tmp_path / "parts.npz", train_x=X, train_y=Y, test_x=X, test_y=Y)
    with pytest.raises(UsageError, match=words):
        convert("train.csv", tmp_path, tmp_path / "train.csv", **splits)


# RUN.toml

TABLES: dict[str, Any] = {"": RunFile, "train": TrainTable, "plan": PlanTable, "splits": SplitsTable}
KEYS = [(table, key) for table, kind in TABLES.items() for key in kind.__struct_fields__ if key not in TABLES]


def run_toml(table: str, key: str, value: str) -> str:
    own = f"{key} = {value}\n"
    if not table:
        return own if key == "model" else f'model = "mlp"\n{own}'
    return f'model = "mlp"\n[{table}]\n{own}'


@pytest.mark.parametrize(("table", "key"), KEYS, ids=str)
@pytest.mark.parametrize("value", ["{a = [1]}", "2020-01-01", '"\\u0000"', "-7", "1e400", "nan"], ids=str)
def test_each_key_of_a_run_rejects_impossible_values(table: str, key: str, value: str) -> None:
    """A value is either valid for its key, or gives an error that names the file, the line and the key."""
    reason = ""
    try:
        parse(run_toml(table, key, value), RunFile, name="RUN.toml")
    except UsageError as error:
        reason = str(error)
    if reason:
        assert "RUN.toml:" in reason
        assert key in reason
    else:
        kind = type(getattr(TABLES[table]("mlp") if not table else TABLES[table](), key))
        assert (kind is str and value.startswith('"')) or key == "options" or kind is tuple


def test_an_unknown_key_in_a_table_of_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="valdation"):
        parse('model = "mlp"\n[splits]\nvaldation = "a.csv"\n', RunFile, name="RUN.toml")
