"""The files that data of runs comes from, by its hash: kept, handed to other trainers, fetched from them.

Whoever takes over the feeding must have the data when the requester is gone. Its hash is that of its files'
bytes, and compared before anything is read in them; then a fenced process unpacks the arrays into a file that
is mapped (`node.content.unpacking`), whether a person's own or a stranger's.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO

import trio

from crypto.identity import PeerId
from node.content import datasets as datasets
from node.content.datasets import Dataset, FileName
from node.content.npz import BadArchive
from node.errors import Unreachable, UsageError
from node.protocols.manifest import Manifest
from node.protocols.runs import FetchData, fetch_into
from node.protocols.uploads import FilePart, whole
from node.seams import Seams
from node.storage.blobs import NoRoom
from node.storage.guests import Guests

DATA_BYTES_MAX = 1 << 30
"""One file."""
FETCHES_MAX = 4
"""Data on its way here at once, in files without a name."""
COPY_BYTES = 1 << 20
FETCH_SECONDS_MAX = 300.0


def data_name(digest: str, name: FileName) -> str:
    """Return where a node keeps a file of data, in its storage."""
    return f"data/{digest}/{name}"


class _Files(ExitStack):
    """Open files of data, closed together; `where` they lie in words for a person. `are_ours`: nobody else
    changes them."""

    def __init__(self, by_name: Mapping[FileName, IO[bytes]], where: str, *, are_ours: bool = False) -> None:
        super().__init__()
        self.by_name = {name: self.enter_context(file) for name, file in by_name.items()}
        self.where = where
        self.are_ours = are_ours


class DataFiles:
    """What is here, and how the rest comes here."""

    def __init__(self, seams: Seams, guests: Guests | None = None) -> None:
        """What was fetched counts as one of the `guests`."""
        self._seams = seams
        self._guests = guests
        self._fetching = trio.CapacityLimiter(FETCHES_MAX)
        self._paths: dict[str, Path] = {}

    async def keep(self, digest: str, path: Path) -> None:
        """Remember where data of this hash lies on this machine, and keep a copy for after a restart.

        What is larger than `DATA_BYTES_MAX` is only remembered. Raises OSError.
        """
        self._paths[digest] = path
        await self._seams.executor.run(partial(self._copy, digest, path))

    def _copy(self, digest: str, path: Path) -> None:
        names: tuple[FileName, ...] = ("text",) if path.is_file() else datasets.FOLDER
        files = {name: path if name == "text" else path / name for name in names}
        if sum(file.stat().st_size for file in files.values()) <= DATA_BYTES_MAX:
            if self._guests is not None:
                self._guests.release(digest)
            for name, file in files.items():
                self._seams.storage.copy_in(data_name(digest, name), file)

    async def open(self, digest: str, name: FileName) -> FilePart | None:
        """One of its files, to be read and closed by the caller; None where it is not here."""
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

    async def learn(self, path: Path, *, window: int) -> Dataset:
        """Data of a person's own, before it is kept. Raises UsageError."""
        files = await self._seams.executor.run(partial(datasets.open_files, path))
        return await self._load(_Files(files, str(path)), window, allow_unfenced=True)

    async def load(
        self, manifest: Manifest, holders: Sequence[PeerId], *, allow_unfenced: bool = False
    ) -> Dataset:
        """A run's data, from here or from another member. Raises UsageError or Unreachable.

        With `allow_unfenced` it is read even where no process can be fenced in for that.
        """
        if manifest.data == datasets.DIGITS_NAME:
            return await self._seams.executor.run(datasets.load_digits)
        reasons: list[str] = []
        for peer in (None, self._seams.network.peer, *holders):
            try:
                files = await self._files(manifest, peer)
                if files is not None:
                    return await self._load(
                        files, manifest.window, wanted=manifest.data, allow_unfenced=allow_unfenced
                    )
            except (Unreachable, UsageError) as error:
                reasons.append(error.detail if isinstance(error, Unreachable) else str(error))
        raise Unreachable("unknown", f"nobody handed over the run's data: {'; '.join(reasons[-3:])}")

    async def _load(
        self, files: _Files, window: int, *, wanted: str | None = None, allow_unfenced: bool
    ) -> Dataset:
        """Data from its files, which are closed; `wanted` is its hash, compared before anything is read.

        Raises:
            Unreachable: it is other data. UsageError: it is none.
        """
        run, storage = self._seams.executor.run, self._seams.storage
        arrays: list[datasets.Arrays] = []
        with files:
            try:
                digest = await run(partial(datasets.digest_of, files.by_name, window))
                if wanted not in (None, digest):
                    raise Unreachable("refused", "the data is another than the run's")
                if (text := files.by_name.get(datasets.TEXT)) is not None:
                    data = await run(partial(datasets.read_text, text, may_map=files.are_ours))
                    return datasets.from_text(data, digest, window, files.where)
                for name in datasets.FOLDER:
                    with await run(storage.temporary) as out:
                        arrays.append(
                            await self._seams.executor.unpack(
                                files.by_name[name], out, allow_unfenced=allow_unfenced
                            )
                        )
            except BadArchive as error:
                raise UsageError(f"{files.where}/{name}: {error}") from None
            except OSError as error:
                raise UsageError(f"{files.where}: {error.strerror or error}") from None
        return datasets.from_arrays(arrays, digest, files.where)

    async def _files(self, manifest: Manifest, peer: PeerId | None) -> _Files | None:
        """The files that lie where a person said (None), that are kept here, or that another member has.

        Raises:
            Unreachable, UsageError: they are not there.
        """
        run, digest = self._seams.executor.run, manifest.data
        if peer is None:
            path = self._paths.get(digest)
            if path is None:
                return None
            return _Files(await run(partial(datasets.open_files, path)), str(path))
        if peer != self._seams.network.peer:
            await self._fetch(manifest, peer)
        kept = await run(partial(self._open_kept, digest))
        if kept is None:
            raise Unreachable("unknown", "this data is not here")
        return _Files(kept, "the data", are_ours=True)

    def _open_kept(self, digest: str) -> dict[FileName, IO[bytes]] | None:
        storage = self._seams.storage
        if (text := storage.open(data_name(digest, datasets.TEXT))) is not None:
            return {datasets.TEXT: text}
        found = {name: storage.open(data_name(digest, name)) for name in datasets.FOLDER}
        files = {name: file for name, file in found.items() if file is not None}
        if len(files) == len(found):
            return files
        for file in files.values():
            file.close()
        return None

    async def _fetch(self, manifest: Manifest, peer: PeerId) -> None:
        """Have the files here, with the hash that they should have. Raises Unreachable."""
        run, storage, digest = self._seams.executor.run, self._seams.storage, manifest.data
        async with self._fetching:
            with ExitStack() as stack:
                files: dict[FileName, IO[bytes]] = {}

                async def one(name: FileName) -> None:
                    file = stack.enter_context(await run(storage.temporary))
                    await self._fetch_file(digest, name, peer, file)
                    files[name] = file

                try:
                    try:
                        await one(datasets.TEXT)
                    except Unreachable:
                        for name in datasets.FOLDER:
                            await one(name)
                    if await run(partial(datasets.digest_of, files, manifest.window)) != digest:
                        raise Unreachable("refused", "the data is another than the run's")
                    await run(partial(self._put, digest, files))
                except NoRoom as error:
                    raise Unreachable("refused", f"no room for it: {error}") from None
                except OSError as error:
                    raise Unreachable("refused", f"no room for it: {error.strerror or error}") from None

    async def _fetch_file(self, digest: str, name: FileName, peer: PeerId, file: IO[bytes]) -> None:
        async def take(chunk: bytes) -> None:
            await self._seams.executor.run(partial(_write_all, file, chunk))

        await fetch_into(
            take,
            self._seams.network,
            peer,
            FetchData(digest, name),
            seconds=FETCH_SECONDS_MAX,
            bytes_max=DATA_BYTES_MAX,
        )

    def _put(self, digest: str, files: Mapping[FileName, IO[bytes]]) -> None:
        """Keep what was fetched, as a guest. Raises NoRoom or OSError."""
        names = {name: data_name(digest, name) for name in files}
        if self._guests is not None:
            size = sum(file.seek(0, os.SEEK_END) for file in files.values())
            self._guests.admit(digest, list(names.values()), size)
        for name, file in files.items():
            draft = self._seams.storage.draft(names[name])
            try:
                file.seek(0)
                while chunk := file.read(COPY_BYTES):
                    draft.write(chunk)
                draft.commit()
            finally:
                draft.discard()


def _write_all(file: IO[bytes], data: bytes) -> None:
    """Files without a buffer may take less than they are given."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
