"""The control channel: how `status`, `train`, `leave` and other commands reach the node on this machine.

The node listens on a Unix socket in its data folder (mode 0600, in a folder of mode 0700). Only its user can
open the socket and so command the node, and the kernel reports who has opened it (unix(7), SO_PEERCRED).
There is no token, since it would lie in the same folder with the same modes. A client sends one JSON line
`{"command", "arguments"}` and gets JSON lines: any number of `{"event": ...}`, then one `{"result": ...}` or
`{"error": {"what", "do", "exit_code", "trace"}}`. If a client hangs up, its request is cancelled. The client
end is `node.cli.client`. Peers and browsers cannot open such sockets.
"""

import contextlib
import os
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import trio

from node.containment import contain
from node.errors import EXIT_UNEXPECTED, PeerloomError, UsageError
from node.forks import keep_from_children
from node.paths import CONTROL_NAME, short_path, socket_path
from node.suggest import did_you_mean

LINE_BYTES_MAX = 4 << 20
"""Maximum length of a request. The largest requests carry a RUN.toml and paths, and are far shorter."""
REQUEST_SECONDS_MAX = 2.0
"""How long a connection may take to send its request; a client sends it immediately."""
WAITING_MAX = 64
"""Maximum number of connections that have not yet sent a request. A new connection displaces the oldest of
them, so a program that connects and stays silent cannot keep others out."""
COMMANDS_MAX = 64
"""Maximum number of simultaneous commands: a screen or two and some scripts. Further commands are refused,
not queued."""
_CHUNK_BYTES = 65_536
_CREDENTIALS = struct.Struct("=iII")
"""struct ucred: process, user, group."""

Emit = Callable[[object], Awaitable[None]]
"""Sends one event (anything `msgspec.json` encodes) to the client; waits while the client reads slowly."""

CommandHandler = Callable[[dict[str, Any], Emit], Awaitable[object]]
"""Serves one command: takes the arguments, returns the result. The client receives a PeerloomError as its
error."""


class _Request(msgspec.Struct, frozen=True):
    command: Annotated[str, msgspec.Meta(max_length=64)]
    arguments: dict[str, Any]


class ControlServer:
    """Serves `handlers` by command name until cancelled, on a socket in `folder`, whose lock the node
    holds."""

    def __init__(self, handlers: Mapping[str, CommandHandler], folder: Path) -> None:
        self._handlers = handlers
        self._folder = folder
        self._waiting: dict[trio.CancelScope, None] = {}
        self._commands = 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; the socket is removed at the end. Raises UsageError if the socket cannot be
        created."""
        bound = _listen(self._folder)
        keep_from_children(bound)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, self._serve, [listener])
                task_status.started()
        finally:
            (self._folder / CONTROL_NAME).unlink(missing_ok=True)

    async def _serve(self, stream: trio.SocketStream) -> None:
        keep_from_children(stream.socket)
        with contain("control"):
            await self._serve_client(stream)

    async def _serve_client(self, stream: trio.SocketStream) -> None:
        async with stream:
            try:
                await self._answer(stream)
            except* (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the client has disconnected, so there is nobody to answer

    async def _answer(self, stream: trio.SocketStream) -> None:
        if not _is_allowed(stream):
            await stream.send_all(_line(_error(UsageError("this node belongs to another user"))))
            return
        line = await self._request(stream)
        if line is None:
            return
        try:
            request = msgspec.json.decode(line, type=_Request)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            await stream.send_all(_line(_error(UsageError("the node did not understand this request"))))
            return
        if self._commands >= COMMANDS_MAX:
            busy = UsageError(f"the node serves {COMMANDS_MAX} commands already", "end some of them, or wait")
            await stream.send_all(_line(_error(busy)))
            return
        self._commands += 1
        try:
            await self._perform(stream, request)
        finally:
            self._commands -= 1

    async def _request(self, stream: trio.SocketStream) -> bytes | None:
        """Return the line of a request; None if it is late, or if a newer connection displaced it."""
        if len(self._waiting) >= WAITING_MAX:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.cancel()
        with trio.move_on_after(REQUEST_SECONDS_MAX) as scope:
            self._waiting[scope] = None
            try:
                return await _read_line(stream)
            finally:
                self._waiting.pop(scope, None)
        return None

    async def _perform(self, stream: trio.SocketStream, request: _Request) -> None:
        handler = self._handlers.get(request.command)
        if handler is None:
            hint = did_you_mean(request.command, sorted(self._handlers))
            await stream.send_all(
                _line(_error(UsageError(f"this node knows no command '{request.command}'{hint}")))
            )
            return
        sending = trio.Lock()  # a handler may emit from several tasks

        async def emit(event: object) -> None:
            async with sending:
                await stream.send_all(_line({"event": event}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at_hang_up, stream, nursery.cancel_scope)
            reply = await _outcome(handler, request, emit)
            await stream.send_all(reply)
            nursery.cancel_scope.cancel()


def _listen(folder: Path) -> socket.socket:
    """Return a listening socket in the data folder, replacing a socket left by a killed node. Raises
    UsageError."""
    path = folder / CONTROL_NAME
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # We hold the folder's lock, so no other node is here and an existing socket is stale.
        path.unlink(missing_ok=True)
        with socket_path(folder) as short:
            listener.bind(short)
        path.chmod(0o600)  # set before the socket listens, so no connection exists yet
        listener.listen(WAITING_MAX)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"control socket {short_path(path)}: {reason}",
            "give the node its own folder, on a disk that supports sockets: `peerloom --data-dir DIR`",
        ) from None
    return listener


def _is_allowed(stream: trio.SocketStream) -> bool:
    """Return whether the other end is this user or root. On systems other than Linux, only the file modes
    ensure that."""
    if sys.platform != "linux":
        return True
    found = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] in (0, os.geteuid())


async def _outcome(handler: CommandHandler, request: _Request, emit: Emit) -> bytes:
    """Return the last line of the answer; an exception of the handler becomes an error line."""
    try:
        return _line({"result": await handler(request.arguments, emit)})
    except Exception as error:
        return _line(_failure(request.command, error))


def _failure(command: str, error: Exception) -> dict[str, object]:
    cause: Exception = error
    while isinstance(cause, ExceptionGroup) and len(cause.exceptions) == 1:
        cause = cause.exceptions[0]  # a handler's nursery wraps its errors
    if isinstance(cause, PeerloomError):
        return _error(cause)
    # This is our bug: the client must get the error, and the node must keep running.
    what = f"the node failed at '{command}': {type(cause).__name__}: {cause}"
    return _error(PeerloomError(what), trace="".join(traceback.format_exception(error)))


async def _cancel_at_hang_up(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    # A client sends nothing after its request, so any input means that it has ended the connection.
    with contextlib.suppress(trio.BrokenResourceError):
        await stream.receive_some(1)
    scope.cancel()


async def _read_line(stream: trio.SocketStream) -> bytes | None:
    """Return the first line, without its line end; None if the stream ends early or the line is too long."""
    buffer = bytearray()
    while len(buffer) <= LINE_BYTES_MAX:
        chunk = await stream.receive_some(_CHUNK_BYTES)
        if not chunk:
            return None
        buffer += chunk
        line, newline, _ = bytes(buffer[-len(chunk) :]).partition(b"\n")
        if newline:
            return bytes(buffer[: len(buffer) - len(chunk)]) + line
    return None


def _error(error: PeerloomError, trace: str = "") -> dict[str, object]:
    exit_code = error.exit_code or EXIT_UNEXPECTED
    what, do = error.written  # the client shows commands in the form that its own user types
    return {"error": {"what": what, "do": do, "exit_code": exit_code, "trace": trace}}


def _line(message: dict[str, object]) -> bytes:
    return msgspec.json.encode(message) + b"\n"
