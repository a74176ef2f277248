"""`/v1/messages`, after Anthropic's API reference, without a memory: each request has the whole conversation.

Fields for services of other servers (caching, containers) are ignored.
"""

from typing import Annotated, Any, Literal

import msgspec

from node.web.forms.asking import (
    PARTS_MAX,
    TOOLS_MAX,
    TURNS_MAX,
    AnswerEnd,
    AnswerFrame,
    AnswerRequest,
    CallPiece,
    Chat,
    FormProblem,
    GatheredCall,
    Share,
    ShortText,
    StopText,
    Temperature,
    TextPiece,
    TokenCount,
    TokenUsage,
    TopK,
    event,
)
from node.web.forms.completions import IMAGES
from node.web.forms.rules import (
    ResponseFormat,
    ToolChoice,
    chosen_tools,
    function_tools,
    rule_of_answer,
    rule_of_format,
)
from partition.serve.text import STOPS_MAX

PASSED_OVER = frozenset({"redacted_thinking"})
"""Blocks of earlier answers that our models do not use."""


class MessageBlock(msgspec.Struct, frozen=True):
    """A block of a message: text, a tool call that the model made, or a call's result."""

    type: ShortText
    text: str | None = None
    id: ShortText | None = None
    name: ShortText | None = None
    input: dict[str, Any] | None = None
    tool_use_id: ShortText | None = None
    content: Any = None
    thinking: str | None = None


Blocks = Annotated[tuple[MessageBlock, ...], msgspec.Meta(max_length=PARTS_MAX)]


class MessageTurn(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks

    def turns(self) -> list[dict[str, Any]]:
        """Return the turns in the form that chat templates take. Tool results are turns of their own. Raises
        FormProblem."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        reasons: list[str] = []
        for block in self.content:
            if block.type == "text":
                texts.append(block.text or "")
            elif block.type == "tool_use":
                function = {"name": block.name or "", "arguments": block.input or {}}
                calls.append({"type": "function", "id": block.id or "", "function": function})
            elif block.type == "tool_result":
                told = result_text(block.content)
                results.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": told})
            elif block.type == "thinking":
                reasons.append(block.thinking or "")
            elif block.type not in PASSED_OVER:
                raise FormProblem(f"messages: a block has the type {block.type[:40]!r}, but {IMAGES}")
        own: dict[str, Any] = {"role": self.role, "content": "".join(texts)}
        if calls:
            own["tool_calls"] = calls
        if reasons:
            own["reasoning_content"] = "".join(reasons)
        return [*results, *([own] if texts or calls else [])]


class MessageTool(msgspec.Struct, frozen=True):
    """A tool. A tool with a `type` that another server runs has no schema, and is ignored."""

    name: ShortText
    description: str = ""
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    format: ResponseFormat | None = None
    effort: ShortText | None = None


class Thinking(msgspec.Struct, frozen=True):
    type: ShortText


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/messages`. null means the same as a missing field."""

    model: ShortText
    max_tokens: TokenCount
    messages: Annotated[tuple[MessageTurn, ...], msgspec.Meta(min_length=1, max_length=TURNS_MAX)]
    system: str | Blocks | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    stop_sequences: Annotated[tuple[StopText, ...], msgspec.Meta(max_length=STOPS_MAX)] | None = None
    stream: bool | None = None
    tools: Annotated[tuple[MessageTool, ...], msgspec.Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None
    thinking: Thinking | None = None

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    def request(self) -> AnswerRequest:
        """Return the request in the common form. Raises FormProblem."""
        choice = self._choice()
        tools = chosen_tools(function_tools(self._tools()), choice)
        asked = self.output_format or (self.output_config and self.output_config.format)
        name = "output_format" if self.output_format else "output_config.format"
        strict = frozenset(tool.name for tool in self.tools or () if tool.strict)
        rule, field = rule_of_answer(tools, choice, rule_of_format(asked or None, name), name, strict)
        turns = [turn for message in self.messages for turn in message.turns()]
        system = self.system
        if system is not None and not isinstance(system, str):
            system = "\n".join(block.text or "" for block in system if block.type == "text")
        if system:
            turns.insert(0, {"role": "system", "content": system})
        if not turns:
            raise FormProblem("messages: at least one message must have content", field="messages")
        return AnswerRequest(
            self.model,
            (Chat(tuple(turns), tools, self._options()),),
            self.max_tokens,
            stops=self.stop_sequences or (),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(self.top_k or 0, 0),
            rule=rule,
            rule_field=field,
            calls_max=1 if choice.is_single else None,
        )

    def _options(self) -> dict[str, Any]:
        """Return the reasoning options of templates, with the names that known templates use."""
        found: dict[str, Any] = {}
        if self.thinking is not None:
            found["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            found["reasoning_effort"] = self.output_config.effort
        return found

    def _choice(self) -> ToolChoice:
        given = self.tool_choice or {}
        is_single = given.get("disable_parallel_tool_use") is True
        kind, name = given.get("type", "auto"), given.get("name")
        if kind == "auto":
            return ToolChoice(is_single=is_single)
        if kind == "none":
            return ToolChoice(())
        if kind == "any":
            return ToolChoice(is_forced=True, is_single=is_single)
        if kind == "tool" and isinstance(name, str):
            return ToolChoice((name,), is_forced=True, is_single=True)
        raise FormProblem("tool_choice: must be auto, any, none, or tool with a name", field="tool_choice")

    def _tools(self) -> tuple[dict[str, Any], ...]:
        """Return the functions in the form of chat completions, which templates take."""
        return tuple(
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in self.tools or ()
            if tool.input_schema is not None
        )


def result_text(content: Any) -> str:
    """Return the text of a call's result. Raises FormProblem if it is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    rows = content if isinstance(content, list) else [content]
    if not all(isinstance(row, dict) and isinstance(row.get("text"), str) for row in rows):
        raise FormProblem(f"messages: a tool_result is not text, but {IMAGES}")
    return "".join(row["text"] for row in rows)


class MessagesWriter:
    """Writes answers of `/v1/messages` as blocks, each of which begins with its first content."""

    def __init__(self, frame: AnswerFrame, _request: MessagesRequest) -> None:
        self._frame = frame
        self._blocks: list[dict[str, Any] | GatheredCall] = []
        self._is_open = False
        self._ending: AnswerEnd | None = None

    def begin(self) -> bytes:
        usage = TokenUsage(self._frame.prompt_tokens, cached=self._frame.cached_tokens)
        started = {"type": "message_start", "message": self._message([], usage)}
        return self._event(started) + self._event({"type": "ping"})

    def piece(self, piece: TextPiece) -> bytes:
        if not piece.text:
            return b""
        kind = "thinking" if piece.is_reasoning else "text"
        told = self._opened(kind)
        block = self._blocks[-1]
        assert isinstance(block, dict)
        block[kind] += piece.text
        return told + self._delta({"type": f"{kind}_delta", kind: piece.text})

    def call(self, piece: CallPiece) -> bytes:
        told = b""
        if piece.name:
            told = self._closed()
            self._blocks.append(GatheredCall(piece.id, piece.name))
            told += self._begun({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
        block = self._blocks[-1]
        assert isinstance(block, GatheredCall)
        if piece.arguments:
            block.arguments += piece.arguments
            told += self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
        return told + (self._closed() if piece.is_over else b"")

    def ending(self, ending: AnswerEnd) -> bytes:
        told = b"" if self._blocks else self._opened("text")
        self._ending = ending
        return told + self._closed()

    def finish(self, usage: TokenUsage) -> bytes:
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        told = {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
        return self._event(told) + self._event({"type": "message_stop"})

    def failure(self, problem: FormProblem) -> bytes:
        return self._event(message_error(problem))

    def whole(self, usage: TokenUsage) -> bytes:
        content = [
            {"type": "tool_use", "id": block.id, "name": block.name, "input": block.input()}
            if isinstance(block, GatheredCall)
            else block
            for block in self._blocks
        ]
        return msgspec.json.encode(self._message(content, usage))

    def _opened(self, kind: str) -> bytes:
        """Begin a block, unless the newest is of this kind and continues."""
        newest = self._blocks[-1] if self._blocks else None
        if self._is_open and isinstance(newest, dict) and newest["type"] == kind:
            return b""
        told = self._closed()
        block: dict[str, Any] = {"type": kind, kind: ""}
        if kind == "thinking":
            block["signature"] = ""  # this server does not check signatures
        self._blocks.append(block)
        return told + self._begun(dict(block))

    def _begun(self, block: dict[str, Any]) -> bytes:
        self._is_open = True
        index = len(self._blocks) - 1
        return self._event({"type": "content_block_start", "index": index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        index = len(self._blocks) - 1
        return self._event({"type": "content_block_delta", "index": index, "delta": delta})

    def _closed(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return self._event({"type": "content_block_stop", "index": len(self._blocks) - 1})

    def _event(self, data: dict[str, Any]) -> bytes:
        return event(data, str(data["type"]))

    @property
    def _stop(self) -> str | None:
        return self._ending.stop if self._ending is not None else None

    @property
    def _reason(self) -> str | None:
        ending = self._ending
        if ending is None:
            return None
        if ending.stop is not None:
            return "stop_sequence"
        return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[ending.finish]

    def _message(self, content: list[dict[str, Any]], usage: TokenUsage) -> dict[str, Any]:
        return {
            "id": f"msg_{self._frame.id}",
            "type": "message",
            "role": "assistant",
            "model": self._frame.model,
            "content": content,
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": _usage(usage),
        }


def message_error(problem: FormProblem) -> dict[str, Any]:
    """Return a problem in the form of Messages."""
    kinds = {
        "invalid": "invalid_request_error",
        "key": "authentication_error",
        "missing": "not_found_error",
        "busy": "rate_limit_error",
        "failed": "api_error",
    }
    return {"type": "error", "error": {"type": kinds[problem.kind], "message": problem.reason}}


def _usage(usage: TokenUsage) -> dict[str, int]:
    """Return the token usage, as Anthropic counts it: `input_tokens` excludes cached ones."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "output_tokens": usage.made,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
    }
