"""Tools that take plain text (`custom` of Responses), shown to models as functions of one text.

A model calls such a tool with JSON like any other; its client sees only the text.
"""

import json
import re
from typing import Any

from node.web.forms.asking import FormProblem

INPUT = "input"
"""The one parameter of such a function."""
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LETTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
"""Whole letters of a JSON string: an escape that is not complete waits."""


def custom_function(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of the type custom as a function in the form of chat completions. A regular expression
    becomes the pattern of its text; a Lark grammar goes into the description. Raises FormProblem: the format
    is invalid."""
    text: dict[str, Any] = {"type": "string"}
    description = tool.get("description")
    description = description if isinstance(description, str) else ""
    asked = tool.get("format") or {"type": "text"}
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "grammar":
        definition, syntax = asked.get("definition"), asked.get("syntax")
        if not isinstance(definition, str) or syntax not in ("lark", "regex"):
            raise FormProblem("tools: want a grammar's syntax (lark or regex) and definition", field="tools")
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        else:
            description += f"\n\n{INPUT} follows this Lark grammar:\n{definition}"
    elif kind != "text":
        raise FormProblem("tools: the format of a custom tool is text or grammar", field="tools")
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    function = {"name": tool.get("name"), "description": description.strip(), "parameters": parameters}
    return {"type": "function", "function": function}


def is_held(tool: dict[str, Any]) -> bool:
    """Return whether a custom tool's text must match a regular expression."""
    asked = tool.get("format")
    return isinstance(asked, dict) and asked.get("syntax") == "regex"


class TextArgument:
    """The text in the JSON of a call's arguments, as it comes."""

    def __init__(self) -> None:
        self._json = ""
        self._at = -1
        """The start of the text that was not returned yet; -1: the text has not begun."""
        self._told = 0

    def push(self, more: str) -> str:
        """Take more JSON; return what it adds to the text."""
        self._json += more
        if self._at < 0:
            head = _HEAD.match(self._json)
            if head is None:
                return ""
            self._at = head.end()
        letters = _LETTERS.match(self._json, self._at)
        assert letters is not None
        self._at = letters.end()
        return self._count(_plain(json.loads(f'"{letters.group()}"', strict=False)))

    def finish(self) -> str:
        """Return the rest of the text; arguments of another form are the text themselves."""
        try:
            found = json.loads(self._json, strict=False)
        except (ValueError, RecursionError):
            found = None
        text = found.get(INPUT) if isinstance(found, dict) else None
        if self._at < 0 and not isinstance(text, str):
            text = self._json
        return self._count(_plain(text)[self._told :]) if isinstance(text, str) else ""

    def _count(self, text: str) -> str:
        self._told += len(text)
        return text


def _plain(text: str) -> str:
    """Return a text without unpaired surrogates, which JSON cannot have."""
    return text.encode("utf-8", "replace").decode()
