"""The lock that reserves a data folder for one process: a record lock on `node.lock`, which names the
process.

A record lock belongs to a process (fcntl(2), F_SETLK). Unlike a lock of flock(2), which survives in children
of a killed node, it is not inherited by fork(2). But a process loses it when it closes *any* descriptor of
the file. So this program never opens the lock file of a folder that it holds: a table of held folders answers
questions, and a second node in this process is refused.
"""

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from node.errors import UsageError
from node.forks import Descriptor
from node.invocation import command_span
from node.paths import LOCK_NAME, OTHER_FOLDER, is_default_data_dir, short_path, unusable, usable
from node.storage.ownership import FILE_MODE, open_own

PROCESS_LENGTH_MAX = 20
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
"""Errors for a record lock that another process holds (fcntl(2))."""

_File = tuple[int, int]
"""Device and inode, which identify a file under any name."""

_held: dict[_File, Descriptor] = {}
_changing = threading.Lock()


def _begin_child() -> None:
    """Forget the locks in a forked child, which holds none of them."""
    global _changing
    _held.clear()
    _changing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the data folder `path` for this process; the system releases it when the process ends.

    Raises:
        UsageError: a node holds it (the error names its process), or the lock is not a file of this user.
    """
    with _changing:
        file, descriptor = _take(path)
        _held[file] = descriptor
    process = os.getpid()
    try:
        with usable(path):
            os.ftruncate(descriptor.fileno(), 0)
            os.pwrite(descriptor.fileno(), str(process).encode(), 0)
        yield
    finally:
        if os.getpid() == process:
            with _changing:
                del _held[file]
                # The file stays: if it were removed, two processes could lock two files with the same name.
                descriptor.close()


def _take(path: Path) -> tuple[_File, Descriptor]:
    if _is_ours(path):
        raise _in_use(path, str(os.getpid()))
    try:
        descriptor = Descriptor(open_own(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, "lock"))
    except FileNotFoundError as error:
        raise unusable(path, error) from None
    number = descriptor.fileno()
    try:
        # Anyone who can read the file could lock it, and keep the node from starting.
        os.fchmod(number, FILE_MODE)
        fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(number, PROCESS_LENGTH_MAX, 0).decode(errors="replace")
        descriptor.close()
        if error.errno in _HELD_BY_ANOTHER:
            raise _in_use(path, holder) from None
        raise _no_locks(path, error) from None
    status = os.fstat(number)
    return (status.st_dev, status.st_ino), descriptor


def _is_ours(path: Path) -> bool:
    """Return whether this process holds the folder, without opening the file."""
    try:
        status = os.stat(path / LOCK_NAME)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) in _held


def find_holder(path: Path) -> str | None:
    """Return the id of the process that holds the data folder `path` now; empty if it is unknown, None if
    nobody holds it or the folder does not exist.

    Raises:
        UsageError: the lock is not a file of this user, or its file system has no locks.
    """
    # otherwise another thread might take the lock meanwhile, and lose it when the descriptor is closed here
    with _changing:
        if _is_ours(path):
            return str(os.getpid())
        try:
            descriptor = open_own(path / LOCK_NAME, os.O_RDWR, "lock")
        except FileNotFoundError:
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _HELD_BY_ANOTHER:
                raise _no_locks(path, error) from None
            return _number(os.pread(descriptor, PROCESS_LENGTH_MAX, 0).decode(errors="replace"))
        finally:
            os.close(descriptor)
        return None


def last_holder(path: Path) -> str:
    """Return the id of the process that holds the folder or held it last; empty if unknown."""
    with _changing:
        if _is_ours(path):
            return str(os.getpid())
        try:
            return _number((path / LOCK_NAME).read_text(errors="replace")[:PROCESS_LENGTH_MAX])
        except OSError:
            return ""


def _number(text: str) -> str:
    return text if text.isdigit() else ""


def _in_use(path: Path, holder: str) -> UsageError:
    process = f"process {holder}" if _number(holder) else "another process"
    which = () if is_default_data_dir(path, os.environ) else ("--data-dir", str(path))
    return UsageError(
        f"this node already runs: {process} holds {short_path(path)}",
        f"look: {command_span('status', *which)}          a second one: `peerloom --data-dir DIR`",
    )


def _no_locks(path: Path, error: OSError) -> UsageError:
    reason = (error.strerror or str(error)).lower()
    return UsageError(
        f"data folder {short_path(path)}: its file system does not support locks ({reason})", OTHER_FOLDER
    )
