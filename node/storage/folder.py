"""The data folder: the real Storage seam. `node.storage.folder_lock` reserves it for one process.

A write goes to a temporary file, which is synced and renamed over the old one; then the folder is synced. So
after a crash either the old or the new blob exists, never a part (POSIX rename(2)). The folder has keys,
contacts, small tables, the graphs of runs and the weights with which they began and ended, and blobs named by
their hash (`node.storage.blobs`), many of which are synced together.
"""

import contextlib
import itertools
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from crypto.errors import LocalProtocolError
from crypto.noise import Data
from node.config import Resources
from node.errors import UsageError
from node.paths import LOCK_NAME, OTHER_FOLDER, short_path, unusable, usable
from node.storage.budget import ScratchBudget
from node.storage.drafts import FileDraft
from node.storage.folder_lock import lock
from node.storage.ownership import FILE_MODE, FOLDER_MODE, close_folder
from node.storage.spill import Spill

NAME_DEPTH_MAX = 8
COPY_BYTES = 1 << 20
IDENTITY_NAME = "identity.key"
FOLDER_MARKS = (IDENTITY_NAME, LOCK_NAME)
"""A folder that contains one of these files is a node's."""
_TEMPORARY_SUFFIX = ".half"
# No leading dot, so neither `..` nor hidden files. 128 characters leave room for the suffix in any file
# system.
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def parts_of(name: str) -> list[str]:
    """Split a storage name. Raises LocalProtocolError if it is malformed, since that means that a name from
    outside was not checked."""
    parts = name.split("/")
    safe = len(parts) <= NAME_DEPTH_MAX and all(_PART.fullmatch(part) for part in parts)
    if not safe or name.endswith(_TEMPORARY_SUFFIX):
        raise LocalProtocolError(f"not a name for storage: {name!r}")
    return parts


class FolderStorage:
    """Implements `node.seams.Storage` with a folder of files; may be used from any thread."""

    def __init__(self, path: Path, scratch: ScratchBudget | None = None) -> None:
        """Create the folder (mode 0700) if it does not exist, and make it inaccessible to others. Raises
        UsageError."""
        self.path = path
        self.scratch = scratch or ScratchBudget(Resources().scratch, path)
        try:
            path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(path, error) from None
        close_folder(path, FOLDER_MARKS)
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
            reason = "its file system is read-only" if is_read_only else "not writable"
            raise UsageError(f"data folder {short_path(path)}: {reason}", OTHER_FOLDER)
        self._spill = Spill(path, self.scratch)
        self._drafts = itertools.count()
        self._changing = threading.Lock()
        # For each name being written: its lock, and how many writers hold it or wait for it.
        self._writers: dict[str, tuple[threading.Lock, int]] = {}

    def read(self, name: str) -> bytes | None:
        """Return the blob, or None if there is none."""
        try:
            return self.file(name).read_bytes()
        except FileNotFoundError:
            return None

    def open(self, name: str) -> IO[bytes] | None:
        """Return the blob as a file for reading; None if it does not exist."""
        try:
            return self.file(name).open("rb", buffering=0)
        except FileNotFoundError:
            return None

    def temporary(self) -> IO[bytes]:
        """Return an empty unnamed file in the folder's file system."""
        return tempfile.TemporaryFile(dir=self.path, buffering=0)

    def read_part(self, name: str, offset: int, length: int) -> bytes | None:
        """Return `length` bytes at `offset`, fewer at the end of the blob; None if the blob does not
        exist."""
        try:
            with self.file(name).open("rb") as file:
                file.seek(offset)
                return file.read(length)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Replace the blob with `data`, durably; only this user can read it."""
        self._put(name, lambda file: file.write(data))

    def copy_in(self, name: str, path: Path) -> None:
        """Replace the blob with the content of the file at `path`, which need not fit into memory."""
        with path.open("rb") as source:
            self._put(name, lambda file: shutil.copyfileobj(source, file, COPY_BYTES))

    def write_soon(self, name: str, data: bytes | memoryview) -> None:
        """Like `write`, but the blob is certain to survive a crash of the machine only after `sync`."""
        self._put(name, lambda file: file.write(data), durable=False)

    def draft(self, name: str) -> FileDraft:
        """Return a draft of a blob of any size, which is written piece by piece."""
        target = self.file(name)
        target.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)

        def put(half: Path) -> None:
            with self._alone(name):
                half.replace(target)
            for folder in self._folders(target):
                self._sync(folder, os.O_RDONLY | os.O_DIRECTORY)

        half = target.with_name(f"{target.name}.{next(self._drafts)}{_TEMPORARY_SUFFIX}")
        half.unlink(missing_ok=True)
        return FileDraft(half, put, FILE_MODE)

    def sync(self, names: Iterable[str]) -> None:
        """Make blobs of `write_soon` durable; missing names are skipped."""
        folders: dict[Path, None] = {}
        for name in names:
            path = self.file(name)
            try:
                self._sync(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            folders |= dict.fromkeys(self._folders(path))
        for folder in folders:
            self._sync(folder, os.O_RDONLY | os.O_DIRECTORY)

    def _sync(self, path: Path, flags: int) -> None:
        descriptor = os.open(path, flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _folders(self, path: Path) -> list[Path]:
        """Return all folders from a file up to the data folder, because a new folder is an entry of its
        parent."""
        return [folder for folder in path.parents if folder.is_relative_to(self.path)]

    def sizes(self, under: str) -> dict[str, int]:
        """Return the blobs whose names begin with `under` and a slash, with their lengths; links are not
        followed."""
        found: dict[str, int] = {}
        waiting = [under]
        while waiting:
            folder = waiting.pop()
            try:
                entries = list(os.scandir(self.file(folder)))
            except (FileNotFoundError, NotADirectoryError):
                continue
            for entry in entries:
                name = f"{folder}/{entry.name}"
                if not _PART.fullmatch(entry.name) or name.endswith(_TEMPORARY_SUFFIX):
                    continue  # not our file, or a half-written file after a crash
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(name)
                elif entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                        found[name] = entry.stat(follow_symlinks=False).st_size
        return found

    def _put(self, name: str, fill: Callable[[IO[bytes]], object], *, durable: bool = True) -> None:
        with self._alone(name):
            self._put_alone(self.file(name), fill, durable=durable)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Wait for other writers of this name, since both would write to the same half file."""
        with self._changing:
            lock, waiting = self._writers.get(name, (threading.Lock(), 0))
            self._writers[name] = lock, waiting + 1
        try:
            with lock:
                yield
        finally:
            with self._changing:
                waiting = self._writers[name][1] - 1
                self._writers[name] = lock, waiting
                if not waiting:
                    del self._writers[name]

    def _put_alone(self, target: Path, fill: Callable[[IO[bytes]], object], *, durable: bool) -> None:
        is_new = not target.parent.is_dir()
        target.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        half = target.with_name(target.name + _TEMPORARY_SUFFIX)
        # A half file left by a crash may have any mode; a new one has ours.
        half.unlink(missing_ok=True)
        descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            with os.fdopen(descriptor, "wb") as file:
                fill(file)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
        except BaseException:
            half.unlink(missing_ok=True)  # the half-written file on a full disk
            raise
        half.replace(target)
        if durable:
            for folder in self._folders(target) if is_new else [target.parent]:
                self._sync(folder, os.O_RDONLY | os.O_DIRECTORY)

    def remove_halves(self) -> None:
        """Remove the half files of writes that a crash interrupted. Call this only while nobody writes."""
        for folder, folders, files in os.walk(self.path):
            for name in (*folders, *files):
                path = Path(folder, name)
                if name.endswith(_TEMPORARY_SUFFIX) and (path.is_symlink() or not path.is_dir()):
                    path.unlink(missing_ok=True)

    def spill(self, data: Data) -> memoryview:
        """Return a view of the same bytes in an unnamed file; see `node.storage.spill`."""
        return self._spill.put(data)

    def delete(self, name: str) -> None:
        """Remove the blob, if there is one."""
        self.file(name).unlink(missing_ok=True)

    def file(self, name: str) -> Path:
        """Return the path of the blob `name`. Names are `/`-separated and cannot leave the folder."""
        return self.path.joinpath(*parts_of(name))


@contextlib.contextmanager
def locked_folder(path: Path, scratch: ScratchBudget) -> Iterator[FolderStorage]:
    """Open and lock the data folder at `path` for a node, and remove half-written files left by a crash.

    Raises UsageError if another process holds the folder, or if it cannot be used.
    """
    storage = FolderStorage(path, scratch)
    with lock(path):
        with usable(path):
            storage.remove_halves()
        yield storage
