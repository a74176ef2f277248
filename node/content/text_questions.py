"""Questions of `node.content.fenced_text` to its process, and the answers: lines of JSON on two pipes."""

from typing import Any

import msgspec

from node.content.calls.formats import (
    CallFormat,
)
from node.content.calls.rules import AnswerRule


class TextFacts(msgspec.Struct, frozen=True):
    """Facts from a model's files: the ids that end an answer, the default sampling settings, whether there is
    a chat template, the size of the tokenizer's vocabulary, and the formats of tool calls and reasoning. At
    temperature 0, the likeliest token is taken."""

    stops: tuple[int, ...]
    vocabulary: int
    has_template: bool
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    calls: CallFormat = ""
    reasoning: int = -1


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Tokenize a prompt."""

    text: str


class Render(msgspec.Struct, frozen=True, tag="render"):
    """Tokenize a chat, up to and including the beginning of an answer. The model may call `tools`. The
    template can use `options` by their names."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    options: dict[str, Any] = {}


class Push(msgspec.Struct, frozen=True, tag="push"):
    """Convert the next tokens of an answer to text; a new `stream` begins with `stops`. With `is_marked`, the
    special tokens of calls and reasoning stay in the text."""

    stream: int
    tokens: list[int]
    stops: list[str] = []
    is_last: bool = False
    is_marked: bool = False


class Spell(msgspec.Struct, frozen=True, tag="spell"):
    """Return the bytes of these tokens."""

    tokens: list[int]


class BeginRule(msgspec.Struct, frozen=True, tag="begin"):
    """Begin to apply a rule to an answer that already has these tokens and may end with `stops`."""

    stream: int
    rule: AnswerRule
    tokens: list[int]
    stops: list[int]


class AdvanceRule(msgspec.Struct, frozen=True, tag="advance"):
    """Report the token that the answer has chosen."""

    stream: int
    token: int


class EndRule(msgspec.Struct, frozen=True, tag="end"):
    """Report that the answer is complete."""

    stream: int


TextQuestion = Encode | Render | Push | Spell | BeginRule | AdvanceRule | EndRule


class TextAnswer(msgspec.Struct, frozen=True):
    """A line from the process. The process sends `facts` first, without a question."""

    facts: TextFacts | None = None
    tokens: list[int] = []
    text: str = ""
    stop: str = ""
    tail: str = ""
    parts: list[bytes] = []
    mask: bytes = b""
    is_over: bool = False
    refused: str = ""
    do: str | None = None


TOO_DEEP = "it is nested too deeply"
