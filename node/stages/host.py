"""StageHost: a stage in a separate process, behind the message API of `partition.stage`.

Torch is slow to import and holds the interpreter while it computes, and a stage that crashes must not crash
the node, so a stage runs in its own process. Requests go over a socket pair, one at a time in the order of
the calls. Parameters are in unnamed shared memory, and the tensors of a micro-batch go through another part
of it (`node.stages.framing`). The process gets nothing else from the node and fences itself in
(`node.stages.sandbox`). The limits that it cannot set itself are enforced here: while an answer is due it is
watched, and killed if it is frozen, too slow or too large. A node that is killed leaves one empty folder
behind, which the next stage of any node removes.

A failed stage stays failed: its user closes it and opens another. A finished stage may pass its process to
the next stage of the same run (`retire`), but never to another run, whose requester could find data left in
it.
"""

import contextlib
import io
import mmap
import os
import signal
from collections.abc import Sequence
from functools import partial
from typing import Self

import trio

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.noise import Data
from node.errors import PayloadRefused, StageFailed
from node.locks import acquire
from node.stages.framing import (
    HEADER_BYTES,
    FramedMessage,
    Header,
    joined,
    largest_payload,
    read_header,
    refusal,
    split,
)
from node.stages.limits import STALLED_SECONDS, WATCH_SECONDS, Allowance, ProcessWatch, allowance_of
from node.stages.process import SPECIFICATION_BYTES_MAX
from node.stages.program import Spare, StageProgram, shared_file
from node.stages.scratch import remove_forgotten
from node.storage.budget import ScratchBudget
from partition.stage import (
    REASON_LENGTH_MAX,
    Admitted,
    Refused,
    Reply,
    StageSpecification,
    timed,
)

EPITAPH_SECONDS = 2.0
"""How long a process that closed its end may take to exit before it is killed with its status unknown."""
RETIRE_SECONDS = 10.0
"""How long a process may take to release a stage. Loading a new process takes longer on any machine."""
REAP_SECONDS = 5.0
"""How long to wait until a killed process is gone; only a stuck system call takes longer."""
PART_BYTES = 256 << 10
"""Number of bytes read at once, which is the size of the kernel's buffer for a link."""
YIELD_BYTES = 1 << 20
"""Number of bytes copied before other tasks may run; copying them takes half a millisecond."""
_REAP_POLL_SECONDS = 0.002
_STDERR_TAIL_BYTES = 2_000
_LAST_LINE_MAX = 200


class StageHost:
    """The node's handle on one stage process; implements `node.seams.Stage`.

    Created by `open`. `call` may be used from many tasks; `aclose` must be called at the end. `admitted` is
    the process's report when it was ready; its `fences` and `unfenced` list the fences that hold and those
    that do not.
    """

    admitted: Admitted

    def __init__(
        self,
        allowance: Allowance,
        *,
        stalled_seconds: float = STALLED_SECONDS,
        scratch: ScratchBudget | None = None,
        program: StageProgram | None = None,
    ) -> None:
        """`program` is a process that waits for a stage; by default a new one is started."""
        self._allowance = allowance
        self._stalled_seconds = stalled_seconds
        self._answer_seconds = self._count_at = 0.0
        self._lock = trio.Lock()  # a fair lock: waiting calls are served in order
        self._failure: str | None = None
        self._mappings: dict[str, mmap.mmap] = {}
        if program is None:
            program = StageProgram(allowance.threads, allowance.device, scratch)
        self._program: StageProgram | None = program
        self._scratch, self._stderr = program.scratch, program.stderr
        self._process, self._link = program.process, program.link
        both = 2 * allowance.payload_bytes_max
        descriptors: list[int] = []
        try:
            descriptors.append(shared_file("exchange", both))
            self._exchange_memory = mmap.mmap(descriptors[0], both)
            for name, size in allowance.arenas.items():
                descriptor = shared_file(name, max(1, size))
                descriptors.append(descriptor)
                self._mappings[name] = mmap.mmap(descriptor, max(1, size))
            program.begin(allowance.own_bytes, descriptors, allow_unfenced=allowance.allow_unfenced)
            self._watch = ProcessWatch(
                self._process.pid, allowance.watched_bytes, stalled_seconds, self._scratch.count
            )
        except BaseException:
            program.discard()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    @classmethod
    async def open(
        cls,
        specification: bytes,
        *,
        start_seconds: float | None = None,
        stalled_seconds: float = STALLED_SECONDS,
        scratch: ScratchBudget | None = None,
        spare: Spare | None = None,
        after: "StageHost | None" = None,
    ) -> Self:
        """Start a process, or take over that of the stage `after` or of `spare`, and wait until it is ready,
        with its initial parameters in the arena. `after` is a stage of the same run, and is closed by this
        call.

        `start_seconds` is by default long enough for any working machine. `stalled_seconds` is how long the
        process may do nothing while an answer is due. Its files count in `scratch`.

        Raises:
            RemoteProtocolError: `specification` is not an encoded `StageSpecification`.
            StageFailed: the stage was not admitted, or the process ended, or was not ready in time.
        """
        program = None
        try:
            # In a thread, since decoding a graph takes milliseconds, or a second for a hostile one.
            allowance = await trio.to_thread.run_sync(partial(_decode_allowance, specification))
            if after is not None:
                program = await after.retire(allowance)
        finally:
            if after is not None:
                await after.aclose()
        if program is None:
            await trio.to_thread.run_sync(remove_forgotten)
            program = None if spare is None else spare.take(allowance.threads, allowance.device)
        host = cls(allowance, stalled_seconds=stalled_seconds, scratch=scratch, program=program)
        try:
            host.admitted = await host._start_up(
                specification, allowance.start_seconds if start_seconds is None else start_seconds
            )
        except BaseException:
            await host.aclose()
            raise
        host._answer_seconds = allowance.answer_seconds(host.admitted)
        return host

    @property
    def pid(self) -> int:
        """The id of the stage's process."""
        return self._process.pid

    async def call(self, request: object, *, seconds: float | None = None) -> Reply:
        """Send one request to the stage and wait for its answer; calls are served in order.

        A stage is killed if it has not answered after `seconds` (by default far more than its work takes on a
        slow machine), hangs, or exceeds its memory.

        If a call is cancelled while it is served, the process is ended, because the next call would receive
        its answer. The stage then counts as failed.

        Raises:
            PayloadRefused: data sent by others with the request cannot be used; the stage goes on.
            SessionRefused: the stage cannot continue a served session; the stage goes on.
            StageDiverged: the stage's result is not finite; the stage goes on.
            StageFailed: the stage refused the request for a different reason (it goes on), or its process is
                gone.
        """
        # Without yielding if the stage is idle; otherwise the call would wait while other tasks encrypt
        # frames.
        await acquire(self._lock)
        try:
            if self._failure is not None:
                raise StageFailed(self._failure)
            parts = split(request)
            if (complaint := self._complaint(parts.header())) is not None:
                reason, part = f"a request of {complaint}", largest_payload(request)
                raise PayloadRefused(reason, part) if part else StageFailed(reason)
            reply = await self._exchange(parts, self._answer_seconds if seconds is None else seconds)
        finally:
            self._lock.release()
        if isinstance(reply, Refused):
            raise refusal(reply)
        return reply

    def vector(self, name: str) -> memoryview:
        """Return the bytes of an arena, the memory in which the stage computes.

        A view stays valid as long as somebody holds it, even after the stage has ended. Read or write it only
        between calls.

        Raises:
            StageFailed: the stage has been closed.
        """
        if name not in self._mappings:
            raise StageFailed(f"the stage is closed, or has no arena '{name}'")
        return memoryview(self._mappings[name])[: self._allowance.arenas[name]]

    async def retire(self, allowance: Allowance, seconds: float = RETIRE_SECONDS) -> StageProgram | None:
        """Have the process release this finished stage within `seconds`, for the next stage of the same run,
        which has this allowance. Return the process; None if a new process is needed."""
        program = self._program
        if program is None or self._failure is not None or self._lock.statistics().locked:
            return None
        if (program.threads, program.device) != (allowance.threads, allowance.device):
            return None
        async with self._lock:
            try:
                self._watch.begin(seconds, "did not release its stage")
                await self._send(Header(0).encode())
                is_free = read_header(await self._receive(HEADER_BYTES)) == Header(0)
            except (OSError, StageFailed, trio.ClosedResourceError):
                is_free = False
            except BaseException:
                self._fail("the stage was closed while it was being released")
                raise
        if not is_free or not program.renew(allowance.own_bytes):
            return None
        self._failure, self._program = "the stage has been closed", None
        return program

    async def aclose(self) -> None:
        """End the process, release the arenas, and remove the scratch folder. After `retire`, the process and
        its folder belong to another stage.

        May be called again. It cannot be cancelled, but its duration is bounded.
        """
        if self._program is not None:
            self._fail("the stage has been closed")
            with trio.CancelScope(shield=True):
                await self._reap(REAP_SECONDS)
                await trio.to_thread.run_sync(self._scratch.remove)
        while self._mappings:
            _, mapping = self._mappings.popitem()
            # If somebody still holds a view, the memory is freed with the last view.
            with contextlib.suppress(BufferError):
                mapping.close()
        self._exchange_memory.close()
        if self._program is not None and self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1

    async def _start_up(self, specification: bytes, seconds: float) -> Admitted:
        reply = await self._exchange(FramedMessage(specification), seconds, what="was not ready")
        if isinstance(reply, Refused):
            raise StageFailed(reply.reason)
        if not isinstance(reply, Admitted):
            self._fail("the stage's process sent an invalid message before any request")
            raise StageFailed(self._failure)
        return reply

    def _complaint(self, header: Header) -> str | None:
        """Return which part of a message is too long; None if none is."""
        length, longest = header.message + header.behind + header.payloads, self._allowance.message_bytes_max
        if length > longest:
            return f"{length} bytes, at most {longest} allowed"
        if header.payloads > self._allowance.payload_bytes_max:
            return f"{header.payloads} bytes of tensors, at most {self._allowance.payload_bytes_max} allowed"
        return None

    async def _exchange(
        self, parts: FramedMessage, seconds: float, *, what: str = "has not answered"
    ) -> Reply:
        """Send one message and wait for its answer; if none arrives, the process is ended."""
        self._watch.begin(seconds, what)
        try:
            self._count_files()
            await self._give(parts.payloads)
            await self._send(parts.header().encode() + parts.message)
            await self._send(parts.behind)
            header = read_header(await self._receive(HEADER_BYTES))
            if (complaint := self._complaint(header)) is not None:
                raise RemoteProtocolError(f"an answer of {complaint}")
            message, behind = await self._receive(header.message), await self._receive(header.behind)
            begin = self._allowance.payload_bytes_max
            payloads = [
                await self._take(begin, header.first),
                await self._take(begin + header.first, header.second),
            ]
            answer: Reply = decode(message, Reply, bytes_max=self._allowance.message_bytes_max)
            reply = timed(joined(answer, behind, payloads), header.busy_nanoseconds)
        except (OSError, trio.ClosedResourceError):
            with trio.CancelScope(shield=True):
                await self._reap(EPITAPH_SECONDS)
            raise self._failed(f"the stage's process {self._epitaph()}") from None
        except RemoteProtocolError as error:
            raise self._failed(f"the stage's process sent an invalid answer: {error}") from None
        except StageFailed as error:
            raise self._failed(str(error)) from None
        except BaseException:
            self._fail("a call to the stage was cancelled while it was served")
            raise
        return reply

    def _count_files(self) -> None:
        """Count the process's files, but only at intervals, because most calls take less time than
        counting."""
        now = trio.current_time()
        if now >= self._count_at:
            self._count_at = now + WATCH_SECONDS
            self._scratch.count()

    async def _give(self, payloads: Sequence[Data]) -> None:
        """Write a request's tensors to where the process reads them."""
        begin = 0
        for payload in payloads:
            view = memoryview(payload)
            for start in range(0, len(view), YIELD_BYTES):
                part = view[start : start + YIELD_BYTES]
                self._shared()[begin : begin + len(part)] = part
                begin += len(part)
                await _yield_after(len(part))

    async def _take(self, begin: int, length: int) -> bytes:
        """Return a copy of a part of an answer's tensors, so that later writes by the process cannot change
        it."""
        if length <= YIELD_BYTES:
            return self._shared()[begin : begin + length]
        copied = io.BytesIO()
        for start in range(begin, begin + length, YIELD_BYTES):
            copied.write(memoryview(self._shared())[start : min(start + YIELD_BYTES, begin + length)])
            await trio.lowlevel.checkpoint()
        return copied.getvalue()

    def _shared(self) -> mmap.mmap:
        """Return the memory for tensors. Raises StageFailed if the stage has been closed meanwhile."""
        if self._failure is not None:
            raise StageFailed(self._failure)
        return self._exchange_memory

    async def _send(self, message: bytes) -> None:
        view = memoryview(message)
        moved = 0
        while view:
            try:
                count = self._link.send(view)
            except BlockingIOError:
                await self._watch.wait(trio.lowlevel.wait_writable, self._link)
                continue
            view = view[count:]
            moved = await _yield_after(moved + count)

    async def _receive(self, length: int) -> bytes:
        """Receive `length` bytes. BytesIO can hand over its buffer, so gigabytes need not be copied in one
        go."""
        received = io.BytesIO()
        moved = 0
        while length:
            try:
                part = self._link.recv(min(length, PART_BYTES))
            except BlockingIOError:
                await self._watch.wait(trio.lowlevel.wait_readable, self._link)
                continue
            if not part:
                raise ConnectionResetError
            received.write(part)
            length -= len(part)
            moved = await _yield_after(moved + len(part))
        return received.getvalue()

    def _failed(self, reason: str) -> StageFailed:
        self._fail(reason)
        return StageFailed(self._failure)

    def _fail(self, reason: str) -> None:
        """Kill the process and keep the first reason. This never blocks; `aclose` waits for the process to
        end."""
        self._failure = self._failure or reason[:REASON_LENGTH_MAX]
        self._process.kill()
        if self._link.fileno() >= 0:
            trio.lowlevel.notify_closing(self._link)
            self._link.close()

    async def _reap(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            while self._process.poll() is None:  # noqa: ASYNC110 - no portable event for a child's end
                await trio.sleep(_REAP_POLL_SECONDS)

    def _epitaph(self) -> str:
        """Return how the process ended, with the last line that it wrote."""
        code = self._process.returncode
        if code is None:
            return "has closed its end"
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        size = os.fstat(self._stderr).st_size
        tail = os.pread(self._stderr, _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES))
        lines = tail.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}: {last[:_LAST_LINE_MAX]}" if last else how


async def _yield_after(moved: int) -> int:
    """Let other tasks run once `moved` bytes have been copied without a pause; return the new count."""
    if moved < YIELD_BYTES:
        return moved
    await trio.lowlevel.checkpoint()
    return 0


def _decode_allowance(specification: bytes) -> Allowance:
    decoded: StageSpecification = decode(specification, StageSpecification, bytes_max=SPECIFICATION_BYTES_MAX)
    return allowance_of(decoded, len(specification))
