"""A scratch folder for a stage's process, removed with the stage; a killed node's folder is removed later.

On Linux, a process that computes on the CPU cannot write there (`node.stages.sandbox`). Other processes (with
an accelerator's driver, or on systems without fences) can. Their files count in the node's budget, and are
checked while an answer is due.

The folder is in the system's temporary folder. The process that made it holds a lock on it, which the kernel
releases when the process ends, so a folder without a lock is abandoned.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from node.errors import StageFailed
from node.forks import Descriptor
from node.paths import temporary_folder
from node.storage.budget import ScratchBudget

PREFIX = "peerloom-stage-"
COMMAND_PREFIX = "peerloom-command-"
"""A folder of the same kind, which a person's command makes while it runs."""
FILES_MAX = 1_000
"""Maximum number of files. An accelerator's libraries make about ten; counting this many takes two
milliseconds."""
_BLOCK_BYTES = 512
"""The unit of st_blocks (stat(2))."""


class Scratch:
    """A scratch folder in `below`, by default the system's folder for temporary files. `path` is empty and
    private, and belongs to this process until `remove`. Its files count in `budget`."""

    def __init__(
        self, budget: ScratchBudget | None = None, *, prefix: str = PREFIX, below: str | None = None
    ) -> None:
        self._budget = budget
        self._counted_bytes = 0
        while True:
            self.path = tempfile.mkdtemp(prefix=prefix, dir=below or temporary_folder())
            # Another process may remove the folder as abandoned before it is locked.
            try:
                # Not a record lock, which a folder cannot have. A child must not inherit this lock.
                self._lock = Descriptor(os.open(self.path, os.O_RDONLY))
            except FileNotFoundError:
                continue
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.isdir(self.path):
                return
            self._lock.close()

    def count(self) -> None:
        """Count the folder's files. Raises StageFailed if there are too many, or if they exceed the space for
        all stages together."""
        found = 0
        for number, size in enumerate(_sizes(self.path), start=1):
            if number > FILES_MAX:
                raise StageFailed(f"the stage's process has made more than {FILES_MAX} files")
            found += size
        self._count(found)

    def _count(self, found: int) -> None:
        more = found - self._counted_bytes
        if self._budget is None or not more:
            return
        if more < 0:
            self._budget.give(-more)
        else:
            try:
                self._budget.take(more)
            except OSError as error:
                reason = f"the stage's process has written {found >> 20} MiB to the disk: {error.strerror}"
                raise StageFailed(reason) from None
        self._counted_bytes = found

    def remove(self) -> None:
        """Remove the folder with all its files; may be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._count(0)
        self._lock.close()


def _sizes(folder: str) -> Iterator[int]:
    """Yield the disk size of each file and folder below `folder`; links are not followed."""
    waiting = [folder]
    while waiting:
        try:
            entries = os.scandir(waiting.pop())
        except OSError:
            continue  # removed meanwhile
        with entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(entry.path)
                yield status.st_blocks * _BLOCK_BYTES


def remove_forgotten(below: str | None = None) -> None:
    """Remove folders of killed nodes and commands, by default from the system's folder for temporary files.
    Folders of other users or of live processes stay."""
    folder = Path(below or temporary_folder())
    for path in sorted([*folder.glob(f"{PREFIX}*"), *folder.glob(f"{COMMAND_PREFIX}*")]):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(lock)
