"""The process that computes one stage: `python -m node.runs.host_process`.

Not for people: `node.runs.host` starts it, in the stage's scratch folder, with the numbers of descriptors,
its parent's, and the settings that count before the specification is read. It inherits one end of a socket
pair and a file descriptor of each arena (`partition.stage.ARENAS`). First it loads everything, then it
fences itself in (`node.runs.sandbox`), and only then it reads what others had a hand in: the specification,
which it admits or refuses before it touches an arena, and then length-prefixed MessagePack requests, each
of which it answers. It ends when the other side closes. On Linux the kernel also kills it when its parent
dies, so a long computation does not outlive a killed node. An error that is not a refusal ends it with a
traceback on stderr, which the node keeps the end of: a half-computed stage must not go on.

The node's process never imports torch; this one does, once it can no longer be left behind.
"""

import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from node.runs import sandbox
from partition.model.graph import GRAPH_BYTES_MAX
from partition.stage import (
    ARENAS,
    REASON_LENGTH_MAX,
    Exported,
    Import,
    Refused,
    Reply,
    Request,
    StageSpecification,
    arena_bytes,
    message_bytes_max,
)

SPECIFICATION_BYTES_MAX = GRAPH_BYTES_MAX + 65_536
"""The first message: the stage's share of the graph, and some hundred bytes of settings."""
HEADER = struct.Struct("<QQ")
"""In front of every message, in both directions: its bytes, and those behind it that are not in MessagePack.

Those are the `data` of an `Import` or `Exported`, which may be gigabytes: decoding copies at one go.
"""

PART_BYTES_MAX = 1 << 30

_PR_SET_PDEATHSIG = 1

Message = TypeVar("Message", Request, Reply)


def main(arguments: list[str]) -> None:
    link_descriptor, parent, threads, device, memory_bytes, *arena_descriptors = arguments
    _die_with(int(parent))
    # Ctrl-C reaches every process of the terminal; the node decides when a stage ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = socket.socket(fileno=int(link_descriptor))
    from partition.execute import StageExecutor, prepare_process
    from partition.execute.admit import admit

    fenced = sandbox.enter(scratch=os.getcwd(), device=device, memory_bytes=int(memory_bytes))
    prepare_process(int(threads))  # it starts threads, which inherit the fences
    first = _receive(link, SPECIFICATION_BYTES_MAX)
    if first is None:
        return
    specification: StageSpecification = decode(
        first[0], StageSpecification, bytes_max=SPECIFICATION_BYTES_MAX
    )
    del first
    try:
        admitted = admit(specification)
        arenas = _map_arenas(specification, [int(number) for number in arena_descriptors])
        handle = StageExecutor(specification, arenas).handle
    except RemoteProtocolError as error:
        _send(link, Refused(str(error)[:REASON_LENGTH_MAX]))
        return
    _send(link, msgspec.structs.replace(admitted, fences=fenced.fences, unfenced=fenced.unfenced))
    bytes_max = message_bytes_max(specification)
    while (received := _receive(link, bytes_max)) is not None:
        _send(link, _answer(handle, *received, bytes_max))
        del received  # not to be kept while the next one comes


def split(message: object) -> tuple[bytes, bytes]:
    """A request or reply as it travels: in MessagePack, and what stands behind it."""
    if isinstance(message, Import | Exported):
        return encode(msgspec.structs.replace(message, data=b"")), message.data
    return encode(message), b""


def joined(message: Message, data: bytes) -> Message:
    """A decoded message with what stood behind it. Raises RemoteProtocolError: it is none that has any."""
    if isinstance(message, Import | Exported):
        return msgspec.structs.replace(message, data=data)
    if data:
        raise RemoteProtocolError(f"{len(data)} bytes behind a message that has none")
    return message


def _answer(handle: Callable[[Request], Reply], message: bytes, data: bytes, bytes_max: int) -> Reply:
    try:
        request: Request = joined(decode(message, Request, bytes_max=bytes_max), data)
    except RemoteProtocolError as error:
        return Refused(str(error)[:REASON_LENGTH_MAX])
    del message, data
    return handle(request)


def _map_arenas(specification: StageSpecification, descriptors: list[int]) -> dict[str, memoryview]:
    sizes = arena_bytes(specification)
    arenas = {}
    for name, descriptor in zip(ARENAS, descriptors, strict=True):
        # Nothing of length zero can be mapped, so every file has one byte at least.
        arenas[name] = memoryview(mmap.mmap(descriptor, max(1, sizes[name])))[: sizes[name]]
        os.close(descriptor)
    return arenas


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the kernel was told: then this process has another one by now.
    if os.getppid() != parent:
        raise SystemExit(0)


def _receive(link: socket.socket, bytes_max: int) -> tuple[bytes, bytes] | None:
    """One message and what stands behind it, or None when the other side has closed."""
    header = _receive_exactly(link, HEADER.size)
    if header is None:
        return None
    length, data_length = HEADER.unpack(header)
    if length + data_length > bytes_max:
        raise RemoteProtocolError(f"a request of {length + data_length} bytes, at most {bytes_max} allowed")
    message = _receive_exactly(link, length)
    data = _receive_exactly(link, data_length)
    return None if message is None or data is None else (message, data)


def _receive_exactly(link: socket.socket, length: int) -> bytes | None:
    parts = []
    while length:
        # As a rule the whole of it at once: the kernel waits for all, but gives at most 2 GiB.
        part = link.recv(min(length, PART_BYTES_MAX), socket.MSG_WAITALL)
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _send(link: socket.socket, reply: Reply) -> None:
    message, data = split(reply)
    link.sendall(HEADER.pack(len(message), len(data)))
    link.sendall(message)
    link.sendall(data)


if __name__ == "__main__":
    status = 0
    try:
        main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        status = 1
    # Not to take torch apart, for a second in which the link is closed already and the status not known.
    sys.stderr.flush()
    os._exit(status)
