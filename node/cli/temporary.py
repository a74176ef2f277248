"""A folder that is removed together with its command. If SIGKILL ends the command, the next command removes
the folder.

As for a stage's process (`node.stages.scratch`), a held lock shows that the folder's owner is alive.
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
    """Yield an empty folder of this process. SIGTERM and SIGHUP end the command only after the folder is
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
