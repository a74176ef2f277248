"""Blobs named by the hash of their content, with pins that keep them and a budget for others' blobs.

A blob's name is the BLAKE3 hash of its bytes, and every read compares it: a damaged file counts as missing,
and is removed. So blobs are written without waiting for the disk, and `pin` and `sync` wait for all of them
together (measured with 1,200 blobs of 256 KiB: 0.9 s waiting for each, 0.5 s together).

A pin is a named set of hashes and sizes, which survives a restart. Blobs without a pin are removed by the
next `sweep`. A pin may name blobs that are not here yet, so that they are not swept when they arrive. Pins of
a *guest* are for blobs that this node keeps for others. Together these take at most the budget; blobs that
this node pins for itself do not count.

All methods wait for the disk, so they are called in the executor's threads, possibly by several at once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Annotated

import msgspec
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from node.seams import Storage
from node.settings import GUEST_BYTES_MAX as GUEST_BYTES_MAX

HASH_BYTES = 32
BLOB_BYTES_MAX = 2 << 20
"""Maximum size of a blob, which is one message on a stream, whole in memory at both ends. Chunks of a state
have one MiB; the longest list of chunks (`node.protocols.checkpoint`) has 1.5 MiB."""
GUEST_PINS_MAX = 4_096
"""Maximum number of guests' pins, even if they hold few bytes, because every blob is a file."""
PIN_BYTES_MAX = 16 << 20
"""Maximum size of the file of one pin, which this node writes itself: four times the hashes of the largest
stage."""
_FOLDER = "blobs"
_PINS = "pins"
_STRIPES = 16
"""Number of locks: this many blobs may be written at once, but never the same blob twice."""


class NoRoom(Exception):
    """The blobs to pin for others exceed the rest of the budget."""


class _Pin(msgspec.Struct, frozen=True, array_like=True):
    """The file of a pin: the concatenated hashes, and the size of each blob."""

    is_guest: bool
    hashes: bytes
    sizes: tuple[Annotated[int, msgspec.Meta(ge=0, le=BLOB_BYTES_MAX)], ...]

    def __post_init__(self) -> None:
        if len(self.hashes) != HASH_BYTES * len(self.sizes):
            raise ValueError("the pin has different numbers of hashes and sizes")


def hash_of(data: bytes | memoryview) -> bytes:
    """Return a blob's name."""
    return blake3(data).digest()


class Blobs:
    """The blobs of one data folder; the constructor reads the existing ones."""

    def __init__(
        self,
        storage: Storage,
        *,
        guest_bytes_max: int = GUEST_BYTES_MAX,
        guest_pins_max: int = GUEST_PINS_MAX,
    ) -> None:
        self.guest_bytes_max = guest_bytes_max
        self._guest_pins_max = guest_pins_max
        self.files_bytes = 0
        """The bytes of the budget that other files of guests use (`node.storage.guests`)."""
        self.make_room: Callable[[int], bool] = _keep
        """Makes the other guests free this many bytes; returns whether they did."""
        self._storage = storage
        self._lock = Lock()
        self._stripes = [Lock() for _ in range(_STRIPES)]
        self._sizes = {
            name: size
            for file, size in storage.sizes(_FOLDER).items()
            if (name := _name_of(file)) is not None
        }
        self._unsynced: set[bytes] = set()
        self._holds = 0
        self._pins: dict[str, _Pin] = {}
        # For each hash: how many own and guests' pins name it, and its size according to them.
        self._references: dict[bytes, list[int]] = {}
        self._guest_bytes = 0
        for file in storage.sizes(_PINS):
            self._read_pin(file)

    # Blobs

    def put(self, data: bytes | memoryview) -> bytes:
        """Store these bytes; return their hash. For an existing blob only the hash is computed.

        No pin keeps the new blob yet: `pin` it, within `hold` if a sweep may happen meanwhile. Raises
        OSError.
        """
        name = hash_of(data)
        self._put(name, data)
        return name

    def take(self, name: bytes, data: bytes | memoryview) -> bool:
        """Store a blob from another node under this name; return False if its hash differs. Raises
        OSError."""
        if len(data) > BLOB_BYTES_MAX or hash_of(data) != name:
            return False
        self._put(name, data)
        return True

    def _put(self, name: bytes, data: bytes | memoryview) -> None:
        if len(data) > BLOB_BYTES_MAX:
            raise LocalProtocolError(f"a blob of {len(data)} bytes; at most {BLOB_BYTES_MAX} are allowed")
        with self._stripe(name):
            if name in self._sizes:
                return
            self._storage.write_soon(_file_of(name), data)
            with self._lock:
                self._sizes[name] = len(data)
                self._unsynced.add(name)

    def get(self, name: bytes) -> bytes | None:
        """Return the bytes; None if they are missing, or were damaged and have been removed."""
        if name not in self._sizes:
            return None
        data = self._read(name)
        if data is None:
            with self._stripe(name):
                # Read again under the lock, since the blob may have been swept and stored again meanwhile.
                data = self._read(name)
                if data is None:
                    self._delete(name)
        return data

    def _read(self, name: bytes) -> bytes | None:
        data = self._storage.read_part(_file_of(name), 0, BLOB_BYTES_MAX + 1)
        return data if data is not None and hash_of(data) == name else None

    def has(self, name: bytes) -> bool:
        """Return whether a file with this name exists; only reading shows whether it is intact."""
        return name in self._sizes

    def delete(self, name: bytes) -> None:
        """Remove a blob, pinned or not."""
        with self._stripe(name):
            self._delete(name)

    def _delete(self, name: bytes) -> int:
        with self._lock:
            size = self._sizes.pop(name, 0)
            self._unsynced.discard(name)
        self._storage.delete(_file_of(name))
        return size

    def _stripe(self, name: bytes) -> Lock:
        return self._stripes[name[0] % _STRIPES]

    def missing(self, names: Iterable[bytes]) -> list[bytes]:
        """Return the missing blobs among `names`, each once, in order."""
        return [name for name in dict.fromkeys(names) if name not in self._sizes]

    @property
    def bytes_here(self) -> int:
        """The size of all blobs."""
        with self._lock:
            return sum(self._sizes.values())

    def sync(self, names: Iterable[bytes]) -> None:
        """Make the stored blobs among `names` survive a crash of the machine. Raises OSError."""
        with self._lock:
            waiting = [name for name in dict.fromkeys(names) if name in self._unsynced]
        self._storage.sync(map(_file_of, waiting))
        with self._lock:
            self._unsynced.difference_update(waiting)

    # Pins

    def pin(self, label: str, sizes: Mapping[bytes, int], *, is_guest: bool = False) -> None:
        """Pin these blobs, given by hash and size, under `label`, replacing its earlier pin. Some may arrive
        later.

        When this returns, the pin and the stored blobs survive a crash.

        Raises:
            NoRoom: guests' blobs would exceed the budget. OSError: the disk is full.
        """
        pin = _Pin(is_guest, b"".join(sizes), tuple(sizes.values()))
        before = self._pins.get(label)
        reason, over = self._try(label, pin)
        if reason is not None and 0 < over <= self.files_bytes and self.make_room(over):
            reason, _ = self._try(label, pin)
        if reason is not None:
            raise NoRoom(reason)
        try:
            self.sync(sizes)
            self._storage.write(f"{_PINS}/{label}", encode(pin))
        except BaseException:
            with self._lock:
                self._forget(label)
                if before is not None:
                    self._remember(label, before)
            raise

    def _try(self, label: str, pin: _Pin) -> tuple[str | None, int]:
        """Replace a label's pin if there is room; return why there is not (or None), and how many bytes are
        missing."""
        with self._lock:
            before = self._pins.get(label)
            self._forget(label)
            self._remember(label, pin)
            reason = self._excess() if pin.is_guest else None
            over = self._guest_bytes + self.files_bytes - self.guest_bytes_max
            if reason is not None:
                self._forget(label)
                if before is not None:
                    self._remember(label, before)
            return reason, over

    def _excess(self) -> str | None:
        used = self._guest_bytes + self.files_bytes
        if used > self.guest_bytes_max:
            return f"{used} bytes for others, at most {self.guest_bytes_max} are allowed"
        if sum(pin.is_guest for pin in self._pins.values()) > self._guest_pins_max:
            return f"{self._guest_pins_max} states of others are already kept here"
        return None

    def unpin(self, label: str) -> None:
        """Release the blobs of `label`, if it has a pin."""
        self._storage.delete(f"{_PINS}/{label}")
        with self._lock:
            self._forget(label)

    def pinned(self, label: str) -> tuple[bytes, ...] | None:
        """Return the hashes that `label` pins; None if there is no such pin."""
        pin = self._pins.get(label)
        return None if pin is None else tuple(split(pin.hashes))

    def labels(self, under: str = "") -> list[str]:
        """Return the labels that begin with `under`, sorted."""
        with self._lock:
            return sorted(label for label in self._pins if label.startswith(under))

    @property
    def guest_bytes(self) -> int:
        """The bytes of guests' pins that this node does not pin for itself, whether stored or still to
        come."""
        return self._guest_bytes

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Prevent sweeps within this context, for blobs that are stored or found here before they can be
        pinned."""
        with self._lock:
            self._holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1

    def sweep(self) -> int:
        """Remove blobs without a pin; return how many bytes were freed. Nothing is removed during a
        `hold`."""
        freed = 0
        for name in list(self._sizes):
            with self._stripe(name):
                with self._lock:
                    if self._holds:
                        return freed
                    if name in self._references or name not in self._sizes:
                        continue
                freed += self._delete(name)
        return freed

    def _read_pin(self, file: str) -> None:
        data = self._storage.read(file)
        try:
            pin: _Pin = decode(data or b"", _Pin, bytes_max=PIN_BYTES_MAX)
        except RemoteProtocolError:
            return  # damaged: its owner pins again (`Checkpoints.recover`)
        self._remember(file.removeprefix(f"{_PINS}/"), pin)

    def _remember(self, label: str, pin: _Pin) -> None:
        self._pins[label] = pin
        for name, size in zip(split(pin.hashes), pin.sizes, strict=True):
            counts = self._references.setdefault(name, [0, 0, size])
            self._guest_bytes -= _guest_bytes(counts)
            counts[pin.is_guest] += 1
            self._guest_bytes += _guest_bytes(counts)

    def _forget(self, label: str) -> None:
        pin = self._pins.pop(label, None)
        if pin is None:
            return
        for name in split(pin.hashes):
            counts = self._references[name]
            self._guest_bytes -= _guest_bytes(counts)
            counts[pin.is_guest] -= 1
            self._guest_bytes += _guest_bytes(counts)
            if not counts[0] and not counts[1]:
                del self._references[name]


def _keep(_: int) -> bool:
    return False


def split(hashes: bytes) -> Iterator[bytes]:
    """Yield the hashes of a concatenation."""
    return (hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES))


def _guest_bytes(counts: list[int]) -> int:
    own, guests, size = counts
    return size if guests and not own else 0


def _file_of(name: bytes) -> str:
    text = name.hex()
    return f"{_FOLDER}/{text[:2]}/{text}"


def _name_of(file: str) -> bytes | None:
    text = file.rpartition("/")[2]
    try:
        name = bytes.fromhex(text)
    except ValueError:
        return None
    return name if len(name) == HASH_BYTES and _file_of(name) == file else None
