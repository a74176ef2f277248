"""Owner and mode of a data folder and its files, checked before anything is read or written there.

A data folder holds keys, and its files command the node: only its user may own it, and nobody else may read
it. The opened file is checked and not its path, so that it cannot be replaced between check and use (open(2),
O_NOFOLLOW). A link to the folder itself is followed: it may lie on another disk. Access lists beyond the mode
are not checked.
"""

import errno
import os
import pwd
import stat
from pathlib import Path

from node.errors import UsageError
from node.paths import OTHER_FOLDER, short_path, unusable

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS, _OTHERS_WRITE = 0o077, 0o022
_LINKED = (errno.ELOOP, errno.EMLINK)
"""Errors for a link that must not be followed."""


def close_folder(path: Path, marks: tuple[str, ...]) -> None:
    """Make sure that a data folder belongs to this user alone; close the user's own folder if it is open to
    others.

    Only a folder that cannot have been tampered with is closed: an empty one, or one that others could only
    read and that has one of `marks`, which identify a node's folder. A home folder named by mistake must not
    change its mode.

    Raises:
        UsageError: it is another user's, not a folder, or open to others in a way that a person must judge.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise unusable(path, error) from None
    try:
        status = os.fstat(descriptor)
        _check_owner(f"data folder {short_path(path)}", status, OTHER_FOLDER)
        if not status.st_mode & _OTHERS:
            return
        held = os.listdir(descriptor)
        if (reason := _why_left_open(status.st_mode, held, marks)) is None:
            try:
                os.fchmod(descriptor, FOLDER_MODE)
            except OSError as error:
                raise unusable(path, error) from None
            if not os.fstat(descriptor).st_mode & _OTHERS:
                return
            reason = "its file system keeps no modes, so others may look in"
    finally:
        os.close(descriptor)
    shown = short_path(path)
    raise UsageError(
        f"data folder {shown}: {reason}",
        f"look whether all in it is yours, then: chmod 700 {shown}; or {OTHER_FOLDER}",
    )


def _why_left_open(mode: int, held: list[str], marks: tuple[str, ...]) -> str | None:
    """Return why a folder that others may access is not simply closed."""
    shown = f"(mode {stat.S_IMODE(mode):04o})"
    if held and mode & _OTHERS_WRITE:
        return f"others may write in it {shown}"
    if held and not set(held) & set(marks):
        return f"open to others {shown}, and holds what is no node's"
    return None


def open_own(path: Path, flags: int, what: str) -> int:
    """Open a file of this user's, which is not a link; with O_CREAT it is made readable by nobody else.

    `what` names the file in errors.

    Raises:
        FileNotFoundError: there is none.
        UsageError: it is a link, not a file, another user's, or cannot be opened.
    """
    what = f"{what} {short_path(path)}"
    remove = f"look what it is, then: rm {short_path(path)}"
    try:
        # A named pipe must not hang us.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _LINKED:
            raise UsageError(f"{what} is a link", remove) from None
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{what}: {reason}", f"chmod 600 {short_path(path)}") from None
    try:
        check_file(descriptor, what, remove)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_file(descriptor: int, what: str, remedy: str) -> os.stat_result:
    """Check that an opened file is this user's or root's, with one name. Raises UsageError."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{what} is not a file", remedy)
    _check_owner(what, status, remedy)
    if status.st_nlink > 1:
        # Writing to it under this name would change it under the other.
        raise UsageError(f"{what} is a link: the same file has {status.st_nlink} names", remedy)
    return status


def _check_owner(what: str, status: os.stat_result, remedy: str) -> None:
    me = os.geteuid()
    if status.st_uid == me or (status.st_uid == 0 and stat.S_ISREG(status.st_mode)):
        return
    raise UsageError(f"{what} belongs to user {_user(status.st_uid)}, and this is user {_user(me)}", remedy)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
