"""Contains unexpected exceptions where they are raised: they are counted and logged, and the node goes on.

    with contain("stream /peerloom/runs/2") as part:
        await handler(stream)
    if part.error is not None: ...              end what can be trusted no more: the stream, the run

Faulty input of a peer raises `RemoteProtocolError`, and is handled where it is read; an exception here is our
own bug, or a failing machine (a full disk). Cancellation and KeyboardInterrupt pass through, extracted from
exception groups first. The log is `logging.getLogger("peerloom")`; `write_log` gives it a file.

In strict mode, for tests and the simulator, nothing is contained: the exception is raised. Counters, mode and
log belong to the process: one process runs one node.
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
"""Failures of one place that are logged with a traceback; later only the hundredth, thousandth, ..., each in
one line: whoever can cause a failure again and again must not fill the disk."""
LOG_BYTES_MAX = 1 << 20
"""The size of the log's file; one older file of this size is kept beside it."""
LOG_NAME = "errors.log"
AGAIN_SECONDS_MIN, AGAIN_SECONDS_MAX = 1.0, 60.0
"""After which pause a part that failed is begun again: a full disk is not emptied by haste."""

DISK_TOLD_SECONDS = 3_600.0
"""After this a disk that takes nothing is told of again, if it still does so."""
_DISK = (*NO_ROOM, errno.EROFS, errno.EIO)
_SQLITE_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)
_DISK_TOLD = "disk"
IN_FULL = "is_in_full"
"""A record with this says all in its line: the file of the log has no more of it."""
_told: dict[str, float] = {}
"""When what was told last, by the monotonic clock."""
log = logging.getLogger("peerloom")
failures: Counter[str] = Counter()
"""How often each place has failed in this process. Places are named by our code, never by a peer."""
_is_strict = False


@dataclass
class Contained:
    """The outcome of a `contain` block: the exception it raised, if any."""

    error: Exception | None = None


@contextmanager
def contain(place: str) -> Iterator[Contained]:
    """Contain unexpected exceptions of the block: see `note`."""
    outcome = Contained()
    try:
        yield outcome
    except Exception as error:
        outcome.error = error
        note(error, place)
    except BaseExceptionGroup as group:
        # A nursery that failed while something around it was cancelled: both must be heard.
        ours, others = group.split(Exception)
        if ours is None or others is None:
            raise
        outcome.error = ours
        note(ours, place)
        raise others from None


async def keep_running(place: str, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
    """Run a part of the node until it ends by itself. A failure is contained, and the part restarted after a
    pause that doubles."""
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
    """Say that a line of a log could not be written, once for each reason."""
    if (cause := _disk_error(error)) is not None:
        _note_disk(cause)
    elif (text := describe(error)) not in _told:
        _told[text] = inf
        log.error("a line of a log was lost: %s", text)


def _note_disk(error: Exception) -> None:
    """Say that the disk takes nothing, once an hour: every write would say it again, in words of its own."""
    now = time.monotonic()
    if now - _told.get(_DISK_TOLD, -inf) >= DISK_TOLD_SECONDS:
        _told[_DISK_TOLD] = now
        text = "the disk takes nothing (%s); the node goes on, and loses what it writes until that ends"
        log.error(text, _reason(error), extra={IN_FULL: True})


def _disk_error(error: BaseException) -> Exception | None:
    """The error, if it is one of a disk that is full or fails, and none of the program."""
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
    """The name of a function or method, also inside a `partial`."""
    while isinstance(task, partial):
        task = task.func
    return str(getattr(task, "__qualname__", type(task).__name__))


def failure_text(error: BaseException) -> str:
    """Say for a person why a run failed here: a full disk is no error of the program."""
    first = _first_cause(error)
    if isinstance(first, OSError) and first.errno in NO_ROOM:
        return "the disk of this node is full: make room, or use another --data-dir"
    return f"an internal error on this node: {describe(error)}"


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException) -> str:
    """One line for a person: the type and the text of the first cause."""
    error = _first_cause(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def strictness(*, is_strict: bool) -> Iterator[None]:
    """Have nothing contained for the time of the block, or have it contained."""
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
    """Formats an entry as one line with the place of its traceback."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def format(self, record: logging.LogRecord) -> str:
        more = "" if getattr(record, IN_FULL, False) else f"; see {self._path}"
        text = f"error: {record.getMessage()}{more}"
        return "".join(letter if letter.isprintable() else "?" for letter in text)


def is_alone(error: BaseException, group: BaseException) -> bool:
    """Return whether an error is all that a group holds, however deep."""
    while group is not error and isinstance(group, BaseExceptionGroup) and len(group.exceptions) == 1:
        group = group.exceptions[0]
    return group is error


@asynccontextmanager
async def cancelled_at_exit() -> AsyncIterator[trio.Nursery]:
    """Yield a nursery whose tasks end with the block."""
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        finally:
            nursery.cancel_scope.cancel()
