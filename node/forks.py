"""Closes every descriptor of the node in a forked child of its process.

A child of `os.fork` has a copy of each (fork(2)): it would keep ports taken, connections open and the loop's
waits alive while it lives, which is longer than a killed parent. The workers of torch's DataLoader are such
children. A program started by exec(2) has none of them: all close there.
"""

import contextlib
import os
import weakref
from typing import Any, Protocol

from node.errors import PeerloomError


class HasDescriptor(Protocol):
    """A socket, a file, or a selector; below 0 if it is closed."""

    def fileno(self) -> int: ...


class ForkedChild(PeerloomError):
    """A forked child uses a node of its parent's."""


class Descriptor:
    """A descriptor by its number, which no forked child keeps."""

    def __init__(self, number: int) -> None:
        self._number = number
        keep_from_children(self)

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        """Close it; may be repeated."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)


_kept: "weakref.WeakSet[HasDescriptor]" = weakref.WeakSet()
_parents: "weakref.WeakSet[object]" = weakref.WeakSet()
_ctypes: Any = None
_loops: "weakref.WeakKeyDictionary[Any, list[HasDescriptor]]" = weakref.WeakKeyDictionary()
"""By trio's token of a loop."""


def keep_from_children(*things: HasDescriptor) -> None:
    """Close the descriptors of these in every child forked from now on, while they are open."""
    _kept.update(things)


def leave_to_parent(thing: object) -> None:
    """Have no forked child take this apart, not even when it ends: its end would alter files that the parent
    uses, as that of a connection of SQLite does (sqlite.org/howtocorrupt.html, 2.6)."""
    global _ctypes
    import ctypes  # in the parent, for an import in a child may wait for a lock; and not for client commands

    _ctypes = ctypes
    _parents.add(thing)


def keep_loop_from_children() -> None:
    """Do the same for the descriptors of the running trio loop. Other loops of this process are
    not affected."""
    import trio  # only here: client commands hold no loop, and must start at once

    # trio has no public name for it: if another version keeps it elsewhere, a child keeps it, which holds no
    # port.
    found: list[Any] = []
    with contextlib.suppress(AttributeError):
        runner = trio._core._run.GLOBAL_RUN_CONTEXT.runner
        found.append(getattr(runner.io_manager, "_epoll", None))
        for wakeup in (runner.entry_queue.wakeup, getattr(runner.io_manager, "_force_wakeup", None)):
            found += [getattr(wakeup, "wakeup_sock", None), getattr(wakeup, "write_sock", None)]
    _loops[trio.lowlevel.current_trio_token()] = [each for each in found if each is not None]


def refuse_in_child(process: int) -> None:
    """Raises ForkedChild: `process`, in which something was made, is not this one."""
    if (here := os.getpid()) != process:
        raise ForkedChild(
            f"this node belongs to process {process}, from which process {here} was forked",
            "use it there, or open another one here: with node.sync(...) as me",
        )


def _lose_all() -> None:
    """In a child. The numbers stay taken, by the null device: objects that the child also has a copy of close
    them once more, and must not meet what the child has opened meanwhile. No call alters what the parent
    waits for, and no lock is taken: a thread that the child does not have may hold it."""
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
