"""Arguments as Gemma writes them: objects with bare keys, and texts between marks of their own."""

import json
import re
from typing import Any

DEPTH_MAX = 32
_KEY = re.compile(r"\s*([^:{}\[\],]+?)\s*:")
_SCALAR = re.compile(r"[^,\]}]*")


class _Unclear(Exception):
    """It is no such text."""


def gemma_arguments(text: str, quote: str) -> dict[str, Any] | None:
    """Return `{key:<quote>text<quote>,other:[1,2]}` as an object; None where it is none."""
    if not text:
        return {}
    try:
        found, rest = _value(text, quote, 0)
    except _Unclear:
        return None
    return found if isinstance(found, dict) and not rest.strip() else None


def _value(text: str, quote: str, depth: int) -> tuple[Any, str]:
    text = text.lstrip()
    if depth > DEPTH_MAX or not text:
        raise _Unclear
    if text.startswith(quote):
        inside, mark, rest = text[len(quote) :].partition(quote)
        if not mark:
            raise _Unclear
        return inside, rest
    if text[0] == "{":
        return _table(text[1:], quote, depth)
    if text[0] == "[":
        return _list(text[1:], quote, depth)
    match = _SCALAR.match(text)
    assert match is not None
    return _scalar(match.group().strip()), text[match.end() :]


def _table(text: str, quote: str, depth: int) -> tuple[dict[str, Any], str]:
    found: dict[str, Any] = {}
    while not text.lstrip().startswith("}"):
        match = _KEY.match(text)
        if match is None:
            raise _Unclear
        key = match.group(1).removeprefix(quote).removesuffix(quote)
        found[key], text = _value(text[match.end() :], quote, depth + 1)
        text = text.lstrip()
        if text.startswith(","):
            text = text[1:]
        elif not text.startswith("}"):
            raise _Unclear
    return found, text.lstrip()[1:]


def _list(text: str, quote: str, depth: int) -> tuple[list[Any], str]:
    found: list[Any] = []
    while not text.lstrip().startswith("]"):
        value, text = _value(text, quote, depth + 1)
        found.append(value)
        text = text.lstrip()
        if text.startswith(","):
            text = text[1:]
        elif not text.startswith("]"):
            raise _Unclear
    return found, text.lstrip()[1:]


def _refuse(word: str) -> Any:
    raise ValueError(word)  # NaN and Infinity are no JSON


def _scalar(word: str) -> Any:
    try:
        found = json.loads(word, parse_constant=_refuse)
    except ValueError:
        return word
    return found
