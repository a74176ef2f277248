"""`/v1/responses`, after OpenAI's API reference, without a memory: the whole input comes each time, as coding
agents send it, and nothing is stored. Kinds of tools that are of other servers are passed over.
"""

from typing import Annotated, Any

import msgspec

from node.web.forms.asking import (
    PARTS_MAX,
    TOOLS_MAX,
    TURNS_MAX,
    AnswerEnd,
    AnswerFrame,
    AnswerRequest,
    Chat,
    FormProblem,
    Gathered,
    Share,
    ShortText,
    Temperature,
    TextPiece,
    TokenCount,
    TokenUsage,
    TopK,
    event,
    refuse_field,
)
from node.web.forms.completions import (
    GRAMMARS,
    TOP_LOGPROBS_MAX,
    CalledFunction,
    ContentPart,
    function_of,
    refuse_forced,
    text_of,
    token_document,
)

PASSED_OVER = frozenset({"reasoning", "compaction", "web_search_call", "local_shell_call"})
"""Items of an input that say nothing to a model of ours."""
TEXT_FORMAT = {"format": {"type": "text"}}
LOGPROBS = "message.output_text.logprobs"


class InputItem(msgspec.Struct, frozen=True):
    """A message, a call that the model made, or what came of one."""

    type: ShortText = "message"
    role: ShortText | None = None
    content: str | Annotated[tuple[ContentPart, ...], msgspec.Meta(max_length=PARTS_MAX)] | None = None
    call_id: ShortText | None = None
    name: ShortText | None = None
    arguments: str | None = None
    output: str | Annotated[tuple[ContentPart, ...], msgspec.Meta(max_length=PARTS_MAX)] | None = None

    def turn(self) -> dict[str, Any] | None:
        """Return it as chat templates take it; None where it says nothing. Raises FormProblem."""
        if self.type in PASSED_OVER:
            return None
        if self.type == "message":
            roles = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
            if self.role not in roles:
                raise FormProblem(f"input: no message has the role {self.role!r}", field="input")
            return {"role": roles[self.role], "content": text_of(self.content)}
        if self.type == "function_call":
            called = CalledFunction(self.name or "", self.arguments or "")
            call = {"type": "function", "id": self.call_id or "", "function": function_of(called)}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "tool_call_id": self.call_id or "", "content": text_of(self.output)}
        raise FormProblem(f"input: an item of the type {self.type[:40]!r} is not known here", field="input")


class TextFormat(msgspec.Struct, frozen=True):
    type: ShortText = "text"


class TextOptions(msgspec.Struct, frozen=True):
    format: TextFormat | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/responses`. Null is as not given."""

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
    text: TextOptions | None = None
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
        """Return what is asked. Raises FormProblem."""
        keeps_nothing = "this node keeps no responses: send the whole input, with store: false"
        refuse_field(self.previous_response_id, "previous_response_id", keeps_nothing)
        refuse_field(self.conversation, "conversation", keeps_nothing)
        refuse_field(self.background, "background", keeps_nothing)
        form = self.text.format.type if self.text and self.text.format else "text"
        refuse_field(form != "text", "text.format", GRAMMARS)
        refuse_forced(self.tool_choice)
        turns: list[dict[str, Any]] = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            turns.append({"role": "user", "content": self.input})
        else:
            turns += [turn for item in self.input if (turn := item.turn()) is not None]
        tools = () if self.tool_choice == "none" else self._tools()
        return AnswerRequest(
            self.model,
            (Chat(joined_calls(turns), tools),),
            self.max_output_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(self.top_k or 0, 0),
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
        )

    def _tools(self) -> tuple[dict[str, Any], ...]:
        """Return the functions in the form of chat completions, which templates take."""
        kept = ("name", "description", "parameters")
        return tuple(
            {"type": "function", "function": {key: tool[key] for key in kept if key in tool}}
            for tool in self.tools or ()
            if tool.get("type") == "function" and isinstance(tool.get("name"), str)
        )


def joined_calls(turns: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return turns in which the calls of one answer are one turn, as templates want them."""
    joined: list[dict[str, Any]] = []
    for turn in turns:
        before = joined[-1] if joined else {}
        if "tool_calls" in turn and before.get("role") == "assistant":
            calls = [*before.get("tool_calls", ()), *turn["tool_calls"]]
            joined[-1] = before | {"tool_calls": calls}
        else:
            joined.append(turn)
    return tuple(joined)


class ResponsesWriter:
    """Answers of `/v1/responses`: one message."""

    def __init__(self, frame: AnswerFrame, request: ResponsesRequest) -> None:
        self._frame = frame
        self._request = request
        self._gathered = Gathered()
        self._number = 0

    def begin(self) -> bytes:
        response = self._response("in_progress", [], None)
        item = self._item("in_progress", [])
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._part_event("response.content_part.added", part=_part("", []))
        )

    def piece(self, piece: TextPiece) -> bytes:
        self._gathered.take(piece)
        rows = self._logprobs(piece.tokens)
        return self._part_event("response.output_text.delta", delta=piece.text, logprobs=rows)

    def ending(self, ending: AnswerEnd) -> bytes:
        self._gathered.end(ending)
        part = self._text_part()
        item = self._item(self._status, [part])
        return (
            self._part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
            + self._part_event("response.content_part.done", part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
        )

    def finish(self, usage: TokenUsage) -> bytes:
        status = self._status
        response = self._response(status, [self._item(status, [self._text_part()])], usage)
        return self._event(f"response.{status}", response=response)

    def failure(self, problem: FormProblem) -> bytes:
        codes = {"busy": "rate_limit_exceeded"}
        error = {"code": codes.get(problem.kind, "server_error"), "message": problem.reason}
        response = self._response("failed", [], None) | {"error": error}
        return self._event("response.failed", response=response)

    def whole(self, usage: TokenUsage) -> bytes:
        status = self._status
        return msgspec.json.encode(self._response(status, [self._item(status, [self._text_part()])], usage))

    @property
    def _status(self) -> str:
        ending = self._gathered.endings.get(0)
        return "incomplete" if ending is not None and ending.finish == "length" else "completed"

    def _event(self, name: str, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._number} | fields
        self._number += 1
        return event(data, name)

    def _part_event(self, name: str, **fields: Any) -> bytes:
        return self._event(name, item_id=self._item_id, output_index=0, content_index=0, **fields)

    @property
    def _item_id(self) -> str:
        return f"msg_{self._frame.id}"

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _text_part(self) -> dict[str, Any]:
        tokens = self._gathered.tokens.get(0, ())
        return _part(self._gathered.text(0), self._logprobs(tuple(tokens)))

    def _logprobs(self, tokens: tuple[Any, ...]) -> list[dict[str, Any]]:
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": TEXT_FORMAT,
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or (),
            "top_p": asked.top_p or 1.0,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.made,
    }
