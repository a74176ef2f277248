"""Data of runs on this node: the owner's data is packed into shards, others' data is fetched in pieces.

The owner's own files are read once. A sandboxed process unpacks the arrays of an npz into a file that is
memory-mapped (`node.content.unpacking`), and the arrays are packed into blobs (`node.content.shards`). Data
from other nodes is never parsed: a manifest is decoded against its types, and everything else is plain
numbers, verified by hash before they are read. A trainer first fetches the shards of the lanes it feeds. Then
it fetches those of the lanes it would feed next, so that the death of another trainer loses no samples.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import trio

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.pieces.swarm import URGENCY_USUAL
from node.content import datasets as datasets
from node.content.blobs import BlobSink, Refuse, fetch_all
from node.content.data_cache import DataCache
from node.content.datasets import Dataset, FileName
from node.content.exchange import DataExchange, Hashes, PieceExchange
from node.content.npz import BadArchive
from node.content.sharded import ShardedArrays, ShardReader
from node.content.shards import MANIFEST_BYTES_MAX, DataManifest, DataPart, PartName, hashes_of
from node.errors import Unreachable, UsageError
from node.protocols.manifest import Manifest
from node.seams import Seams
from node.storage.blobs import HASH_BYTES, Blobs, NoRoom
from partition.plan.assignment import LANES

FETCHES_MAX = 4
"""Maximum number of data sets whose manifests are being fetched."""
URGENCY_NOW, URGENCY_NEXT = URGENCY_USUAL - 1, URGENCY_USUAL + 1

Lanes = tuple[Sequence[int], Sequence[int]]
"""Lanes whose samples are needed, and lanes whose samples are kept in addition."""
EVERYTHING: Lanes = (range(LANES), ())


class _Supply:
    """One data set of one run, while its samples arrive."""

    def __init__(
        self, held: "_Held", exchange: PieceExchange, holders: Callable[[], Sequence[PeerId]]
    ) -> None:
        self._held = held
        self._exchange = exchange
        self._holders = holders

    async def ready(self, part: PartName, shards: Sequence[int], *, again: bool = False) -> None:
        """Wait for shards of a part, or for all of its shards if `shards` is empty. Raises Unreachable."""
        found = self._held.manifest.part(part)
        if found is None:
            return
        numbers = self._held.numbers(found, shards or range(len(found.shards)))
        if again:
            self._exchange.recheck(numbers)
        if self._exchange.core.lacks(numbers):
            await wait_for(self._exchange, numbers, self._holders, URGENCY_NOW)


async def wait_for(
    exchange: PieceExchange, numbers: Sequence[int], holders: Callable[[], Sequence[PeerId]], urgency: int
) -> None:
    """Wait for pieces. Raises Unreachable if no peer has them, or there is no room."""
    try:
        await exchange.wait(numbers, holders, urgency)
    except OSError as error:
        raise Unreachable("refused", f"no room for the data: {error.strerror or error}") from None


class _Held:
    """A data set with its manifest and the lists of some shards."""

    def __init__(self, name: bytes, manifest: DataManifest, manifest_bytes: int) -> None:
        self.name = name
        self.manifest = manifest
        self.lists: dict[tuple[PartName, int], list[bytes]] = {}
        self._manifest_bytes = manifest_bytes
        self._first = {(part.name, shard): first for part, shard, first in manifest.shards()}

    def numbers(self, part: DataPart, shards: Sequence[int]) -> list[int]:
        """Return the pieces of these shards."""
        found: list[int] = []
        for shard in shards:
            first = self._first[part.name, shard]
            found += range(first, first + self.manifest.pieces_of(part, shard))
        return found

    @property
    def hashes(self) -> Hashes:
        """Return the hashes of all pieces. They are empty for shards whose list is missing."""
        found = [b""] * self.manifest.pieces
        for key, hashes in self.lists.items():
            first = self._first[key]
            found[first : first + len(hashes)] = hashes
        return found

    @property
    def sizes(self) -> dict[bytes, int]:
        """Return the sizes of all blobs wanted here: the manifest, the known lists, and their pieces."""
        found = {self.name: self._manifest_bytes}
        for part, shard, _ in self.manifest.shards():
            hashes = self.lists.get((part.name, shard))
            if hashes is not None:
                found[part.shards[shard]] = len(hashes) * HASH_BYTES
                found |= dict(zip(hashes, self.manifest.piece_sizes(part, shard), strict=True))
        return found


class DataFiles:
    """The data on this node, and the means to fetch the rest."""

    def __init__(
        self,
        seams: Seams,
        blobs: Blobs,
        *,
        refuse: Refuse,
        start_task: Callable[..., None],
        needed: Callable[[], Sequence[str]] = tuple,
        came: Callable[[bytes, PeerId, int], None] = lambda _data, _peer, _size: None,
        served: Callable[[PeerId, int], None] = lambda _peer, _size: None,
    ) -> None:
        """`needed` returns the hashes of the data of active runs. For the other arguments see
        `DataExchange`."""
        self._seams = seams
        self._blobs = blobs
        self._refuse = refuse
        self._fetching = trio.CapacityLimiter(FETCHES_MAX)
        self.cache = DataCache(seams.storage, blobs, needed)
        self.exchange = DataExchange(
            seams,
            blobs,
            refuse=refuse,
            known=self._known,
            start_task=start_task,
            came=came,
            served=served,
        )

    async def keep(self, digest: str, path: Path, *, window: int = 0) -> None:
        """Pack the owner's data with this hash. Raises UsageError."""
        if await self._find(digest) is None:
            found = await self.learn(path, window=window)
            if found.digest != digest:
                raise UsageError(f"{path}: the data has changed")

    async def learn(self, path: Path, *, window: int) -> Dataset:
        """Read the owner's data and pack it, so that this node can train on it and serve it. Raises
        UsageError."""
        run = self._seams.executor.run
        put = self._blobs.put
        with ExitStack() as stack:
            files = await run(partial(datasets.open_files, path))
            for file in files.values():
                stack.enter_context(file)
            stack.enter_context(self._blobs.hold())
            name: FileName = datasets.TEXT
            try:
                if (text := files.get(datasets.TEXT)) is not None:
                    data = await run(partial(datasets.read_text, text, may_map=True))
                    found = await run(partial(datasets.from_text, data, window, str(path), put), apart=True)
                else:
                    parts: dict[PartName, datasets.Arrays] = {}
                    for name, file in files.items():
                        with await run(self._seams.storage.temporary) as out:
                            parts[datasets.part_of(name)] = await self._seams.executor.unpack(
                                file, out, allow_unfenced=True
                            )
                    found = await run(partial(datasets.from_arrays, parts, str(path), put), apart=True)
                await run(partial(self._keep_own, bytes.fromhex(found.digest)))
            except BadArchive as error:
                raise UsageError(f"{path}/{name}: {error}") from None
            except OSError as error:
                raise UsageError(f"{path}: {error.strerror or error}") from None
        await run(self.cache.sweep)
        return found

    def _keep_own(self, name: bytes) -> None:
        held = self._read_held(name)
        assert held is not None, "packed data is missing"
        self.cache.keep(name.hex(), held.sizes, is_own=True)

    async def load(
        self, manifest: Manifest, holders: Sequence[PeerId], lanes: Lanes | None = None
    ) -> Dataset:
        """Return a run's data, from here or from other members.

        With `lanes`, this returns once the shards' lists are here, and the samples of those lanes arrive
        later. Without `lanes`, it waits for all data.

        Raises:
            UsageError: the data is the digits, which are not installed.
            Unreachable: no peer has the data, or there is no room.
        """
        if manifest.data == datasets.DIGITS_NAME:
            return await self._seams.executor.run(datasets.load_digits)
        try:
            held = await self._hold(manifest.data, holders, lanes or EVERYTHING)
        except NoRoom as error:
            raise Unreachable("refused", f"no room for the data: {error}") from None
        except OSError as error:
            raise Unreachable("refused", f"no room for the data: {error.strerror or error}") from None
        exchange = self.exchange.open(held.name, held.hashes)
        supply = _Supply(held, exchange, lambda: holders)
        reader = ShardReader(held.manifest, held.lists, self._blobs.get)
        arrays: dict[PartName, Any] = {part.name: ShardedArrays(reader, part) for part in held.manifest.parts}
        for urgency, some in enumerate(lanes or EVERYTHING):
            numbers = held.numbers(held.manifest.parts[0], _shards_of(held.manifest.parts[0], some))
            exchange.want(numbers, URGENCY_USUAL + urgency)
        for part in held.manifest.parts[1:]:
            exchange.want(held.numbers(part, range(len(part.shards))), URGENCY_USUAL)
        if lanes is None:
            for part in held.manifest.parts:
                await supply.ready(part.name, ())
        elif exchange.core.is_complete is False:
            exchange.meet(list(holders))
        return Dataset(
            manifest.data,
            arrays["train"],
            arrays["test"],
            held.manifest.label_values,
            held.manifest.window,
            validation=arrays.get("validation"),
            shards=len(held.manifest.parts[0].shards),
            supply=supply,
        )

    async def _hold(self, digest: str, holders: Sequence[PeerId], lanes: Lanes) -> _Held:
        """Fetch the manifest and the lists, and make room for the pieces of `lanes`.

        Raises:
            Unreachable: no peer delivers them.
            NoRoom, OSError: there is no room.
        """
        name = bytes.fromhex(digest)
        sink, network = BlobSink(self._blobs, self._seams.executor), self._seams.network
        async with self._fetching:
            with self._blobs.hold():
                await _fetched(
                    fetch_all(
                        network,
                        {name: MANIFEST_BYTES_MAX},
                        holders,
                        sink=sink,
                        refuse=self._refuse,
                        clock=self._seams.clock,
                    )
                )
                held = await self._seams.executor.run(partial(self._read_held, name))
                if held is None:
                    raise Unreachable("refused", "the manifest received for the run's data is malformed")
                lists = {}
                for part, shard, _ in held.manifest.shards():
                    wanted = _shards_of(part, (*lanes[0], *lanes[1])) if part.name == "train" else [shard]
                    if shard in wanted:
                        lists[part.shards[shard]] = held.manifest.pieces_of(part, shard) * HASH_BYTES
                await _fetched(
                    fetch_all(
                        network, lists, holders, sink=sink, refuse=self._refuse, clock=self._seams.clock
                    )
                )
                held = await self._seams.executor.run(partial(self._read_held, name))
                assert held is not None, "the manifest has disappeared"
                await self._seams.executor.run(partial(self.cache.keep, digest, held.sizes, is_own=False))
        await self._seams.executor.run(self.cache.sweep)
        return held

    async def _known(self, name: bytes) -> Hashes | None:
        held = await self._find(name.hex())
        return None if held is None else held.hashes

    async def _find(self, digest: str) -> _Held | None:
        if digest not in self.cache:
            return None
        return await self._seams.executor.run(partial(self._read_held, bytes.fromhex(digest)))

    def _read_held(self, name: bytes) -> _Held | None:
        """Return a data set by its hash, or None if its manifest is missing or malformed."""
        data = self._blobs.get(name)
        if data is None:
            return None
        try:
            manifest: Any = decode(data, DataManifest, bytes_max=MANIFEST_BYTES_MAX)
            held = _Held(name, manifest, len(data))
            for part, shard, _ in held.manifest.shards():
                listed = self._blobs.get(part.shards[shard])
                if listed is not None:
                    held.lists[part.name, shard] = hashes_of(listed, held.manifest.pieces_of(part, shard))
        except RemoteProtocolError:
            return None
        return held


def _shards_of(part: DataPart, lanes: Sequence[int]) -> list[int]:
    return sorted({lane % len(part.shards) for lane in lanes})


async def _fetched(fetch: Any) -> None:
    try:
        await fetch
    except Unreachable as error:
        raise Unreachable("unknown", f"no peer delivers the run's data: {error.detail}") from None
