"""A chat rendered to text by the chat template in a model's folder, with the positions of its answers.

The template is written in Jinja. It runs in Jinja's sandbox, with the names that transformers documents
("Chat templates"), in the sandboxed process that reads the data. If the template does not mark answers
(`generation`), an answer is the text by which it extends the prompt of all earlier messages.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from node.errors import UsageError
from node.invocation import install_command

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
Counted = Literal["answers", "last", "all"]

TEXT_LENGTH_MAX = 1 << 24
"""Maximum number of characters of one rendered chat."""
ASSISTANT = "assistant"
_OPEN, _CLOSE = "\ue3f0", "\ue3f1"
"""Private-use characters that mark answers during rendering. The user's text must not contain them."""
_ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}


class ChatTemplate:
    """A compiled template. Raises UsageError if the template is malformed, or jinja2 is not installed."""

    def __init__(self, text: str, folder: Path, special: Mapping[str, str]) -> None:
        try:
            import jinja2
            import jinja2.ext
            import jinja2.sandbox
        except ImportError:
            raise UsageError(
                f"{folder}: jinja2, which its chat template is written for, is not installed",
                install_command("jinja2"),
            ) from None
        self._folder, self._special = folder, dict(special)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation(jinja2), jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = self._raise
        environment.globals["strftime_now"] = _strftime_now
        self._errors = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError)
        try:
            self._template = environment.from_string(text)
        except self._errors as error:
            raise UsageError(
                f"{folder}: its chat template is not valid Jinja: {_first_line(error)}"
            ) from None
        self.has_today = "strftime_now" in text
        self.marks_answers = "generation" in text and "endgeneration" in text

    def render(
        self,
        messages: Messages,
        *,
        prompts: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return messages as a text; if `prompts`, with the beginning of an answer at the end. The template
        can use `options` by their names. Raises ValueError with the template's message."""
        found = self._marked(messages, prompts=prompts, tools=tools, options=options or {})
        return found.replace(_OPEN, "").replace(_CLOSE, "")

    def _marked(
        self,
        messages: Messages,
        *,
        prompts: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        try:
            found = self._template.render(
                {
                    **(options or {}),
                    **self._special,
                    "messages": [dict(message) for message in messages],
                    "tools": [dict(tool) for tool in tools] or None,
                    "documents": None,
                    "add_generation_prompt": prompts,
                }
            )
        except self._errors as error:
            raise ValueError(f"the chat template refuses it: {_first_line(error)}") from None
        if len(found) > TEXT_LENGTH_MAX:
            raise ValueError(f"the chat template turns it into {len(found):,} characters")
        return found

    def answers(self, messages: Messages, counted: Counted) -> tuple[str, list[Span]]:
        """Return a chat as a text, and the spans of its answers that count. Raises ValueError if the template
        refuses the messages, or if the positions of the answers cannot be found."""
        if any(mark in str(message) for message in messages for mark in (_OPEN, _CLOSE)):
            raise ValueError("it has characters U+E3F0 or U+E3F1, which mark answers here")
        marked = self._marked(messages)
        text = marked.replace(_OPEN, "").replace(_CLOSE, "")
        if counted == "all":
            return text, [(0, len(text))]
        if _OPEN in marked:
            spans = _spans(marked)
            return text, spans[-1:] if counted == "last" else spans
        places = [at for at, message in enumerate(messages) if message.get("role") == ASSISTANT]
        spans = []
        for at in places[-1:] if counted == "last" else places:
            before = self.render(messages[:at], prompts=True) if at else ""
            whole = self.render(messages[: at + 1])
            if not (text.startswith(whole) and whole.startswith(before)):
                raise ValueError(_UNKNOWN_ANSWERS)
            spans.append((len(before), len(whole)))
        return text, spans

    @staticmethod
    def _raise(message: str) -> str:
        raise ValueError(str(message))


_UNKNOWN_ANSWERS = "the chat template writes an answer differently once others follow it"


def is_unclear(error: ValueError) -> bool:
    """Return whether an error means that the positions of answers cannot be found."""
    return str(error) == _UNKNOWN_ANSWERS


def checked_messages(found: object) -> list[dict[str, Any]]:
    """Return a record's messages with `role` and `content`. ShareGPT's form (`from`, `value`) is converted.
    Raises ValueError."""
    if not isinstance(found, list) or not found:
        raise ValueError("want a list of messages with role and content")
    messages = []
    for message in found:
        if not isinstance(message, dict):
            raise ValueError("want messages with role and content")
        if "role" not in message and isinstance(message.get("from"), str) and "value" in message:
            if message["from"] not in _ROLES:
                raise ValueError(
                    f"a message is from {message['from'][:40]!r}; known senders are {', '.join(_ROLES)}"
                )
            message = {"role": _ROLES[message["from"]], "content": message["value"]}
        if not isinstance(message.get("role"), str):
            raise ValueError("a message has no role")
        if not isinstance(message.get("content"), str | list | None):
            raise ValueError("a message's content is not text")
        messages.append(message)
    return messages


def _spans(marked: str) -> list[Span]:
    """Return the positions of marked parts in the text without the marks."""
    spans, length, begin = [], 0, 0
    for part in marked.split(_OPEN):
        inside, _, rest = part.partition(_CLOSE)
        if begin:
            spans.append((length, length + len(inside)))
        length += len(inside) + len(rest)
        begin = 1
    return spans


def _generation(jinja2: Any) -> Any:
    """Return the Jinja tag `generation`, with which a template marks an assistant's text."""

    class Generation(jinja2.ext.Extension):  # type: ignore[misc]  # jinja2 is loaded late
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    return Generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(text: str) -> str:
    return datetime.now().strftime(text)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
