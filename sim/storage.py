"""The Storage seam of the simulation: blobs in memory, which survive a restart if the storage object does."""

import io
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from crypto.noise import Data
from node.storage.folder import parts_of


class _Blobs(dict[str, bytes]):
    """Blobs by name. Names that a real folder would refuse are refused here too."""

    def find(self, name: str) -> bytes | None:
        parts_of(name)
        return super().get(name)

    def pop(self, name: str, default: Any = None) -> Any:
        parts_of(name)
        return super().pop(name, default)

    def __setitem__(self, name: str, blob: bytes) -> None:
        parts_of(name)
        super().__setitem__(name, blob)


class MemoryDraft:
    """Bytes that become a blob once complete."""

    def __init__(self, blobs: _Blobs, name: str) -> None:
        self._blobs = blobs
        self._name = name
        self._data = bytearray()

    def write(self, data: Data) -> None:
        self._data += data

    def commit(self) -> None:
        self._blobs[self._name] = bytes(self._data)

    def discard(self) -> None:
        self._data.clear()


class MemoryStorage:
    """Storage with the lifetime of this object; to restart a peer with its disk, keep the object."""

    def __init__(self) -> None:
        self._blobs = _Blobs()

    def read(self, name: str) -> bytes | None:
        return self._blobs.find(name)

    def write(self, name: str, data: bytes) -> None:
        self._blobs[name] = bytes(data)

    def delete(self, name: str) -> None:
        self._blobs.pop(name, None)

    def open(self, name: str) -> IO[bytes] | None:
        blob = self._blobs.find(name)
        return None if blob is None else io.BytesIO(blob)

    def temporary(self) -> IO[bytes]:
        return tempfile.TemporaryFile(buffering=0)

    def read_part(self, name: str, offset: int, length: int) -> bytes | None:
        blob = self._blobs.find(name)
        return None if blob is None else blob[offset : offset + length]

    def copy_in(self, name: str, path: Path) -> None:
        self._blobs[name] = path.read_bytes()

    def write_soon(self, name: str, data: bytes | memoryview) -> None:
        self._blobs[name] = bytes(data)

    def draft(self, name: str) -> MemoryDraft:
        return MemoryDraft(self._blobs, name)

    def sync(self, names: Iterable[str]) -> None:
        """Do nothing: blobs survive as long as this object does."""

    def spill(self, data: Data) -> memoryview:
        return memoryview(bytes(data))

    @property
    def names(self) -> list[str]:
        """Return the names of all blobs that are there."""
        return list(self._blobs)

    def sizes(self, under: str) -> dict[str, int]:
        return {name: len(blob) for name, blob in self._blobs.items() if name.startswith(f"{under}/")}
