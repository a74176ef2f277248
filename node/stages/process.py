"""The process that computes one stage: `python -m node.stages.process`.

It is not meant for people. `node.stages.program` starts it in the stage's scratch folder, and passes the
number of a descriptor, its parent's id, and the settings needed while it loads. It inherits one end of a
socket pair. First it loads everything. Later, perhaps much later, it receives the settings needed before the
specification, and file descriptors: for the tensors' memory (`node.stages.framing`), and for each arena
(`partition.stage.ARENAS`). It fences itself in (`node.stages.sandbox`), and only after that reads data that
others influenced. First comes the specification, which it admits or refuses before it touches an arena; then
requests, each of which it answers. An empty request means that the stage has ended: the process releases it,
confirms with an empty answer, and receives the next stage of the same run, beginning with its settings. The
fences stay up, so traces of a requester's stage can reach only that requester. The process ends when the
other side closes. On Linux the kernel also kills it when its parent dies, so a long computation does not
outlive a killed node. An error that is not a refusal ends it with a traceback on stderr, the end of which the
node keeps, because a half-computed stage must not continue.

The node's process never imports torch; this process does, once it is certain to end with its parent.
"""

import gc
import mmap
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

import msgspec

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.noise import Data
from node.stages import sandbox
from node.stages.framing import HEADER_BYTES, FramedMessage, joined, read_header, split
from node.stages.parent import die_with
from node.stages.program import SETTINGS
from node.stages.threads import ThreadChooser, adaptive, candidates
from partition.model.graph import GRAPH_BYTES_MAX, SERVE
from partition.stage import ARENAS, REASON_LENGTH_MAX, Refused, Reply, Request, StageSpecification
from partition.stage_layout import arena_bytes, message_bytes_max, payload_bytes_max

SPECIFICATION_BYTES_MAX = GRAPH_BYTES_MAX + 65_536
"""Maximum size of the first message: the stage's share of the graph, and some hundred bytes of settings."""
PART_BYTES_MAX = 1 << 30


def main(arguments: list[str]) -> None:
    link_descriptor, parent, threads, device = arguments
    die_with(int(parent))
    # Ctrl-C reaches every process of the terminal, but the node decides when a stage ends.
    link = _Link(socket.socket(fileno=int(link_descriptor)))
    from partition.execute import defer_compiler, keep_freed_memory, load_late_modules, prepare_process

    keep_freed_memory()
    defer_compiler()
    load_late_modules()
    gc.freeze()  # loaded modules stay, so the garbage collector need not scan them again
    found = link.settings()
    if found is None:
        return
    memory_bytes, allow_unfenced, descriptors = found
    try:
        fenced = sandbox.enter(
            scratch=os.getcwd(),
            device=device,
            memory_bytes=memory_bytes,
            allow_unfenced=allow_unfenced,
            may_be_raised=True,
        )
    except sandbox.NotFenced as error:
        # No byte chosen by others has been read yet.
        link.send(split(Refused(f"a stage cannot be fenced in here: {error}"[:REASON_LENGTH_MAX])), 0)
        return
    prepare_process(int(threads))  # starts threads, which inherit the fences
    while _compute_stage(link, descriptors, fenced, int(threads), device):
        _let_go(device)
        link.send(FramedMessage(b""), 0)
        if (found := link.settings()) is None:
            return
        _, _, descriptors = found  # the node has set the process's memory limit; the fences are still up


def _compute_stage(
    link: "_Link", descriptors: list[int], fenced: sandbox.Fenced, threads: int, device: str
) -> bool:
    """Compute one stage until the node ends it. Return whether another stage follows."""
    from partition.execute import StageExecutor, set_threads
    from partition.execute.admit import admit, room_bytes

    exchange, *arenas = descriptors
    set_threads(threads)  # the previous stage may have chosen a different number
    first = link.receive()
    if first is None:
        return False
    specification: StageSpecification = decode(
        first.message, StageSpecification, bytes_max=SPECIFICATION_BYTES_MAX
    )
    del first
    try:
        admitted = admit(specification)
        room = room_bytes(specification, admitted)
        executor = StageExecutor(specification, _map_arenas(specification, arenas), room)
        handle: Callable[[Request], Reply] = executor.handle
    except RemoteProtocolError as error:
        link.send(split(Refused(str(error)[:REASON_LENGTH_MAX])), 0)
        return False
    link.widen(specification, exchange)
    ready = msgspec.structs.replace(admitted, fences=fenced.fences, unfenced=fenced.unfenced)
    link.send(split(ready), 0)
    # A served stage gives the same bits only with the same number of threads.
    serves = any(entry.name == SERVE for entry in specification.graph.entries)
    numbers = candidates(threads) if device == "cpu" and not serves else ()
    if len(numbers) > 1:
        clock = time.perf_counter_ns
        handle = adaptive(handle, ThreadChooser(numbers), set_threads=set_threads, clock=clock)
    follows = _serve(link, handle, time.perf_counter_ns)
    link.narrow()
    return follows


def _let_go(device: str) -> None:
    """Free the memory of a finished stage."""
    from partition.execute import release_memory

    gc.collect()
    release_memory(device)


class _Link:
    """The process's end of the link: a socket and, once mapped, the shared memory for tensors."""

    def __init__(self, link: socket.socket) -> None:
        self.bytes_max = SPECIFICATION_BYTES_MAX
        self._socket = link
        self._requests = self._answers = memoryview(b"")

    def settings(self) -> tuple[int, bool, list[int]] | None:
        """Receive the memory limit, whether the process may run unfenced, and descriptors; None if the other
        side has closed."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, SETTINGS.size, 1 + len(ARENAS))
        if len(data) < SETTINGS.size:
            return None
        memory_bytes, allow_unfenced = SETTINGS.unpack(data)
        return memory_bytes, bool(allow_unfenced), descriptors

    def widen(self, specification: StageSpecification, exchange: int) -> None:
        """Switch from the specification to requests; `exchange` is the descriptor of the memory for their
        tensors."""
        size = payload_bytes_max(specification)
        self.bytes_max = message_bytes_max(specification)
        whole = _map(exchange, 2 * size)
        self._requests, self._answers = whole[:size], whole[size:]

    def narrow(self) -> None:
        """Switch back to waiting for the specification of the next stage."""
        self.bytes_max = SPECIFICATION_BYTES_MAX
        self._requests = self._answers = memoryview(b"")

    def receive(self) -> FramedMessage | None:
        """Receive one message; None if the other side has closed."""
        found = self._exactly(HEADER_BYTES)
        if found is None:
            return None
        header = read_header(found)
        length = header.message + header.behind + header.payloads
        if length > self.bytes_max or header.payloads > len(self._requests):
            raise RemoteProtocolError(f"a request of {length} bytes, at most {self.bytes_max} allowed")
        message, behind = self._exactly(header.message), self._exactly(header.behind)
        if message is None or behind is None:
            return None
        first, end = header.first, header.payloads
        return FramedMessage(
            message, behind, (bytes(self._requests[:first]), bytes(self._requests[first:end]))
        )

    def send(self, parts: FramedMessage, busy_nanoseconds: int) -> None:
        """Send all but the payloads, which `give` has already written."""
        self._socket.sendall(parts.header(busy_nanoseconds).encode() + parts.message)
        self._socket.sendall(parts.behind)

    def give(self, payloads: tuple[Data, ...]) -> None:
        begin = 0
        for payload in payloads:
            self._answers[begin : begin + len(payload)] = payload
            begin += len(payload)

    def _exactly(self, length: int) -> bytes | None:
        parts = []
        while length:
            # Usually one call: the kernel waits for all bytes, but returns at most 2 GiB.
            part = self._socket.recv(min(length, PART_BYTES_MAX), socket.MSG_WAITALL)
            if not part:
                return None
            parts.append(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _serve(link: _Link, handle: Callable[[Request], Reply], clock: Callable[[], int]) -> bool:
    """Answer requests until the other side closes, or requests another stage (returns True). Only the time
    between a request and its answer counts as `busy`."""
    while (received := link.receive()) is not None:
        if not received.message:
            return True
        begun = clock()
        answer = split(_answer(handle, received, link.bytes_max))
        link.give(answer.payloads)
        link.send(answer, clock() - begun)
        del received, answer  # free them while waiting for the next request
    return False


def _answer(handle: Callable[[Request], Reply], received: FramedMessage, bytes_max: int) -> Reply:
    try:
        decoded: Request = decode(received.message, Request, bytes_max=bytes_max)
        request = joined(decoded, received.behind, received.payloads)
    except RemoteProtocolError as error:
        return Refused(str(error)[:REASON_LENGTH_MAX])
    return handle(request)


def _map_arenas(specification: StageSpecification, descriptors: list[int]) -> dict[str, memoryview]:
    sizes = arena_bytes(specification)
    return {name: _map(descriptor, sizes[name]) for name, descriptor in zip(ARENAS, descriptors, strict=True)}


def _map(descriptor: int, size: int) -> memoryview:
    # A mapping cannot have length zero, so every file has at least one byte.
    view = memoryview(mmap.mmap(descriptor, max(1, size)))[:size]
    os.close(descriptor)
    return view


if __name__ == "__main__":
    status = 0
    try:
        main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        status = 1
    # Skip torch's cleanup, which would delay the exit status for a second after the link is closed.
    sys.stderr.flush()
    os._exit(status)
