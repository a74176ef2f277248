"""Rules for answers as grammars for `llguidance`: a JSON schema, a regular expression, the client's own
grammar, tool calls in the format of the model's family, or free text with such calls. Reasoning may come
first.

Grammars are compiled behind a fence (`node.content.masks`), not here. Schemas are never fetched: a `$ref` to
another schema is refused there.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from node.content.calls.formats import DEEPSEEK, REASONING, CallFormat
from node.content.calls.scanning import NAME_LENGTH_MAX

RULE_LENGTH_MAX = 1 << 18
"""Maximum number of characters of a schema, an expression or a grammar. Large ones of real APIs have some
50,000."""
TOOLS_MAX = 512
WHITE_SPACE = r"[ \n]{1,32}"
"""White space allowed between the parts of JSON. It is limited because some models would otherwise write it
endlessly."""
SCHEMA_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE}
_TEXT = r"/(.|\n)*/"

RuleKind = Literal["schema", "regex", "grammar", "choice", "calls", "text"]
_OPENINGS: dict[CallFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "llama": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": (DEEPSEEK["calls▁begin"],),
    "granite": ("<|tool_call|>", "<tool_call>"),
}
"""The marks that begin calls. A model must use the first one."""


class RuleTool(msgspec.Struct, frozen=True):
    """A tool that may be called, and the JSON schema of its arguments."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
    schema: str = "{}"


class AnswerRule(msgspec.Struct, frozen=True):
    """A rule for one answer. `text` is the schema, the expression, the grammar (Lark as llguidance reads it,
    or GBNF), or a list of choices. With `tools` in addition to another kind, the answer may consist of calls
    instead. With the kind "text", calls may follow any text."""

    kind: RuleKind
    text: Annotated[str, msgspec.Meta(max_length=RULE_LENGTH_MAX)] = ""
    tools: Annotated[tuple[RuleTool, ...], msgspec.Meta(max_length=TOOLS_MAX)] = ()
    calls: CallFormat = ""
    is_single: bool = False
    """Whether at most one call may be made."""
    reasoning: int = -1
    """The row of `REASONING` that the model writes."""
    is_reasoning: bool = False
    """Whether the prompt has begun the reasoning."""


@dataclass(frozen=True)
class ModelMarks:
    """Facts about a model's tokenizer and template: the id of a special token (-1 if no token has that name),
    and whether the template contains a text."""

    special: Callable[[str], int]
    template: str = ""


def written_calls(calls: CallFormat) -> CallFormat:
    """Return the format that a model must use for calls. It may differ from its family's own, because some of
    these are not JSON."""
    return "json" if calls in ("", "gemma") else calls


def held_calls(rule: AnswerRule, calls: CallFormat) -> CallFormat | None:
    """Return the format of calls that a rule enforces in the answer of a model with the format `calls`.
    Return None if it enforces none: a call after free text needs its family's marks, and JSON."""
    if rule.kind == "text":
        return calls if calls in _OPENINGS or calls == "harmony" else None
    return written_calls(calls) if rule.tools else calls


def grammar_of(rule: AnswerRule, marks: ModelMarks) -> str:
    """Return a rule in llguidance's form. Raises ValueError if it is malformed."""
    grammars: list[dict[str, Any]] = [{"name": "answer"}]
    options: list[str] = []
    if rule.kind == "text":
        options.append(f"{_harmony_head('final', marks)} TEXT" if rule.calls == "harmony" else "PLAIN")
    elif rule.kind != "calls":
        grammars.append({"name": "body"} | _body(rule))
        options.append(f"{_harmony_head('final', marks)} @body" if rule.calls == "harmony" else "@body")
    rules: list[str] = []
    if rule.tools:
        options.append("calls")
        for number, tool in enumerate(rule.tools):
            grammars.append({"name": f"arguments_{number}", "json_schema": _schema(tool.schema)})
        rules += _calls(rule, marks)
    lines = [f"start: {_reasoning(rule, marks)} ({' | '.join(options)})", *rules, f"TEXT: {_TEXT}"]
    lines.append(r"SPACE: /\n{0,2}/")
    if rule.kind == "text" and rule.calls != "harmony":
        lines.append(f"PLAIN: {_plain(rule.calls)}")
    if rule.reasoning >= 0:
        lines.append(f"reasoning[suffix={_quoted(REASONING[rule.reasoning][1])}]: {_TEXT}")
    grammars[0]["lark_grammar"] = "\n".join(lines)
    return json.dumps({"grammars": grammars})


def _body(rule: AnswerRule) -> dict[str, Any]:
    match rule.kind:
        case "schema":
            return {"json_schema": _schema(rule.text)}
        case "regex":
            return {"lark_grammar": f"start: /{_unslashed(rule.text)}/"}
        case "choice":
            choices = json.loads(rule.text)
            return {"lark_grammar": "start: " + " | ".join(map(_quoted, choices))}
        case _:
            return {"lark_grammar": rule.text}


def _schema(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("a schema that is not JSON") from None
    if found is True:
        found = {}
    if not isinstance(found, dict):
        raise ValueError("a schema that is no object")
    return found | {"x-guidance": SCHEMA_OPTIONS}


def _unslashed(text: str) -> str:
    """Return an expression in which slashes are escaped."""
    found, is_escaped = [], False
    for letter in text:
        found.append("\\/" if letter == "/" and not is_escaped else "\\n" if letter == "\n" else letter)
        is_escaped = letter == "\\" and not is_escaped
    if is_escaped:
        raise ValueError("a regular expression that ends with a backslash")
    return "".join(found)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _mark(mark: str, marks: ModelMarks) -> str:
    """Return a mark as its token, or else as its characters."""
    number = marks.special(mark)
    return _quoted(mark) if number < 0 else f"<[{number}]>"


def _reasoning(rule: AnswerRule, marks: ModelMarks) -> str:
    if rule.calls == "harmony":
        head = _harmony_head("analysis", marks)
        end = f"{_mark('<|end|>', marks)} {_mark('<|start|>', marks)}"
        return f'({head} TEXT {end} "assistant")?'
    if rule.reasoning < 0:
        return ""
    begin, end = REASONING[rule.reasoning]
    inside = f"{_until(end, marks)} SPACE"
    return inside if rule.is_reasoning else f"({_mark(begin, marks)} {inside})?"


def _until(end: str, marks: ModelMarks) -> str:
    if marks.special(end) >= 0:
        return f"TEXT {_mark(end, marks)}"
    return "reasoning"


def _harmony_head(channel: str, marks: ModelMarks) -> str:
    return f'{_mark("<|channel|>", marks)} "{channel}" {_mark("<|message|>", marks)}'


def _calls(rule: AnswerRule, marks: ModelMarks) -> list[str]:
    numbers = range(len(rule.tools))
    each = {number: _call(number, tool.name, rule, marks) for number, tool in enumerate(rule.tools)}
    lines = [f"call: {' | '.join(f'call_{number}' for number in numbers)}"]
    lines += [f"call_{number}: {each[number]}" for number in numbers]
    begin, between, end = _around(rule, marks)
    more = "" if rule.is_single or not between else f" ({between} call)*"
    lines.append(f"calls: {begin} call{more} {end}")
    if rule.kind == "text":
        lines[-1] = f"calls: opening call{more} {end}"
        lines += _opening(rule, marks, begin)
    return lines


def _opening(rule: AnswerRule, marks: ModelMarks, begin: str) -> list[str]:
    """Return the text before the first call of an answer that may begin with text."""
    if rule.calls == "harmony":
        said = f"{_harmony_head('commentary', marks)} TEXT {_mark('<|end|>', marks)}"
        return [f'opening: ({said} {_mark("<|start|>", marks)} "assistant")?']
    mark, rest = _OPENINGS[rule.calls][0], begin.partition(" ")[2]
    opening = f"PLAIN {_mark(mark, marks)}" if marks.special(mark) >= 0 else "head"
    lines = [f"opening: {opening} {rest}" + (" | SPACE" if rule.calls == "llama" else "")]
    if opening == "head":
        lines.append(f"head[lazy]: /{_before(rule.calls)}{_escaped(mark)}/")
    return lines


def _plain(calls: CallFormat) -> str:
    """Return the expression for text in which no call begins."""
    begun = [f"~/(.|\\n)*{_escaped(mark)}(.|\\n)*/" for mark in _OPENINGS[calls]]
    return " & ".join([f"/{_before(calls)}/", *begun])


def _before(calls: CallFormat) -> str:
    """Return the expression for text before a mark. Llama's calls need no mark at the beginning of the
    answer."""
    return r"[ \t\r\n]*([^{ \t\r\n](.|\n)*)?" if calls == "llama" else r"(.|\n)*"


def _escaped(mark: str) -> str:
    return re.sub(r"([\[\]|])", r"\\\1", mark)


def _call(number: int, name: str, rule: AnswerRule, marks: ModelMarks) -> str:
    arguments = f"@arguments_{number}"
    key = "parameters" if rule.calls == "llama" else "arguments"
    head = _quoted(f'{{"name": {_quoted(name)}, "{key}": ')
    written = f'{head} {arguments} "}}"'
    match rule.calls:
        case "hermes":
            return f'"\\n" {written} "\\n"'
        case "mistral" if marks.special("[ARGS]") >= 0:
            return f"{_quoted(name)} {_mark('[ARGS]', marks)} {arguments}"
        case "deepseek":
            begin, end = _mark(DEEPSEEK["call▁begin"], marks), _mark(DEEPSEEK["call▁end"], marks)
            sep = _mark(DEEPSEEK["sep"], marks)
            if "```" in marks.template:
                fenced = _quoted(f"{name}\n```json\n")
                return f'{begin} "function" {sep} {fenced} {arguments} "\\n```" {end}'
            return f"{begin} {_quoted(name)} {sep} {arguments} {end}"
        case "harmony":
            head = _quoted(f"commentary to=functions.{name} ")
            kind = f'{_mark("<|constrain|>", marks)} "json" {_mark("<|message|>", marks)}'
            return f"{_mark('<|channel|>', marks)} {head} {kind} {arguments}"
        case _:
            return written


def _around(rule: AnswerRule, marks: ModelMarks) -> tuple[str, str, str]:
    """Return the text that begins all calls, the text between two calls (empty: only one call is possible),
    and the text that ends them."""
    match rule.calls:
        case "hermes":
            begin, end = _mark("<tool_call>", marks), _mark("</tool_call>", marks)
            return begin, f'{end} "\\n" {begin}', end
        case "mistral" if marks.special("[ARGS]") >= 0:
            return _mark("[TOOL_CALLS]", marks), _mark("[TOOL_CALLS]", marks), ""
        case "mistral":
            return f'{_mark("[TOOL_CALLS]", marks)} "["', '", "', '"]"'
        case "granite":
            return f'{_mark("<|tool_call|>", marks)} "["', '", "', '"]"'
        case "deepseek":
            return _mark(DEEPSEEK["calls▁begin"], marks), '"\\n"', _mark(DEEPSEEK["calls▁end"], marks)
        case _:
            return "", "", ""
