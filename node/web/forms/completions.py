"""`/v1/completions` and `/v1/chat/completions`, after OpenAI's API reference.

In a stream, the finish reason has a chunk of its own. The usage chunk is the last; it comes once, and is the
only one without choices. Then comes `[DONE]`.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from node.content.calls.rules import AnswerRule
from node.web.forms.asking import (
    CHOICES_MAX,
    PARTS_MAX,
    PROMPT_TOKENS_MAX,
    TOOLS_MAX,
    TURNS_MAX,
    AnswerEnd,
    AnswerFrame,
    AnswerRequest,
    Biases,
    CallPiece,
    Chat,
    Choices,
    FormProblem,
    Gathered,
    MinShare,
    Penalty,
    Prompt,
    Repetition,
    Seed,
    Share,
    ShortText,
    Stops,
    Temperature,
    TextPiece,
    TokenCount,
    TokenSaid,
    TokenUsage,
    TopK,
    biases_of,
    event,
    refuse_field,
    stops_of,
)
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

TOKENS_USUAL = 16
"""The default length of a completion, as in OpenAI's API."""
LOGPROBS_MAX = 5
TOP_LOGPROBS_MAX = 20
DONE = b"data: [DONE]\n\n"
IMAGES = "the models of this swarm take only text"

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
TokenIds = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=PROMPT_TOKENS_MAX)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class SampledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both forms. null means the same as a missing field."""

    model: ShortText
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: MinShare | None = None
    n: Choices | None = None
    seed: Seed | None = None
    stop: Stops = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Biases | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def rule(self) -> tuple[AnswerRule | None, str]:
        """Return the rule of the answer, and the field that has it. Raises FormProblem."""
        rule = rule_of_format(self.response_format, "response_format")
        outputs = rule_of_outputs(self.structured_outputs)
        if rule is not None and outputs is not None:
            raise FormProblem(
                "structured_outputs: give either this or response_format", field="structured_outputs"
            )
        return rule or outputs, "response_format" if outputs is None else "structured_outputs"

    def asked(
        self, prompts: tuple[Prompt, ...], tokens_max: int | None, logprobs: int | None
    ) -> AnswerRequest:
        """Return the request common to all forms. Raises FormProblem."""
        rule, field = self.rule()
        return AnswerRequest(
            self.model,
            prompts,
            tokens_max,
            self.n or 1,
            stops_of(self.stop),
            1.0 if self.temperature is None else self.temperature,
            max(self.top_k or 0, 0),
            self.top_p or 1.0,
            self.min_p or 0.0,
            self.seed,
            self.frequency_penalty or 0.0,
            self.presence_penalty or 0.0,
            biases_of(self.logit_bias),
            logprobs,
            1.0 if self.repetition_penalty is None else self.repetition_penalty,
            rule,
            field,
        )


class CompletionRequest(SampledRequest, frozen=True, kw_only=True):
    """`/v1/completions`: the prompt is a text, the tokens of one, or a list of either."""

    prompt: str | Annotated[tuple[str | TokenId | TokenIds, ...], msgspec.Meta(max_length=PROMPT_TOKENS_MAX)]
    max_tokens: TokenCount | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def request(self) -> AnswerRequest:
        """Return the request in the common form. Raises FormProblem."""
        refuse_field(self.echo, "echo", "the prompt cannot be repeated in the answer")
        refuse_field(self.suffix, "suffix", "no model of this swarm fills in text before a suffix")
        refuse_field(
            (self.best_of or 1) > (self.n or 1), "best_of", "must not exceed n: all answers are returned"
        )
        prompts = self._prompts()
        if len(prompts) * (self.n or 1) > CHOICES_MAX:
            raise FormProblem(
                f"prompt: at most {CHOICES_MAX} answers are allowed in one request", field="prompt"
            )
        return self.asked(prompts, self.max_tokens or TOKENS_USUAL, self.logprobs)

    def _prompts(self) -> tuple[Prompt, ...]:
        given = self.prompt
        if isinstance(given, str):
            return (given,)
        numbers = tuple(each for each in given if isinstance(each, int))
        if numbers and len(numbers) == len(given):
            return (numbers,)
        prompts = tuple(each for each in given if not isinstance(each, int))
        if not prompts or len(prompts) < len(given):
            raise FormProblem("prompt: must be a text, tokens, or a list of either", field="prompt")
        return prompts


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message."""

    type: ShortText
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: ShortText
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call that the model made in an earlier turn."""

    id: ShortText
    function: CalledFunction
    type: ShortText = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[tuple[ContentPart, ...], msgspec.Meta(max_length=PARTS_MAX)] | None = None
    name: ShortText | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], msgspec.Meta(max_length=TOOLS_MAX)] | None = None
    tool_call_id: ShortText | None = None
    reasoning_content: str | None = None

    def turn(self) -> dict[str, Any]:
        """Return the turn in the form that chat templates take. Raises FormProblem if a part is not text."""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        found["content"] = text_of(self.content)
        if self.reasoning_content is not None:
            found["reasoning_content"] = self.reasoning_content
        if self.name is not None:
            found["name"] = self.name
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            found["tool_calls"] = [
                {"type": "function", "id": call.id, "function": function_of(call.function)}
                for call in self.tool_calls
            ]
        return found


class ChatRequest(SampledRequest, frozen=True, kw_only=True):
    """`/v1/chat/completions`. Tools go to the model's template unchanged; those that are not functions are
    ignored."""

    messages: Annotated[tuple[ChatMessage, ...], msgspec.Meta(min_length=1, max_length=TURNS_MAX)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    tools: Annotated[tuple[dict[str, Any], ...], msgspec.Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ShortText | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None

    def request(self) -> AnswerRequest:
        """Return the request in the common form. Raises FormProblem."""
        refuse_field(self.functions or self.function_call, "functions", "use tools and tool_choice")
        choice = choice_of(self.tool_choice, is_single=self.parallel_tool_calls is False)
        tools = chosen_tools(function_tools(self.tools or ()), choice)
        if self.top_logprobs and not self.logprobs:
            raise FormProblem("top_logprobs: needs logprobs: true", field="top_logprobs")
        options = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        chat = Chat(tuple(message.turn() for message in self.messages), tools, options)
        tokens_max = self.max_completion_tokens or self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        asked = self.asked((chat,), tokens_max, logprobs)
        strict = frozenset(
            tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True
        )
        rule, field = rule_of_answer(tools, choice, asked.rule, asked.rule_field, strict)
        return replace(asked, rule=rule, rule_field=field, calls_max=1 if choice.is_single else None)


def text_of(content: str | tuple[ContentPart, ...] | None) -> str:
    """Return the text of a message. Raises FormProblem if a part of it is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise FormProblem(
                f"content: a part has the type {part.type[:40]!r}, but {IMAGES}", field="messages"
            )
    return "".join(part.text or part.refusal or "" for part in content)


def function_of(called: CalledFunction) -> dict[str, Any]:
    """Return a call in the form that templates take, with its arguments as an object if they are one."""
    try:
        arguments = msgspec.json.decode(called.arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        arguments = called.arguments
    return {"name": called.name, "arguments": arguments}


class CompletionWriter:
    """Writes answers of `/v1/completions`."""

    def __init__(self, frame: AnswerFrame, request: CompletionRequest) -> None:
        self._frame = frame
        self._wants_usage = request.wants_usage
        self._logprobs = request.logprobs is not None
        self._gathered = Gathered()
        self._offsets: dict[int, int] = {}

    def begin(self) -> bytes:
        return b""

    def piece(self, piece: TextPiece) -> bytes:
        self._gathered.take(piece)
        logprobs = self._logprobs_of(piece.choice, piece.tokens) if self._logprobs else None
        row = {"index": piece.choice, "text": piece.text, "logprobs": logprobs, "finish_reason": None}
        return self._chunk([row])

    def call(self, piece: CallPiece) -> bytes:
        raise AssertionError(f"a text completion has no calls: {piece.number}")

    def ending(self, ending: AnswerEnd) -> bytes:
        self._gathered.end(ending)
        row = {"index": ending.choice, "text": "", "logprobs": None, "finish_reason": ending.finish}
        return self._chunk([row])

    def finish(self, usage: TokenUsage) -> bytes:
        told = self._chunk([], usage) if self._wants_usage else b""
        return told + DONE

    def failure(self, problem: FormProblem) -> bytes:
        return event(error_document(problem))

    def whole(self, usage: TokenUsage) -> bytes:
        self._offsets.clear()
        rows = [self._row(choice) for choice in self._gathered.choices()]
        return msgspec.json.encode(self._document(rows) | {"usage": usage_document(usage)})

    def _row(self, choice: int) -> dict[str, Any]:
        found = self._gathered
        logprobs = self._logprobs_of(choice, tuple(found.tokens.get(choice, ())))
        return {
            "index": choice,
            "text": found.text(choice),
            "logprobs": logprobs if self._logprobs else None,
            "finish_reason": found.endings[choice].finish,
        }

    def _chunk(self, rows: list[dict[str, Any]], usage: TokenUsage | None = None) -> bytes:
        document = self._document(rows)
        if self._wants_usage:
            document["usage"] = None if usage is None else usage_document(usage)
        return event(document)

    def _document(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        frame = self._frame
        return {
            "id": f"cmpl-{frame.id}",
            "object": "text_completion",
            "created": frame.created,
            "model": frame.model,
            "choices": rows,
        }

    def _logprobs_of(self, choice: int, tokens: tuple[TokenSaid, ...]) -> dict[str, Any]:
        at, offsets = self._offsets.get(choice, 0), []
        for token in tokens:
            offsets.append(at)
            at += len(token.text)
        self._offsets[choice] = at
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{each.text: each.logprob for each in token.top} for token in tokens],
            "text_offset": offsets,
        }


class ChatWriter:
    """Writes answers of `/v1/chat/completions`."""

    def __init__(self, frame: AnswerFrame, request: ChatRequest) -> None:
        self._frame = frame
        self._choices = request.n or 1
        self._wants_usage = request.wants_usage
        self._logprobs = bool(request.logprobs)
        self._gathered = Gathered()

    def begin(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, delta) for choice in range(self._choices))

    def piece(self, piece: TextPiece) -> bytes:
        self._gathered.take(piece)
        key = "reasoning_content" if piece.is_reasoning else "content"
        return self._chunk(piece.choice, {key: piece.text}, piece.tokens)

    def call(self, piece: CallPiece) -> bytes:
        self._gathered.take_call(piece)
        row: dict[str, Any] = {"index": piece.number, "function": {"arguments": piece.arguments}}
        if piece.name:
            function = {"name": piece.name, "arguments": piece.arguments}
            row |= {"id": piece.id, "type": "function", "function": function}
        elif not piece.arguments:
            return b""
        return self._chunk(piece.choice, {"tool_calls": [row]})

    def ending(self, ending: AnswerEnd) -> bytes:
        self._gathered.end(ending)
        return self._chunk(ending.choice, {}, finish=ending.finish)

    def finish(self, usage: TokenUsage) -> bytes:
        told = b""
        if self._wants_usage:
            told = event(self._document("chat.completion.chunk", []) | {"usage": usage_document(usage)})
        return told + DONE

    def failure(self, problem: FormProblem) -> bytes:
        return event(error_document(problem))

    def whole(self, usage: TokenUsage) -> bytes:
        found = self._gathered
        rows = [
            {
                "index": choice,
                "message": self._message(choice),
                "logprobs": self._logprobs_of(tuple(found.tokens.get(choice, ()))),
                "finish_reason": found.endings[choice].finish,
            }
            for choice in found.choices()
        ]
        document = self._document("chat.completion", rows) | {"usage": usage_document(usage)}
        return msgspec.json.encode(document)

    def _message(self, choice: int) -> dict[str, Any]:
        found = self._gathered
        text, calls = found.text(choice), found.calls.get(choice, ())
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := found.reasoning(choice):
            message["reasoning_content"] = reasoning
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return message

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        tokens: tuple[TokenSaid, ...] = (),
        finish: str | None = None,
    ) -> bytes:
        row = {
            "index": choice,
            "delta": delta,
            "logprobs": self._logprobs_of(tokens) if tokens else None,
            "finish_reason": finish,
        }
        document = self._document("chat.completion.chunk", [row])
        return event(document | ({"usage": None} if self._wants_usage else {}))

    def _document(self, kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        frame = self._frame
        return {
            "id": f"chatcmpl-{frame.id}",
            "object": kind,
            "created": frame.created,
            "model": frame.model,
            "choices": rows,
        }

    def _logprobs_of(self, tokens: tuple[TokenSaid, ...]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        rows = [token_document(t) | {"top_logprobs": list(map(token_document, t.top))} for t in tokens]
        return {"content": rows, "refusal": None}


def token_document(token: TokenSaid) -> dict[str, Any]:
    """Return a token with its log probability."""
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def usage_document(usage: TokenUsage) -> dict[str, Any]:
    """Return the token usage, as OpenAI counts it."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.made,
        "total_tokens": usage.prompt + usage.made,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def error_document(problem: FormProblem) -> dict[str, Any]:
    """Return a problem in OpenAI's form."""
    kinds = {
        "invalid": "invalid_request_error",
        "key": "authentication_error",
        "missing": "invalid_request_error",
        "busy": "rate_limit_error",
        "failed": "server_error",
    }
    codes = {"key": "invalid_api_key", "missing": "model_not_found", "busy": "rate_limit_exceeded"}
    return {
        "error": {
            "message": problem.reason,
            "type": kinds[problem.kind],
            "param": problem.field,
            "code": problem.code or codes.get(problem.kind),
        }
    }
