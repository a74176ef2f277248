"""The process that computes one stage: `python -m node.runs.host_process SOCKET PARENT ARENA...`.

Not for people: `node.runs.host` starts it. It inherits one end of a socket pair and a file descriptor
of each arena (`partition.stage.ARENAS`), reads length-prefixed MessagePack requests, answers each, and
ends when the other side closes. On Linux the kernel also kills it when its parent dies, so a long
computation does not outlive a killed node. An error that is not a refusal ends it with a traceback on
stderr, which the node keeps the end of: a half-computed stage must not go on.

The node's process never imports torch; this one does, once it can no longer be left behind.
"""

import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from partition.stage import (
    ARENAS,
    REASON_LENGTH_MAX,
    Done,
    Refused,
    Reply,
    Request,
    StageSpecification,
    arena_bytes,
    message_bytes_max,
)

SPECIFICATION_BYTES_MAX = 65_536
"""The first message. A real one has some hundred bytes; a captured graph will be named by its hash."""
HEADER = struct.Struct("<Q")
"""In front of every message, in both directions: its length in bytes."""

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    descriptor, parent, *arena_descriptors = (int(argument) for argument in arguments)
    _die_with(parent)
    # Ctrl-C reaches every process of the terminal; the node decides when a stage ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = socket.socket(fileno=descriptor)
    first = _receive(link, SPECIFICATION_BYTES_MAX)
    if first is None:
        return
    specification: StageSpecification = decode(
        bytes(first), StageSpecification, bytes_max=SPECIFICATION_BYTES_MAX
    )
    handle = _make_executor(specification, arena_descriptors)
    _send(link, encode(Done()))
    bytes_max = message_bytes_max(specification)
    while (message := _receive(link, bytes_max)) is not None:
        _send(link, encode(_answer(handle, message, bytes_max)))


def _answer(handle: Callable[[Request], Reply], message: bytearray, bytes_max: int) -> Reply:
    try:
        request: Request = decode(memoryview(message), Request, bytes_max=bytes_max)
    except RemoteProtocolError as error:
        return Refused(str(error)[:REASON_LENGTH_MAX])
    return handle(request)


def _make_executor(specification: StageSpecification, descriptors: list[int]) -> Callable[[Request], Reply]:
    # cuBLAS reads this when it is loaded; without it its sums may differ from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from partition.execute import StageExecutor, prepare_process

    prepare_process(specification.threads)
    sizes = arena_bytes(specification)
    arenas = {}
    for name, descriptor in zip(ARENAS, descriptors, strict=True):
        # Nothing of length zero can be mapped, so every file has one byte at least.
        arenas[name] = memoryview(mmap.mmap(descriptor, max(1, sizes[name])))[: sizes[name]]
        os.close(descriptor)
    return StageExecutor(specification, arenas).handle


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the kernel was told: then this process has another one by now.
    if os.getppid() != parent:
        raise SystemExit(0)


def _receive(link: socket.socket, bytes_max: int) -> bytearray | None:
    """One message, or None when the other side has closed."""
    header = _receive_exactly(link, HEADER.size)
    if header is None:
        return None
    (length,) = HEADER.unpack(header)
    if length > bytes_max:
        raise RemoteProtocolError(f"a request of {length} bytes, at most {bytes_max} allowed")
    return _receive_exactly(link, length)


def _receive_exactly(link: socket.socket, length: int) -> bytearray | None:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = link.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return data


def _send(link: socket.socket, message: bytes) -> None:
    link.sendall(HEADER.pack(len(message)))
    link.sendall(message)


if __name__ == "__main__":
    main(sys.argv[1:])
