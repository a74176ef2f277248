"""The sandboxed process of `node.content.fenced_text`: `python -m node.content.text_process`.

It converts texts to tokens and tokens to texts, and computes which tokens may come next if an answer must
follow a rule (`node.content.masks`). It fences itself in (`node.stages.sandbox`) before it reads the model's
files. It renders chats with the model's template, which is a program written by the model's author.
"""

import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from node.content.calls.formats import (
    KEPT,
    adapt_turns,
    describe_tools,
    detect_calls,
    detect_reasoning,
)
from node.content.chat import ChatTemplate
from node.content.masks import Masks, ServiceMasks
from node.content.model_folder import CONFIG, CONFIG_BYTES_MAX, TOKENIZER, read_table, tokenizer_facts
from node.content.text_files import GENERATION_CONFIG
from node.content.text_questions import (
    TOO_DEEP,
    AdvanceRule,
    BeginRule,
    Encode,
    EndRule,
    Push,
    Render,
    Spell,
    TextAnswer,
    TextFacts,
    TextQuestion,
)
from node.content.token_bytes import special_ids, token_bytes
from node.content.tokens import Tokens
from node.errors import UsageError
from node.stages import sandbox
from node.stages.parent import die_with
from partition.serve.text import TextStream

STREAMS_MAX = 256
"""Maximum number of answers converted to text at the same time."""
STOPS_MAX = 8
"""Maximum number of ids that end an answer; a manifest has the same limit."""
BYTES = 256
"""Vocabulary size of a byte model, which has no tokenizer."""
TAIL_LENGTH = 64
"""Number of characters at the end of a prompt that are checked for the beginning of reasoning."""


class _Texts:
    """The state of the process for a model with a tokenizer."""

    def __init__(self, folder: Path) -> None:
        self._known = Tokens(folder / TOKENIZER)
        special, self._template_text = tokenizer_facts(folder)
        self._template = ChatTemplate(self._template_text, folder, special) if self._template_text else None
        self._special = special_ids(self._known.package)
        self._kept = {number: name for number, name in self._special.items() if name in KEPT}
        self._streams: dict[int, TextStream] = {}
        self._bytes: list[bytes] = []
        self._masks = ServiceMasks(self._new_masks)
        facts = read_facts(folder, self._known.count, has_template=bool(self._template_text))
        self.facts = msgspec.structs.replace(
            facts,
            calls=detect_calls(self._template_text, self._has_token),
            reasoning=detect_reasoning(self._template_text, self._has_token),
        )

    def _has_token(self, name: str) -> bool:
        return self._known.id_of(name) >= 0

    def answer(self, question: TextQuestion) -> TextAnswer:
        """Answer a question. Raises UsageError."""
        match question:
            case Encode(text=text):
                return TextAnswer(tokens=list(self._known.encode(text, special=True).ids))
            case Render():
                return self._render(question)
            case Push():
                return self._push(question)
            case Spell():
                return TextAnswer(parts=[self._spelled(token) for token in question.tokens])
            case BeginRule():
                return _begun(self._masks, question)
            case _:
                return _advanced(self._masks, question)

    def _new_masks(self, stops: list[int]) -> Masks:
        self._spelled(0)
        return Masks(self._bytes, self._special, stops, self._template_text, self._known.package)

    def _spelled(self, token: int) -> bytes:
        if not self._bytes:
            self._bytes = token_bytes(self._known.package, self._known.count)
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def _render(self, asked: Render) -> TextAnswer:
        if self._template is None:
            raise UsageError(
                "the model has no chat template", "use `peerloom generate`, which takes plain text"
            )
        turns, tools = adapt_turns(asked.messages, self.facts.calls), asked.tools
        if "tools" not in self._template_text:
            turns, tools = describe_tools(turns, tools), []
        try:
            text = self._template.render(turns, prompts=True, tools=tools, options=asked.options)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return TextAnswer(tokens=list(self._known.encode(text).ids), tail=text[-TAIL_LENGTH:])

    def _push(self, question: Push) -> TextAnswer:
        decode = self._decode_marked if question.is_marked and self._kept else self._decode
        return _pushed(self._streams, question, decode)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._known.decode(list(ids))

    def _decode_marked(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, including the special tokens that are kept."""
        parts: list[str] = []
        begin = 0
        for place, token in enumerate(ids):
            if token in self._kept:
                parts += [self._decode(ids[begin:place]), self._kept[token]]
                begin = place + 1
        return "".join(parts) + self._decode(ids[begin:])


class _Bytes:
    """The state of the process for a byte model, for which it only applies rules to answers."""

    def __init__(self) -> None:
        self._masks = ServiceMasks(_byte_masks)
        self.facts = TextFacts((), BYTES, has_template=False)

    def answer(self, question: TextQuestion) -> TextAnswer:
        """Answer a question. Raises UsageError."""
        if isinstance(question, BeginRule):
            return _begun(self._masks, question)
        return _advanced(self._masks, question)


def _byte_masks(stops: list[int]) -> Masks:
    return Masks([bytes([each]) for each in range(BYTES)], {}, stops, "", None)


def _pushed(
    streams: dict[int, TextStream], question: Push, decode: Callable[[Sequence[int]], str]
) -> TextAnswer:
    stream = streams.get(question.stream)
    if stream is None:
        if len(streams) >= STREAMS_MAX:
            del streams[next(iter(streams))]
        stream = streams[question.stream] = TextStream(decode, question.stops)
    pieces = [stream.push(token) for token in question.tokens]
    if question.is_last:
        pieces.append(stream.finish())
        del streams[question.stream]
    return TextAnswer(text="".join(pieces), stop=stream.stopped_by)


def _masked(found: tuple[bytes, bool]) -> TextAnswer:
    mask, is_over = found
    return TextAnswer(mask=mask, is_over=is_over)


def _begun(masks: ServiceMasks, question: BeginRule) -> TextAnswer:
    return _masked(masks.begin(question.stream, question.rule, question.tokens, question.stops))


def _advanced(masks: ServiceMasks, question: TextQuestion) -> TextAnswer:
    if isinstance(question, EndRule):
        masks.end(question.stream)
        return TextAnswer()
    if isinstance(question, AdvanceRule):
        return _masked(masks.advance(question.stream, question.token))
    raise UsageError("no answer with this number follows a rule")


def read_facts(folder: Path, vocabulary: int, *, has_template: bool) -> TextFacts:
    """Return the facts in a model's folder that concern its answers. Raises UsageError."""
    config = read_table(folder / CONFIG, CONFIG_BYTES_MAX) if (folder / CONFIG).is_file() else {}
    path = folder / GENERATION_CONFIG
    asked = read_table(path, CONFIG_BYTES_MAX) if path.is_file() else {}
    ends = asked.get("eos_token_id", config.get("eos_token_id"))
    stops: list[int] = [each for each in (ends if isinstance(ends, list) else [ends]) if _is_id(each)]
    facts = TextFacts(tuple(dict.fromkeys(stops))[:STOPS_MAX], vocabulary, has_template)
    if asked.get("do_sample") is not True:
        return facts
    return msgspec.structs.replace(
        facts,
        temperature=_share(asked, "temperature", 1.0, 100.0),
        top_k=top_k if _is_id(top_k := asked.get("top_k")) else 0,
        top_p=_share(asked, "top_p", 1.0, 1.0) or 1.0,
        min_p=_share(asked, "min_p", 0.0, 1.0),
    )


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 24


def _share(table: Mapping[str, Any], name: str, usual: float, most: float) -> float:
    value = table.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value is not None and 0 <= value <= most else usual


def main(arguments: list[str]) -> None:
    parent, memory_bytes, allow_unfenced = map(int, arguments)
    die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        import jinja2.ext
        import jinja2.sandbox  # noqa: F401
        import tokenizers  # noqa: F401 - behind the fence no library is loaded any more
    except ImportError:
        pass  # the code that needs them reports what is not installed
    with suppress(ImportError):
        import llguidance  # noqa: F401
    try:
        sandbox.enter(
            scratch=os.getcwd(), device="cpu", memory_bytes=memory_bytes, allow_unfenced=bool(allow_unfenced)
        )
    except sandbox.NotFenced as error:
        _say(TextAnswer(refused=f"no process can be fenced in to read a service's tokenizer: {error}"))
        return
    try:
        texts = _Texts(Path(".")) if Path(TOKENIZER).exists() else _Bytes()
    except UsageError as error:
        _say(_refusal(error))
        return
    except MemoryError:
        _say(TextAnswer(refused="the tokenizer takes more memory than its size explains"))
        return
    _say(TextAnswer(texts.facts))
    while line := sys.stdin.buffer.readline():
        try:
            said = texts.answer(msgspec.json.decode(line, type=TextQuestion))
        except UsageError as error:
            said = _refusal(error)
        except MemoryError:
            said = TextAnswer(refused="it takes more memory than is allowed for a prompt")
        except RecursionError:
            said = TextAnswer(refused=TOO_DEEP)
        _say(said)


def _refusal(error: UsageError) -> TextAnswer:
    what, do = error.written
    return TextAnswer(refused=what.removeprefix(f"{TOKENIZER}: ") or "it cannot be read", do=do)


def _say(said: TextAnswer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
