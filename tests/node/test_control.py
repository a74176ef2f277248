"""The control channel: a real server under trio, the real client in a thread."""

import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from node.cli.client import GoneAway, NodeRefused, ask, is_running, request
from node.control import LINE_BYTES_MAX, CommandHandler, ControlServer, Emit
from node.errors import NoNode, RunFailed, UsageError
from node.storage.folder import FolderStorage


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
async def serving(folder: Path, handlers: dict[str, CommandHandler] = HANDLERS) -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        server = ControlServer(handlers, FolderStorage(folder), os.urandom)
        port: int = await nursery.start(server.run)
        yield port
        nursery.cancel_scope.cancel()


async def in_thread(function: Any, *arguments: Any) -> Any:
    return await trio.to_thread.run_sync(lambda: function(*arguments))


async def raw(port: int, data: bytes) -> bytes:
    """What the node answers to bytes of a stranger, until it hangs up."""
    answer = b""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
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


async def test_errors_keep_their_words_and_exit_code(tmp_path: Path) -> None:
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
        assert await in_thread(ask, tmp_path, "echo") == {}  # and the node lives


async def test_only_the_owner_can_read_the_token_and_it_goes_with_the_node(tmp_path: Path) -> None:
    async with serving(tmp_path):
        assert stat.S_IMODE((tmp_path / "control.json").stat().st_mode) == 0o600
        assert is_running(tmp_path)
    assert not (tmp_path / "control.json").exists()
    assert not is_running(tmp_path)


async def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as port:
        for token in ("", "0" * 64, "é"):
            line = json.dumps({"token": token, "command": "echo", "arguments": {}}).encode() + b"\n"
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(line)
                assert b"wrong token" in await stream.receive_some()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff\n",
        b"[" * 100_000 + b"\n",
        b"{}\n",
        b'{"token":1,"command":"echo","arguments":{}}\n',
        b"x" * (LINE_BYTES_MAX + 100_000),
    ],
)
async def test_garbage_is_refused_and_the_node_lives(tmp_path: Path, data: bytes) -> None:
    async with serving(tmp_path) as port:
        answer = await raw(port, data)
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


async def test_a_client_that_does_not_read_stops_only_its_own_command(tmp_path: Path) -> None:
    async def flood(_: dict[str, Any], emit: Emit) -> object:
        async with trio.open_nursery() as nursery:
            for _task in range(2):
                nursery.start_soon(flood_once, emit)
        return None

    async def flood_once(emit: Emit) -> None:
        while True:
            await emit("x" * 100_000)

    def begin_and_break_off() -> None:
        control = json.loads((tmp_path / "control.json").read_bytes())
        with socket.create_connection(("127.0.0.1", control["port"])) as connection:
            asked = {"token": control["token"], "command": "flood", "arguments": {}}
            connection.sendall(json.dumps(asked).encode() + b"\n")
            connection.recv(1)

    async with serving(tmp_path, HANDLERS | {"flood": flood}):
        await in_thread(begin_and_break_off)
        assert await in_thread(ask, tmp_path, "echo") == {}


async def test_a_node_that_goes_away_in_between_is_said(tmp_path: Path) -> None:
    async def dying(_: dict[str, Any], emit: Emit) -> object:
        stop.cancel()
        await trio.sleep_forever()

    with trio.CancelScope() as stop:
        async with trio.open_nursery() as nursery:
            await nursery.start(ControlServer({"dying": dying}, FolderStorage(tmp_path), os.urandom).run)
            with trio.CancelScope(shield=True), pytest.raises(GoneAway):
                await in_thread(ask, tmp_path, "dying")


async def test_a_node_that_says_nothing_is_not_waited_for_without_end(tmp_path: Path) -> None:
    async def silent(_: dict[str, Any], emit: Emit) -> object:
        await trio.sleep_forever()

    async with serving(tmp_path, {"status": silent}):
        with pytest.raises(NoNode, match="has not answered"):
            await trio.to_thread.run_sync(lambda: ask(tmp_path, "status", seconds=0.1))


@pytest.mark.parametrize(
    "control",
    [None, "", "[]", '{"pid": 1}', '{"pid": "x", "port": 1, "token": ""}'],
)
def test_without_a_node_a_client_says_so(tmp_path: Path, control: str | None) -> None:
    if control is not None:
        (tmp_path / "control.json").write_text(control)
    with pytest.raises(NoNode, match="no node runs on this machine") as caught:
        ask(tmp_path, "status")
    assert "python -m node" in (caught.value.do or "")


def test_a_node_that_died_or_does_not_answer_counts_as_none(tmp_path: Path) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        port = unheard.getsockname()[1]
        for pid, reason in ((2**22 + 1, "ended without a goodbye"), (os.getpid(), "nothing answers")):
            document = {"pid": pid, "port": port, "token": "t"}
            (tmp_path / "control.json").write_text(json.dumps(document))
            with pytest.raises(NoNode, match=reason):
                ask(tmp_path, "status")
