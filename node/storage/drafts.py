"""A file that is written piece by piece and gets its name only when complete."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from crypto.noise import Data
from node.forks import keep_from_children


class FileDraft:
    """Implements `node.seams.Draft`: writes to `half`, a new file with this mode in the folder of its
    destination.

    Called in the executor's threads, one call at a time. Raises OSError.
    """

    def __init__(self, half: Path, name: Callable[[Path], object], mode: int) -> None:
        """`name` is called with the complete file's path, and gives the file its final name."""
        self._half = half
        self._name = name
        self._file = os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")
        keep_from_children(self._file)

    def write(self, data: Data) -> None:
        """Append these bytes."""
        self._file.write(data)

    def commit(self) -> None:
        """Sync the complete file and give it its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._name(self._half)

    def discard(self) -> None:
        """Remove the file, unless it was committed."""
        with suppress(OSError):  # flushing the rest of the buffer may fail on a full disk
            self._file.close()
        self._half.unlink(missing_ok=True)


def draft_beside(path: Path) -> FileDraft:
    """Return a draft of a person's own file, which may replace an older one."""
    half = path.with_name(f".{path.name}.{os.getpid()}.half")
    half.unlink(missing_ok=True)
    return FileDraft(half, lambda whole: whole.replace(path), 0o666)
