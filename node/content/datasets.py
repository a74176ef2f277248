"""Training data: scikit-learn's digits, a folder with `train.npz` and `test.npz`, or a file of text.

Samples are dealt by number, so that every micro-batch can be made again by anybody who holds the
data: epoch e is the permutation that (seed, e) gives, and micro-batch m is the m-th run of samples
through the epochs. Only numpy is used: importing scikit-learn takes seconds, its file does not.
"""

import gzip
import importlib.metadata
import io
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from blake3 import blake3

from node.content.npz import BadArchive, unpack_here
from node.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
Columns = Sequence[tuple[str, str]]
"""(name of an array, numpy's name of a type) for each port."""

FileName = Literal["text", "train.npz", "test.npz"]
TEXT: FileName = "text"
FOLDER: tuple[FileName, ...] = ("train.npz", "test.npz")

DIGITS_NAME = "digits"
HASH_BYTES = 1 << 20
"""Read at once."""
HELD_OUT = 5
"""One digit in five is kept from training."""
TEXT_HELD_OUT = 10
"""The last tenth of a text is kept from training."""
TEXT_VALUES = 256
"""A text is its bytes, so that any language and any file will do."""
_SPLIT_SEED = 20
_DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"
_DIGITS_SCALE = 16.0


@dataclass(frozen=True)
class Dataset:
    """Samples by the names of their arrays, each (N, ...), for training and held out.

    Where there is one input and one label they are called x and y. `window` is how many bytes make a sample,
    where it is text.
    """

    digest: str
    train: Arrays
    test: Arrays
    label_values: int = 0
    window: int = 0

    @property
    def train_samples(self) -> int:
        return len(next(iter(self.train.values())))

    @property
    def test_samples(self) -> int:
        return len(next(iter(self.test.values())))

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Of x, for a model that is built in. Raises UsageError: there is none."""
        return tuple(self._named("x").shape[1:])

    @property
    def label_shape(self) -> tuple[int, ...]:
        return tuple(self._named("y").shape[1:])

    @property
    def classes(self) -> int:
        """How many different labels a model must tell apart."""
        largest = max(int(self._named("y").max()), int(self.test["y"].max()))
        return self.label_values or largest + 1

    def _named(self, name: str) -> Array:
        if name not in self.train:
            raise UsageError(f"a built-in model wants arrays x and y; the data has {', '.join(self.train)}")
        return self.train[name]


def labelled(
    digest: str,
    train: tuple[Array, Array],
    test: tuple[Array, Array],
    *,
    label_values: int = 0,
    window: int = 0,
) -> Dataset:
    """Data of one input and one label."""
    arrays = [dict(zip(("x", "y"), part, strict=True)) for part in (train, test)]
    return Dataset(digest, arrays[0], arrays[1], label_values, window)


def load(data: str, base: Path, *, window: int) -> Dataset:
    """Return what `data` of a RUN.toml in the folder `base` names; `window` is for text. Raises
    UsageError."""
    if data == DIGITS_NAME:
        return load_digits()
    return load_path(path_of(data, base), window=window)


def path_of(data: str, base: Path) -> Path:
    """Return where data that is not built in lies."""
    return base / Path(data).expanduser()


def load_path(path: Path, *, window: int) -> Dataset:
    """A folder of arrays or a file of text. Raises UsageError."""
    return load_text(path, window=window) if path.is_file() else load_folder(path)


def load_digits() -> Dataset:
    """1,797 handwritten digits of 1x8x8 (UCI, as scikit-learn ships them); a fixed fifth is held out.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        path = importlib.metadata.distribution("scikit-learn").locate_file(_DIGITS_FILE)
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "data 'digits' comes with scikit-learn, which is not installed", "pip install 'peerloom[demo]'"
        ) from None
    with gzip.open(str(path), "rt") as lines:
        table = np.loadtxt(lines, delimiter=",")
    inputs = (table[:, :-1] / _DIGITS_SCALE).reshape(-1, 1, 8, 8)
    labels = table[:, -1].astype(np.int64)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    held_out = len(labels) // HELD_OUT + 1
    test, train = order[:held_out], order[held_out:]
    return labelled(DIGITS_NAME, (inputs[train], labels[train]), (inputs[test], labels[test]))


def load_folder(folder: Path) -> Dataset:
    """`train.npz` and `test.npz`, each with `x` and `y` (N, ...), or arrays of the names that the model's
    inputs and labels have.

    In this process: a node has strangers' read elsewhere (`node.content.dataset_store`).

    Raises:
        UsageError: what is missing or does not fit.
    """
    with ExitStack() as stack:
        files = {name: stack.enter_context(file) for name, file in open_files(folder).items()}
        arrays: list[Arrays] = []
        for name in FOLDER:
            out = stack.enter_context(tempfile.TemporaryFile(buffering=0))
            try:
                arrays.append(unpack_here(files[name], out))
            except BadArchive as error:
                raise UsageError(f"{folder / name}: {error}") from None
        return from_arrays(arrays, digest_of(files, 0), str(folder))


def load_text(path: Path, *, window: int) -> Dataset:
    """The bytes of a file in samples of `window`, each with the bytes one further on as its labels.

    Raises:
        UsageError: it cannot be read, or is too short for two samples.
    """
    with open_files(path)[TEXT] as file:
        return from_text(read_text(file, may_map=False), digest_of({TEXT: file}, window), window, str(path))


def open_files(path: Path) -> dict[FileName, IO[bytes]]:
    """The files of data that lies at `path`, a text or a folder, to be closed. Raises UsageError."""
    files: dict[FileName, IO[bytes]] = {}
    names: tuple[FileName, ...] = (TEXT,) if path.is_file() else FOLDER
    for name in names:
        file = path if name == TEXT else path / name
        try:
            files[name] = file.open("rb", buffering=0)
        except OSError as error:
            for each in files.values():
                each.close()
            reason = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror).lower()
            raise UsageError(
                f"{file}: {reason}", "a data folder holds train.npz and test.npz; a text is one file"
            ) from None
    return files


def digest_of(files: Mapping[FileName, IO[bytes]], window: int) -> str:
    """The hash of data: of the bytes of its files, so that it is known before anything is read in them."""
    if TEXT in files:
        whole = blake3(derive_key_context=f"peerloom text in windows of {window}")
        _hash_into(whole, files[TEXT])
    else:
        whole = blake3(derive_key_context="peerloom folder of train.npz and test.npz")
        for name in FOLDER:
            each = blake3()
            _hash_into(each, files[name])
            whole.update(each.digest())
    return whole.hexdigest()


def _hash_into(hasher: blake3, file: IO[bytes]) -> None:
    file.seek(0)
    while chunk := file.read(HASH_BYTES):
        hasher.update(chunk)


def read_text(file: IO[bytes], *, may_map: bool) -> Array:
    """The bytes of a text; mapped where nobody makes the file shorter. Raises OSError."""
    if may_map and file.seek(0, os.SEEK_END):
        with suppress(io.UnsupportedOperation):  # it is in memory already
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    file.seek(0)
    return np.frombuffer(file.read(), np.uint8)


def from_arrays(arrays: Sequence[Arrays], digest: str, where: str) -> Dataset:
    """Data of the arrays for training, and of those held out. Raises UsageError: they do not go together."""
    train, test = arrays
    if set(train) != set(test):
        raise UsageError(f"{where}: train.npz has {', '.join(train)}, and test.npz {', '.join(test)}")
    for name, array in train.items():
        if array.shape[1:] != test[name].shape[1:]:
            raise UsageError(
                f"{where}: {name} of train.npz holds samples of {array.shape[1:]}, "
                f"of test.npz {test[name].shape[1:]}"
            )
    return Dataset(digest, train, test)


def from_text(data: Array, digest: str, window: int, where: str) -> Dataset:
    """Data of the bytes of a text. Raises UsageError: it is too short."""
    count = (len(data) - 1) // max(1, window)
    if count < 2:
        raise UsageError(f"{where}: {len(data)} bytes of text are too few for samples of {window}")
    inputs = data[: count * window].reshape(count, window)
    labels = data[1 : count * window + 1].reshape(count, window)
    kept = count - max(1, count // TEXT_HELD_OUT)
    return labelled(
        digest,
        (inputs[:kept], labels[:kept]),
        (inputs[kept:], labels[kept:]),
        label_values=TEXT_VALUES,
        window=window,
    )


class Batches:
    """Micro-batches of a dataset by number, the same for everyone with the same seed.

    `inputs` and `labels` are names of arrays in the order of the model's ports, each with numpy's name of
    the type that the model takes.
    """

    def __init__(
        self, dataset: Dataset, *, microbatch: int, seed: int, inputs: Columns, labels: Columns
    ) -> None:
        self._dataset = dataset
        self._microbatch = microbatch
        self._seed = seed
        self._columns = inputs, labels
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)

    def train(self, number: int) -> tuple[list[Array], list[Array]]:
        """Inputs and labels of training micro-batch `number`, counted from 0 over all epochs."""
        return self._taken(self._dataset.train, self.rows(number, train=True))

    def pick(self, rows: list[int]) -> tuple[list[Array], list[Array]]:
        """Inputs and labels of these training samples."""
        return self._taken(self._dataset.train, rows)

    @property
    def train_samples(self) -> int:
        """How many samples there are to train on."""
        return self._dataset.train_samples

    def rows(self, number: int, *, train: bool) -> list[int]:
        """Return which samples make a micro-batch, in its order."""
        positions = range(number * self._microbatch, (number + 1) * self._microbatch)
        if not train:
            return [position for position in positions if position < self._dataset.test_samples]
        total = self._dataset.train_samples
        return [int(self._permutation(p // total)[p % total]) for p in positions]

    def test(self, number: int) -> tuple[list[Array], list[Array]]:
        """Inputs and labels of held-out micro-batch `number`; the last may be short."""
        part = slice(number * self._microbatch, (number + 1) * self._microbatch)
        return self._taken(self._dataset.test, part)

    def _taken(self, arrays: Arrays, rows: "list[int] | slice") -> tuple[list[Array], list[Array]]:
        inputs, labels = (
            [np.ascontiguousarray(arrays[name][rows], kind) for name, kind in columns]
            for columns in self._columns
        )
        return inputs, labels

    def _make_permutation(self, epoch: int) -> Array:
        return np.random.default_rng((self._seed, epoch)).permutation(self._dataset.train_samples)
