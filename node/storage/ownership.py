"""Owner and mode of a data folder and its files, checked before anything is read or written there.

A data folder has keys, and its files can command the node, so only its user may own it, and nobody else may
read it. The opened file is checked, not its path, so that it cannot be replaced between check and use
(open(2), O_NOFOLLOW). A link to the folder itself is followed, since the folder may be on another disk.
Access lists beyond the mode are not checked.
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
    """Ensure that a data folder is accessible only to this user, if necessary by changing the mode of the
    user's own folder.

    The mode is changed only if the folder cannot have been tampered with: if it is empty, or if others could
    only read it and it contains one of `marks`, which identify a node's folder. A home folder named by
    mistake must not change its mode.

    Raises:
        UsageError: the folder belongs to another user, is not a folder, or is open to others in a way that a
            person must judge.
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
            reason = "its file system does not support modes, so others may access it"
    finally:
        os.close(descriptor)
    shown = short_path(path)
    raise UsageError(
        f"data folder {shown}: {reason}",
        f"check that everything in it is yours; if so: chmod 700 {shown}; or {OTHER_FOLDER}",
    )


def _why_left_open(mode: int, held: list[str], marks: tuple[str, ...]) -> str | None:
    """Return why the mode of a folder that others may access is not simply changed; None if it may be."""
    shown = f"(mode {stat.S_IMODE(mode):04o})"
    if held and mode & _OTHERS_WRITE:
        return f"others may write in it {shown}"
    if held and not set(held) & set(marks):
        return f"it is open to others {shown}, and does not look like a node's folder"
    return None


def open_own(path: Path, flags: int, what: str) -> int:
    """Open a file of this user, which must not be a link. With O_CREAT it is created readable by nobody else.

    `what` names the file in errors.

    Raises:
        FileNotFoundError: the file does not exist.
        UsageError: it is a link, not a file, another user's, or cannot be opened.
    """
    what = f"{what} {short_path(path)}"
    remove = f"check what it is; to remove it: rm {short_path(path)}"
    try:
        # Opening a named pipe must not block.
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
    """Check that an opened file belongs to this user or root, and has only one name. Raises UsageError."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{what} is not a file", remedy)
    _check_owner(what, status, remedy)
    if status.st_nlink > 1:
        # Writing to it under this name would change it under the other names.
        raise UsageError(f"{what} is a hard link: the same file has {status.st_nlink} names", remedy)
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
