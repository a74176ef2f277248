"""Tools that take plain text (`custom` of Responses), presented to models as functions with one text
argument.

A model calls such a tool with JSON like any other tool; its client sees only the text.
"""

import json
import re
from typing import Any

from node.web.forms.asking import FormProblem

INPUT = "input"
"""The single parameter of such a function."""
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LETTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
"""Complete characters of a JSON string. An incomplete escape waits for more input."""


def custom_function(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of the type custom as a function in the form of chat completions. A regular expression
    becomes the pattern of its text; a Lark grammar is added to the description. Raises FormProblem if the
    format is invalid."""
    text: dict[str, Any] = {"type": "string"}
    description = tool.get("description")
    description = description if isinstance(description, str) else ""
    asked = tool.get("format") or {"type": "text"}
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "grammar":
        definition, syntax = asked.get("definition"), asked.get("syntax")
        if not isinstance(definition, str) or syntax not in ("lark", "regex"):
            raise FormProblem(
                "tools: a grammar needs a syntax (lark or regex) and a definition", field="tools"
            )
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        else:
            description += f"\n\n{INPUT} follows this Lark grammar:\n{definition}"
    elif kind != "text":
        raise FormProblem("tools: the format of a custom tool must be text or grammar", field="tools")
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
    """Extracts the text from the JSON of a call's arguments as the JSON arrives."""

    def __init__(self) -> None:
        self._json = ""
        self._at = -1
        """Where the text begins that was not returned yet; -1 before the text has begun."""
        self._told = 0

    def push(self, more: str) -> str:
        """Take more JSON; return the text that it adds."""
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
        """Return the rest of the text. Arguments in a different form are themselves the text."""
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
