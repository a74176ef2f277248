"""A fenced process that makes tokens of texts and texts of tokens: `python -m node.content.fenced_text`.

It also says which tokens may come next where an answer has to follow a rule (`node.content.masks`). It has
the files of one model (`node.content.text_files`), which may be a stranger's, and fences itself in
(`node.stages.sandbox`) before it looks at them. It renders chats by the model's template, which is a
program of its author: neither Jinja's sandbox nor a tokenizer's rules bound what they take, so each answer
has a time, after which the process is killed, and the kernel bounds its memory. Prompts and answers go
through pipes, and stand nowhere else. It is kept while a service is asked something, since it takes a
second to start.

Long because both ends of the pipe stand here, with what they say to each other.
"""

import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import trio

from node.content.calls.formats import (
    KEPT,
    CallFormat,
    adapt_turns,
    describe_tools,
    detect_calls,
    detect_reasoning,
)
from node.content.calls.rules import AnswerRule
from node.content.chat import ChatTemplate
from node.content.masks import Masks, ServiceMasks
from node.content.model_folder import CONFIG, CONFIG_BYTES_MAX, TOKENIZER, read_table, tokenizer_facts
from node.content.text_files import GENERATION_CONFIG, read_files
from node.content.token_bytes import special_ids, token_bytes
from node.content.tokens import Tokens
from node.errors import UsageError
from node.stages import sandbox
from node.stages.parent import die_with
from node.stages.piped import PipedProcess
from node.stages.scratch import Scratch
from partition.serve.text import TextStream

MEMORY_BYTES = 256 << 20
"""On top of Python, the libraries, and the tokenizer's tables: a chat as a text, and its tokens."""
TABLES_RATIO = 24
"""A tokenizer.json as its tables: 11 MB take 120."""
START_SECONDS = 60.0
"""Python and the libraries take a second, 35 MB of tokenizer some; a machine may be busy."""
ANSWER_SECONDS = 10.0
"""For a chat to be rendered and made tokens of: an honest one of a million letters takes a second."""
LINE_BYTES_MAX = 1 << 24
"""One answer: the tokens of a long prompt."""
STREAMS_MAX = 256
"""Answers whose text is made at once."""
MESSAGES_MAX = 4_096
STOPS_MAX = 8
"""Ids that end an answer, as a manifest has room for."""
BYTES = 256
"""The vocabulary of a model of bytes, which has no tokenizer."""
TAIL_LENGTH = 64
"""Letters at the end of a prompt that say whether reasoning has begun."""
_ROOT = str(Path(__file__).parents[2])


class TextFacts(msgspec.Struct, frozen=True):
    """What a model's files say: the ids that end an answer, how it is usually asked, whether chats have a
    template, how many tokens the tokenizer tells apart, and in which formats it writes calls of tools and its
    reasoning. Temperature 0 takes the likeliest."""

    stops: tuple[int, ...]
    vocabulary: int
    has_template: bool
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    calls: CallFormat = ""
    reasoning: int = -1


class RenderedChat(msgspec.Struct, frozen=True):
    """The tokens of a chat, and the last letters of its text."""

    tokens: list[int]
    tail: str = ""


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """The tokens of a prompt."""

    text: str


class Render(msgspec.Struct, frozen=True, tag="render"):
    """The tokens of a chat, with the beginning of an answer at the end; the model may call `tools`. A
    template gets `options` by their names."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    options: dict[str, Any] = {}


class Push(msgspec.Struct, frozen=True, tag="push"):
    """The next tokens of an answer; an unknown `stream` begins with `stops`. One that `is_marked` keeps the
    special tokens by which calls and reasoning are told apart."""

    stream: int
    tokens: list[int]
    stops: list[str] = []
    is_last: bool = False
    is_marked: bool = False


class Spell(msgspec.Struct, frozen=True, tag="spell"):
    """The bytes that tokens stand for."""

    tokens: list[int]


class BeginRule(msgspec.Struct, frozen=True, tag="begin"):
    """An answer follows a rule, has these tokens already, and may end with `stops`."""

    stream: int
    rule: AnswerRule
    tokens: list[int]
    stops: list[int]


class AdvanceRule(msgspec.Struct, frozen=True, tag="advance"):
    """The token that came."""

    stream: int
    token: int


class EndRule(msgspec.Struct, frozen=True, tag="end"):
    """The answer is over."""

    stream: int


_Question = Encode | Render | Push | Spell | BeginRule | AdvanceRule | EndRule


class _Said(msgspec.Struct, frozen=True):
    """A line of the process. `facts` come first, of themselves."""

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


class TokenMask(msgspec.Struct, frozen=True):
    """Which tokens may come next, a bit for each; none does where the answer `is_over`."""

    bits: bytes
    is_over: bool


class TextLost(Exception):
    """The process has ended or was killed. The text says why; `is_own`: it was at the asker's question."""

    def __init__(self, reason: str, *, is_own: bool = False) -> None:
        super().__init__(reason)
        self.is_own = is_own


class FencedText:
    """One such process. `open` starts it, `aclose` ends it."""

    def __init__(self, process: PipedProcess, scratch: Scratch) -> None:
        self.facts = TextFacts((), 0, False)
        self.is_lost = False
        self._process = process
        self._scratch = scratch
        self._buffer = bytearray()
        self._turn = trio.Lock()

    @classmethod
    async def open(cls, data: bytes, *, allow_unfenced: bool) -> "FencedText":
        """Start one for the files of a model, or for one of bytes, which has none. Raises UsageError: they
        cannot be read; RemoteProtocolError: they are no such files; TextLost."""
        files = read_files(data) if data else {}
        scratch = await trio.to_thread.run_sync(Scratch)
        try:
            await trio.to_thread.run_sync(_write_files, Path(scratch.path), files)
            process = _start(scratch.path, len(files.get(TOKENIZER, b"")), allow_unfenced=allow_unfenced)
            found = cls(process, scratch)
        except BaseException:
            scratch.remove()
            raise
        try:
            said = await found._listen(START_SECONDS)
            if said.facts is None:
                raise TextLost("it says nothing of the tokenizer")
            found.facts = said.facts
        except BaseException:
            with trio.CancelScope(shield=True):
                await found.aclose()
            raise
        return found

    async def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt. Raises UsageError, TextLost."""
        return (await self._ask(Encode(text))).tokens

    async def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the tokens of a chat, up to where the answer begins. Raises UsageError: there is no
        template, it refuses the messages, or they are too many; TextLost."""
        return (await self.render_chat(messages, tools)).tokens

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The same, with `options` for the template, and how the text ends."""
        if len(messages) > MESSAGES_MAX:
            raise UsageError(f"{len(messages):,} messages; at most {MESSAGES_MAX:,}", "a shorter chat")
        turns = [dict(each) for each in messages]
        said = await self._ask(Render(turns, [dict(tool) for tool in tools], dict(options or {})))
        return RenderedChat(said.tokens, said.tail)

    async def push(
        self,
        stream: int,
        tokens: Sequence[int],
        stops: Sequence[str],
        *,
        is_last: bool = False,
        is_marked: bool = False,
    ) -> tuple[str, str]:
        """Return what the next tokens of an answer add to its text, and which of `stops` ended it, if one
        did. Raises TextLost, UsageError."""
        said = await self._ask(Push(stream, list(tokens), list(stops), is_last, is_marked))
        return said.text, said.stop

    async def spell(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes that each token stands for. Raises TextLost, UsageError."""
        return (await self._ask(Spell(list(tokens)))).parts

    async def begin_rule(
        self, stream: int, rule: AnswerRule, tokens: Sequence[int], stops: Sequence[int]
    ) -> TokenMask:
        """Have an answer follow a rule; return which tokens may come after those that it has. Raises
        UsageError: it cannot be followed; TextLost."""
        said = await self._ask(BeginRule(stream, rule, list(tokens), list(stops)))
        return TokenMask(said.mask, said.is_over)

    async def advance_rule(self, stream: int, token: int) -> TokenMask:
        """Return which tokens may come after this one. Raises UsageError, TextLost."""
        said = await self._ask(AdvanceRule(stream, token))
        return TokenMask(said.mask, said.is_over)

    async def end_rule(self, stream: int) -> None:
        """Forget an answer's rule. Raises TextLost."""
        await self._ask(EndRule(stream))

    async def _ask(self, question: _Question) -> _Said:
        # Shielded, and bounded in time: half a question, or an answer that nobody takes, would be another's.
        async with self._turn:
            said: _Said | None = None
            with trio.CancelScope(shield=True):
                said = await self._asked(question)
            assert said is not None, "nobody cancels it"
            return said

    async def _asked(self, question: _Question) -> _Said:
        if self.is_lost:
            raise TextLost("it has ended")
        try:
            line = msgspec.json.encode(question) + b"\n"
        except RecursionError:
            raise UsageError(_TOO_DEEP) from None
        try:
            with trio.fail_after(ANSWER_SECONDS):
                await self._process.send(line)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self.aclose()
            raise TextLost("it has ended") from None  # before it had the whole question
        except trio.TooSlowError:
            await self.aclose()
            raise TextLost(_TOO_SLOW) from None
        return await self._listen(ANSWER_SECONDS)

    async def _listen(self, seconds: float) -> _Said:
        line: bytes | None = None
        with trio.move_on_after(seconds):
            line = await self._line()
        is_own = not self.is_lost  # else somebody ended it meanwhile
        if line is None:
            await self.aclose()
            raise TextLost(_TOO_SLOW, is_own=is_own)
        try:
            said = msgspec.json.decode(line, type=_Said)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            await self.aclose()
            raise TextLost("it has ended, or says what cannot be understood", is_own=is_own) from None
        if said.refused:
            raise UsageError(_printable(said.refused), said.do and _printable(said.do))
        return said

    async def _line(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            data = await self._process.receive()
            if not data or len(self._buffer) > LINE_BYTES_MAX:
                return b""
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    async def aclose(self) -> None:
        """End the process; may be called again."""
        self.is_lost = True
        with trio.CancelScope(shield=True):
            await self._process.aclose()
            await trio.to_thread.run_sync(self._scratch.remove)


_TOO_DEEP = "it is nested too deeply"
_TOO_SLOW = f"it took longer than {ANSWER_SECONDS:.0f} s"


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)[:400]


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _start(scratch: str, tokenizer_bytes: int, *, allow_unfenced: bool) -> PipedProcess:
    memory = MEMORY_BYTES + TABLES_RATIO * tokenizer_bytes
    arguments = map(str, (os.getpid(), memory, int(allow_unfenced)))
    environment = sandbox.environment(os.environ, scratch=scratch, path=_ROOT, threads=1)
    return PipedProcess(
        [sys.executable, "-P", "-m", "node.content.fenced_text", *arguments],
        cwd=scratch,
        env=environment | {"TOKENIZERS_PARALLELISM": "false"},
    )


# In the process


class _Texts:
    """What the process knows of a model with a tokenizer."""

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

    def answer(self, question: _Question) -> _Said:
        """Answer one. Raises UsageError."""
        match question:
            case Encode(text=text):
                return _Said(tokens=list(self._known.encode(text, special=True).ids))
            case Render():
                return self._render(question)
            case Push():
                return self._push(question)
            case Spell():
                return _Said(parts=[self._spelled(token) for token in question.tokens])
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

    def _render(self, asked: Render) -> _Said:
        if self._template is None:
            raise UsageError("the model has no chat template", "`peerloom generate` takes a text as it is")
        turns, tools = adapt_turns(asked.messages, self.facts.calls), asked.tools
        if "tools" not in self._template_text:
            turns, tools = describe_tools(turns, tools), []
        try:
            text = self._template.render(turns, prompts=True, tools=tools, options=asked.options)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return _Said(tokens=list(self._known.encode(text).ids), tail=text[-TAIL_LENGTH:])

    def _push(self, question: Push) -> _Said:
        decode = self._decode_marked if question.is_marked and self._kept else self._decode
        return _pushed(self._streams, question, decode)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._known.decode(list(ids))

    def _decode_marked(self, ids: Sequence[int]) -> str:
        """Return the text of tokens with the special ones that are kept."""
        parts: list[str] = []
        begin = 0
        for place, token in enumerate(ids):
            if token in self._kept:
                parts += [self._decode(ids[begin:place]), self._kept[token]]
                begin = place + 1
        return "".join(parts) + self._decode(ids[begin:])


class _Bytes:
    """What the process knows of a model of bytes: it holds answers to rules, and no more is asked of it."""

    def __init__(self) -> None:
        self._masks = ServiceMasks(_byte_masks)
        self.facts = TextFacts((), BYTES, has_template=False)

    def answer(self, question: _Question) -> _Said:
        """Answer one. Raises UsageError."""
        if isinstance(question, BeginRule):
            return _begun(self._masks, question)
        return _advanced(self._masks, question)


def _byte_masks(stops: list[int]) -> Masks:
    return Masks([bytes([each]) for each in range(BYTES)], {}, stops, "", None)


def _pushed(streams: dict[int, TextStream], question: Push, decode: Callable[[Sequence[int]], str]) -> _Said:
    stream = streams.get(question.stream)
    if stream is None:
        if len(streams) >= STREAMS_MAX:
            del streams[next(iter(streams))]
        stream = streams[question.stream] = TextStream(decode, question.stops)
    pieces = [stream.push(token) for token in question.tokens]
    if question.is_last:
        pieces.append(stream.finish())
        del streams[question.stream]
    return _Said(text="".join(pieces), stop=stream.stopped_by)


def _masked(found: tuple[bytes, bool]) -> _Said:
    mask, is_over = found
    return _Said(mask=mask, is_over=is_over)


def _begun(masks: ServiceMasks, question: BeginRule) -> _Said:
    return _masked(masks.begin(question.stream, question.rule, question.tokens, question.stops))


def _advanced(masks: ServiceMasks, question: _Question) -> _Said:
    if isinstance(question, EndRule):
        masks.end(question.stream)
        return _Said()
    if isinstance(question, AdvanceRule):
        return _masked(masks.advance(question.stream, question.token))
    raise UsageError("no such rule is followed here")


def read_facts(folder: Path, vocabulary: int, *, has_template: bool) -> TextFacts:
    """Return what a folder says of how its model answers. Raises UsageError."""
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
        pass  # what needs them says what is not installed
    with suppress(ImportError):
        import llguidance  # noqa: F401
    try:
        sandbox.enter(
            scratch=os.getcwd(), device="cpu", memory_bytes=memory_bytes, allow_unfenced=bool(allow_unfenced)
        )
    except sandbox.NotFenced as error:
        _say(_Said(refused=f"no process can be fenced in to read a service's tokenizer: {error}"))
        return
    try:
        texts = _Texts(Path(".")) if Path(TOKENIZER).exists() else _Bytes()
    except UsageError as error:
        _say(_refusal(error))
        return
    except MemoryError:
        _say(_Said(refused="the tokenizer takes more memory than its size explains"))
        return
    _say(_Said(texts.facts))
    while line := sys.stdin.buffer.readline():
        try:
            said = texts.answer(msgspec.json.decode(line, type=_Question))
        except UsageError as error:
            said = _refusal(error)
        except MemoryError:
            said = _Said(refused="it takes more memory than a prompt may")
        except RecursionError:
            said = _Said(refused=_TOO_DEEP)
        _say(said)


def _refusal(error: UsageError) -> _Said:
    what, do = error.written
    return _Said(refused=what.removeprefix(f"{TOKENIZER}: ") or "it cannot be read", do=do)


def _say(said: _Said) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
