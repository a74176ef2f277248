"""Paths of files that commands write, checked before the work instead of after it."""

import tempfile
from pathlib import Path

from node.errors import UsageError


def output_path(text: str, option: str = "--out") -> Path:
    """Return the absolute path of an output file. Raises UsageError if it cannot be written."""
    path = Path(text).expanduser().absolute()
    if path.is_dir():
        raise UsageError(f"{option} {text}: is a folder", f"give a file in it: {option} {path / 'FILE'}")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {text}: no folder {path.parent}", f"make it: mkdir -p {path.parent}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass  # quotas and read-only file systems only show when the file is written
        if path.exists():
            with path.open("r+b"):
                pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{option} {text}: cannot be written: {reason}", "name another file") from None
    return path
