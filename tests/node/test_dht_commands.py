"""`peerloom dht`: the requests that it makes from its arguments, and its output."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from node.cli import dht

RUNNER = CliRunner()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Answer as a node that stores everything and always returns one value; record the requests."""
    seen: list[dict[str, Any]] = []

    def ask(_place: Path, name: str, arguments: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        del seconds
        seen.append({"name": name} | arguments)
        return {"found": True, "value": b"\x00\xff".hex(), "holders": 1, "key": "ab" * 20}

    monkeypatch.setattr(dht, "ask", ask)
    return seen


def call(folder: Path, *arguments: str, given: bytes = b"") -> Any:
    return RUNNER.invoke(dht.app, [*arguments, "--data-dir", str(folder)], input=given)


def test_put_reads_a_value_from_stdin(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    result = call(tmp_path, "put", "name", "-", given=b"\x00\x01")
    assert (result.exit_code, result.stdout) == (0, "name: kept by 1 node for 1 h 0 min\n")
    assert (asked[0]["key"], asked[0]["value"], asked[0]["immutable"]) == ("name", "0001", False)


def test_an_immutable_value_needs_no_key_and_its_hash_is_printed(
    asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    result = call(tmp_path, "put", "--immutable", "for ever")
    assert result.stdout.startswith("ab" * 20)
    assert (bytes.fromhex(asked[0]["value"]), asked[0]["immutable"]) == (b"for ever", True)


def test_put_without_any_value_makes_no_request(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    assert call(tmp_path, "put", "name").exit_code != 0
    assert asked == []


def test_get_can_write_the_raw_value_into_a_pipe(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    assert call(tmp_path, "get", "name", "--raw").stdout_bytes == b"\x00\xff"
    assert [each["name"] for each in asked] == ["dht.get"]


def test_get_shows_a_value_escaped_by_default(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    assert call(tmp_path, "get", "name").stdout == "\\x00\\xff\n"
    assert call(tmp_path, "get", "name", "--raw", "--json").exit_code != 0
    assert dht.escaped("\x1b[2Jgrün\u202e\n".encode()) == "\\x1b[2Jgrün\\u202e\n"
