"""The common part of all forms: a request for answers, the pieces of answers, and problems for the client.

A form converts its request to an `AnswerRequest`, and has a writer that takes `TextPiece`s and `AnswerEnd`s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from node.content.calls.rules import AnswerRule
from node.errors import split_place
from partition.serve.sampling import (
    BIAS_MAX,
    BIASES_MAX,
    PENALTY_MAX,
    REPETITION_MAX,
    SEED_MAX,
    TOP_K_MAX,
)
from partition.serve.text import STOP_LENGTH_MAX, STOPS_MAX

CHOICES_MAX = 8
"""Maximum number of answers to one request. Each is a separate session in every stage."""
TURNS_MAX = 4_096
"""Maximum number of messages in one conversation; the size of a body bounds their length."""
PARTS_MAX = 1_024
TOOLS_MAX = 512
"""Maximum number of tools. Coding agents send some dozens, and some hundred with all their plugins."""
NAME_LENGTH_MAX = 256
PROMPT_TOKENS_MAX = 1 << 20
TEMPERATURE_MAX = 2.0
"""Highest temperature, as in OpenAI's API."""

Finish = Literal["stop", "length", "tool_calls"]
Kind = Literal["invalid", "key", "missing", "busy", "failed"]
"""Why a request is not answered. "invalid": the request is wrong. "key": its key is wrong. "missing": there
is no such model. "busy": there are too many requests. "failed": the answer broke off."""

ShortText = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)]
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=STOP_LENGTH_MAX)]
Stops = StopText | Annotated[tuple[StopText, ...], msgspec.Meta(max_length=STOPS_MAX)] | None
Temperature = Annotated[float, msgspec.Meta(ge=0, le=TEMPERATURE_MAX)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
MinShare = Annotated[float, msgspec.Meta(ge=0, le=1)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=TOP_K_MAX)]
"""0 and -1 allow all tokens, as clients of other servers send it."""
TokenCount = Annotated[int, msgspec.Meta(ge=1, le=PROMPT_TOKENS_MAX)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=CHOICES_MAX)]
Seed = Annotated[int, msgspec.Meta(ge=-SEED_MAX, le=SEED_MAX)]
Repetition = Annotated[float, msgspec.Meta(gt=0, le=REPETITION_MAX)]
Penalty = Annotated[float, msgspec.Meta(ge=-PENALTY_MAX, le=PENALTY_MAX)]
BiasValue = Annotated[float, msgspec.Meta(ge=-BIAS_MAX, le=BIAS_MAX)]
Biases = Annotated[dict[str, BiasValue], msgspec.Meta(max_length=BIASES_MAX)]


class FormProblem(Exception):
    """A request cannot be answered. `field` names the part that is wrong; `code` is for programs."""

    def __init__(
        self,
        reason: str,
        *,
        kind: Kind = "invalid",
        field: str | None = None,
        code: str | None = None,
        retry_seconds: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind: Kind = kind
        self.field = field
        self.code = code
        self.retry_seconds = retry_seconds
        self.is_begun = False
        """Whether tokens of the answer were already made: a retry would compute them again."""

    @property
    def status(self) -> HTTPStatus:
        return {
            "invalid": HTTPStatus.BAD_REQUEST,
            "key": HTTPStatus.UNAUTHORIZED,
            "missing": HTTPStatus.NOT_FOUND,
            "busy": HTTPStatus.TOO_MANY_REQUESTS,
            "failed": HTTPStatus.SERVICE_UNAVAILABLE,
        }[self.kind]


@dataclass(frozen=True)
class Chat:
    """A conversation for chat templates: turns with `role`, `content`, `tool_calls` and so on, the tools that
    the model may call, and further arguments of the template."""

    turns: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


Prompt = str | tuple[int, ...] | Chat


@dataclass(frozen=True)
class AnswerRequest:
    """The answers that a client wants from a model, one for each prompt and choice. `tokens_max` None means
    the model's maximum; `seed` None means a random one."""

    model: str
    prompts: tuple[Prompt, ...]
    tokens_max: int | None = None
    choices: int = 1
    stops: tuple[str, ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    biases: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """How many of the likeliest tokens to report with each token; None for only the text."""
    repetition_penalty: float = 1.0
    rule: AnswerRule | None = None
    """The rule that every answer must follow. The format of the model's calls is not known yet."""
    rule_field: str = ""
    """The field of the request that has the rule."""
    calls_max: int | None = None
    """The number of calls after which an answer ends."""


@dataclass(frozen=True)
class TokenSaid:
    """A token, for clients that want its probability; `data` may be a part of a character."""

    text: str
    data: bytes
    logprob: float
    top: tuple["TokenSaid", ...] = ()


@dataclass(frozen=True)
class TextPiece:
    """More text of an answer, or of the reasoning before it, in whole characters. `tokens` are those since
    the previous piece, if requested."""

    choice: int
    text: str
    tokens: tuple[TokenSaid, ...] = ()
    is_reasoning: bool = False


@dataclass(frozen=True)
class CallPiece:
    """More of a tool call. The first piece has the call's id and the tool's name, the later ones more of the
    JSON of its arguments. The last one `is_over`."""

    choice: int
    number: int
    """The index of the call in the answer, from 0."""
    id: str
    name: str = ""
    arguments: str = ""
    is_over: bool = False


@dataclass(frozen=True)
class AnswerEnd:
    """An answer is over; `stop` is the text that ended it, if one did."""

    choice: int
    finish: Finish
    stop: str | None = None


@dataclass(frozen=True)
class TokenUsage:
    """Numbers of tokens: those of prompts (and how many were cached from an earlier answer) and those made
    (and how many are reasoning)."""

    prompt: int = 0
    made: int = 0
    reasoning: int = 0
    cached: int = 0


@dataclass(frozen=True)
class AnswerFrame:
    """The fixed data of an answer: its id, when it began, and the model's name as requested."""

    id: str
    created: int
    model: str
    prompt_tokens: int = 0
    cached_tokens: int = 0


class AskedForm(Protocol):
    """A request in one of the forms."""

    @property
    def model(self) -> str: ...
    @property
    def is_streamed(self) -> bool: ...
    def request(self) -> AnswerRequest: ...


class AnswerWriter(Protocol):
    """Writes an answer, or its event stream. Each method returns bytes to send, possibly none. For an answer
    without streaming, the caller discards them and sends only `whole`."""

    def begin(self) -> bytes: ...
    def piece(self, piece: TextPiece) -> bytes: ...
    def call(self, piece: CallPiece) -> bytes: ...
    def ending(self, ending: AnswerEnd) -> bytes: ...
    def finish(self, usage: TokenUsage) -> bytes: ...
    def failure(self, problem: FormProblem) -> bytes: ...
    def whole(self, usage: TokenUsage) -> bytes: ...


T = TypeVar("T")


def read_form(data: bytes, form: type[T]) -> T:
    """Decode a request; unknown fields are ignored. Raises FormProblem."""
    try:
        return msgspec.json.decode(data, type=form)
    except msgspec.ValidationError as error:
        reason, field = split_place(str(error))
        raise FormProblem(f"{field}: {reason}" if field else reason, field=field or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FormProblem("the body is not JSON") from None


def stops_of(stops: "Stops") -> tuple[str, ...]:
    """Return the texts that end an answer."""
    return (stops,) if isinstance(stops, str) else tuple(stops or ())


def biases_of(biases: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Return biases by token. Raises FormProblem if a key is not a token."""
    found = []
    for name, bias in (biases or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) <= 9):
            raise FormProblem(f"logit_bias: {name[:40]!r} is not a token id", field="logit_bias")
        found.append((int(name), bias))
    return tuple(found)


def refuse_field(is_given: object, field: str, reason: str) -> None:
    """Raise FormProblem if a field is given that would change an answer but is not supported."""
    if is_given:
        raise FormProblem(f"{field}: {reason}", field=field, code="unsupported_parameter")


def event(data: object, name: str = "") -> bytes:
    """Return one server-sent event. msgspec writes no line breaks, so the data is one line."""
    head = b"event: %s\n" % name.encode() if name else b""
    return head + b"data: %s\n\n" % msgspec.json.encode(data)


BEAT = b": beat\n\n"
"""A comment in the event stream, so that proxies and clients do not take the time of a long prompt for a dead
connection."""


@dataclass
class GatheredCall:
    """A tool call as far as it has come."""

    id: str
    name: str
    arguments: str = ""

    def input(self) -> dict[str, Any]:
        """The arguments as an object. Text that is not an object is wrapped in one."""
        try:
            found = msgspec.json.decode(self.arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            found = None
        return found if isinstance(found, dict) else {"arguments": self.arguments}


@dataclass
class Gathered:
    """The text, reasoning, calls and tokens of each answer as far as they have come."""

    texts: dict[int, list[str]] = field(default_factory=dict)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    calls: dict[int, list[GatheredCall]] = field(default_factory=dict)
    tokens: dict[int, list[TokenSaid]] = field(default_factory=dict)
    endings: dict[int, AnswerEnd] = field(default_factory=dict)

    def take(self, piece: TextPiece) -> None:
        texts = self.reasons if piece.is_reasoning else self.texts
        texts.setdefault(piece.choice, []).append(piece.text)
        self.tokens.setdefault(piece.choice, []).extend(piece.tokens)

    def take_call(self, piece: CallPiece) -> GatheredCall:
        """Take a piece of a call; return the call so far."""
        calls = self.calls.setdefault(piece.choice, [])
        if piece.number == len(calls):
            calls.append(GatheredCall(piece.id, piece.name))
        calls[piece.number].arguments += piece.arguments
        return calls[piece.number]

    def end(self, ending: AnswerEnd) -> None:
        self.endings[ending.choice] = ending

    def text(self, choice: int) -> str:
        return "".join(self.texts.get(choice, ()))

    def reasoning(self, choice: int) -> str:
        return "".join(self.reasons.get(choice, ()))

    def choices(self) -> Sequence[int]:
        return sorted(self.endings)
