"""A sandboxed process that reads an npz file, `python -m node.content.unpacking`, and its caller.

The process inherits two descriptors, the archive and an unnamed file for the numbers. It fences itself in
(`node.stages.sandbox`) before it reads either, so an archive that exploits zlib or numpy cannot reach the
network or any other file, and gets little memory. The process reports the archive's layout. The node checks
the layout itself, allocates the space on disk, and has the process write the numbers there. The node maps the
numbers and never parses a byte.
"""

import mmap
import os
import resource
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import IO

import msgspec
import trio

from node.content.npz import (
    RATIO_FREE_BYTES,
    RATIO_MAX,
    Arrays,
    BadArchive,
    Layouts,
    arrays_of,
    check_layouts,
    read_layouts,
    unpack_into,
)
from node.forks import keep_from_children
from node.stages import sandbox
from node.stages.parent import die_with
from node.stages.scratch import Scratch
from node.storage.budget import ScratchBudget

MEMORY_BYTES = 256 << 20
"""Memory allowed in addition to Python and numpy: a few chunks, and the archive's directory, even if it fills
the whole archive."""
START_SECONDS = 30.0
"""Time limit for the start. Python and numpy take a third of a second, but the machine may be busy."""
SLOW_BYTES_PER_SECOND = 1e7
"""The rate of unpacking to a slow disk."""
LINE_BYTES_MAX = 65_536
"""Maximum length of a line from the process."""
_REASON_LENGTH_MAX = 200
_ROOT = str(Path(__file__).parents[2])


class _Said(msgspec.Struct, frozen=True):
    """A line from the process: its findings, or the reason for a failure. Empty at the end."""

    layouts: Layouts | None = None
    refused: str = ""


async def unpack_fenced(
    archive: IO[bytes], out: IO[bytes], *, allow_unfenced: bool, budget: ScratchBudget | None = None
) -> Arrays:
    """Return the arrays of an npz, unpacked into `out`, an empty file of this node, and mapped.

    They count in `budget` until the last view of them is gone.

    Raises:
        BadArchive: the archive is malformed or too large, or no process can be fenced in.
        OSError: the disk is full, or the budget is spent.
    """
    archive_bytes = os.fstat(archive.fileno()).st_size
    scratch = await trio.to_thread.run_sync(Scratch)
    try:
        process = _start(archive, out, scratch.path, archive_bytes, allow_unfenced=allow_unfenced)
        try:
            # A duplicate, because an abandoned thread must not write to a different file that reuses the
            # descriptor.
            room = os.fdopen(os.dup(out.fileno()), "r+b", buffering=0)
            converse = partial(_converse, process, archive_bytes, room, budget)
            with trio.move_on_after(_seconds(archive_bytes)):
                return arrays_of(*await trio.to_thread.run_sync(converse, abandon_on_cancel=True))
        finally:
            process.kill()  # a thread that still talks to the process then sees that it has ended
            process.wait()
        raise BadArchive("it took too long to read")
    finally:
        scratch.remove()


def _seconds(archive_bytes: int) -> float:
    """Return the time allowed for an archive of this length."""
    return START_SECONDS + (RATIO_FREE_BYTES + RATIO_MAX * archive_bytes) / SLOW_BYTES_PER_SECOND


def _start(
    archive: IO[bytes], out: IO[bytes], scratch: str, archive_bytes: int, *, allow_unfenced: bool
) -> "subprocess.Popen[bytes]":
    descriptors = archive.fileno(), out.fileno()
    seconds = round(_seconds(archive_bytes))
    arguments = map(str, (*descriptors, os.getpid(), seconds, int(allow_unfenced)))
    return subprocess.Popen(  # noqa: S603 - our own program and arguments
        [sys.executable, "-P", "-m", "node.content.unpacking", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
        cwd=scratch,
        env=sandbox.environment(os.environ, scratch=scratch, path=_ROOT, threads=1),
    )


def _converse(
    process: "subprocess.Popen[bytes]", archive_bytes: int, room: IO[bytes], budget: ScratchBudget | None
) -> tuple[Layouts, mmap.mmap]:
    assert process.stdin is not None
    assert process.stdout is not None
    keep_from_children(process.stdin, process.stdout)
    with room, process.stdin as to, process.stdout as come:
        layouts = _listen(come).layouts
        if layouts is None:
            raise BadArchive("the process that reads it sent nothing")
        check_layouts(layouts, archive_bytes)
        mapping = _make_room(room, layouts.unpacked_bytes, budget)
        try:
            to.write(b"go\n")
            to.flush()
        except BrokenPipeError:
            raise BadArchive("the process that reads it has ended") from None
        _listen(come)
    return layouts, mapping


def _make_room(room: IO[bytes], size: int, budget: ScratchBudget | None) -> mmap.mmap:
    """Extend an empty file to this length and map it. Raises OSError."""
    if budget is not None:
        budget.take(size)
    try:
        if sys.platform == "linux":
            # Allocate real blocks, without holes. A full disk raises an error here, but would kill a process
            # that writes to the map.
            os.posix_fallocate(room.fileno(), 0, size)
        else:
            room.truncate(size)
        mapping = mmap.mmap(room.fileno(), size, access=mmap.ACCESS_READ)
    except BaseException:
        if budget is not None:
            budget.give(size)
        raise
    if budget is not None:
        weakref.finalize(mapping, budget.give, size)
    return mapping


def _listen(come: IO[bytes]) -> _Said:
    line = come.readline(LINE_BYTES_MAX)
    try:
        said = msgspec.json.decode(line, type=_Said)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadArchive("the process that reads it has ended") from None
    if said.refused:
        printable = "".join(each if each.isprintable() else "?" for each in said.refused)
        raise BadArchive(printable[:_REASON_LENGTH_MAX])
    return said


def main(arguments: list[str]) -> None:
    archive, out, parent, seconds, allow_unfenced = map(int, arguments)
    die_with(parent)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        sandbox.enter(
            scratch=os.getcwd(), device="cpu", memory_bytes=MEMORY_BYTES, allow_unfenced=bool(allow_unfenced)
        )
        with os.fdopen(archive, "rb") as file, os.fdopen(out, "r+b") as room:
            layouts = read_layouts(file)
            _say(_Said(layouts))
            if sys.stdin.readline():
                unpack_into(file, layouts, room)
                _say(_Said())
    except BadArchive as error:
        _say(_Said(refused=str(error) or "it cannot be read"))
    except sandbox.NotFenced as error:
        _say(_Said(refused=f"no process can be fenced in to read it: {error}"))


def _say(said: _Said) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
