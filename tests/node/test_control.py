"""The control channel: a real server under trio, and the real client in a thread."""

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio
import trio.testing

from node.cli.client import GoneAway, NodeRefused, ask, is_running, request
from node.control import (
    COMMANDS_MAX,
    LINE_BYTES_MAX,
    REQUEST_SECONDS_MAX,
    WAITING_MAX,
    CommandHandler,
    ControlServer,
    Emit,
)
from node.errors import NoNode, RunFailed, UsageError
from node.paths import CONTROL_NAME, LOCK_NAME


async def echo(arguments: dict[str, Any], emit: Emit) -> object:
    for number in range(arguments.get("events", 0)):
        await emit({"number": number})
    return arguments


async def run_failed(_: dict[str, Any], emit: Emit) -> object:
    async with trio.open_nursery():
        raise RunFailed("no peers", "add one")


async def user_error(_: dict[str, Any], emit: Emit) -> object:
    raise UsageError("wrong file")


async def our_bug(_: dict[str, Any], emit: Emit) -> object:
    raise KeyError("x")


async def unspeakable(_: dict[str, Any], emit: Emit) -> object:
    return object()


HANDLERS: dict[str, CommandHandler] = {
    "echo": echo,
    "run_failed": run_failed,
    "user_error": user_error,
    "our_bug": our_bug,
    "unspeakable": unspeakable,
}


@asynccontextmanager
async def serving(folder: Path, handlers: dict[str, CommandHandler] = HANDLERS) -> AsyncIterator[Path]:
    """Run a server in `folder`, and yield the path of its socket."""
    async with trio.open_nursery() as nursery:
        await nursery.start(ControlServer(handlers, folder).run)
        yield folder / CONTROL_NAME
        nursery.cancel_scope.cancel()


async def in_thread(function: Any, *arguments: Any) -> Any:
    return await trio.to_thread.run_sync(lambda: function(*arguments))


async def raw(path: Path, data: bytes) -> bytes:
    """Send these bytes, and return everything that the node sends until it hangs up."""
    answer = b""
    async with await trio.open_unix_socket(path) as stream:
        try:
            await stream.send_all(data)
            await stream.send_eof()
            while chunk := await stream.receive_some():
                answer += chunk
        except trio.BrokenResourceError:
            pass
    return answer


async def test_a_client_gets_the_events_and_then_the_result(tmp_path: Path) -> None:
    async with serving(tmp_path):
        replies = await in_thread(lambda: list(request(tmp_path, "echo", {"events": 2, "é": [1]})))
        assert replies == [
            {"event": {"number": 0}},
            {"event": {"number": 1}},
            {"result": {"events": 2, "é": [1]}},
        ]
        assert await in_thread(ask, tmp_path, "echo") == {}


async def test_errors_reach_the_client_with_their_text_and_exit_code(tmp_path: Path) -> None:
    async with serving(tmp_path):
        for command, what, do, exit_code in (
            ("run_failed", "no peers", "add one", 5),
            ("user_error", "wrong file", None, 2),
            ("our_bug", "the node failed at 'our_bug': KeyError: 'x'", None, 1),
            ("ecko", "this node knows no command 'ecko'; did you mean 'echo'?", None, 2),
        ):
            with pytest.raises(NodeRefused) as caught:
                await in_thread(ask, tmp_path, command)
            assert (caught.value.what, caught.value.do, caught.value.exit_code) == (what, do, exit_code)
        with pytest.raises(NodeRefused, match="TypeError"):
            await in_thread(ask, tmp_path, "unspeakable")
        assert await in_thread(ask, tmp_path, "echo") == {}  # the node still runs


async def test_the_socket_is_private_and_removed_with_the_node(tmp_path: Path) -> None:
    async with serving(tmp_path) as path:
        status = path.stat()
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert is_running(tmp_path)
        assert os.listdir(tmp_path) == [CONTROL_NAME]
    assert os.listdir(tmp_path) == []
    assert not is_running(tmp_path)


AS_NOBODY = """
import os, socket, sys
path, message = sys.argv[1], b'{"command": "echo", "arguments": {}}' + bytes([10])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.connect(path)
try:
    connection.sendall(message)
except BrokenPipeError:
    pass
print(connection.makefile().readline())
"""


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="only root can become another user")
async def test_another_user_is_refused_even_if_the_file_modes_allow_access(tmp_path: Path) -> None:
    with TemporaryDirectory() as open_folder:  # pytest's own folders are closed to others
        folder = Path(open_folder)
        async with serving(folder) as path:

            async def ask_as_nobody() -> "subprocess.CompletedProcess[bytes]":
                command = [sys.executable, "-c", AS_NOBODY, str(path)]
                return await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)

            folder.chmod(0o755)  # noqa: ASYNC240 - at once
            assert b"PermissionError" in (await ask_as_nobody()).stderr
            path.chmod(0o666)
            assert b"belongs to another user" in (await ask_as_nobody()).stdout


async def test_silent_connections_block_no_client_and_soon_end(tmp_path: Path) -> None:
    async with serving(tmp_path) as path, AsyncExitStack() as stack:
        crowd = [
            await stack.enter_async_context(await trio.open_unix_socket(path)) for _ in range(2 * WAITING_MAX)
        ]
        with trio.fail_after(REQUEST_SECONDS_MAX / 2):
            assert await in_thread(ask, tmp_path, "echo") == {}
        with trio.fail_after(REQUEST_SECONDS_MAX + 5):
            for stream in crowd:
                assert await stream.receive_some(1) == b""


async def test_endless_commands_are_limited_in_number(tmp_path: Path) -> None:
    begun: list[object] = []

    async def endless(arguments: dict[str, Any], emit: Emit) -> object:
        begun.append(arguments)
        await trio.sleep_forever()

    line = b'{"command": "endless", "arguments": {}}\n'
    async with serving(tmp_path, HANDLERS | {"endless": endless}) as path, AsyncExitStack() as stack:
        for count in range(COMMANDS_MAX):
            stream = await stack.enter_async_context(await trio.open_unix_socket(path))
            await stream.send_all(line)
            while len(begun) <= count:
                await trio.lowlevel.checkpoint()
        with pytest.raises(NodeRefused, match=f"serves {COMMANDS_MAX} commands already"):
            await in_thread(ask, tmp_path, "echo")
        await stream.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert await in_thread(ask, tmp_path, "echo") == {}


async def test_a_socket_left_by_a_killed_node_is_replaced(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / CONTROL_NAME))
    left.listen()
    left.close()
    (tmp_path / LOCK_NAME).write_text("4121")
    assert not is_running(tmp_path)
    with pytest.raises(NoNode, match="process 4121 ended without a goodbye"):
        await in_thread(ask, tmp_path, "echo")
    async with serving(tmp_path):
        assert await in_thread(ask, tmp_path, "echo") == {}


async def test_a_data_folder_with_a_long_path_gets_a_socket_too(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["x" * 60] * 4)
    folder.mkdir(parents=True)
    before = set(os.listdir(tempfile.gettempdir()))
    async with serving(folder) as path:
        assert len(str(path)) > 240
        assert is_running(folder)
        assert await in_thread(ask, folder, "echo") == {}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not is_running(folder)
    assert {name for name in os.listdir(tempfile.gettempdir()) if len(name) == 11} <= before


def test_a_folder_that_cannot_hold_a_socket_is_an_error(tmp_path: Path) -> None:
    (tmp_path / CONTROL_NAME).mkdir()
    with pytest.RaisesGroup(pytest.RaisesExc(UsageError, match="control socket"), allow_unwrapped=True):
        trio.run(ControlServer(HANDLERS, tmp_path).run)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff\n",
        b"[" * 100_000 + b"\n",
        b"{}\n",
        b'{"command":1,"arguments":{}}\n',
        b"x" * (LINE_BYTES_MAX + 100_000),
    ],
)
async def test_garbage_is_refused_and_the_node_keeps_running(tmp_path: Path, data: bytes) -> None:
    async with serving(tmp_path) as path:
        answer = await raw(path, data)
        assert answer == b"" or b"did not understand" in answer
        assert await in_thread(ask, tmp_path, "echo") == {}


async def test_a_client_that_hangs_up_cancels_its_command(tmp_path: Path) -> None:
    cancelled = trio.Event()

    async def endless(_: dict[str, Any], emit: Emit) -> object:
        await emit("begun")
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    def begin_and_hang_up() -> None:
        replies = request(tmp_path, "endless")
        assert next(replies) == {"event": "begun"}
        replies.close()  # type: ignore[attr-defined]  # an iterator to callers, a generator in truth

    async with serving(tmp_path, {"endless": endless}):
        await in_thread(begin_and_hang_up)
        await cancelled.wait()


async def test_a_client_that_does_not_read_blocks_only_its_own_command(tmp_path: Path) -> None:
    async def flood(_: dict[str, Any], emit: Emit) -> object:
        async with trio.open_nursery() as nursery:
            for _task in range(2):
                nursery.start_soon(flood_once, emit)
        return None

    async def flood_once(emit: Emit) -> None:
        while True:
            await emit("x" * 100_000)

    def begin_and_break_off() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / CONTROL_NAME))
            asked = {"command": "flood", "arguments": {}}
            connection.sendall(json.dumps(asked).encode() + b"\n")
            connection.recv(1)

    async with serving(tmp_path, HANDLERS | {"flood": flood}):
        await in_thread(begin_and_break_off)
        assert await in_thread(ask, tmp_path, "echo") == {}


async def test_a_client_is_told_if_its_node_stops_during_a_command(tmp_path: Path) -> None:
    async def dying(_: dict[str, Any], emit: Emit) -> object:
        stop.cancel()
        await trio.sleep_forever()

    with trio.CancelScope() as stop:
        async with trio.open_nursery() as nursery:
            await nursery.start(ControlServer({"dying": dying}, tmp_path).run)
            with trio.CancelScope(shield=True), pytest.raises(GoneAway):
                await in_thread(ask, tmp_path, "dying")


async def test_a_client_waits_only_a_limited_time_for_a_silent_node(tmp_path: Path) -> None:
    async def silent(_: dict[str, Any], emit: Emit) -> object:
        await trio.sleep_forever()

    async with serving(tmp_path, {"status": silent}):
        with pytest.raises(NoNode, match="has not answered"):
            await trio.to_thread.run_sync(lambda: ask(tmp_path, "status", seconds=0.1))


async def test_a_client_reports_a_node_that_accepts_no_connections(tmp_path: Path) -> None:
    """The node's process is stopped: the kernel queues a few connections for it, and then no more."""
    (tmp_path / LOCK_NAME).write_text("4121")
    with ExitStack() as stack:
        stopped = stack.enter_context(socket.socket(socket.AF_UNIX))
        stopped.bind(str(tmp_path / CONTROL_NAME))
        stopped.listen(1)
        with suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(str(tmp_path / CONTROL_NAME))
        assert is_running(tmp_path)


@pytest.mark.parametrize("kind", ["nothing", "a file", "no folder"])
def test_a_client_reports_that_no_node_is_running(tmp_path: Path, kind: str) -> None:
    folder = tmp_path
    if kind == "a file":
        (tmp_path / CONTROL_NAME).write_text("")
    elif kind == "no folder":
        folder = tmp_path / "none"
    with pytest.raises(NoNode, match="no node runs on this machine") as caught:
        ask(folder, "status")
    assert "python -m node" in (caught.value.do or "")
