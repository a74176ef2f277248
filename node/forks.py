"""Closes every descriptor of the node in a forked child of its process.

A child of `os.fork` inherits a copy of each descriptor (fork(2)). The copies would keep ports in use,
connections open and the event loop's waits alive until the child ends, even if the parent is killed. Workers
of torch's DataLoader are such children. A program started by exec(2) has no copies, because all descriptors
close there.
"""

import contextlib
import os
import weakref
from typing import Any, Protocol

from node.errors import PeerloomError


class HasDescriptor(Protocol):
    """A socket, a file, or a selector; its descriptor is below 0 if it is closed."""

    def fileno(self) -> int: ...


class ForkedChild(PeerloomError):
    """A forked child tried to use a node that belongs to its parent."""


class Descriptor:
    """Holds a descriptor by number and closes it in every forked child."""

    def __init__(self, number: int) -> None:
        self._number = number
        keep_from_children(self)

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        """Close the descriptor; may be repeated."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)


_kept: "weakref.WeakSet[HasDescriptor]" = weakref.WeakSet()
_parents: "weakref.WeakSet[object]" = weakref.WeakSet()
_ctypes: Any = None
_loops: "weakref.WeakKeyDictionary[Any, list[HasDescriptor]]" = weakref.WeakKeyDictionary()
"""The loop's descriptors, keyed by trio's token of the loop."""


def keep_from_children(*things: HasDescriptor) -> None:
    """Close the descriptors of these objects in every child forked from now on, if they are still open."""
    _kept.update(things)


def leave_to_parent(thing: object) -> None:
    """Never destroy this object in a forked child, not even when the child ends. Destroying it would alter
    files that the parent uses, as closing a connection of SQLite does (sqlite.org/howtocorrupt.html, 2.6)."""
    global _ctypes
    # imported in the parent, since an import in a child may wait for a lock; not on top, for client commands
    import ctypes

    _ctypes = ctypes
    _parents.add(thing)


def keep_loop_from_children() -> None:
    """Close the descriptors of the running trio loop in every child forked from now on. Other loops of this
    process are not affected."""
    import trio  # only here: client commands have no loop, and must start quickly

    # trio has no public API for these. If another version of trio keeps them elsewhere, a child inherits
    # them; they hold no port.
    found: list[Any] = []
    with contextlib.suppress(AttributeError):
        runner = trio._core._run.GLOBAL_RUN_CONTEXT.runner
        found.append(getattr(runner.io_manager, "_epoll", None))
        for wakeup in (runner.entry_queue.wakeup, getattr(runner.io_manager, "_force_wakeup", None)):
            found += [getattr(wakeup, "wakeup_sock", None), getattr(wakeup, "write_sock", None)]
    _loops[trio.lowlevel.current_trio_token()] = [each for each in found if each is not None]


def refuse_in_child(process: int) -> None:
    """Raise ForkedChild if this process is not `process`, in which the object was made."""
    if (here := os.getpid()) != process:
        raise ForkedChild(
            f"this node belongs to process {process}, from which process {here} was forked",
            "use it there, or open another one here: with node.sync(...) as me",
        )


def _lose_all() -> None:
    """Close the inherited descriptors; runs in a child. Their numbers are redirected to the null device
    instead of being freed, because inherited objects will close the numbers again, and must not close a file
    that the child has opened meanwhile. No call here alters what the parent waits for or takes a lock, which
    a thread that does not exist in the child may hold."""
    things = [*_kept, *(each for loop in list(_loops.values()) for each in loop)]
    _kept.clear()
    _loops.clear()
    for each in list(_parents) if _ctypes is not None else ():
        _ctypes.pythonapi.Py_IncRef(_ctypes.py_object(each))
    _parents.clear()
    numbers = []
    for thing in things:
        with contextlib.suppress(OSError, ValueError):  # closed
            numbers.append(thing.fileno())
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in numbers:
            if number >= 0:
                os.dup2(null, number, inheritable=False)
        os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lose_all)
