"""Users' data files are converted into the folder that a run reads."""

import struct
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from node.content.datasets import Dataset, load_folder
from node.content.sources import convert, hold_out, is_source
from node.errors import UsageError

Pixels = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]


def converted(source: Path | str, out: Path) -> Dataset:
    out.mkdir(exist_ok=True)
    assert is_source(str(source), Path())
    convert(str(source), Path(), out)
    return load_folder(out)


def png(path: Path, pixels: Pixels) -> None:
    """Write an (H, W, 3) array as a PNG, without Pillow."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def gray(level: int, height: int = 4, width: int = 6) -> Pixels:
    return np.full((height, width, 3), level, np.uint8)


def test_a_table_has_numbers_and_labels_that_may_be_words(tmp_path: Path) -> None:
    rows = "".join(f"{number},{number / 2},{'cat' if number % 2 else 'ant'}\n" for number in range(10))
    (tmp_path / "pets.csv").write_text(f"size,weight,Class\n{rows}")
    found = converted(tmp_path / "pets.csv", tmp_path / "out")
    assert (found.train["x"].shape, found.test["x"].shape) == ((8, 2), (2, 2))
    x = np.concatenate([found.train["x"], found.test["x"]])
    y = np.concatenate([found.train["y"], found.test["y"]])
    assert y.dtype == np.int64
    assert [int(label) for _, label in sorted(zip(x[:, 0].tolist(), y.tolist(), strict=True))] == [0, 1] * 5


def test_equal_sources_make_equal_bytes(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{n},{n % 3}\n" for n in range(9)))
    first, second = (converted(tmp_path / "t.csv", tmp_path / name) for name in ("one", "two"))
    assert first.digest == second.digest


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "want a line of column names"),
        ("a,y\n", "want a line of column names"),
        ("a,y\n1,2\n3\n", "row 3 has 1 fields, the first line 2"),
        ("y\n1\n2\n", "only one column"),
        ("a,y\n1,2\nred,3\n", "column 'a', sample 2: 'red' is no number"),
        ("a,y\n1,2\n2,\n", "has an empty field"),
        ("a,y\n1,2\n", "at least 2"),
    ],
)
def test_an_unusable_table_is_refused_with_the_place_of_the_error(
    tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UsageError, match=reason):
        converted(tmp_path / "t.csv", tmp_path / "out")


def test_a_split_is_read_by_the_names_of_the_training_columns(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b,label\n1,2,0\n3,4,1\n")
    (tmp_path / "test.csv").write_text("label,b,a\n1,6,5\n")
    (tmp_path / "out").mkdir()
    convert("train.csv", tmp_path, tmp_path / "out", test="test.csv")
    test = load_folder(tmp_path / "out").test
    assert (test["x"].tolist(), test["y"].tolist()) == ([[5.0, 6.0]], [1])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,label\n1,0\n", "no column 'b', which the training samples have"),
        ("a,b,class\n1,2,0\n", "no column 'label', which the training samples have"),
        ("a,b,c,label\n1,2,3,0\n", "a column 'c', which the training samples do not have"),
    ],
)
def test_a_split_with_different_columns_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b,label\n1,2,0\n3,4,1\n")
    (tmp_path / "test.csv").write_text(text)
    with pytest.raises(UsageError, match=reason):
        convert("train.csv", tmp_path, tmp_path, test="test.csv")


def test_a_parquet_file_is_read_as_a_table(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"a": [1.0, 2.0, 3.0, 4.0, 5.0], "target": [0, 1, 0, 1, 0]})
    parquet.write_table(table, tmp_path / "t.parquet")
    found = converted(tmp_path / "t.parquet", tmp_path / "out")
    assert sorted(np.concatenate([found.train["x"], found.test["x"]]).ravel()) == [1, 2, 3, 4, 5]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UsageError, match="no Parquet file"):
        converted(tmp_path / "broken.parquet", tmp_path / "out")


def test_arrays_are_split_unless_the_file_already_splits_them(tmp_path: Path) -> None:
    x, y = np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10)
    safetensors.numpy.save_file({"x": x, "y": y}, tmp_path / "whole.safetensors")
    np.savez(tmp_path / "parts.npz", train_x=x[:7], train_y=y[:7], test_x=x[7:], test_y=y[7:])
    found = converted(tmp_path / "whole.safetensors", tmp_path / "one")
    assert len(found.test["x"]) == 2
    assert np.array_equal(found.train["x"][:, 0], 2 * found.train["y"])
    assert np.array_equal(converted(tmp_path / "parts.npz", tmp_path / "two").test["x"], x[7:])


@pytest.mark.parametrize("name", ["t.npz", "t.safetensors"])
def test_a_damaged_array_file_is_refused_without_advice_to_unpickle(tmp_path: Path, name: str) -> None:
    writers: list[Callable[[Path], object]] = [
        lambda path: path.write_bytes(b"PK\x03\x04 damaged"),
        lambda path: path.write_bytes(b""),
    ]
    if name.endswith("npz"):
        writers.append(lambda path: np.savez(path, x=np.array([{}], dtype=object), y=np.zeros(1)))
    for write in writers:
        write(tmp_path / name)
        with pytest.raises(UsageError) as caught:
            converted(tmp_path / name, tmp_path / "out")
        assert "allow_pickle" not in str(caught.value)


def test_each_subfolder_of_images_becomes_a_class(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    for part, count in (("train", 3), ("test", 1)):
        for level, name in ((0, "black"), (255, "white")):
            for number in range(count):
                png(tmp_path / "pictures" / part / name / f"{number}.png", gray(level))
    found = converted(tmp_path / "pictures", tmp_path / "out")
    assert (found.train["x"].shape, found.train["x"].dtype) == ((6, 3, 4, 6), np.dtype("float32"))
    assert found.train["y"].tolist() == [0, 0, 0, 1, 1, 1]
    assert [float(image.mean()) for image in found.test["x"]] == [0.0, 1.0]


def test_images_of_different_sizes_and_damaged_ones_are_reported(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    png(tmp_path / "p" / "a" / "one.png", gray(1))
    png(tmp_path / "p" / "b" / "two.png", gray(1, height=5))
    with pytest.raises(UsageError, match=r"two.png: 6 x 5 pixels, but one.png has 6 x 4"):
        converted(tmp_path / "p", tmp_path / "out")
    (tmp_path / "p" / "b" / "two.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(UsageError, match=r"two.png: no image"):
        converted(tmp_path / "p", tmp_path / "out")


def test_the_binary_version_of_cifar_10_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(3)
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        rows = rng.integers(0, 256, (4, 3073), np.uint8)
        rows[:, 0] = [0, 9, 3, 1]
        rows.tofile(folder / name)
    found = converted(folder, tmp_path / "out")
    assert (found.train["x"].shape, found.test["x"].shape) == ((8, 3, 32, 32), (4, 3, 32, 32))
    assert found.test["y"].tolist() == [0, 9, 3, 1]
    assert float(found.test["x"][0, 0, 0, 0]) == pytest.approx(rows[0, 1] / 255)
    (folder / "data_batch_2.bin").write_bytes(bytes(100))
    with pytest.raises(UsageError, match="no whole number of samples"):
        converted(folder, tmp_path / "out")


def test_a_source_may_be_a_file_on_a_web_server(tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    (served / "t.csv").write_text("a,y\n1,0\n2,1\n")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Log nothing, so that the test prints only failures."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert len(converted(f"{url}/t.csv", tmp_path / "out").train["x"]) == 1
        for path, reason in (("missing.csv", "(?i)not found"), ("t.pickle", "want a file that ends in")):
            with pytest.raises(UsageError, match=reason):
                converted(f"{url}/{path}", tmp_path / "out")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_data_ready_for_a_run_needs_no_conversion(tmp_path: Path) -> None:
    (tmp_path / "train.npz").write_bytes(b"")
    (tmp_path / "book.txt").write_text("once upon a time")
    assert not is_source(str(tmp_path), Path())
    assert not is_source("book.txt", tmp_path)


@given(st.integers(2, 200))
def test_a_split_loses_and_duplicates_no_sample(count: int) -> None:
    x = np.arange(count)
    train, test = hold_out({"x": x, "y": -x}, 0.2, "data", "test")
    assert sorted([*train["x"], *test["x"]]) == list(range(count))
    assert np.array_equal(train["x"], -train["y"])
    assert np.array_equal(test["x"], -test["y"])
    assert len(test["x"]) >= 1


def test_a_split_makes_no_second_copy_of_the_samples() -> None:
    x, y = np.arange(3_000_000.0, dtype=np.float32).reshape(100_000, 5, 6), np.arange(100_000)
    first = x[:, 0, 0].copy()
    tracemalloc.start()
    train, test = hold_out({"x": x, "y": y}, 0.2, "data", "test")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * x.nbytes
    assert (len(train["x"]), len(test["x"])) == (80_000, 20_000)
    for part in (train, test):
        assert np.array_equal(part["x"][:, 0, 0], first[part["y"]])
        assert np.array_equal(part["x"][:, 4, 5], first[part["y"]] + 29)


def test_a_split_of_arrays_that_share_memory_keeps_rows_together() -> None:
    tokens = np.arange(41)
    train, test = hold_out(
        {"x": tokens[:-1].reshape(10, 4), "y": tokens[1:].reshape(10, 4)}, 0.2, "text", "test"
    )
    assert all(np.array_equal(part["x"] + 1, part["y"]) for part in (train, test))
    assert np.array_equal(tokens, np.arange(41))


def test_arrays_may_have_the_names_of_the_models_inputs_and_labels(tmp_path: Path) -> None:
    arrays = {
        "input_ids": np.arange(20).reshape(10, 2),
        "mask": np.ones((10, 2), bool),
        "score": np.arange(10.0),
    }
    np.savez(tmp_path / "all.npz", **arrays)  # type: ignore[arg-type]  # numpy's own
    found = converted(tmp_path / "all.npz", tmp_path / "out")
    assert (set(found.train), found.train_samples, found.test_samples) == (set(arrays), 8, 2)
    rows = np.concatenate([found.train["input_ids"], found.test["input_ids"]])
    scores = np.concatenate([found.train["score"], found.test["score"]])
    assert np.array_equal(rows[:, 0] // 2, scores), "values of one sample are no longer in the same row"
    parts = {f"{part}_{name}": array for name, array in arrays.items() for part in ("train", "test")}
    np.savez(tmp_path / "parts.npz", **parts)  # type: ignore[arg-type]  # numpy's own
    found = converted(tmp_path / "parts.npz", tmp_path / "split")
    assert (set(found.train), found.train_samples, found.test_samples) == (set(arrays), 10, 10)


def test_arrays_of_different_lengths_are_reported(tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", ids=np.zeros((4, 2)), mask=np.zeros((5, 2)))
    with pytest.raises(UsageError, match="arrays of different lengths: ids 4, mask 5"):
        convert(str(tmp_path / "bad.npz"), Path(), tmp_path)
