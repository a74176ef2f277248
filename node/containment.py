"""An unexpected exception stays where it was raised: it is counted and logged, and the node goes on.

    with contain("stream /peerloom/runs/2") as part:
        await handler(stream)
    if part.error is not None: ...              end what can be trusted no more: the stream, the run

What a peer may send is `RemoteProtocolError` and handled where it is read; what comes here is our own bug, or
a machine that fails (a full disk). Cancellation and KeyboardInterrupt pass through, and are taken out of an
exception group first. The log is `logging.getLogger("peerloom")`; `write_log` gives it a file.

In strict mode, in which tests and the simulator run, nothing is contained: the bug comes out as it was
raised.
The tally and the mode are those of the process, as its log is: one process runs one node.
"""

import errno
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

import trio

LOGGED_MAX = 10
"""Failures of one place that are logged with a traceback; later only the hundredth, thousandth, ..., each in
one line: whoever can cause a failure again and again must not fill the disk."""
LOG_BYTES_MAX = 1 << 20
"""The size of the log's file; one older file of this size is kept beside it."""
LOG_NAME = "errors.log"
AGAIN_SECONDS_MIN, AGAIN_SECONDS_MAX = 1.0, 60.0
"""After which pause a part that failed is begun again: a full disk is not emptied by haste."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
log = logging.getLogger("peerloom")
failures: Counter[str] = Counter()
"""How often each place has failed in this process. Places are named by our code, never by a peer."""
_is_strict = False


@dataclass
class Contained:
    """What became of a `contain` block: the exception it raised, if any."""

    error: Exception | None = None


@contextmanager
def contain(place: str) -> Iterator[Contained]:
    """Contain what the block raises unexpectedly: see `note`."""
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
    """Run a part of the node until it ends by itself. Where it fails it is contained, and begun again after a
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
    count = failures[place]
    if count <= LOGGED_MAX:
        log.error("%s failed, and the node goes on: %s", place, describe(error), exc_info=error)
    elif str(count).strip("0") == "1":
        log.error("%s has failed %d times: %s", place, count, describe(error))


def place_of(task: object) -> str:
    """The name of a function or method, also inside a `partial`."""
    while isinstance(task, partial):
        task = task.func
    return str(getattr(task, "__qualname__", type(task).__name__))


def failure_text(error: BaseException) -> str:
    """Say for a person why a run failed here: a full disk is no error of the program."""
    first = _first_cause(error)
    if isinstance(first, OSError) and first.errno in _NO_ROOM:
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
    """Write what is logged to a file in this folder, tracebacks too, and one line each to stderr."""
    whole = _OwnFile(folder / LOG_NAME, maxBytes=LOG_BYTES_MAX, backupCount=1, encoding="utf-8", delay=True)
    whole.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    brief = logging.StreamHandler()
    brief.setFormatter(_OneLine(folder / LOG_NAME))
    log.propagate = False
    log.handlers = [whole, brief]


class _OwnFile(RotatingFileHandler):
    """For this user only, and no link that somebody has planted."""

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return TextIOWrapper(open(os.open(self.baseFilename, flags, 0o600), "wb"), encoding="utf-8")


class _OneLine(logging.Formatter):
    """Says what happened and where the traceback is."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def format(self, record: logging.LogRecord) -> str:
        text = f"error: {record.getMessage()}; see {self._path}"
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
