"""A folder for the time of one command, gone with it; one that SIGKILL left goes with the next command.

Like the folder of a stage's process (`node.stages.scratch`): whoever holds its lock is alive.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from node.stages.scratch import COMMAND_PREFIX, Scratch, remove_forgotten

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def command_folder() -> Iterator[Path]:
    """Yield an empty folder of this process's own; SIGTERM and SIGHUP, too, end the command only after it was
    removed."""
    remove_forgotten()
    scratch = Scratch(prefix=COMMAND_PREFIX)
    is_main = threading.current_thread() is threading.main_thread()
    before = [signal.signal(number, _exit) for number in _ENDING] if is_main else []
    try:
        yield Path(scratch.path)
    finally:
        scratch.remove()
        for number, handler in zip(_ENDING, before, strict=False):
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's shape
    raise SystemExit(128 + number)
