"""Stopping a program that has started others: the first Ctrl-C ends it in an orderly way, the second
immediately.

The signal only sets a flag, which the program checks wherever it waits. An exception at an arbitrary point
could come between the start of a process and the record of it.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from node.errors import EXIT_FORCED

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals for Ctrl-C, the stop of a service, and a closed terminal."""


class Stopped(Exception):
    """The user, or the system, stopped the program."""


class StopFlag:
    """A flag that a signal sets inside `heeded`. Code that waits then raises `Stopped`."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def pause(self, seconds: float = 0.0) -> None:
        """Wait. Raises Stopped immediately when the flag is set."""
        if self._event.wait(seconds):
            raise Stopped

    @contextmanager
    def heeded(self, force: Callable[[], None]) -> Iterator[None]:
        """Handle the signals inside this context. A second signal calls `force` and ends this process with
        exit code 130."""

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
