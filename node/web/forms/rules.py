"""The rules for answers in each form: schemas, regular expressions, grammars, and tools that must be
called."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from node.content.calls.rules import RULE_LENGTH_MAX, AnswerRule, RuleTool
from node.content.calls.scanning import NAME_LENGTH_MAX
from node.web.forms.asking import FormProblem, ShortText

CHOICES_MAX = 256
DEPTH_MAX = 64
"""Maximum depth of a schema; no compiler here goes deeper."""
ANY_OBJECT = '{"type":"object"}'
RuleText = Annotated[str, msgspec.Meta(min_length=1, max_length=RULE_LENGTH_MAX)]


class SchemaFormat(msgspec.Struct, frozen=True):
    """A schema with a name, which our models do not use."""

    schema: dict[str, Any] | bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`response_format`, and `text.format` of Responses, in which the schema is next to the type."""

    type: ShortText = "text"
    json_schema: SchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None
    name: ShortText | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """The field of other servers of open models for rules beyond schemas. Exactly one of its parts is
    given."""

    json: dict[str, Any] | RuleText | None = None
    json_object: bool | None = None
    regex: RuleText | None = None
    grammar: RuleText | None = None
    choice: (
        Annotated[
            tuple[Annotated[str, msgspec.Meta(min_length=1)], ...],
            msgspec.Meta(min_length=1, max_length=CHOICES_MAX),
        ]
        | None
    ) = None


@dataclass(frozen=True)
class ToolChoice:
    """The tools that may be called (None: all), and whether one of them must be called."""

    names: tuple[str, ...] | None = None
    is_forced: bool = False
    is_single: bool = False


def rule_of_format(asked: ResponseFormat | None, field: str) -> AnswerRule | None:
    """Return the rule for a format; None for plain text. Raises FormProblem."""
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return AnswerRule("schema", ANY_OBJECT)
    if asked.type == "json_schema":
        schema = asked.json_schema.schema if asked.json_schema is not None else asked.schema
        if schema is None:
            raise FormProblem(f"{field}: want a schema", field=field)
        return AnswerRule("schema", schema_text(schema, field))
    raise FormProblem(
        f"{field}: {asked.type[:40]!r} is not a type of answer: use text, json_object or json_schema",
        field=field,
        code="unsupported_parameter",
    )


def rule_of_outputs(asked: StructuredOutputs | None) -> AnswerRule | None:
    """Return the rule of `structured_outputs`. Raises FormProblem if it has no rule, or more than one."""
    if asked is None:
        return None
    field = "structured_outputs"
    given = [name for name in asked.__struct_fields__ if getattr(asked, name)]
    if len(given) != 1:
        raise FormProblem(
            f"{field}: give exactly one of json, json_object, regex, grammar and choice", field=field
        )
    if asked.json is not None:
        text = asked.json if isinstance(asked.json, str) else schema_text(asked.json, field)
        return AnswerRule("schema", text)
    if asked.regex is not None:
        return AnswerRule("regex", asked.regex)
    if asked.grammar is not None:
        return AnswerRule("grammar", asked.grammar)
    if asked.choice is not None:
        return AnswerRule("choice", _bounded(msgspec.json.encode(asked.choice).decode(), field))
    return AnswerRule("schema", ANY_OBJECT)


def schema_text(schema: object, field: str) -> str:
    """Return a schema as text. Raises FormProblem if it is too long or too deep."""
    if not _is_shallow(schema, DEPTH_MAX):
        raise FormProblem(f"{field}: the schema has more than {DEPTH_MAX} levels", field=field)
    return _bounded(msgspec.json.encode(schema).decode(), field)


def _bounded(text: str, field: str) -> str:
    if len(text) > RULE_LENGTH_MAX:
        raise FormProblem(f"{field}: {len(text):,} letters; at most {RULE_LENGTH_MAX:,}", field=field)
    return text


def _is_shallow(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inner)


def choice_of(choice: str | dict[str, Any] | None, *, is_single: bool) -> ToolChoice:
    """Read the `tool_choice` of Chat Completions or Responses. Raises FormProblem."""
    if choice in (None, "auto"):
        return ToolChoice(is_single=is_single)
    if choice == "none":
        return ToolChoice(())
    if choice == "required":
        return ToolChoice(is_forced=True, is_single=is_single)
    if isinstance(choice, dict):
        function = choice.get("function")
        named = function if isinstance(function, dict) else choice
        if choice.get("type") in ("function", "custom") and isinstance(named.get("name"), str):
            return ToolChoice((named["name"],), is_forced=True, is_single=True)
        if choice.get("type") == "allowed_tools":
            inner = choice.get("allowed_tools")
            allowed = inner if isinstance(inner, dict) else choice
            names = _allowed_names(allowed.get("tools"))
            if names and allowed.get("mode") in ("auto", "required"):
                return ToolChoice(names, allowed["mode"] == "required", is_single)
    raise FormProblem(
        "tool_choice: must be auto, none, required, or a function by its name",
        field="tool_choice",
        code="unsupported_parameter",
    )


def _allowed_names(tools: object) -> tuple[str, ...]:
    found = []
    for tool in tools if isinstance(tools, list) else ():
        inner = tool.get("function") if isinstance(tool, dict) else None
        named = inner if isinstance(inner, dict) else tool
        if isinstance(named, dict) and isinstance(named.get("name"), str):
            found.append(named["name"])
    return tuple(found)


def chosen_tools(tools: tuple[dict[str, Any], ...], choice: ToolChoice) -> tuple[dict[str, Any], ...]:
    """Return the tools that may be called. Raises FormProblem if a required tool is missing."""
    if choice.names is None:
        if choice.is_forced and not tools:
            raise FormProblem("tool_choice: needs tools", field="tool_choice")
        return tools
    found = tuple(tool for tool in tools if tool["function"]["name"] in choice.names)
    missing = set(choice.names) - {tool["function"]["name"] for tool in found}
    if missing:
        raise FormProblem(f"tool_choice: no tool has the name {min(missing)[:80]!r}", field="tool_choice")
    return found


def rule_of_answer(
    tools: tuple[dict[str, Any], ...],
    choice: ToolChoice,
    asked: AnswerRule | None,
    field: str,
    strict: frozenset[str] = frozenset(),
) -> tuple[AnswerRule | None, str]:
    """Return the rule for an answer that may have to be tool calls, and the field that has the rule. Calls of
    `strict` tools follow their schemas even if the model need not call any. Raises FormProblem."""
    if not choice.is_forced:
        if asked is not None and tools:
            asked = msgspec.structs.replace(asked, tools=_rule_tools(tools), is_single=choice.is_single)
        elif not strict.isdisjoint(tool["function"]["name"] for tool in tools):
            held = tuple(
                each if each.name in strict else RuleTool(each.name, ANY_OBJECT)
                for each in _rule_tools(tools)
            )
            return AnswerRule("text", "", held, is_single=choice.is_single), "tools"
        return asked, field
    return AnswerRule("calls", "", _rule_tools(tools), is_single=choice.is_single), "tools"


def _rule_tools(tools: tuple[dict[str, Any], ...]) -> tuple[RuleTool, ...]:
    found = []
    for tool in tools:
        schema = tool["function"].get("parameters") or {"type": "object"}
        found.append(RuleTool(tool["function"]["name"], schema_text(schema, "tools")))
    return tuple(found)


def function_tools(tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Return the tools that are functions; other kinds belong to other servers. Raises FormProblem if one has
    no name, or invalid parameters."""
    found = []
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            continue
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH_MAX:
            raise FormProblem(f"tools[{number}]: want a name", field="tools")
        if parameters is not None and not isinstance(parameters, dict):
            raise FormProblem(f"tools[{number}]: parameters are not a schema", field="tools")
        found.append(tool)
    return tuple(found)
