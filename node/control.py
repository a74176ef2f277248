"""The control channel: how `status`, `train`, `leave` and the others reach the node on this machine.

The node listens on 127.0.0.1, any port, and writes `control.json` (mode 0600: port, token, pid) into
its data folder: who may read that folder may command the node. A client sends one JSON line
`{"token", "command", "arguments"}` and gets JSON lines: any number of `{"event": ...}`, then one
`{"result": ...}` or `{"error": {"what", "do", "exit_code", "trace"}}`. A client that hangs up
cancels what it asked for. The other end is `node.cli.client`.

Not for peers, and not for browsers: a web page's request begins with a line that is no JSON.
"""

import contextlib
import hmac
import os
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec
import trio

from node.containment import contain
from node.errors import EXIT_UNEXPECTED, PeerloomError, UsageError
from node.nearest import did_you_mean
from node.paths import CONTROL_NAME
from node.seams import Storage

HOST = "127.0.0.1"
LINE_BYTES_MAX = 4 << 20
"""Of a request: the largest carries a RUN.toml and paths, far below this."""
REQUEST_SECONDS_MAX = 10.0
"""A client writes its request at once; who stays silent longer is not one."""
CLIENTS_MAX = 64
"""A screen or two and some scripts; more are refused rather than left waiting."""
_CHUNK_BYTES = 65_536
_TOKEN_BYTES = 32

Emit = Callable[[object], Awaitable[None]]
"""Sends one event (anything `msgspec.json` encodes) to the client; waits while it reads slowly."""

CommandHandler = Callable[[dict[str, Any], Emit], Awaitable[object]]
"""Serves one command: arguments in, result out. PeerloomError becomes the client's error."""


class _Request(msgspec.Struct, frozen=True):
    token: Annotated[str, msgspec.Meta(max_length=128)]
    command: Annotated[str, msgspec.Meta(max_length=64)]
    arguments: dict[str, Any]


class ControlServer:
    """Serves `handlers` by command name until cancelled; `entropy` makes the token."""

    def __init__(
        self,
        handlers: Mapping[str, CommandHandler],
        storage: Storage,
        entropy: Callable[[int], bytes],
    ) -> None:
        self._handlers = handlers
        self._storage = storage
        self._token = entropy(_TOKEN_BYTES).hex()
        self._clients = 0

    async def run(self, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; the port is started's value. `control.json` goes away at the end."""
        listeners = await trio.open_tcp_listeners(0, host=HOST)
        port: int = listeners[0].socket.getsockname()[1]
        document = {"port": port, "token": self._token, "pid": os.getpid()}
        self._storage.write(CONTROL_NAME, msgspec.json.encode(document))
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, self._serve, listeners)
                task_status.started(port)
        finally:
            self._storage.delete(CONTROL_NAME)

    async def _serve(self, stream: trio.SocketStream) -> None:
        with contain("control"):
            await self._serve_client(stream)

    async def _serve_client(self, stream: trio.SocketStream) -> None:
        async with stream:
            if self._clients >= CLIENTS_MAX:
                return
            self._clients += 1
            try:
                await self._answer(stream)
            except* (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the client has gone, and with it whoever could be told
            finally:
                self._clients -= 1

    async def _answer(self, stream: trio.SocketStream) -> None:
        line = None
        with trio.move_on_after(REQUEST_SECONDS_MAX):
            line = await _read_line(stream)
        if line is None:
            return
        try:
            request = msgspec.json.decode(line, type=_Request)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            await stream.send_all(_line(_error(UsageError("the node did not understand this request"))))
            return
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            await stream.send_all(_line(_error(UsageError("the node refused this request: wrong token"))))
            return
        await self._perform(stream, request)

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


async def _outcome(handler: CommandHandler, request: _Request, emit: Emit) -> bytes:
    """The last line of the answer, whatever the handler does."""
    try:
        return _line({"result": await handler(request.arguments, emit)})
    except Exception as error:
        return _line(_failure(request.command, error))


def _failure(command: str, error: Exception) -> dict[str, object]:
    cause: Exception = error
    while isinstance(cause, ExceptionGroup) and len(cause.exceptions) == 1:
        cause = cause.exceptions[0]  # a handler's nursery wraps what it raised
    if isinstance(cause, PeerloomError):
        return _error(cause)
    # Our bug: the client must hear of it, and the node must live.
    what = f"the node failed at '{command}': {type(cause).__name__}: {cause}"
    return _error(PeerloomError(what), trace="".join(traceback.format_exception(error)))


async def _cancel_at_hang_up(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    # After its request a client sends nothing more, so whatever comes is the end.
    with contextlib.suppress(trio.BrokenResourceError):
        await stream.receive_some(1)
    scope.cancel()


async def _read_line(stream: trio.SocketStream) -> bytes | None:
    """The first line, without its end; None where the stream ends before it or it is too long."""
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
    return {"error": {"what": error.what, "do": error.do, "exit_code": exit_code, "trace": trace}}


def _line(message: dict[str, object]) -> bytes:
    return msgspec.json.encode(message) + b"\n"
