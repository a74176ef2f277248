"""Collect the lines that are written to the package's log during a test."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def heard_log() -> Iterator[list[str]]:
    """Yield a list that receives the lines of the log as they come."""
    listener, log = _Listener(), logging.getLogger("peerloom")
    log.addHandler(listener)
    try:
        yield listener.lines
    finally:
        log.removeHandler(listener)
