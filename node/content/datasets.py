"""Training data: scikit-learn's digits, a folder with `train.npz` and `test.npz`, or a text file.

Samples are dealt by number, so that any peer that has the data can recreate every micro-batch. If a data set
has S shards (`node.content.shards`), micro-batch m consists of the next samples of shard m % S. Each epoch of
a shard is a permutation drawn from (seed, epoch, shard). Most data sets have one shard. This module uses only
numpy, and reads scikit-learn's file directly, because importing scikit-learn takes seconds.
"""

import gzip
import importlib.metadata
import io
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import numpy as np

from node.content.npz import BadArchive, unpack_here
from node.content.shards import PartName, Put, pack
from node.errors import UsageError
from node.invocation import install_command
from node.storage.blobs import hash_of

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
Columns = Sequence[tuple[str, str]]
"""For each port: (name of an array, numpy's name of its type)."""

FileName = Literal["text", "train.npz", "validation.npz", "test.npz"]
TEXT: FileName = "text"
FOLDER: tuple[FileName, ...] = ("train.npz", "test.npz")
VALIDATION: FileName = "validation.npz"
"""The optional file of validation samples."""

DIGITS_NAME = "digits"
ORIGINS_NAME = "origins.npz"
"""Name of the origins file, which accompanies parts dealt from one source: see `read_origins`."""
HELD_OUT = 5
"""One digit in five is held out."""
DIGITS_SAMPLE_SHAPE = (1, 8, 8)
DIGITS_CLASSES = 10
"""Number of classes, known before the digits are read, so that a built-in model can be made for them."""
TEXT_HELD_OUT = 10
"""The last tenth of a text is held out."""
TEXT_VALUES = 256
"""Number of different values. Text is learnt as bytes, so any language and any file works."""
_SPLIT_SEED = 20
_DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"
_DIGITS_SCALE = 16.0


class Supply(Protocol):
    """Provides samples that are not on this node yet."""

    async def ready(self, part: PartName, shards: Sequence[int], *, again: bool = False) -> None:
        """Wait until these shards of a part are here. Set `again` if they were reported ready but are
        missing. Raises Unreachable."""


@dataclass(frozen=True)
class Dataset:
    """Samples for training and held-out samples: arrays by name, each (N, ...).

    A single input and a single label are named x and y. `window` is the number of bytes in a sample of text.
    `validation` holds the samples for judging a run while it trains, if any. `shards` are the shards of the
    training samples. `supply` fetches samples that are still on their way. Arrays may be
    `node.content.sharded.ShardedArray`, from which samples are taken by number.
    """

    digest: str
    train: Mapping[str, Array]
    test: Mapping[str, Array]
    label_values: int = 0
    window: int = 0
    validation: Mapping[str, Array] | None = None
    shards: int = 1
    supply: Supply | None = None

    @property
    def train_samples(self) -> int:
        return len(next(iter(self.train.values())))

    @property
    def test_samples(self) -> int:
        return len(next(iter(self.test.values())))

    @property
    def validation_samples(self) -> int:
        return len(next(iter(self.validation.values()))) if self.validation else 0

    @property
    def parts(self) -> dict[PartName, Mapping[str, Array]]:
        """Return all parts by name."""
        found: dict[PartName, Mapping[str, Array]] = {"train": self.train}
        if self.validation is not None:
            found["validation"] = self.validation
        return found | {"test": self.test}

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Return the shape of a sample's x, for a built-in model. Raises UsageError if there is none."""
        return tuple(self._named("x").shape[1:])

    @property
    def classes(self) -> int:
        """Return how many different labels a model must distinguish."""
        largest = max(int(self._named("y").max()), int(self.test["y"].max()))
        return self.label_values or largest + 1

    def _named(self, name: str) -> Any:
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
    """Return a data set with one input and one label."""
    arrays = [dict(zip(("x", "y"), part, strict=True)) for part in (train, test)]
    return Dataset(digest, arrays[0], arrays[1], label_values, window)


def load(data: str, base: Path, *, window: int, tell: Callable[[str], None] = lambda _: None) -> Dataset:
    """Load the `data` of a RUN.toml in the folder `base`; `window` is for text. Raises UsageError."""
    if data == DIGITS_NAME:
        return load_digits()
    path = path_of(data, base)
    return load_text(path, window=window, tell=tell) if path.is_file() else load_folder(path)


def path_of(data: str, base: Path) -> Path:
    """Return the path of data that is not built in."""
    return base / Path(data).expanduser()


@lru_cache(maxsize=1)
def load_digits() -> Dataset:
    """Return 1,797 handwritten digits of 1x8x8 (UCI, as scikit-learn ships them); a fixed fifth is held out.
    The data (half a megabyte) is read once per process and shared, so callers must not write to it.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        path = importlib.metadata.distribution("scikit-learn").locate_file(_DIGITS_FILE)
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "data 'digits' comes with scikit-learn, which is not installed", install_command("scikit-learn")
        ) from None
    with gzip.open(str(path), "rt") as lines:
        table = np.loadtxt(lines, delimiter=",")
    inputs = (table[:, :-1] / _DIGITS_SCALE).reshape(-1, *DIGITS_SAMPLE_SHAPE)
    labels = table[:, -1].astype(np.int64)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    held_out = len(labels) // HELD_OUT + 1
    test, train = order[:held_out], order[held_out:]
    found = labelled(DIGITS_NAME, (inputs[train], labels[train]), (inputs[test], labels[test]))
    for array in (*found.train.values(), *found.test.values()):
        array.flags.writeable = False
    return found


def read_origins(folder: Path) -> dict[str, Array]:
    """Return, for each part, the number that each sample had in the source from which the requester's command
    dealt it."""
    path = folder / ORIGINS_NAME
    if not path.exists():
        return {}
    with np.load(path, allow_pickle=False) as origins:
        return dict(origins)


def load_folder(folder: Path) -> Dataset:
    """Load `train.npz`, `test.npz` and optionally `validation.npz`. Each has `x` and `y` (N, ...), or arrays
    named like the model's inputs and labels.

    This reads in the calling process. A node reads in another process (`node.content.dataset_store`).

    Raises:
        UsageError: a file is missing or does not fit.
    """
    with ExitStack() as stack:
        files = {name: stack.enter_context(file) for name, file in open_files(folder).items()}
        arrays: dict[PartName, Arrays] = {}
        for name, file in files.items():
            out = stack.enter_context(tempfile.TemporaryFile(buffering=0))
            try:
                arrays[part_of(name)] = unpack_here(file, out)
            except BadArchive as error:
                raise UsageError(f"{folder / name}: {error}") from None
        return from_arrays(arrays, str(folder))


def part_of(name: FileName) -> PartName:
    """Return the part that this file of a folder contains."""
    return "train" if name == "train.npz" else "test" if name == "test.npz" else "validation"


def load_text(path: Path, *, window: int, tell: Callable[[str], None] = lambda _: None) -> Dataset:
    """Load the bytes of a file in samples of `window`; labels are the same bytes shifted by one position.
    `tell` receives the progress.

    Raises:
        UsageError: the file cannot be read, or is too short for two samples.
    """
    with open_files(path)[TEXT] as file:
        data, packed = read_text(file, may_map=False), 0

        def put(blob: bytes) -> bytes:
            nonlocal packed
            packed += len(blob)
            tell(f"made {packed / 1e6:,.0f} MB of samples from {len(data) / 1e6:,.0f} MB of text")
            return hash_of(blob)

        return from_text(data, window, str(path), put)


def open_files(path: Path) -> dict[FileName, IO[bytes]]:
    """Open the files of the data at `path`, a text or a folder. The caller closes them. Raises UsageError."""
    files: dict[FileName, IO[bytes]] = {}
    names: tuple[FileName, ...] = (TEXT,) if path.is_file() else FOLDER
    if (path / VALIDATION).exists():
        names = ("train.npz", VALIDATION, "test.npz")
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


def read_text(file: IO[bytes], *, may_map: bool) -> Array:
    """Return the bytes of a text. `may_map`: memory-map the file; this requires that nobody truncates it.
    Raises OSError."""
    if may_map and file.seek(0, os.SEEK_END):
        with suppress(io.UnsupportedOperation):  # the file is already in memory
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    file.seek(0)
    return np.frombuffer(file.read(), np.uint8)


def from_arrays(parts: Mapping[PartName, Mapping[str, Array]], where: str, put: Put = hash_of) -> Dataset:
    """Make a data set from the arrays of each part. `put` receives the packed blobs.

    Raises:
        UsageError: the arrays do not match.
        OSError: as raised by `put`.
    """
    train = parts["train"]
    for part, arrays in parts.items():
        if set(train) != set(arrays):
            raise UsageError(
                f"{where}: train.npz has {', '.join(train)}, but {part}.npz has {', '.join(arrays)}",
                "give all parts the same arrays",
            )
        for name, array in train.items():
            other = arrays[name]
            if array.shape[1:] != other.shape[1:]:
                raise UsageError(
                    f"{where}: {name} of train.npz holds samples of {array.shape[1:]}, but "
                    f"{part}.npz of {other.shape[1:]}"
                )
            if array.dtype != other.dtype and not np.can_cast(other.dtype, array.dtype, "same_kind"):
                raise UsageError(
                    f"{where}: {name} of train.npz is {array.dtype}, but of {part}.npz {other.dtype}"
                )
    return _packed(Dataset("", train, parts["test"], validation=parts.get("validation")), where, put)


def from_text(data: Array, window: int, where: str, put: Put = hash_of) -> Dataset:
    """Make a data set from the bytes of a text. Raises UsageError if the text is too short, and OSError as
    `put` does."""
    count = (len(data) - 1) // max(1, window)
    if count < 2:
        raise UsageError(f"{where}: {len(data)} bytes of text are too few for samples of {window}")
    inputs = data[: count * window].reshape(count, window)
    labels = data[1 : count * window + 1].reshape(count, window)
    kept = count - max(1, count // TEXT_HELD_OUT)
    text = labelled(
        "",
        (inputs[:kept], labels[:kept]),
        (inputs[kept:], labels[kept:]),
        label_values=TEXT_VALUES,
        window=window,
    )
    return _packed(text, where, put)


def _packed(dataset: Dataset, where: str, put: Put) -> Dataset:
    try:
        manifest, name = pack(dataset.parts, put, window=dataset.window, label_values=dataset.label_values)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    return replace(dataset, digest=name.hex(), shards=len(manifest.parts[0].shards))


class Batches:
    """Micro-batches of a dataset by number. They are the same for every peer with the same seed.

    `inputs` and `labels` name arrays in the order of the model's ports, each with numpy's name of its type.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        microbatch: int,
        seed: int,
        inputs: Columns,
        labels: Columns,
        validated: int = 0,
    ) -> None:
        """Held-out micro-batches first use up the `validated` validation samples, then the test samples."""
        self._dataset = dataset
        self._validated = validated
        self._validations = -(-validated // microbatch)
        self._microbatch = microbatch
        self._seed = seed
        self._columns = inputs, labels
        self._permutation = lru_cache(maxsize=2 * dataset.shards)(self._make_permutation)

    def train(self, number: int) -> tuple[list[Array], list[Array]]:
        """Return inputs and labels of training micro-batch `number`, counted from 0 over all epochs."""
        return self._taken(self._dataset.train, self.rows(number, train=True))

    def pick(self, rows: list[int]) -> tuple[list[Array], list[Array]]:
        """Return inputs and labels of these training samples."""
        return self._taken(self._dataset.train, rows)

    @property
    def train_samples(self) -> int:
        """Return the number of training samples."""
        return self._dataset.train_samples

    @property
    def held_out_samples(self) -> tuple[int, int]:
        """Return the numbers of validation and test samples."""
        return self._dataset.validation_samples, self._dataset.test_samples

    def rows(self, number: int, *, train: bool) -> list[int]:
        """Return the numbers of the samples in a micro-batch, in order. Held-out samples are numbered within
        their part."""
        if not train:
            place = number if number < self._validations else number - self._validations
            count = self._validated if number < self._validations else self._dataset.test_samples
            positions = range(place * self._microbatch, (place + 1) * self._microbatch)
            return [position for position in positions if position < count]
        count = self._dataset.shards
        number, shard = divmod(number, count)
        total = len(range(shard, self._dataset.train_samples, count))
        positions = range(number * self._microbatch, (number + 1) * self._microbatch)
        return [int(self._permutation(p // total, shard)[p % total]) * count + shard for p in positions]

    async def ready(self, number: int, *, train: bool, again: bool = False) -> None:
        """Wait until the samples of a micro-batch are here. Raises Unreachable if no peer has them."""
        if self._dataset.supply is None:
            return
        if train:
            await self._dataset.supply.ready("train", [number % self._dataset.shards], again=again)
        else:
            part: PartName = "validation" if number < self._validations else "test"
            await self._dataset.supply.ready(part, [], again=again)

    def held_out(self, number: int) -> tuple[list[Array], list[Array]]:
        """Return inputs and labels of a held-out micro-batch: validation samples come before test samples."""
        if number >= self._validations:
            return self.test(number - self._validations)
        assert self._dataset.validation is not None
        return self._taken(self._dataset.validation, self.rows(number, train=False))

    def test(self, number: int) -> tuple[list[Array], list[Array]]:
        """Return inputs and labels of test micro-batch `number`; the last micro-batch may be smaller."""
        part = slice(number * self._microbatch, (number + 1) * self._microbatch)
        return self._taken(self._dataset.test, part)

    def validation(self, number: int) -> tuple[list[Array], list[Array]]:
        """Return inputs and labels of validation micro-batch `number`, if the data has such samples."""
        assert self._dataset.validation is not None
        part = slice(number * self._microbatch, (number + 1) * self._microbatch)
        return self._taken(self._dataset.validation, part)

    def _taken(
        self, arrays: Mapping[str, Array], rows: "list[int] | slice"
    ) -> tuple[list[Array], list[Array]]:
        inputs, labels = (
            [np.ascontiguousarray(arrays[name][rows], kind) for name, kind in columns]
            for columns in self._columns
        )
        return inputs, labels

    def _make_permutation(self, epoch: int, shard: int) -> Array:
        count = self._dataset.shards
        seed = (self._seed, epoch) if count == 1 else (self._seed, epoch, shard)
        return np.random.default_rng(seed).permutation(len(range(shard, self._dataset.train_samples, count)))
