"""The data sets on this node, in order of last use; the least recently used are evicted to make room.

The owner's own data and the data fetched for others' runs each have the guests' budget (`node.storage.blobs`)
as their limit. Above the limit, the least recently used set is evicted, unless a run on this node needs it.
All functions here wait for the disk, so they are called in the executor's threads.
"""

from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import Annotated

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from node.seams import Storage
from node.storage.blobs import Blobs, NoRoom

SETS_MAX = 256
"""Maximum number of data sets kept, however small they are."""
INDEX_NAME = "datasets"
_INDEX_BYTES_MAX = 1 << 20
_LABEL = "data-"


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    is_own: bool


class DataCache:
    """The cache of one data folder. It loads the existing sets when it is created."""

    def __init__(self, storage: Storage, blobs: Blobs, needed: Callable[[], Sequence[str]]) -> None:
        self.evicted: list[str] = []
        """The hashes of evicted sets."""
        self._storage = storage
        self._blobs = blobs
        self._needed = needed
        self._lock = RLock()
        self._is_swept = True
        try:
            found: dict[str, _Kept] = decode(
                storage.read(INDEX_NAME) or encode({}),
                dict[str, _Kept],
                bytes_max=_INDEX_BYTES_MAX,
                cleans_text=False,
            )
        except RemoteProtocolError:
            found = {}
        pinned = {label.removeprefix(_LABEL) for label in blobs.labels(_LABEL)}
        self._kept = {digest: kept for digest, kept in found.items() if digest in pinned}
        for digest in pinned - set(self._kept):  # a crash interrupted storing the set
            blobs.unpin(_LABEL + digest)

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

    @property
    def digests(self) -> tuple[str, ...]:
        """Return all hashes, the least recently used first."""
        return tuple(self._kept)

    def bytes_here(self, *, own: bool) -> int:
        """Return the total size of this node's own sets (`own`), or of all other sets."""
        return sum(kept.size_bytes for kept in self._kept.values() if kept.is_own == own)

    def keep(self, digest: str, sizes: Mapping[bytes, int], *, is_own: bool) -> None:
        """Hold the blobs of a set, some of which may arrive later. The set becomes the most recently used.

        Raises:
            NoRoom: evicting all unneeded sets does not free enough.
            OSError: as raised by the storage.
        """
        with self._lock:
            before = self._kept.pop(digest, None)
            is_own = is_own or (before is not None and before.is_own)
            kept = _Kept(sum(sizes.values()), is_own)
            try:
                self._make_room(kept)
                self._pin(digest, sizes, kept)
            except BaseException:
                if before is not None:
                    self._kept[digest] = before
                raise
            self._kept[digest] = kept
            self._save()

    def _pin(self, digest: str, sizes: Mapping[bytes, int], kept: _Kept) -> None:
        while True:
            try:
                self._blobs.pin(_LABEL + digest, sizes, is_guest=not kept.is_own)
                return
            except NoRoom:
                if not self._evict_one(own=False):
                    raise

    def _make_room(self, kept: _Kept) -> None:
        while len(self._kept) >= SETS_MAX:
            if not self._evict_one(own=True) and not self._evict_one(own=False):
                raise NoRoom(f"{SETS_MAX} data sets are in use here")
        if kept.is_own:
            # The owner's own set is kept whatever its size; earlier own sets are evicted.
            while self.bytes_here(own=True) + kept.size_bytes > self._blobs.guest_bytes_max:
                if not self._evict_one(own=True):
                    return

    def _evict_one(self, *, own: bool) -> bool:
        needed = set(self._needed())
        for digest, kept in self._kept.items():
            if kept.is_own == own and digest not in needed:
                del self._kept[digest]
                self._blobs.unpin(_LABEL + digest)
                self._is_swept = False
                self.evicted.append(digest)
                del self.evicted[:-SETS_MAX]
                return True
        return False

    def sweep(self) -> None:
        """Free the blobs of evicted sets. Must not be called while blobs are being held."""
        if not self._is_swept:
            self._is_swept = True
            self._blobs.sweep()

    def _save(self) -> None:
        self._storage.write(INDEX_NAME, encode(self._kept))
