"""Files of other peers' runs apart from checkpoints, within the guests' budget: results, graphs, data.

Each guest is a label with its files. They share the budget of `node.storage.blobs`. New data of either kind
evicts the oldest of these files, which can be fetched again or were delivered long ago, but never files that
a run on this node needs. This node's own files are not listed and do not count.

All methods wait for the disk, so they are called in the executor's threads, possibly by several at once.
"""

from collections import deque
from collections.abc import Collection
from threading import RLock
from typing import Annotated

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from node.seams import Storage
from node.storage.blobs import Blobs, NoRoom

GUESTS_MAX = 1_024
"""Maximum number of labels, however small."""
INDEX_NAME = "guests"
_INDEX_BYTES_MAX = 1 << 20

Size = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Guest(msgspec.Struct, frozen=True, array_like=True):
    files: tuple[str, ...]
    size: Size


class Guests:
    """The guests of one data folder, the oldest first; the constructor reads the existing ones."""

    def __init__(self, storage: Storage, blobs: Blobs) -> None:
        self.needed: frozenset[str] = frozenset()
        """The labels that runs on this node need now."""
        self.evicted: deque[str] = deque(maxlen=GUESTS_MAX)
        """Evicted labels."""
        self._storage = storage
        self._blobs = blobs
        self._lock = RLock()
        try:
            self._guests: dict[str, _Guest] = decode(
                storage.read(INDEX_NAME) or encode({}), dict[str, _Guest], bytes_max=_INDEX_BYTES_MAX
            )
        except RemoteProtocolError:
            self._guests = {}  # damaged: the files that it listed no longer count
        self._count()
        blobs.make_room = self._shrink

    @property
    def bytes_here(self) -> int:
        """The size of all guests' files."""
        return sum(guest.size for guest in self._guests.values())

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels, the oldest first."""
        return tuple(self._guests)

    def admit(self, label: str, files: Collection[str], size: int) -> None:
        """Make room for these files, with `size` bytes in total, and count them from now on. They replace the
        label's earlier files.

        Raises:
            NoRoom: evicting the oldest guests does not free enough. OSError: the disk is full.
        """
        with self._lock:
            before = self._guests.pop(label, None)
            self._count()
            free = self._blobs.guest_bytes_max - self._blobs.guest_bytes - self.bytes_here
            count = len(self._guests) + 1 - GUESTS_MAX
            if not self._evict(size - free, count):
                if before is not None:
                    self._guests[label] = before
                    self._count()
                raise NoRoom(
                    f"there is no room for {size} bytes of others' data; at most "
                    f"{self._blobs.guest_bytes_max} are allowed in total"
                )
            self._guests[label] = _Guest(tuple(files), size)
            self._save()

    def release(self, label: str) -> None:
        """Stop counting the files of this label, because they are this node's own now, or gone."""
        with self._lock:
            if self._guests.pop(label, None) is not None:
                self._save()

    def _shrink(self, size: int) -> bool:
        with self._lock:
            found = self._evict(size, 0)
            self._save()
            return found

    def _evict(self, size: int, count: int) -> bool:
        """Evict the oldest guests, at least this many bytes and labels; evict none if that is not
        possible."""
        needed, going = self.needed, []
        for label, guest in self._guests.items():
            if size <= 0 and count <= 0:
                break
            if label not in needed:
                going.append(label)
                size -= guest.size
                count -= 1
        if size > 0 or count > 0:
            return False
        for label in going:
            for file in self._guests.pop(label).files:
                self._storage.delete(file)
            self.evicted.append(label)
        self._count()
        return True

    def _count(self) -> None:
        self._blobs.files_bytes = self.bytes_here

    def _save(self) -> None:
        self._count()
        self._storage.write(INDEX_NAME, encode(self._guests))
