"""A streaming reader of answers: it separates text, reasoning and tool calls.

    reader = AnswerReader("hermes", reasoning=0, is_reasoning=False, tools={"look": {...}})
    parts = reader.push("<tool_call>\\n{\\"name\\"")      what can be told by now
    parts = reader.finish()                             the rest; what was no call after all is text

It is one pass over the text: a generator that waits (`yield`) where it needs more.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from node.content.calls.answer_parts import CallArguments, CallBegun, CallOver, Part, ReasoningPart, TextPart
from node.content.calls.formats import DEEPSEEK, GEMMA, REASONING, CallFormat
from node.content.calls.gemma import gemma_arguments
from node.content.calls.scanning import NAME_LENGTH_MAX, CallObject

Steps = Generator[None, None, None]
Found = Generator[None, None, str]
Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by its name."""
CALLS_MAX = 128
"""Calls of one answer; further ones are text."""
_SPACE = " \t\r\n"


class AnswerReader:
    """Reads one answer. Without `tools` it reads no calls. Long because all formats are read by one pass over
    one text."""

    def __init__(
        self,
        calls: CallFormat,
        reasoning: int = -1,
        *,
        is_reasoning: bool = False,
        tools: Tools | None = None,
    ) -> None:
        self.calls = 0
        """Complete calls."""
        self._format: CallFormat = calls
        self._tools = tools or {}
        self._marks = REASONING[reasoning] if reasoning >= 0 else None
        self._is_reasoning = is_reasoning
        self._text = ""
        self._is_last = False
        self._parts: list[Part] = []
        self._number = 0
        self._is_in_call = False
        self._space = ""
        """White space before the newest mark, not reported yet."""
        self._tried = ""
        self._is_trying = False
        self._steps = self._harmony() if calls == "harmony" else self._answer()
        next(self._steps, None)

    @property
    def is_reasoning(self) -> bool:
        """Return whether the next text is reasoning."""
        return self._is_reasoning

    def push(self, text: str) -> list[Part]:
        """Read more text; return its parts."""
        self._text += text
        next(self._steps, None)
        return self._taken()

    def finish(self) -> list[Part]:
        """Return the text held back; no more text follows."""
        self._is_last = True
        for _ in self._steps:
            pass
        if self._text:
            self._say(self._text)
            self._text = ""
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        joined: list[Part] = []
        for part in parts:
            last = joined[-1] if joined else None
            if isinstance(part, TextPart | ReasoningPart) and type(last) is type(part):
                assert isinstance(last, TextPart | ReasoningPart)
                joined[-1] = type(part)(last.text + part.text)
            else:
                joined.append(part)
        return joined

    # Output

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(TextPart(text))

    def _try(self, text: str) -> None:
        """Hold back the text from here on, until it is known whether a call begins."""
        self._tried, self._is_trying = text, True

    def _release(self) -> None:
        """Report the held text: it is not a call."""
        self._say(self._tried)
        self._tried, self._is_trying = "", False

    def _reason(self, text: str) -> None:
        if text:
            self._parts.append(ReasoningPart(text))

    def _begin(self, name: str) -> None:
        self._leave()
        self._is_in_call = True
        self._parts.append(CallBegun(self._number, name))
        self._tried, self._is_trying = "", False

    def _argue(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self._number, text))

    def _end(self) -> None:
        self._parts.append(CallOver(self._number))
        self._leave()
        self.calls += 1

    def _leave(self) -> None:
        """Count the call that has begun, even if it is malformed: the next call has another number."""
        self._number += self._is_in_call
        self._is_in_call = False

    # Input

    def _drop(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        if self._is_trying:
            self._tried += taken
        return taken

    def _until(self, marks: Sequence[str], tell: Callable[[str], None], *, is_stripped: bool = True) -> Found:
        """Report the text before the first of some marks; drop and return the mark, "" if none comes. White
        space before a mark is dropped."""
        while True:
            places = [(place, mark) for mark in marks if (place := self._text.find(mark)) >= 0]
            if places:
                place, mark = min(places, key=lambda each: (each[0], -len(each[1])))
                told = self._drop(place)
                self._drop(len(mark))
                kept = told.rstrip() if is_stripped else told
                self._space = told[len(kept) :]
                tell(kept)
                return mark
            if self._is_last:
                tell(self._drop(len(self._text)))
                return ""
            keep = max((_overlap(self._text, mark) for mark in marks), default=0)
            free = self._text[: len(self._text) - keep]
            tell(self._drop(len(free.rstrip()) if is_stripped else len(free)))
            yield

    def _skip_space(self) -> Steps:
        while True:
            self._drop(len(self._text) - len(self._text.lstrip(_SPACE)))
            if self._text or self._is_last:
                return
            yield

    def _next_is(self, *marks: str) -> Found:
        """Drop and return the one of some marks that comes next; "" if none does."""
        while not self._is_last and any(mark.startswith(self._text) and mark != self._text for mark in marks):
            yield
        for mark in sorted(marks, key=len, reverse=True):
            if self._text.startswith(mark):
                self._drop(len(mark))
                return mark
        return ""

    def _taken_until(self, marks: Sequence[str]) -> Generator[None, None, tuple[str, str]]:
        """Return the text before the first of some marks, and the mark; drop both."""
        told: list[str] = []
        mark = yield from self._until(marks, told.append, is_stripped=False)
        return "".join(told), mark

    # The answer

    def _answer(self) -> Steps:
        yield from self._reasoning()
        reads_calls = bool(self._tools)
        if reads_calls and self._format in ("llama", "json"):
            self._try("")
            yield from self._bare_calls()
        marks = self._opening() if reads_calls else ()
        while True:
            mark = yield from self._until(marks, self._say, is_stripped=bool(marks))
            if not mark:
                return
            self._try(self._space + mark)
            if self._number >= CALLS_MAX:
                self._release()
            else:
                yield from self._group(mark)
                self._leave()
            self._tried, self._is_trying = "", False

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
                not self._is_last
                and begin.startswith(self._text.lstrip(_SPACE))
                and (len(self._text.lstrip(_SPACE)) < len(begin))
            ):
                yield
            stripped = self._text.lstrip(_SPACE)
            if not stripped.startswith(begin):
                return
            self._text = stripped[len(begin) :]
            self._is_reasoning = True
        yield from self._skip_space()
        mark = yield from self._until((end,), self._reason)
        self._is_reasoning = False
        if mark:
            yield from self._skip_space()

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
        """Read one call as an object; text that turns out not to be one is reported as text."""
        found, is_begun = CallObject(), False
        while True:
            self._drop(found.take(self._text))
            if found.is_begun and not found.is_broken:
                if not is_begun:
                    self._begin(found.name)
                    is_begun = True
                self._argue(found.new_arguments())
            if found.is_over or found.is_broken or self._is_last:
                break
            yield
        if found.is_over and not found.is_broken:
            self._end()
            return True
        if not is_begun:
            self._release()
        return False

    def _listed(self) -> Generator[None, None, bool]:
        """Read a list of calls, or one."""
        yield from self._skip_space()
        if not (yield from self._next_is("[")):
            return (yield from self._object())
        while (yield from self._object()):
            yield from self._skip_space()
            if not (yield from self._next_is(",")):
                yield from self._next_is("]")
                return True
            yield from self._skip_space()
            self._try("")
        return False

    def _bare_calls(self) -> Steps:
        """Read calls without marks, separated by `;`: Llama's."""
        while True:
            while not self._is_last and not self._text.strip(_SPACE):
                yield
            lead = len(self._text) - len(self._text.lstrip(_SPACE))
            starts = "{[" if self._format == "json" else "{"
            if self._text[lead : lead + 1] not in tuple(starts) or self._number >= CALLS_MAX:
                self._release()
                return
            self._drop(lead)
            if not (yield from self._listed()):
                return
            yield from self._skip_space()
            self._try("")
            yield from self._next_is(";", ",")

    def _marked(self) -> Steps:
        """Read a call between marks: Hermes' object, or Qwen's and GLM's elements."""
        yield from self._skip_space()
        if self._text.startswith(("{", "[")):
            if (yield from self._listed()):
                yield from self._skip_space()
                yield from self._next_is("</tool_call>")
        elif (yield from self._next_is("<function=")):
            yield from self._elements()
        elif self._text:
            yield from self._pairs()
        else:
            self._release()
            return
        yield from self._skip_space()

    def _elements(self) -> Steps:
        """Read `<function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder's."""
        name, mark = yield from self._taken_until((">",))
        name = name.strip()
        if not mark or not name or len(name) > NAME_LENGTH_MAX:
            self._release()
            return
        self._begin(name)
        count = 0
        while True:
            _, mark = yield from self._taken_until(("<parameter=", "</tool_call>"))
            if mark != "<parameter=":
                break
            key, _ = yield from self._taken_until((">",))
            value, closed = yield from self._taken_until(("</parameter>",))
            if not closed:
                return
            value = value.removeprefix("\n").removesuffix("\n")
            self._argue_pair(count, name, key.strip(), value)
            count += 1
        self._argue("}" if count else "{}")
        self._end()

    def _pairs(self) -> Steps:
        """Read `name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5's."""
        told, mark = yield from self._taken_until(("<arg_key>", "</tool_call>"))
        name = told.strip()
        if not mark or not name or len(name) > NAME_LENGTH_MAX or any(each in name for each in "\n<{"):
            self._release()
            return
        self._begin(name)
        count = 0
        while mark == "<arg_key>":
            key, _ = yield from self._taken_until(("</arg_key>",))
            yield from self._taken_until(("<arg_value>",))
            value, closed = yield from self._taken_until(("</arg_value>",))
            if not closed:
                return
            self._argue_pair(count, name, key.strip(), value)
            count += 1
            _, mark = yield from self._taken_until(("<arg_key>", "</tool_call>"))
        self._argue("}" if count else "{}")
        self._end()

    def _argue_pair(self, count: int, name: str, key: str, text: str) -> None:
        value = typed(text, self._tools.get(name, {}), key)
        lead = ", " if count else "{"
        self._argue(f"{lead}{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")

    def _mistral(self) -> Steps:
        """Read a list of objects, or repeated `name[ARGS]{...}` (with `[CALL_ID]id` before the arguments)."""
        yield from self._skip_space()
        if self._text.startswith(("[", "{")):
            yield from self._listed()
            return
        name, end = yield from self._taken_until(("[ARGS]", "[CALL_ID]", "{"))
        if end == "[CALL_ID]":
            _, end = yield from self._taken_until(("[ARGS]", "{"))
        if not end or not 0 < len(name.strip()) <= NAME_LENGTH_MAX:
            self._release()
            return
        self._begin(name.strip())
        self._text = ("{" if end == "{" else "") + self._text
        if (yield from self._arguments()):
            self._end()

    def _arguments(self) -> Generator[None, None, bool]:
        """Report an object as the arguments of the current call; return False if it does not end."""
        found = CallObject("-")
        while True:
            self._drop(found.take(self._text))
            self._argue(found.new_arguments())
            if found.is_over or found.is_broken or self._is_last:
                return found.is_over and not found.is_broken
            yield

    def _deepseek(self) -> Steps:
        """Read `function<sep>name`, a fence and the arguments (V3, R1), or `name<sep>` and the arguments
        (V3.1)."""
        while True:
            yield from self._skip_space()
            if not (yield from self._next_is(DEEPSEEK["call▁begin"])):
                yield from self._next_is(DEEPSEEK["calls▁end"])
                yield from self._skip_space()
                return
            head, sep = yield from self._taken_until((DEEPSEEK["sep"],))
            name = head.strip()
            if name == "function":
                name, _ = yield from self._taken_until(("\n",))
                name = name.strip()
                yield from self._skip_space()
                yield from self._next_is("```json", "```")
            if not sep or not 0 < len(name) <= NAME_LENGTH_MAX:
                self._release()
                return
            yield from self._skip_space()
            self._begin(name)
            if not (yield from self._arguments()):
                return
            self._end()
            yield from self._taken_until((DEEPSEEK["call▁end"],))

    def _gemma(self, mark: str) -> Steps:
        """Read `call:name{key:value}` with marks around texts."""
        _, end, quote = next(row for row in GEMMA if row[0] == mark)
        told, _ = yield from self._taken_until((end,))
        name, brace, inside = told.strip().partition("{")
        arguments = gemma_arguments(brace + inside, quote)
        name = name.removeprefix("call:").strip()
        if arguments is None or not 0 < len(name) <= NAME_LENGTH_MAX:
            self._release()
            return
        self._begin(name)
        self._argue(json.dumps(arguments, ensure_ascii=False))
        self._end()
        yield from self._skip_space()

    def _harmony(self) -> Steps:
        """Read messages whose headers name a channel and, for a call, its recipient: GPT-OSS'."""
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        while True:
            self._is_reasoning = False
            yield from self._skip_space()
            if not (yield from self._next_is("<|channel|>", "<|start|>")):
                mark = yield from self._until(("<|channel|>", *ends), self._say, is_stripped=False)
                if not mark:
                    return
                if mark != "<|channel|>":
                    continue
            header, mark = yield from self._taken_until(("<|message|>",))
            if not mark:
                return
            words = header.replace("<|channel|>", " ").replace("<|constrain|>", " ").split()
            recipient = next((word[3:] for word in words if word.startswith("to=")), "")
            if recipient.startswith("functions.") and self._tools and self._number < CALLS_MAX:
                self._begin(recipient.removeprefix("functions.")[:NAME_LENGTH_MAX])
                yield from self._until(ends, self._argue, is_stripped=False)
                self._end()
                continue
            self._is_reasoning = "analysis" in words
            tell = self._reason if self._is_reasoning else self._say
            yield from self._until(ends, tell, is_stripped=False)


def typed(text: str, schema: Mapping[str, Any], key: str) -> object:
    """Return a value that was written as text: as text if its schema says so, else parsed as JSON."""
    properties = schema.get("properties")
    said = properties.get(key) if isinstance(properties, Mapping) else None
    if isinstance(said, Mapping) and said.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _overlap(text: str, mark: str) -> int:
    """Return how many letters at the end of a text may begin a mark."""
    return next(
        (size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0
    )
