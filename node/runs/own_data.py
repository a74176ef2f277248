"""Data sets of this node's owner that never leave it: read in place, never packed into a blob or served to
anybody.

A federated run names the data that each member must have, and its form (`OwnData`); each member trains on its
own data. A peer learns only whether a member's data set is usable. The reason why not is only for the owner,
since such reasons contain paths and values.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import trio

from node.content import datasets
from node.content.datasets import Arrays, Dataset
from node.content.npz import BadArchive
from node.content.shards import PartName
from node.errors import UsageError
from node.offering import NamedData
from node.protocols.manifest import Run, own_data_hash, own_data_of
from node.runs.data_check import check_values
from node.runs.manifest_builder import bind_data, word
from node.seams import Seams
from partition.model.graph import Graph
from partition.run.local_settings import COLUMNS_MAX, Column, OwnData

Stamp = tuple[tuple[int, int, int, int], ...]
"""Device, inode, size and modification time of each file."""


@dataclass(frozen=True)
class _Read:
    """A data set as it was read, and the models (graph and sizes) for which its values were checked."""

    path: Path
    window: int
    stamp: Stamp
    dataset: Dataset
    checked: set[tuple[str, tuple[int, ...]]]


def columns_of(dataset: Dataset) -> tuple[Column, ...]:
    """Return the form of a data set's arrays, in the order of their names."""
    return tuple(
        Column(name, array.dtype.name, tuple(array.shape[1:]))
        for name, array in sorted(dataset.train.items())
    )


def own_data_like(dataset: Dataset, data: str, where: str) -> OwnData:
    """Return the data that other members must have for a federated run with `data` of a RUN.toml. Its name is
    the path's last part without the ending. Raises UsageError if the data set has too many arrays."""
    if not 0 < len(dataset.train) <= COLUMNS_MAX:
        raise UsageError(f"{where}: train.federated: {len(dataset.train)} arrays; at most {COLUMNS_MAX}")
    name = word(Path(data.partition(".py:")[0]).stem)
    return OwnData(name, columns_of(dataset), dataset.window)


class OwnDataSets:
    """The data sets of one node. `named` returns those that its owner offers to federated runs. Data that a
    person gives for a run requested here is held for that run alone."""

    def __init__(self, seams: Seams, named: Callable[[], Sequence[NamedData]]) -> None:
        self._seams = seams
        self._named = named
        self._held: dict[bytes, Dataset] = {}
        self._latest: _Read | None = None
        self._turn = trio.Lock()

    async def read(self, path: Path, *, window: int) -> Dataset:
        """Read a data set into file-backed memory, without keeping it for a run. Raises UsageError."""
        async with self._turn:
            return (await self._read(path, window)).dataset

    def hold(self, run: bytes, dataset: Dataset) -> None:
        """Hold a data set for a run that this node requests."""
        self._held[run] = dataset

    def release(self, run: bytes) -> None:
        """Release the data of a run that has ended here."""
        self._held.pop(run, None)
        self._latest = None

    async def find(self, run: Run, graph: Graph) -> Dataset:
        """Return the data that this node trains on in a federated run. Raises UsageError with a message for
        the owner."""
        own = own_data_of(run.manifest)
        assert own is not None, "the run's data stays with its owners"
        if (held := self._held.get(run.id)) is not None:
            return held
        named = self._path_of(own)
        if named is None:
            raise UsageError(
                f"there is no data set with the name {own.name} here",
                f"`peerloom config set own_data {own.name}=/PATH`",
            )
        async with self._turn:
            found = await self._read(named, own.window)
            if reason := _misfit(own, found.dataset):
                raise UsageError(f"{named}: {reason}")
            key = run.manifest.graph, run.manifest.sizes_max
            if key not in found.checked:
                check = partial(_check, graph, found.dataset, run, str(named))
                await self._seams.executor.run(check, apart=True)
                found.checked.add(key)
        return replace(found.dataset, digest=own_data_hash(own))

    async def refusal(self, run: Run, graph: Graph) -> str | None:
        """Return why this node has no usable data for a federated run, as a text for a peer; None if it
        has."""
        own = own_data_of(run.manifest)
        if own is None:
            return None
        if run.id not in self._held and self._path_of(own) is None:
            return f"it offers no data set of its own with the name {own.name}"
        try:
            await self.find(run, graph)
        except UsageError:
            return f"its own data set {own.name} is not usable: this model takes {own}"
        return None

    def _path_of(self, own: OwnData) -> Path | None:
        return next((named.path for named in self._named() if named.name == own.name), None)

    async def _read(self, path: Path, window: int) -> _Read:
        run = self._seams.executor.run
        with ExitStack() as stack:
            files = await run(partial(datasets.open_files, path))
            for file in files.values():
                stack.enter_context(file)
            stamp = await run(lambda: tuple(map(_stamp, (file.fileno() for file in files.values()))))
            latest = self._latest
            if latest is not None and (latest.path, latest.window, latest.stamp) == (path, window, stamp):
                return latest
            self._latest = None
            name = datasets.TEXT
            try:
                if (text := files.get(datasets.TEXT)) is not None:
                    data = await run(partial(datasets.read_text, text, may_map=True))
                    found = await run(partial(datasets.from_text, data, window, str(path)), apart=True)
                else:
                    parts: dict[PartName, Arrays] = {}
                    for name, file in files.items():
                        with await run(self._seams.storage.temporary) as out:
                            parts[datasets.part_of(name)] = await self._seams.executor.unpack(
                                file, out, allow_unfenced=True
                            )
                    found = await run(partial(datasets.from_arrays, parts, str(path)), apart=True)
            except BadArchive as error:
                raise UsageError(f"{path}/{name}: {error}") from None
            except OSError as error:
                raise UsageError(f"{path}: {error.strerror or error}") from None
        # One contiguous shard, because no shards are sent to others.
        self._latest = _Read(path, window, stamp, replace(found, shards=1), set())
        return self._latest


def _stamp(descriptor: int) -> tuple[int, int, int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _misfit(own: OwnData, dataset: Dataset) -> str:
    """Return how a data set differs from what a run requires of its members; "" if it fits. Numbers of a
    different size are accepted, because they are converted to the model's type."""
    found: Mapping[str, Column] = {column.name: column for column in columns_of(dataset)}
    there = ", ".join(map(str, found.values()))
    for wanted in own.columns:
        column = found.get(wanted.name)
        is_same = column is not None and column.shape == wanted.shape
        if not is_same or not np.can_cast(column.dtype, wanted.dtype, "same_kind"):  # type: ignore[union-attr]  # it is there
            return f"holds {there}; the run wants {own}"
    return "" if len(found) == len(own.columns) else f"holds {there}; the run wants {own}"


def _check(graph: Graph, dataset: Dataset, run: Run, where: str) -> None:
    """Raise UsageError for shapes or values that the model cannot take."""
    sizes = bind_data(graph, dataset, run.manifest.microbatch, where)
    if sizes != run.manifest.sizes_max:
        raise UsageError(f"{where}: its samples have different sizes from those of the run")
    check_values(graph, dataset, sizes, run.manifest.model, where)
