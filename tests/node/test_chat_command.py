"""The terminal's chat: a failed answer loses nothing, and what its commands do."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.cli import chat
from node.cli.client import NodeRefused
from node.errors import NoNode
from node.main import run


class Node:
    """In the place of a node: answers with the number of the question, or fails as it is told to."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.failures: dict[int, Exception] = {}

    def ask(self, _folder: Path, command: str, *_: Any, **__: Any) -> Any:
        row = {"name": "words", "service": "ab", "context": 64, "stages": [[]], "replicas": 1}
        answers = {
            "services.text": row | {"has_template": True},
            "services": {"services": [row | {"first_seconds": None, "tokens_per_second": None}]},
        }
        return answers[command]

    def request(self, _folder: Path, _command: str, arguments: Any) -> Iterator[dict[str, Any]]:
        self.asked.append(arguments["question"]["messages"])
        number = len(self.asked)
        yield {"event": {"piece": f"answer {number}"}}
        if number in self.failures:
            raise self.failures[number]
        told: dict[str, Any] = {
            "tokens": 2,
            "first_seconds": None,
            "tokens_per_second": None,
            "route": [],
            "moves": 0,
        }
        yield {"result": told | {"finish": "stop", "forgotten": 0}}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    found = Node()
    monkeypatch.setattr(chat, "ask", found.ask)
    monkeypatch.setattr(chat, "request", found.request)
    monkeypatch.setattr(chat, "peer_names", lambda _folder: {})
    return found


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> int:
    """The exit code of a chat in which these lines are said."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    return run(["chat", "words", "--data-dir", "/nowhere"])


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [each["content"] for each in messages]


def test_a_failed_answer_is_told_and_the_next_line_goes_on(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node.failures = {2: NodeRefused("words: the answer broke off", "ask again", 5, "")}
    assert say(monkeypatch, "one", "two", "three") == 0
    assert contents(node.asked[2]) == ["one", "answer 1", "two", "answer 2", "three"]
    told = capsys.readouterr()
    assert "error: words: the answer broke off\n  do: ask again" in told.err
    assert told.out == "answer 1\nanswer 2\nanswer 3\n"


def test_a_message_without_an_answer_is_tried_again_and_not_sent_twice(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any) -> Iterator[Any]:
        for _none in "x":
            raise NoNode("no node runs on this machine", "start one")
        yield {}

    answering = node.request
    monkeypatch.setattr(chat, "request", nothing)
    monkeypatch.setattr(chat._Talk, "_list", lambda *_: monkeypatch.setattr(chat, "request", answering))
    assert say(monkeypatch, "one", "/models", "/retry", "two") == 0
    assert contents(node.asked[0]) == ["one"]
    assert contents(node.asked[1]) == ["one", "answer 1", "two"]
    monkeypatch.setattr(chat, "request", nothing)
    # Where a program says the lines, the code tells it that the last one failed.
    assert say(monkeypatch, "one") == 3


def test_commands_change_what_is_sent(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert say(monkeypatch, *lines, f"/save {saved}") == 2
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
    assert say(monkeypatch, "/quit", "one") == 0
    assert len(node.asked) == 4


def test_the_services_that_answer_are_listed(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(monkeypatch, "/models") == 0
    assert "words  ab  up to 64 tokens" in capsys.readouterr().err
    assert not node.asked
