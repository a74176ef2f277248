"""Arguments as Gemma writes them: objects with bare keys, and texts between special marks.

A model writes them, so they may be malformed. Each character is read a bounded number of times.
"""

import json
import re
from typing import Any

DEPTH_MAX = 32
_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"([^:{}\[\],]+):")
_SCALAR = re.compile(r"[^,\]}]*")


class _Unclear(Exception):
    """The text is malformed."""


def gemma_arguments(text: str, quote: str) -> dict[str, Any] | None:
    """Return `{key:<quote>text<quote>,other:[1,2]}` as an object; None if it is malformed."""
    if not text:
        return {}
    try:
        found, end = _value(text, 0, quote, 0)
    except _Unclear:
        return None
    return found if isinstance(found, dict) and _skip(text, end) == len(text) else None


def _skip(text: str, at: int) -> int:
    """Return the position at which white space ends."""
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _value(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    """Return the value that begins at a position, and the position at which it ends."""
    at = _skip(text, at)
    if depth > DEPTH_MAX or at == len(text):
        raise _Unclear
    if text.startswith(quote, at):
        begin = at + len(quote)
        end = text.find(quote, begin)
        if end < 0:
            raise _Unclear
        return text[begin:end], end + len(quote)
    if text[at] == "{":
        return _table(text, at + 1, quote, depth)
    if text[at] == "[":
        return _list(text, at + 1, quote, depth)
    match = _SCALAR.match(text, at)
    assert match is not None
    return _scalar(match.group().strip()), match.end()


def _table(text: str, at: int, quote: str, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while not text.startswith("}", at := _skip(text, at)):
        match = _KEY.match(text, at)
        key = "" if match is None else match.group(1).strip()
        if match is None or not key:
            raise _Unclear
        key = key.removeprefix(quote).removesuffix(quote)
        found[key], at = _value(text, match.end(), quote, depth + 1)
        at = _after(text, at, "}")
    return found, at + 1


def _list(text: str, at: int, quote: str, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while not text.startswith("]", at := _skip(text, at)):
        value, at = _value(text, at, quote, depth + 1)
        found.append(value)
        at = _after(text, at, "]")
    return found, at + 1


def _after(text: str, at: int, end: str) -> int:
    """Return the position at which the next element begins, or the end."""
    at = _skip(text, at)
    if text.startswith(",", at):
        return at + 1
    if not text.startswith(end, at):
        raise _Unclear
    return at


def _refuse(word: str) -> Any:
    raise ValueError(word)  # NaN and Infinity are not JSON


def _scalar(word: str) -> Any:
    try:
        found = json.loads(word, parse_constant=_refuse)
    except ValueError:
        return word
    return found
