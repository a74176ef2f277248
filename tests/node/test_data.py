"""Training data: samples from a folder or a text, and micro-batches selected by their numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.content.datasets import TEXT_VALUES, Batches, load, load_folder, load_text
from node.errors import UsageError


def save(folder: Path, name: str, x: Any, y: Any) -> None:
    np.savez(folder / f"{name}.npz", x=np.asarray(x), y=np.asarray(y))


def test_a_folder_may_hold_integers_and_a_label_for_every_position(tmp_path: Path) -> None:
    for name, count in (("train", 5), ("test", 2)):
        save(tmp_path, name, np.ones((count, 3), np.uint8), np.full((count, 3), 6, np.int32))
    data = load(str(tmp_path), tmp_path, window=0)
    assert (data.sample_shape, data.classes) == ((3,), 7)
    columns = [("x", "int64")], [("y", "int64")]
    batches = Batches(data, microbatch=2, seed=1, inputs=columns[0], labels=columns[1])
    (inputs,), (labels,) = batches.train(7)
    assert inputs.shape == (2, 3)
    assert (inputs.dtype.name, labels.dtype.name) == ("int64", "int64")


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.zeros((2, 3)), np.zeros(3, int), r"want arrays with equal numbers of samples \(N, ...\)"),
        (np.zeros((2, 3)), np.array(["a", "b"]), "want numbers in y"),
        (np.zeros((2, 3), complex), np.zeros(2, int), "want numbers in x"),
        (np.zeros(()), np.zeros(2, int), r"want arrays with equal numbers of samples"),
    ],
)
def test_arrays_that_are_not_data_are_reported(tmp_path: Path, x: Any, y: Any, words: str) -> None:
    save(tmp_path, "train", x, y)
    save(tmp_path, "test", x, y)
    with pytest.raises(UsageError, match=words):
        load_folder(tmp_path)


def test_one_array_in_place_of_two_is_reported(tmp_path: Path) -> None:
    for name in ("train.npz", "test.npz"):
        with (tmp_path / name).open("wb") as file:
            np.save(file, np.zeros(3))
    with pytest.raises(UsageError, match="want arrays x and y"):
        load_folder(tmp_path)


def test_samples_of_two_different_shapes_are_reported(tmp_path: Path) -> None:
    save(tmp_path, "train", np.zeros((2, 3)), np.zeros(2, int))
    save(tmp_path, "test", np.zeros((2, 4)), np.zeros(2, int))
    with pytest.raises(UsageError, match=r"holds samples of \(3,\), but test.npz of \(4,\)"):
        load_folder(tmp_path)


def test_a_texts_labels_are_the_bytes_that_follow_each_position(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("äbcdefghijklmnopqrstuvwxyz".encode())
    data = load("text.txt", tmp_path, window=4)
    assert data.classes == TEXT_VALUES
    whole = np.concatenate([data.train["x"].ravel(), data.test["x"].ravel()])
    assert bytes(whole) == path.read_bytes()[:24]
    nexts = np.concatenate([data.train["y"].ravel(), data.test["y"].ravel()])
    assert bytes(nexts) == path.read_bytes()[1:25]
    assert len(data.test["x"]) == 1
    assert load_text(path, window=4).digest == data.digest
    assert load_text(path, window=5).digest != data.digest, "different samples of one text have equal hashes"


@pytest.mark.parametrize("content", [b"", b"too short"])
def test_a_text_too_short_for_held_out_samples_is_reported(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="text"):
        load_text(path, window=8)


def test_the_error_for_a_missing_folder_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        load("nothing", tmp_path, window=8)
    assert "train.npz" in (error.value.do or "")
