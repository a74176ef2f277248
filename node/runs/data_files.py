"""The files that data of runs comes from, by its hash: kept, handed to other trainers, fetched from them.

Whoever takes over the feeding must have the data when the requester is gone. What came is read as data
before it is believed: its hash is that of what it holds.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from crypto.identity import PeerId
from node.errors import Unreachable, UsageError
from node.runs import data as datasets
from node.runs.manifest import Manifest
from node.runs.requests import FetchData, fetch
from node.runs.uploads import FilePart, whole
from node.seams import Seams

DATA_BYTES_MAX = 1 << 30
"""One file, of which a trainer holds all in memory while it fetches it."""
FETCH_SECONDS_MAX = 300.0

FileName = Literal["text", "train.npz", "test.npz"]
_FOLDER: tuple[FileName, ...] = ("train.npz", "test.npz")


def data_name(digest: str, name: FileName) -> str:
    """Where a node keeps a file of data, in its storage."""
    return f"data/{digest}/{name}"


class DataFiles:
    """What is here, and how the rest comes here."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self._paths: dict[str, Path] = {}

    async def keep(self, digest: str, path: Path) -> None:
        """Remember where data of this hash lies on this machine, and keep a copy for after a restart.

        What is larger than `DATA_BYTES_MAX` is only remembered. Raises OSError.
        """
        self._paths[digest] = path
        await self._seams.executor.run(partial(self._copy, digest, path))

    def _copy(self, digest: str, path: Path) -> None:
        names: tuple[FileName, ...] = ("text",) if path.is_file() else _FOLDER
        files = {name: path if name == "text" else path / name for name in names}
        if sum(file.stat().st_size for file in files.values()) <= DATA_BYTES_MAX:
            for name, file in files.items():
                self._seams.storage.copy_in(data_name(digest, name), file)

    async def read(self, digest: str, name: FileName) -> bytes | None:
        """One of its files, None where it is not here."""
        return await self._seams.executor.run(partial(self._read, digest, name))

    def _read(self, digest: str, name: FileName) -> bytes | None:
        part = self._open(digest, name)
        if part is None:
            return None
        with part.file as file:
            file.seek(0)
            return file.read(part.length)

    async def open(self, digest: str, name: FileName) -> FilePart | None:
        """The same, to be read and closed by the caller."""
        return await self._seams.executor.run(partial(self._open, digest, name))

    def _open(self, digest: str, name: FileName) -> FilePart | None:
        path = self._paths.get(digest)
        if path is None:
            return whole(self._seams.storage.open(data_name(digest, name)), bytes_max=DATA_BYTES_MAX)
        file = path if path.is_file() and name == "text" else path / name
        try:
            return whole(file.open("rb", buffering=0), bytes_max=DATA_BYTES_MAX)
        except OSError:
            return None

    async def load(self, manifest: Manifest, holders: Sequence[PeerId]) -> datasets.Dataset:
        """A run's data, from here or from another member. Raises UsageError or Unreachable."""
        run = self._seams.executor.run
        if manifest.data == datasets.DIGITS_NAME:
            return await run(datasets.load_digits)
        window = manifest.window
        if (path := self._paths.get(manifest.data)) is not None:
            return await run(lambda: datasets.load_path(path, window=window))
        reasons: list[str] = []
        for peer in (self._seams.network.peer, *holders):
            try:
                files = await self._files(manifest.data, peer)
                dataset = await run(partial(datasets.load_bytes, files, window=window))
                if dataset.digest != manifest.data:
                    raise Unreachable("refused", "the data is another than the run's")
            except (Unreachable, UsageError) as error:
                reasons.append(error.detail if isinstance(error, Unreachable) else str(error))
                continue
            for name, data in files.items():
                await run(partial(self._seams.storage.write, data_name(manifest.data, name), data))
            return dataset
        raise Unreachable("unknown", f"nobody handed over the run's data: {'; '.join(reasons[-3:])}")

    async def _files(self, digest: str, peer: PeerId) -> dict[FileName, bytes]:
        if peer != self._seams.network.peer:

            async def one(name: FileName) -> bytes:
                return await fetch(
                    self._seams.network,
                    peer,
                    FetchData(digest, name),
                    seconds=FETCH_SECONDS_MAX,
                    bytes_max=DATA_BYTES_MAX,
                )
        else:

            async def one(name: FileName) -> bytes:
                data = await self.read(digest, name)
                if data is None:
                    raise Unreachable("unknown", "this data is not here")
                return data

        try:
            return {"text": await one("text")}
        except Unreachable:
            return {name: await one(name) for name in _FOLDER}
