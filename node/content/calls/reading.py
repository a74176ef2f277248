"""A streaming reader of answers: it separates text, reasoning and tool calls.

    reader = AnswerReader("hermes", reasoning=0, is_reasoning=False, tools={"look": {...}})
    parts = reader.push("<tool_call>\\n{\\"name\\"")      the parts that are certain by now
    parts = reader.finish()                             the rest; what was not a call becomes text

It reads the text in one pass, with a generator that waits (`yield`) if it needs more.
"""

import json
from collections.abc import Generator, Mapping
from typing import Any

from node.content.calls.answer_parts import AnswerParts, Part
from node.content.calls.answer_text import SPACE, AnswerText, Steps
from node.content.calls.formats import DEEPSEEK, GEMMA, REASONING, CallFormat
from node.content.calls.gemma import gemma_arguments
from node.content.calls.scanning import NAME_LENGTH_MAX, CallObject

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by its name."""
CALLS_MAX = 128
"""Maximum number of calls in one answer; further calls are treated as text."""


class AnswerReader:
    """Reads one answer. Without `tools`, calls are treated as text."""

    def __init__(
        self,
        calls: CallFormat,
        reasoning: int = -1,
        *,
        is_reasoning: bool = False,
        tools: Tools | None = None,
    ) -> None:
        self._format: CallFormat = calls
        self._tools = tools or {}
        self._marks = REASONING[reasoning] if reasoning >= 0 else None
        self._is_reasoning = is_reasoning
        self._text = AnswerText()
        self._output = AnswerParts()
        self._steps = self._harmony() if calls == "harmony" else self._answer()
        next(self._steps, None)

    @property
    def calls(self) -> int:
        """Return the number of complete calls."""
        return self._output.calls

    @property
    def is_reasoning(self) -> bool:
        """Return whether the next text is reasoning."""
        return self._is_reasoning

    def push(self, text: str) -> list[Part]:
        """Read more text; return its parts."""
        self._text.rest += text
        next(self._steps, None)
        return self._output.take()

    def finish(self) -> list[Part]:
        """Return the text that was held back. No more text may follow."""
        self._text.is_last = True
        for _ in self._steps:
            pass
        if self._text.rest:
            self._output.say(self._text.rest)
            self._text.rest = ""
        return self._output.take()

    # Output

    def _begin(self, name: str) -> None:
        self._text.take_held()
        self._output.begin(name)

    def _release(self) -> None:
        """Report the saved text as text, because it is not a call."""
        self._output.say(self._text.take_held())

    # The answer

    def _answer(self) -> Steps:
        yield from self._reasoning()
        reads_calls = bool(self._tools)
        if reads_calls and self._format in ("llama", "json"):
            self._text.hold("")
            yield from self._bare_calls()
        marks = self._opening() if reads_calls else ()
        while True:
            mark = yield from self._text.until(marks, self._output.say, is_stripped=bool(marks))
            if not mark:
                return
            self._text.hold(self._text.space + mark)
            if self._output.number >= CALLS_MAX:
                self._release()
            else:
                yield from self._group(mark)
                self._output.leave()
            self._text.take_held()

    def _opening(self) -> tuple[str, ...]:
        found: dict[str, tuple[str, ...]] = {
            "hermes": ("<tool_call>",),
            "llama": ("<|python_tag|>",),
            "mistral": ("[TOOL_CALLS]",),
            "deepseek": (DEEPSEEK["calls▁begin"],),
            "granite": ("<|tool_call|>", "<tool_call>"),
            "gemma": tuple(begin for begin, _, _ in GEMMA),
        }
        return found.get(self._format, ())

    def _reasoning(self) -> Steps:
        if self._marks is None:
            return
        begin, end = self._marks
        if not self._is_reasoning:
            while (
                not self._text.is_last
                and begin.startswith(self._text.rest.lstrip(SPACE))
                and (len(self._text.rest.lstrip(SPACE)) < len(begin))
            ):
                yield
            stripped = self._text.rest.lstrip(SPACE)
            if not stripped.startswith(begin):
                return
            self._text.rest = stripped[len(begin) :]
            self._is_reasoning = True
        yield from self._text.skip_space()
        mark = yield from self._text.until((end,), self._output.reason)
        self._is_reasoning = False
        if mark:
            yield from self._text.skip_space()

    def _group(self, mark: str) -> Steps:
        """Read one or more calls after a mark."""
        match self._format:
            case "hermes":
                yield from self._marked()
            case "llama":
                yield from self._bare_calls()
            case "mistral":
                yield from self._mistral()
            case "deepseek":
                yield from self._deepseek()
            case "granite":
                yield from self._listed()
            case _:
                yield from self._gemma(mark)

    def _object(self) -> Generator[None, None, bool]:
        """Read one call as an object. If it turns out not to be a call, report it as text."""
        found, is_begun = CallObject(), False
        while True:
            self._text.drop(found.take(self._text.rest))
            if found.is_begun and not found.is_broken:
                if not is_begun:
                    self._begin(found.name)
                    is_begun = True
                self._output.argue(found.new_arguments())
            if found.is_over or found.is_broken or self._text.is_last:
                break
            yield
        if found.is_over and not found.is_broken:
            self._output.end()
            return True
        if not is_begun:
            self._release()
        return False

    def _listed(self) -> Generator[None, None, bool]:
        """Read a list of calls, or a single call."""
        yield from self._text.skip_space()
        if not (yield from self._text.next_is("[")):
            return (yield from self._object())
        while (yield from self._object()):
            yield from self._text.skip_space()
            if not (yield from self._text.next_is(",")):
                yield from self._text.next_is("]")
                return True
            yield from self._text.skip_space()
            self._text.hold("")
        return False

    def _bare_calls(self) -> Steps:
        """Read calls without marks, separated by `;`, as Llama writes them."""
        while True:
            while not self._text.is_last and not self._text.rest.strip(SPACE):
                yield
            lead = len(self._text.rest) - len(self._text.rest.lstrip(SPACE))
            starts = "{[" if self._format == "json" else "{"
            if self._text.rest[lead : lead + 1] not in tuple(starts) or self._output.number >= CALLS_MAX:
                self._release()
                return
            self._text.drop(lead)
            if not (yield from self._listed()):
                return
            yield from self._text.skip_space()
            self._text.hold("")
            yield from self._text.next_is(";", ",")

    def _marked(self) -> Steps:
        """Read a call between marks: an object (Hermes), or elements (Qwen and GLM)."""
        yield from self._text.skip_space()
        if self._text.rest.startswith(("{", "[")):
            if (yield from self._listed()):
                yield from self._text.skip_space()
                yield from self._text.next_is("</tool_call>")
        elif (yield from self._text.next_is("<function=")):
            yield from self._elements()
        elif self._text.rest:
            yield from self._pairs()
        else:
            self._release()
            return
        yield from self._text.skip_space()

    def _elements(self) -> Steps:
        """Read `<function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder's."""
        name, mark = yield from self._text.taken_until((">",))
        name = name.strip()
        if not mark or not name or len(name) > NAME_LENGTH_MAX:
            self._release()
            return
        self._begin(name)
        count = 0
        while True:
            _, mark = yield from self._text.taken_until(("<parameter=", "</tool_call>"))
            if mark != "<parameter=":
                break
            key, _ = yield from self._text.taken_until((">",))
            value, closed = yield from self._text.taken_until(("</parameter>",))
            if not closed:
                return
            value = value.removeprefix("\n").removesuffix("\n")
            self._argue_pair(count, name, key.strip(), value)
            count += 1
        self._output.argue("}" if count else "{}")
        self._output.end()

    def _pairs(self) -> Steps:
        """Read `name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5's."""
        told, mark = yield from self._text.taken_until(("<arg_key>", "</tool_call>"))
        name = told.strip()
        if not mark or not name or len(name) > NAME_LENGTH_MAX or any(each in name for each in "\n<{"):
            self._release()
            return
        self._begin(name)
        count = 0
        while mark == "<arg_key>":
            key, _ = yield from self._text.taken_until(("</arg_key>",))
            yield from self._text.taken_until(("<arg_value>",))
            value, closed = yield from self._text.taken_until(("</arg_value>",))
            if not closed:
                return
            self._argue_pair(count, name, key.strip(), value)
            count += 1
            _, mark = yield from self._text.taken_until(("<arg_key>", "</tool_call>"))
        self._output.argue("}" if count else "{}")
        self._output.end()

    def _argue_pair(self, count: int, name: str, key: str, text: str) -> None:
        value = typed(text, self._tools.get(name, {}), key)
        lead = ", " if count else "{"
        self._output.argue(f"{lead}{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")

    def _mistral(self) -> Steps:
        """Read a list of objects, or repeated `name[ARGS]{...}` (with `[CALL_ID]id` before the arguments)."""
        yield from self._text.skip_space()
        if self._text.rest.startswith(("[", "{")):
            yield from self._listed()
            return
        name, end = yield from self._text.taken_until(("[ARGS]", "[CALL_ID]", "{"))
        if end == "[CALL_ID]":
            _, end = yield from self._text.taken_until(("[ARGS]", "{"))
        if not end or not 0 < len(name.strip()) <= NAME_LENGTH_MAX:
            self._release()
            return
        self._begin(name.strip())
        self._text.rest = ("{" if end == "{" else "") + self._text.rest
        if (yield from self._arguments()):
            self._output.end()

    def _arguments(self) -> Generator[None, None, bool]:
        """Report an object as the arguments of the current call; return False if it does not end."""
        found = CallObject("-")
        while True:
            self._text.drop(found.take(self._text.rest))
            self._output.argue(found.new_arguments())
            if found.is_over or found.is_broken or self._text.is_last:
                return found.is_over and not found.is_broken
            yield

    def _deepseek(self) -> Steps:
        """Read `function<sep>name`, a fence and the arguments (V3, R1), or `name<sep>` and the arguments
        (V3.1)."""
        while True:
            yield from self._text.skip_space()
            if not (yield from self._text.next_is(DEEPSEEK["call▁begin"])):
                yield from self._text.next_is(DEEPSEEK["calls▁end"])
                yield from self._text.skip_space()
                return
            head, sep = yield from self._text.taken_until((DEEPSEEK["sep"],))
            name = head.strip()
            if name == "function":
                name, _ = yield from self._text.taken_until(("\n",))
                name = name.strip()
                yield from self._text.skip_space()
                yield from self._text.next_is("```json", "```")
            if not sep or not 0 < len(name) <= NAME_LENGTH_MAX:
                self._release()
                return
            yield from self._text.skip_space()
            self._begin(name)
            if not (yield from self._arguments()):
                return
            self._output.end()
            yield from self._text.taken_until((DEEPSEEK["call▁end"],))

    def _gemma(self, mark: str) -> Steps:
        """Read `call:name{key:value}` with marks around texts."""
        _, end, quote = next(row for row in GEMMA if row[0] == mark)
        told, _ = yield from self._text.taken_until((end,))
        name, brace, inside = told.strip().partition("{")
        arguments = gemma_arguments(brace + inside, quote)
        name = name.removeprefix("call:").strip()
        if arguments is None or not 0 < len(name) <= NAME_LENGTH_MAX:
            self._release()
            return
        self._begin(name)
        self._output.argue(json.dumps(arguments, ensure_ascii=False))
        self._output.end()
        yield from self._text.skip_space()

    def _harmony(self) -> Steps:
        """Read messages whose headers give a channel and, for a call, its recipient, as GPT-OSS writes
        them."""
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        while True:
            self._is_reasoning = False
            yield from self._text.skip_space()
            if not (yield from self._text.next_is("<|channel|>", "<|start|>")):
                mark = yield from self._text.until(
                    ("<|channel|>", *ends), self._output.say, is_stripped=False
                )
                if not mark:
                    return
                if mark != "<|channel|>":
                    continue
            header, mark = yield from self._text.taken_until(("<|message|>",))
            if not mark:
                return
            words = header.replace("<|channel|>", " ").replace("<|constrain|>", " ").split()
            recipient = next((word[3:] for word in words if word.startswith("to=")), "")
            if recipient.startswith("functions.") and self._tools and self._output.number < CALLS_MAX:
                self._begin(recipient.removeprefix("functions.")[:NAME_LENGTH_MAX])
                yield from self._text.until(ends, self._output.argue, is_stripped=False)
                self._output.end()
                continue
            self._is_reasoning = "analysis" in words
            tell = self._output.reason if self._is_reasoning else self._output.say
            yield from self._text.until(ends, tell, is_stripped=False)


def typed(text: str, schema: Mapping[str, Any], key: str) -> object:
    """Return a value that was written as text: unchanged if its schema says it is text, otherwise parsed as
    JSON."""
    properties = schema.get("properties")
    said = properties.get(key) if isinstance(properties, Mapping) else None
    if isinstance(said, Mapping) and said.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
