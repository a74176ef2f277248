"""Samples from a user's Dataset, iterator or arrays, or a text as tokens, are converted into a run's data."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from node import toml
from node.cli.capture import prepare_data
from node.content.datasets import Dataset as Data
from node.content.datasets import load_folder
from node.content.reading import read_reading
from node.content.samples import SAMPLES_BYTES_MAX, write_samples
from node.errors import UsageError
from node.protocols.run_file import RunFile
from node.runs.manifest_builder import columns_of
from tests.node.test_named_data import captured

WHERE = "RUN.toml: data"


def written(source: Any, folder: Path) -> Data:
    folder.mkdir(exist_ok=True)
    write_samples(source, folder, WHERE)
    return load_folder(folder)


class Squares(Dataset[Any]):
    """A dataset with a length and items, whose iterator would never end."""

    def __init__(self, count: int = 11) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        return torch.full((2, 3), float(place)), place**2


def test_a_torch_dataset_becomes_arrays_x_and_y(tmp_path: Path) -> None:
    found = written(Squares(), tmp_path)
    assert (found.train["x"].shape, found.train["x"].dtype.name) == ((9, 2, 3), "float32")
    assert found.train["y"].dtype == np.dtype(np.int64)
    assert sorted([*found.train["y"], *found.test["y"]]) == [place**2 for place in range(11)]
    assert list(found.test["y"]) == [4**2, 9**2], "not every fifth sample is held out"
    assert np.array_equal(found.train["x"][:, 0, 0] ** 2, found.train["y"]), (
        "x and y of one sample are no longer in the same row"
    )


class Stream(IterableDataset[Any]):
    """Yields mappings from names to values, as a tokenizer does."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for place in range(7):
            yield {"input_ids": [place, 2, 3], "mask": torch.tensor([True, False, True]), "score": place / 2}


def test_an_iterator_of_mappings_becomes_arrays_by_name(tmp_path: Path) -> None:
    found = written(Stream(), tmp_path)
    assert {name: (array.dtype.name, array.shape[1:]) for name, array in found.train.items()} == {
        "input_ids": ("int64", (3,)),
        "mask": ("bool", (3,)),
        "score": ("float32", ()),
    }
    assert list(found.test["input_ids"][:, 0]) == [4]


def test_equal_samples_make_equal_bytes(tmp_path: Path) -> None:
    assert written(Stream(), tmp_path / "a").digest == written(iter(Stream()), tmp_path / "b").digest


def test_a_pair_is_read_as_training_and_held_out_samples(tmp_path: Path) -> None:
    found = written((Squares(4), (Squares(3)[place] for place in range(3))), tmp_path)
    assert (found.train_samples, found.test_samples) == (4, 3)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 10])
def test_no_sample_is_lost_or_duplicated(count: int, tmp_path: Path) -> None:
    found = written(Squares(count), tmp_path)
    assert sorted([*found.train["y"], *found.test["y"]]) == [place**2 for place in range(count)]
    assert found.test_samples == max(1, count // 5)


def test_tuples_are_assigned_in_the_order_of_inputs_and_labels(tmp_path: Path) -> None:
    _, model = captured()
    ids, mask = torch.zeros(6, 5, dtype=torch.int64), torch.ones(6, 5, dtype=torch.int64)
    score, kind = torch.zeros(6), torch.ones(6, dtype=torch.int64)
    found = written(TensorDataset(ids, mask, score, kind), tmp_path)
    names = [f"item_{place}" for place in range(4)]
    assert columns_of(model.graph, found, "RUN.toml") == (names[:2], names[2:])


def test_mappings_of_arrays_and_nested_names_are_read(tmp_path: Path) -> None:
    found = written({"x": np.arange(12).reshape(6, 2), "y": torch.arange(6)}, tmp_path / "a")
    assert found.train["x"].shape == (5, 2)
    nested = [{"batch": {"ids": [1, 2], "parts": (torch.zeros(2), 3)}} for _ in range(3)]
    found = written(nested, tmp_path / "b")
    assert sorted(found.train) == ["batch.ids", "batch.parts.0", "batch.parts.1"]
    labelled = [({"ids": [1, 2], "mask": [1, 0]}, 3) for _ in range(3)]
    assert sorted(written(labelled, tmp_path / "c").train) == ["ids", "mask", "y"]


def test_images_become_values_from_0_to_1(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    images = [(pillow.new("RGB", (4, 3), (255, 0, place)), place) for place in range(3)]
    found = written(images, tmp_path)
    assert (found.train["x"].shape, found.train["x"].dtype.name) == ((2, 3, 3, 4), "float32")
    assert found.train["x"][0, :, 0, 0].tolist() == [1.0, 0.0, 0.0]


def unequal() -> Iterator[tuple[list[int], int]]:
    for count in (3, 3, 2):
        yield list(range(count)), 0


def broken() -> Iterator[tuple[int, int]]:
    yield 1, 1
    raise KeyError("no such row")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (unequal(), r"samples have x int64\[3\], y int64\[\], held-out samples x int64\[2\]"),
        (
            [(np.zeros(3 - place // 3), place) for place in range(5)],
            r"sample 3: x has shape \(2,\), but in",
        ),
        ([(1, 1), (2, 2), (0.5, 3), (4, 4)], "sample 2: x is float32, before int64"),
        (broken(), "sample 1: KeyError: 'no such row'"),
        ([("a text", 1), ("b", 2)], "sample 0: x is text, which is not numeric"),
        ([(None, 1), (None, 2)], "sample 0: x is NoneType"),
        ([{"x": 1}, {"y": 1}, {"x": 1}], r"sample 1 has y, but earlier samples have x|sample 0 has y"),
        (Squares(1), "1 samples; at least 2"),
        ([], "0 samples"),
        (5, "is int, which gives no samples"),
        (DataLoader(Squares()), "is a DataLoader, which gives batches"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "arrays of different lengths: x 3, y 4"),
    ],
)
def test_sources_without_samples_are_refused_by_name(source: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        write_samples(source, tmp_path, WHERE)


def test_an_endless_iterator_is_stopped_at_a_size_limit(tmp_path: Path) -> None:
    assert SAMPLES_BYTES_MAX >= 1 << 30
    endless = ({"x": np.zeros(1000)} for _ in itertools.count())
    with pytest.raises(UsageError, match="more than 0 GiB after") as caught:
        write_samples(endless, tmp_path, WHERE, bytes_max=1 << 20)
    assert "itertools.islice" in (caught.value.do or "")


# Sources as RUN.toml names them


def run_file(text: str) -> RunFile:
    return toml.parse(f'model = "m.peerloom"\n{text}', RunFile, name="RUN.toml").value


def test_a_function_in_a_users_file_provides_a_runs_data(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def noise():\n    return TensorDataset(torch.rand(6, 2), torch.arange(6))\n"
        "def fails():\n    raise OSError('no disk')\n"
    )
    digests = []
    for name in "ab":
        (tmp_path / name).mkdir()
        assert prepare_data(run_file('data = "mine.py:noise"'), tmp_path, tmp_path / name, "RUN.toml")
        digests.append(load_folder(tmp_path / name).digest)
    assert digests[0] == digests[1], "the random draws differ between two conversions"
    with pytest.raises(UsageError, match=r"RUN\.toml: data: fails failed: OSError: no disk"):
        prepare_data(run_file('data = "mine.py:fails"'), tmp_path, tmp_path, "RUN.toml")
    with pytest.raises(UsageError, match="has no function 'others'; it has"):
        prepare_data(run_file('data = "mine.py:others"'), tmp_path, tmp_path, "RUN.toml")


def test_a_text_becomes_windows_of_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: place for place, word in enumerate(["?", "the", "cat", "sat", "on", "mat", "."])}
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    known.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("the cat sat on the mat .\n" * 10)
    text = run_file('data = "text.txt"\ntokenizer = "tokenizer.json"\n[train]\nwindow = 6')
    (tmp_path / "out").mkdir()
    assert prepare_data(text, tmp_path, tmp_path / "out", "RUN.toml")
    found = load_folder(tmp_path / "out")
    assert (found.train_samples, found.test_samples, found.sample_shape) == (10, 1, (6,))
    assert found.train["x"][0].tolist() == [1, 2, 3, 4, 1, 5]
    assert found.train["y"][0].tolist() == [2, 3, 4, 1, 5, 6]
    reading = read_reading(tmp_path / "out")
    assert reading is not None
    assert reading.vocabulary == 7
    long = run_file('data = "text.txt"\ntokenizer = "tokenizer.json"')
    with pytest.raises(UsageError, match="70 tokens are too few for samples of 64"):
        prepare_data(long, tmp_path, tmp_path / "out", "RUN.toml")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer\.json: is not a readable tokenizer\.json"):
        prepare_data(text, tmp_path, tmp_path / "out", "RUN.toml")
