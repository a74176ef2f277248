"""Files that commands write: whether that can be done is said before the work, and not after it."""

import tempfile
from pathlib import Path

from node.errors import UsageError


def output_path(text: str, option: str = "--out") -> Path:
    """Return where a command is to write, absolute. Raises UsageError: no file can be there."""
    path = Path(text).expanduser().absolute()
    if path.is_dir():
        raise UsageError(f"{option} {text}: is a folder", f"name a file in it: {option} {path / 'FILE'}")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {text}: no folder {path.parent}", f"make it: mkdir -p {path.parent}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass  # asked of the system itself, which knows of quotas and of file systems that are read only
        if path.exists():
            with path.open("r+b"):
                pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{option} {text}: cannot be written: {reason}", "name another file") from None
    return path
