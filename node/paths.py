"""Locations of a node's data folder and control socket, for the node and for client commands.

It also has the errors for folders that the system does not let us use. It is separate from `node.config`, and
uses only the standard library, because a client command must start quickly.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from node.errors import UsageError

ENVIRONMENT_PREFIX = "PEERLOOM_"
CONTROL_NAME = "control.sock"
"""The socket in the data folder that belongs to the node that holds the folder (`node.control`)."""
LOCK_NAME = "node.lock"
"""The lock file in the data folder; its node holds the lock and writes its process id into it
(`node.storage.folder`)."""
OTHER_FOLDER = "give the node a folder of its own: `peerloom --data-dir DIR`"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""The error numbers of a full disk or quota."""
NO_HOME = "this user has no home folder: HOME is not set, and the list of users does not have it"
SOCKET_PATH_BYTES_MAX = 100
"""Systems accept socket paths of at most 107 bytes, some of at most 103 (unix(7))."""


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """Return `~/.local/share/peerloom/default`, or a folder below XDG_DATA_HOME (XDG base directory
    specification)."""
    base = environ.get("XDG_DATA_HOME", "")
    # The specification says that a relative path is invalid here and must be ignored.
    if not os.path.isabs(base):
        try:
            base = str(Path.home() / ".local" / "share")
        except RuntimeError:
            raise UsageError(
                f"no folder for data: {NO_HOME}", "name one: --data-dir DIR; or set HOME or XDG_DATA_HOME"
            ) from None
    return Path(base) / "peerloom" / "default"


def is_default_data_dir(path: Path, environ: Mapping[str, str]) -> bool:
    """Return whether commands look for a node in this folder by default."""
    try:
        return path == default_data_dir(environ)
    except UsageError:
        return False


def expand(text: str) -> Path:
    """Return the path that a person wrote, with `~` replaced by the home folder. Raises UsageError if there
    is none."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        is_own = Path(text).parts[0] == "~"
        reason = NO_HOME if is_own else "there is no such user, or none with a home folder"
        raise UsageError(reason, "write the whole path" + (", or set HOME" if is_own else "")) from None


def cache_folder(environ: Mapping[str, str], otherwise: Path) -> Path:
    """Return `~/.cache/peerloom`, or a folder below XDG_CACHE_HOME (XDG base directory specification);
    `otherwise` if the user has no home folder."""
    base = environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "peerloom"
    except RuntimeError:
        return otherwise


def temporary_folder() -> str:
    """Return the system's folder for temporary files. Raises UsageError if no such folder is writable."""
    import tempfile  # only here: it would cost every client command some milliseconds

    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise UsageError(
            "no folder for temporary files can be written to, /tmp neither",
            "make room in /tmp, or set TMPDIR to another folder",
        ) from None


def unusable(path: Path | str, error: OSError, what: str = "data folder") -> UsageError:
    """Return the error for a folder or file that the system does not let us use."""
    reason = (error.strerror or str(error)).lower()
    room = "make room there, or " if error.errno in NO_ROOM else ""
    return UsageError(f"{what} {short_path(path)}: {reason}", room + OTHER_FOLDER)


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Report a system error in this block as an error of the data folder. Raises UsageError."""
    try:
        yield
    except OSError as error:
        raise unusable(path, error) from None


@contextmanager
def socket_path(folder: Path) -> Iterator[str]:
    """Yield a path of the control socket in `folder` that is short enough to bind or connect to within this
    context.

    If the socket's own path is too long, the yielded path leads through a link in a private temporary folder.
    Raises OSError.
    """
    path = str(folder / CONTROL_NAME)
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        yield path
        return
    import tempfile  # only here, as in `temporary_folder`

    base = temporary_folder()
    if len(os.fsencode(base)) > SOCKET_PATH_BYTES_MAX // 2:
        base = "/tmp"  # noqa: S108 - for a private folder in it
    with tempfile.TemporaryDirectory(dir=base) as private:
        os.symlink(folder.absolute(), f"{private}/data")
        yield f"{private}/data/{CONTROL_NAME}"


def short_path(path: Path | str) -> str:
    """Return a path as a person writes it, with `~` for the home folder."""
    try:
        return str(Path("~") / Path(path).relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return str(path)
