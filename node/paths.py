"""Where a node's data folder and its control socket are, for the node and for client commands.

Kept apart from `node.config` because a client command must start at once: only the standard library.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT_PREFIX = "PEERLOOM_"
CONTROL_NAME = "control.sock"
"""In the data folder: the socket of the node that holds it (`node.control`)."""
LOCK_NAME = "node.lock"
"""In the data folder: held by its node, whose process it names (`node.storage.folder`)."""
SOCKET_PATH_BYTES_MAX = 100
"""Systems take paths of sockets up to 107 bytes, some up to 103 (unix(7))."""


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """`~/.local/share/peerloom/default`, or below XDG_DATA_HOME (XDG base directory specification)."""
    base = environ.get("XDG_DATA_HOME", "")
    # The specification: a relative path there is invalid and is to be ignored.
    data_home = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share"
    return data_home / "peerloom" / "default"


@contextmanager
def socket_path(folder: Path) -> Iterator[str]:
    """A path of the control socket in `folder` that is short enough to bind or connect to, in this context.

    Where its own is too long it leads through a link in a private temporary folder. Raises OSError.
    """
    path = str(folder / CONTROL_NAME)
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        yield path
        return
    import tempfile  # only here: it would cost every client command some milliseconds

    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > SOCKET_PATH_BYTES_MAX // 2:
        base = "/tmp"  # noqa: S108 - for a private folder in it
    with tempfile.TemporaryDirectory(dir=base) as private:
        os.symlink(folder.absolute(), f"{private}/data")
        yield f"{private}/data/{CONTROL_NAME}"


def short_path(path: Path | str) -> str:
    """A path as a person writes it: `~` for the home folder."""
    try:
        return str(Path("~") / Path(path).relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return str(path)
