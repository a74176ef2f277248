"""The chat in the terminal: a failed answer loses nothing, and each command works."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from typer.testing import CliRunner

from node.control import ControlServer, Emit
from node.errors import NoNode, PeerloomError
from node.main import run

ROW = {"name": "words", "service": "ab", "context": 64, "stages": [[]], "replicas": 1}
TOLD: dict[str, Any] = {
    "tokens": 2,
    "first_seconds": None,
    "tokens_per_second": None,
    "route": [],
    "moves": 0,
}


class Node:
    """A node's control socket. It answers with the number of the question, or fails where the test asks for
    it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[list[dict[str, str]]] = []
        self.failures: dict[int, PeerloomError] = {}
        self.is_away = False
        """Whether questions fail; reset once a client asks for the services."""
        self.is_up = threading.Event()
        self._handlers = {
            "services.text": self._text,
            "services": self._services,
            "generate": self._generate,
            "status": self._status,
            "peers": self._peers,
        }

    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(ControlServer(self._handlers, self.folder).run)
            self._scope, self._token = nursery.cancel_scope, trio.lowlevel.current_trio_token()
            self.is_up.set()

    def stop(self) -> None:
        self._token.run_sync_soon(self._scope.cancel)

    async def _text(self, _arguments: dict[str, Any], _emit: Emit) -> object:
        return ROW | {"has_template": True}

    async def _services(self, _arguments: dict[str, Any], _emit: Emit) -> object:
        self.is_away = False
        return {"services": [ROW | {"first_seconds": None, "tokens_per_second": None}]}

    async def _generate(self, arguments: dict[str, Any], emit: Emit) -> object:
        if self.is_away:
            raise NoNode("no node runs on this machine", "start one")
        self.asked.append(arguments["question"]["messages"])
        number = len(self.asked)
        await emit({"piece": f"answer {number}"})
        if number in self.failures:
            raise self.failures[number]
        return TOLD | {"finish": "stop", "forgotten": 0}

    async def _status(self, _arguments: dict[str, Any], _emit: Emit) -> object:
        return {"peer": "p", "name": ""}

    async def _peers(self, _arguments: dict[str, Any], _emit: Emit) -> object:
        return {"peers": []}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    folder = tmp_path / "data"
    folder.mkdir()
    found = Node(folder)
    thread = threading.Thread(target=trio.run, args=(found.serve,))
    thread.start()
    assert found.is_up.wait(60)
    yield found
    found.stop()
    thread.join(60)


def say(node: Node, *lines: str) -> int:
    """Return the exit code of a chat with these input lines."""
    with CliRunner().isolation(input="\n".join(lines) + "\n") as (printed, errors, _):
        code = run(["chat", "words", "--data-dir", str(node.folder)])
        told = [each.getvalue().decode() for each in (printed, errors)]
    sys.stdout.write(told[0])
    sys.stderr.write(told[1])
    return code


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [each["content"] for each in messages]


def test_a_failed_answer_is_reported_and_the_next_line_is_sent(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.failures = {2: PeerloomError("words: the answer broke off", "ask again")}
    assert say(node, "one", "two", "three") == 0
    assert contents(node.asked[2]) == ["one", "answer 1", "two", "answer 2", "three"]
    told = capsys.readouterr()
    assert "error: words: the answer broke off\n  do: ask again" in told.err
    assert told.out == "answer 1\nanswer 2\nanswer 3\n"


def test_a_message_without_an_answer_is_retried_and_not_sent_twice(node: Node) -> None:
    node.is_away = True
    assert say(node, "one", "/models", "/retry", "two") == 0
    assert contents(node.asked[0]) == ["one"]
    assert contents(node.asked[1]) == ["one", "answer 1", "two"]
    node.is_away = True
    # With piped input the exit code reports that the last line failed.
    assert say(node, "one") == 3


def test_chat_commands_change_the_request(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "talk.json"
    lines = [
        "/system Be brief.",
        "one",
        "//etc",
        "/retry",
        f"/save {saved}",
        "/clear",
        "two",
        "/hlep",
        "/help",
    ]
    assert say(node, *lines, f"/save {saved}") == 2
    assert contents(node.asked[1]) == ["Be brief.", "one", "answer 1", "/etc"]
    assert node.asked[2] == node.asked[1]
    assert contents(node.asked[3]) == ["Be brief.", "two"]
    kept = json.loads(saved.read_text())
    assert contents(kept) == ["Be brief.", "one", "answer 1", "/etc", "answer 3"]
    assert saved.stat().st_mode & 0o777 == 0o600
    errors = capsys.readouterr().err
    assert "/hlep: no such command; did you mean 'help'" in errors
    assert "file exists" in errors
    assert "/retry" in errors
    assert say(node, "/quit", "one") == 0
    assert len(node.asked) == 4


def test_the_services_that_answer_are_listed(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert say(node, "/models") == 0
    assert "words  ab  up to 64 tokens" in capsys.readouterr().err
    assert not node.asked
