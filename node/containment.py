"""Contains unexpected exceptions where they are raised: they are counted and logged, and the node continues.

    with contain("stream /peerloom/runs/2") as part:
        await handler(stream)
    if part.error is not None: ...              end what is no longer trustworthy: the stream, the run

Faulty input from a peer raises `RemoteProtocolError`, which is handled where the input is read. So an
exception here is our own bug, or a failing machine (such as a full disk). Cancellation and KeyboardInterrupt
are extracted from exception groups and pass through. The log is `logging.getLogger("peerloom")`; `write_log`
gives it a file.

In strict mode, for tests and the simulator, nothing is contained: the exception is raised. Counters, mode and
log belong to the process, since one process runs one node.
"""

import errno
import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

import trio

from node.eventlog import LogFile
from node.paths import NO_ROOM

LOGGED_MAX = 10
"""Number of failures in one part of the node that are logged with a traceback. After that only the hundredth,
thousandth, ... is logged, each in one line, so that a repeated failure cannot fill the disk."""
LOG_BYTES_MAX = 1 << 20
"""Maximum size of the log file; one older file of this size is kept."""
LOG_NAME = "errors.log"
AGAIN_SECONDS_MIN, AGAIN_SECONDS_MAX = 1.0, 60.0
"""Shortest and longest pause before a failed part is restarted. The pause grows because quick retries do not
help, for example if the disk is full."""

DISK_TOLD_SECONDS = 3_600.0
"""Seconds after which a failing disk is reported again."""
_DISK = (*NO_ROOM, errno.EROFS, errno.EIO)
_SQLITE_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)
_DISK_TOLD = "disk"
IN_FULL = "is_in_full"
"""A log record with this attribute is complete in one line; the log file has no more details."""
_told: dict[str, float] = {}
"""The monotonic time at which each text was last logged."""
log = logging.getLogger("peerloom")
failures: Counter[str] = Counter()
"""Number of failures of each part of the node in this process. The names come from our code, never from a
peer."""
_is_strict = False


@dataclass
class Contained:
    """The outcome of a `contain` block: the exception it raised, if any."""

    error: Exception | None = None


@contextmanager
def contain(place: str) -> Iterator[Contained]:
    """Contain unexpected exceptions of the block, as `note` does."""
    outcome = Contained()
    try:
        yield outcome
    except Exception as error:
        outcome.error = error
        note(error, place)
    except BaseExceptionGroup as group:
        # A nursery failed while something around it was cancelled: both errors must be handled.
        ours, others = group.split(Exception)
        if ours is None or others is None:
            raise
        outcome.error = ours
        note(ours, place)
        raise others from None


async def keep_running(place: str, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
    """Run a part of the node until it ends by itself. If it fails, contain the failure and restart the part
    after a pause that doubles each time."""
    pause = AGAIN_SECONDS_MIN
    while True:
        with contain(place) as part:
            await task(*arguments)
        if part.error is None:
            return
        await trio.sleep(pause)
        pause = min(AGAIN_SECONDS_MAX, 2 * pause)


def note(error: Exception, place: str) -> None:
    """Count and log an unexpected exception of a part of the node; in strict mode raise it."""
    if _is_strict:
        raise error
    failures[place] += 1
    if (full := _disk_error(error)) is not None:
        _note_disk(full)
        return
    count = failures[place]
    if count <= LOGGED_MAX:
        log.error("%s failed, and the node goes on: %s", place, describe(error), exc_info=error)
    elif str(count).strip("0") == "1":
        log.error("%s has failed %d times: %s", place, count, describe(error))


def note_lost_line(error: BaseException) -> None:
    """Log that a line of a log could not be written, once for each reason."""
    if (cause := _disk_error(error)) is not None:
        _note_disk(cause)
    elif (text := describe(error)) not in _told:
        _told[text] = inf
        log.error("a line of a log was lost: %s", text)


def _note_disk(error: Exception) -> None:
    """Log that the disk fails, at most once an hour. Otherwise every failed write would log it in different
    words."""
    now = time.monotonic()
    if now - _told.get(_DISK_TOLD, -inf) >= DISK_TOLD_SECONDS:
        _told[_DISK_TOLD] = now
        text = "the disk cannot be written (%s); the node goes on, and loses what it writes until that ends"
        log.error(text, _reason(error), extra={IN_FULL: True})


def _disk_error(error: BaseException) -> Exception | None:
    """Return the error if its first cause is a full or failing disk; None if it is a bug of the program."""
    first = _first_cause(error)
    if isinstance(first, OSError) and first.errno in _DISK:
        return first
    if isinstance(first, sqlite3.Error) and _sqlite_code(first) in _SQLITE_DISK:
        return first
    return None


def _sqlite_code(error: sqlite3.Error) -> int:
    """Return the primary code, without the extended bits above its byte (sqlite.org/rescode.html)."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _reason(error: Exception) -> str:
    if isinstance(error, sqlite3.Error) and _sqlite_code(error) == sqlite3.SQLITE_FULL:
        return os.strerror(errno.ENOSPC).lower()
    return (getattr(error, "strerror", None) or str(error)).lower()


def place_of(task: object) -> str:
    """Return the name of a function or method, looking inside a `partial`."""
    while isinstance(task, partial):
        task = task.func
    return str(getattr(task, "__qualname__", type(task).__name__))


def failure_text(error: BaseException) -> str:
    """Return a text for the user about why a run failed here; a full disk is not reported as a program
    error."""
    first = _first_cause(error)
    if isinstance(first, OSError) and first.errno in NO_ROOM:
        return "the disk of this node is full: make room, or use another --data-dir"
    return f"an internal error on this node: {describe(error)}"


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException) -> str:
    """Return one line for a person: the type and the text of the first cause."""
    error = _first_cause(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def strictness(*, is_strict: bool) -> Iterator[None]:
    """Turn strict mode on or off during the block; in strict mode nothing is contained."""
    global _is_strict
    before, _is_strict = _is_strict, is_strict
    try:
        yield
    finally:
        _is_strict = before


def write_log(folder: Path) -> None:
    """Write log entries with tracebacks to a file in this folder, and one line each to stderr."""
    whole = LogFile(folder / LOG_NAME, LOG_BYTES_MAX, 1, note_lost_line)
    whole.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    brief = logging.StreamHandler()
    brief.setFormatter(_OneLine(folder / LOG_NAME))
    log.propagate = False
    log.handlers = [whole, brief]


class _OneLine(logging.Formatter):
    """Formats an entry as one line with the path of the file that has its traceback."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def format(self, record: logging.LogRecord) -> str:
        more = "" if getattr(record, IN_FULL, False) else f"; see {self._path}"
        text = f"error: {record.getMessage()}{more}"
        return "".join(letter if letter.isprintable() else "?" for letter in text)


def is_alone(error: BaseException, group: BaseException) -> bool:
    """Return whether `error` is the only exception in a group, at any depth."""
    while group is not error and isinstance(group, BaseExceptionGroup) and len(group.exceptions) == 1:
        group = group.exceptions[0]
    return group is error


@asynccontextmanager
async def cancelled_at_exit() -> AsyncIterator[trio.Nursery]:
    """Yield a nursery whose tasks are cancelled when the block ends."""
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        finally:
            nursery.cancel_scope.cancel()
