"""How a program that started others is stopped: the first Ctrl-C ends it in order, the second at once.

The signal only sets a sign, and the program looks at it wherever it waits: an exception out of nowhere
might strike between the start of a process and the note that it was started.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from node.errors import EXIT_FORCED

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a service's stop, a closed terminal."""


class Stopped(Exception):
    """The person, or the system, wants no more."""


class StopFlag:
    """Set by a signal while `heeded`; raised as `Stopped` by whoever waits."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def pause(self, seconds: float = 0.0) -> None:
        """Wait. Raises Stopped when told to stop, at once."""
        if self._event.wait(seconds):
            raise Stopped

    @contextmanager
    def heeded(self, force: Callable[[], None]) -> Iterator[None]:
        """Heed the signals inside; a second one calls `force` and ends this process with 130."""

        def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's shape
            if self._event.is_set():
                force()
                os._exit(EXIT_FORCED)
            self._event.set()

        before = [signal.signal(number, on_signal) for number in SIGNALS]
        try:
            yield
        finally:
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)
