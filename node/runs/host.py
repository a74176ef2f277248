"""StageHost: a stage in a process of its own, behind the one message API of `partition.stage`.

Why a process: torch is slow to import and holds the interpreter while it computes, and a stage that
breaks must not take the node with it. Requests go over a socket pair, one at a time in the order of
the calls; the numbers lie in shared memory without a name, so nothing is left behind even when the
node is killed.

A stage that fails stays failed: whoever opened it closes it and opens another.
"""

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from node.errors import StageFailed
from node.runs.host_process import HEADER, SPECIFICATION_BYTES_MAX
from partition.stage import (
    REASON_LENGTH_MAX,
    Refused,
    Reply,
    StageSpecification,
    arena_bytes,
    message_bytes_max,
)

START_SECONDS = 60.0
"""Until the process is ready. Importing torch alone takes five seconds on a busy machine."""
REAP_SECONDS = 5.0
"""How long to wait for a killed process to be gone; only a stuck kernel call takes longer."""
_REAP_POLL_SECONDS = 0.002
_STDERR_TAIL_BYTES = 2_000
_LAST_LINE_MAX = 200

_SOURCE_ROOT = str(Path(__file__).parents[2])


class StageHost:
    """The node's handle on one stage process; implements `node.seams.Stage`.

    Made by `open`. `call` may be used from many tasks; `aclose` must be called in the end.
    """

    def __init__(self, specification: StageSpecification) -> None:
        self._bytes_max = message_bytes_max(specification)
        self._sizes = arena_bytes(specification)
        self._lock = trio.Lock()  # hands over in the order of asking
        self._failure: str | None = None
        self._stderr = _make_shared_file("stderr", 0)
        self._mappings: dict[str, mmap.mmap] = {}
        ours, theirs = socket.socketpair()
        descriptors = []
        with theirs:
            try:
                for name, size in self._sizes.items():
                    descriptor = _make_shared_file(name, max(1, size))
                    descriptors.append(descriptor)
                    self._mappings[name] = mmap.mmap(descriptor, max(1, size))
                self._process = _start(theirs.fileno(), descriptors, self._stderr)
            except BaseException:
                ours.close()
                os.close(self._stderr)
                raise
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))

    @classmethod
    async def open(cls, specification: bytes, *, start_seconds: float = START_SECONDS) -> Self:
        """Start a process and wait until it is ready, with its first parameters in the arena.

        Raises:
            RemoteProtocolError: `specification` is not an encoded `StageSpecification`.
            StageFailed: the process ended, or was not ready within `start_seconds`.
        """
        decoded: StageSpecification = decode(
            specification, StageSpecification, bytes_max=SPECIFICATION_BYTES_MAX
        )
        host = cls(decoded)
        try:
            with trio.move_on_after(start_seconds) as scope:
                await host._exchange(specification)
            if scope.cancelled_caught:
                raise StageFailed(f"the stage's process was not ready within {start_seconds:g} s")
        except BaseException:
            await host.aclose()
            raise
        return host

    @property
    def pid(self) -> int:
        """Of the stage's process."""
        return self._process.pid

    async def call(self, request: object) -> Reply:
        """Hand one request to the stage and wait for its answer; calls are served in order.

        Cancelling a call that is being served ends the process: its answer would be taken for the next
        call's. The stage then counts as failed.

        Raises:
            StageFailed: the stage refused the request (it goes on), or its process is gone.
        """
        async with self._lock:
            if self._failure is not None:
                raise StageFailed(self._failure)
            message = encode(request)
            if len(message) > self._bytes_max:
                raise StageFailed(f"a request of {len(message)} bytes, at most {self._bytes_max} allowed")
            return await self._exchange(message)

    def vector(self, name: str) -> memoryview:
        """The bytes of an arena, the very memory the stage computes in.

        A view stays valid as long as somebody holds it, also after the stage has ended. Read or write it
        only between calls.

        Raises:
            StageFailed: the stage has been closed.
        """
        if name not in self._mappings:
            raise StageFailed(f"the stage is closed, or has no arena '{name}'")
        return memoryview(self._mappings[name])[: self._sizes[name]]

    async def aclose(self) -> None:
        """End the process and let go of the arenas. May be called again; not to be cancelled, but bounded."""
        self._fail("the stage has been closed")
        with trio.CancelScope(shield=True):
            await self._reap()
        while self._mappings:
            _, mapping = self._mappings.popitem()
            # Where somebody still holds a view, the memory goes with the last one.
            with contextlib.suppress(BufferError):
                mapping.close()
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1

    async def _exchange(self, message: bytes) -> Reply:
        """Send one message and wait for the answer; every way out but an answer ends the process."""
        try:
            await self._stream.send_all(HEADER.pack(len(message)))
            await self._stream.send_all(message)
            (length,) = HEADER.unpack(await self._receive_exactly(HEADER.size))
            if length > self._bytes_max:
                raise RemoteProtocolError(f"an answer of {length} bytes, at most {self._bytes_max} allowed")
            answer = await self._receive_exactly(length)
            reply: Reply = decode(memoryview(answer), Reply, bytes_max=self._bytes_max)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            with trio.CancelScope(shield=True):
                await self._reap()
            self._fail(f"the stage's process {self._epitaph()}")
            raise StageFailed(self._failure) from None
        except RemoteProtocolError as error:
            self._fail(f"the stage's process answered nonsense: {error}")
            raise StageFailed(self._failure) from None
        except BaseException:
            self._fail("a call to the stage was cancelled while it was served")
            raise
        if isinstance(reply, Refused):
            raise StageFailed(reply.reason)
        return reply

    async def _receive_exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = await self._stream.socket.recv_into(view)
            if count == 0:
                raise trio.BrokenResourceError
            view = view[count:]
        return data

    def _fail(self, reason: str) -> None:
        """Kill the process and remember the first reason. Never blocks; `aclose` reaps."""
        self._failure = self._failure or reason[:REASON_LENGTH_MAX]
        self._process.kill()
        self._stream.socket.close()

    async def _reap(self) -> None:
        with trio.move_on_after(REAP_SECONDS):
            while self._process.poll() is None:  # noqa: ASYNC110 - no portable event for a child's end
                await trio.sleep(_REAP_POLL_SECONDS)

    def _epitaph(self) -> str:
        """How the process ended, with the last line it wrote."""
        code = self._process.returncode
        if code is None:
            return "has closed its end"
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        size = os.fstat(self._stderr).st_size
        tail = os.pread(self._stderr, _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES))
        lines = tail.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}: {last[:_LAST_LINE_MAX]}" if last else how


def _start(link: int, arenas: list[int], stderr: int) -> "subprocess.Popen[bytes]":
    # Not trio's open_process: it forks from a thread of its pool, and Linux kills a child that asked to
    # die with its parent as soon as the *thread* that forked it ends.
    arguments = [str(number) for number in (link, os.getpid(), *arenas)]
    path = os.pathsep.join(filter(None, (_SOURCE_ROOT, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(  # noqa: S603 - our own program and arguments
        # -P: a file in the current folder must not stand in for one of the stage's modules.
        [sys.executable, "-P", "-m", "node.runs.host_process", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(link, *arenas),
        env={**os.environ, "PYTHONPATH": path},
    )


def _make_shared_file(name: str, size: int) -> int:
    """A descriptor of `size` zero bytes that have no name in any folder."""
    if sys.platform == "linux":
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create(f"peerloom-{name}", flags)
        os.truncate(descriptor, size)
        if size:
            # A file that shrinks under a mapping kills whoever reads it.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    else:
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            descriptor = os.dup(file.fileno())
    return descriptor
