"""Files of others' runs beside checkpoints, within the guests' budget: results, graphs, data.

Each is a label with its files. They share the budget of `node.storage.blobs`: new data of either kind evicts
the oldest of these files, which can be fetched again or were delivered long ago, but never files that a run
on this node needs. This node's own files are not listed and do not count.

Everything here waits for the disk, so it is called in the executor's threads, and may be by several at once.
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
"""Labels, however small."""
INDEX_NAME = "guests"
_INDEX_BYTES_MAX = 1 << 20

Size = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Guest(msgspec.Struct, frozen=True, array_like=True):
    files: tuple[str, ...]
    size: Size


class Guests:
    """The guests of one data folder; reads the existing ones when it is made. The oldest comes first."""

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
            self._guests = {}  # damaged: the files in it no longer count
        self._count()
        blobs.make_room = self._shrink

    @property
    def bytes_here(self) -> int:
        """Return the size of all labels."""
        return sum(guest.size for guest in self._guests.values())

    @property
    def labels(self) -> tuple[str, ...]:
        """Return all labels, the oldest first."""
        return tuple(self._guests)

    def admit(self, label: str, files: Collection[str], size: int) -> None:
        """Make room for these files, of `size` bytes together, and count them from now on, replacing the
        label's earlier ones.

        Raises:
            NoRoom: evicting the oldest is not enough. OSError: the disk is full.
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
                raise NoRoom(f"{size} bytes for others, at most {self._blobs.guest_bytes_max} are given")
            self._guests[label] = _Guest(tuple(files), size)
            self._save()

    def release(self, label: str) -> None:
        """Stop counting the files of this label: they are this node's own now, or gone."""
        with self._lock:
            if self._guests.pop(label, None) is not None:
                self._save()

    def _shrink(self, size: int) -> bool:
        with self._lock:
            found = self._evict(size, 0)
            self._save()
            return found

    def _evict(self, size: int, count: int) -> bool:
        """Evict the oldest, at least this many bytes and labels; none if that is not enough."""
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
