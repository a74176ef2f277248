"""`/v1/responses`, after OpenAI's API reference, without a memory: each request has the whole input, as
coding agents send it, and nothing is stored. Kinds of tools that only other servers run are ignored.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from node.content.calls.rules import AnswerRule
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
    Share,
    ShortText,
    Temperature,
    TextPiece,
    TokenCount,
    TokenSaid,
    TokenUsage,
    TopK,
    event,
    refuse_field,
)
from node.web.forms.completions import (
    TOP_LOGPROBS_MAX,
    CalledFunction,
    ContentPart,
    function_of,
    text_of,
    token_document,
)
from node.web.forms.custom_tools import TextArgument, custom_function, is_held
from node.web.forms.rules import (
    ResponseFormat,
    StructuredOutputs,
    choice_of,
    chosen_tools,
    function_tools,
    rule_of_answer,
    rule_of_format,
    rule_of_outputs,
)

PASSED_OVER = frozenset({"compaction", "web_search_call", "local_shell_call"})
"""Items of an input that our models do not use."""
CALL_KINDS = frozenset({"function_call", "custom_tool_call"})
RESULT_KINDS = frozenset({"function_call_output", "custom_tool_call_output"})
LOGPROBS = "message.output_text.logprobs"


class InputItem(msgspec.Struct, frozen=True):
    """A message, a tool call that the model made, or a call's result."""

    type: ShortText = "message"
    role: ShortText | None = None
    content: str | Annotated[tuple[ContentPart, ...], msgspec.Meta(max_length=PARTS_MAX)] | None = None
    call_id: ShortText | None = None
    name: ShortText | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Annotated[tuple[ContentPart, ...], msgspec.Meta(max_length=PARTS_MAX)] | None = None

    def turn(self) -> dict[str, Any] | None:
        """Return the turn for chat templates; None if it is empty. Raises FormProblem."""
        if self.type in PASSED_OVER:
            return None
        if self.type == "message":
            roles = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
            if self.role not in roles:
                raise FormProblem(f"input: {self.role!r} is not a role of a message", field="input")
            return {"role": roles[self.role], "content": text_of(self.content)}
        if self.type == "reasoning":
            told = "".join(part.text or "" for part in self.content or () if isinstance(part, ContentPart))
            return {"role": "assistant", "content": "", "reasoning_content": told} if told else None
        if self.type in CALL_KINDS:
            written = self.arguments
            if self.input is not None:  # the tool takes plain text
                written = msgspec.json.encode({"input": self.input}).decode()
            called = CalledFunction(self.name or "", written or "")
            call = {"type": "function", "id": self.call_id or "", "function": function_of(called)}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type in RESULT_KINDS:
            return {"role": "tool", "tool_call_id": self.call_id or "", "content": text_of(self.output)}
        raise FormProblem(
            f"input: this server does not know items of the type {self.type[:40]!r}", field="input"
        )


class TextOptions(msgspec.Struct, frozen=True):
    format: ResponseFormat | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    effort: ShortText | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/responses`. null means the same as a missing field."""

    model: ShortText
    input: str | Annotated[tuple[InputItem, ...], msgspec.Meta(min_length=1, max_length=TURNS_MAX)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    stream: bool | None = None
    tools: Annotated[tuple[dict[str, Any], ...], msgspec.Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=32)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def request(self) -> AnswerRequest:
        """Return the request in the common form. Raises FormProblem."""
        keeps_nothing = "this node stores no responses. Send the whole input, with store: false"
        refuse_field(self.previous_response_id, "previous_response_id", keeps_nothing)
        refuse_field(self.conversation, "conversation", keeps_nothing)
        refuse_field(self.background, "background", keeps_nothing)
        choice = choice_of(self.tool_choice, is_single=self.parallel_tool_calls is False)
        tools = chosen_tools(function_tools(self._functions()), choice)
        rule, field = rule_of_answer(tools, choice, *self._rule(), self._strict())
        turns: list[dict[str, Any]] = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            turns.append({"role": "user", "content": self.input})
        else:
            turns += [turn for item in self.input if (turn := item.turn()) is not None]
        options = dict(self.chat_template_kwargs or {})
        if self.reasoning is not None and self.reasoning.effort is not None:
            options["reasoning_effort"] = self.reasoning.effort
        return AnswerRequest(
            self.model,
            (Chat(joined_calls(turns), tools, options),),
            self.max_output_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(self.top_k or 0, 0),
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            rule=rule,
            rule_field=field,
            calls_max=1 if choice.is_single else None,
        )

    def _rule(self) -> tuple[AnswerRule | None, str]:
        rule = rule_of_format(self.text.format if self.text else None, "text.format")
        outputs = rule_of_outputs(self.structured_outputs)
        if rule is not None and outputs is not None:
            raise FormProblem(
                "structured_outputs: give either this or text.format", field="structured_outputs"
            )
        return rule or outputs, "text.format" if outputs is None else "structured_outputs"

    def _functions(self) -> tuple[dict[str, Any], ...]:
        """Return the functions in the form of chat completions, which templates take."""
        kept = ("name", "description", "parameters")
        return tuple(
            {"type": "function", "function": {key: tool[key] for key in kept if key in tool}}
            if tool.get("type") == "function"
            else custom_function(tool)
            for tool in self.tools or ()
            if tool.get("type") in ("function", "custom")
        )

    def _strict(self) -> frozenset[str]:
        """Return the names of the tools whose calls must follow their schema."""
        return frozenset(
            str(tool.get("name"))
            for tool in self.tools or ()
            if (tool.get("type") == "function" and tool.get("strict") is True)
            or (tool.get("type") == "custom" and is_held(tool))
        )

    def custom_names(self) -> frozenset[str]:
        """The names of the tools that take plain text."""
        return frozenset(str(tool.get("name")) for tool in self.tools or () if tool.get("type") == "custom")


def joined_calls(turns: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the turns with the reasoning, text and calls of each answer joined into one turn, as templates
    need them."""
    joined: list[dict[str, Any]] = []
    for turn in turns:
        before = joined[-1] if joined else {}
        if before.get("role") != "assistant" or turn["role"] != "assistant":
            joined.append(turn)
        elif "tool_calls" in turn:
            calls = [*before.get("tool_calls", ()), *turn["tool_calls"]]
            joined[-1] = before | {"tool_calls": calls}
        elif before.keys() == {"role", "content", "reasoning_content"} and not before["content"]:
            joined[-1] = before | turn
        else:
            joined.append(turn)
    return tuple(joined)


@dataclass
class _Item:
    """A part of the output: a message, reasoning, or a tool call."""

    kind: str
    id: str
    name: str = ""
    call_id: str = ""
    text: str = ""
    status: str = "in_progress"
    tokens: list[TokenSaid] = field(default_factory=list)
    argument: TextArgument = field(default_factory=TextArgument)
    """The text argument of a call, for a tool that takes plain text."""

    @property
    def is_call(self) -> bool:
        return self.kind in CALL_KINDS


class ResponsesWriter:
    """Writes answers of `/v1/responses` as items, each of which begins with its first content."""

    def __init__(self, frame: AnswerFrame, request: ResponsesRequest) -> None:
        self._frame = frame
        self._request = request
        self._items: list[_Item] = []
        self._ending: AnswerEnd | None = None
        self._number = 0
        self._custom = request.custom_names()

    def begin(self) -> bytes:
        response = self._response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: TextPiece) -> bytes:
        told = self._opened("reasoning" if piece.is_reasoning else "message")
        item = self._items[-1]
        item.text += piece.text
        item.tokens += piece.tokens
        if piece.is_reasoning:
            return told + self._part_event("response.reasoning_text.delta", delta=piece.text)
        rows = self._logprobs(piece.tokens)
        return told + self._part_event("response.output_text.delta", delta=piece.text, logprobs=rows)

    def call(self, piece: CallPiece) -> bytes:
        kind = "custom_tool_call" if piece.name in self._custom else "function_call"
        told = self._opened(kind, piece) if piece.name else b""
        item = self._items[-1]
        more, name = piece.arguments, "response.function_call_arguments.delta"
        if item.kind == "custom_tool_call":
            more, name = item.argument.push(more), "response.custom_tool_call_input.delta"
            more += item.argument.finish() if piece.is_over else ""
        item.text += more
        if more:
            told += self._item_event(name, delta=more)
        return told + (self._closed() if piece.is_over else b"")

    def ending(self, ending: AnswerEnd) -> bytes:
        told = b"" if self._items else self._opened("message")
        self._ending = ending
        return told + self._closed(self._status)

    def finish(self, usage: TokenUsage) -> bytes:
        response = self._response(self._status, list(map(self._item, self._items)), usage)
        return self._event(f"response.{self._status}", response=response)

    def failure(self, problem: FormProblem) -> bytes:
        codes = {"busy": "rate_limit_exceeded"}
        error = {"code": codes.get(problem.kind, "server_error"), "message": problem.reason}
        response = self._response("failed", [], None) | {"error": error}
        return self._event("response.failed", response=response)

    def whole(self, usage: TokenUsage) -> bytes:
        output = list(map(self._item, self._items))
        return msgspec.json.encode(self._response(self._status, output, usage))

    @property
    def _status(self) -> str:
        is_cut = self._ending is not None and self._ending.finish == "length"
        return "incomplete" if is_cut else "completed"

    def _opened(self, kind: str, call: CallPiece | None = None) -> bytes:
        """Begin an item, unless the newest is of this kind and continues; close the open item."""
        newest = self._items[-1] if self._items else None
        if newest is not None and newest.kind == kind and newest.status == "in_progress" and call is None:
            return b""
        told = self._closed()
        prefixes = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
        prefix = prefixes[kind]
        count = len(self._items)
        item = _Item(kind, f"{prefix}_{self._frame.id}" + (f"_{count}" if count else ""))
        if call is not None:
            item.name, item.call_id = call.name, call.id
        self._items.append(item)
        told += self._event("response.output_item.added", output_index=count, item=self._item(item))
        if not item.is_call:
            told += self._part_event("response.content_part.added", part=self._part(item))
        return told

    def _closed(self, status: str = "completed") -> bytes:
        """End the newest item, if it is open."""
        item = self._items[-1] if self._items else None
        if item is None or item.status != "in_progress":
            return b""
        item.status = status
        part = self._part(item)
        match item.kind:
            case "message":
                logprobs = part["logprobs"]
                told = self._part_event("response.output_text.done", text=item.text, logprobs=logprobs)
            case "reasoning":
                told = self._part_event("response.reasoning_text.done", text=item.text)
            case "custom_tool_call":
                told = self._item_event("response.custom_tool_call_input.done", input=item.text)
            case _:
                done = "response.function_call_arguments.done"
                told = self._item_event(done, arguments=item.text)
        if not item.is_call:
            told += self._part_event("response.content_part.done", part=part)
        index = len(self._items) - 1
        return told + self._event("response.output_item.done", output_index=index, item=self._item(item))

    def _event(self, name: str, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._number} | fields
        self._number += 1
        return event(data, name)

    def _item_event(self, name: str, **fields: Any) -> bytes:
        index = len(self._items) - 1
        return self._event(name, item_id=self._items[-1].id, output_index=index, **fields)

    def _part_event(self, name: str, **fields: Any) -> bytes:
        return self._item_event(name, content_index=0, **fields)

    def _item(self, item: _Item) -> dict[str, Any]:
        found: dict[str, Any] = {"id": item.id, "type": item.kind, "status": item.status}
        if item.is_call:
            key = "input" if item.kind == "custom_tool_call" else "arguments"
            return found | {"call_id": item.call_id, "name": item.name, key: item.text}
        content = [self._part(item)] if item.text or item.status != "in_progress" else []
        if item.kind == "reasoning":
            return found | {"summary": [], "content": content}
        return found | {"role": "assistant", "content": content}

    def _part(self, item: _Item) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        logprobs = self._logprobs(tuple(item.tokens))
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: tuple[TokenSaid, ...]) -> list[dict[str, Any]]:
        if not self._request.wants_logprobs:
            return []
        return [token_document(t) | {"top_logprobs": list(map(token_document, t.top))} for t in tokens]

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: TokenUsage | None
    ) -> dict[str, Any]:
        asked = self._request
        return {
            "id": f"resp_{self._frame.id}",
            "object": "response",
            "created_at": self._frame.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._frame.model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": self._format()},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or (),
            "top_p": asked.top_p or 1.0,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }

    def _format(self) -> dict[str, Any]:
        asked = self._request.text and self._request.text.format
        if not asked or asked.type != "json_schema":
            return {"type": asked.type if asked else "text"}
        return {"type": asked.type, "name": asked.name or "answer", "schema": asked.schema or {}}


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.made,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.made,
    }
