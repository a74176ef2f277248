"""A folder for a stage's process to write in, gone with the stage; one that a killed node left goes later.

It lies in the system's temporary folder. Whoever made it holds a lock on it, which the kernel lets go of with
the holder, so a folder without one is nobody's.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "peerloom-stage-"


class Scratch:
    """`path` is empty, private, and this process's own until `remove`."""

    def __init__(self) -> None:
        while True:
            self.path = tempfile.mkdtemp(prefix=PREFIX)
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.isdir(self.path):
                return
            os.close(self._lock)  # another process took it for a forgotten one, just before the lock

    def remove(self) -> None:
        """With all that is in it; may be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_forgotten() -> None:
    """Remove what killed nodes have left; what another user or a living node has made stays."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
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
