"""A fenced process that makes tokens of texts and texts of tokens: `python -m node.content.fenced_text`.

It has the files of one model (`node.content.text_files`), which may be a stranger's, and fences itself in
(`node.stages.sandbox`) before it looks at them. It renders chats by the model's template, which is a
program of its author: neither Jinja's sandbox nor a tokenizer's rules bound what they take, so each answer
has a time, after which the process is killed, and the kernel bounds its memory. Prompts and answers go
through pipes, and stand nowhere else. It is kept while a service is asked something, since it takes a
second to start.
"""

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import trio

from node.content.chat import ChatTemplate
from node.content.model_folder import CONFIG, CONFIG_BYTES_MAX, TOKENIZER, read_table, tokenizer_facts
from node.content.text_files import GENERATION_CONFIG, read_files
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
_ROOT = str(Path(__file__).parents[2])


class TextFacts(msgspec.Struct, frozen=True):
    """What a model's files say: the ids that end an answer, how it is usually asked, whether chats have a
    template, and how many tokens the tokenizer tells apart. Temperature 0 takes the likeliest."""

    stops: tuple[int, ...]
    vocabulary: int
    has_template: bool
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """The tokens of a prompt."""

    text: str


class Render(msgspec.Struct, frozen=True, tag="render"):
    """The tokens of a chat, with the beginning of an answer at the end; the model may call `tools`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []


class Push(msgspec.Struct, frozen=True, tag="push"):
    """The next tokens of an answer; an unknown `stream` begins with `stops`."""

    stream: int
    tokens: list[int]
    stops: list[str] = []
    is_last: bool = False


_Question = Encode | Render | Push


class _Said(msgspec.Struct, frozen=True):
    """A line of the process. `facts` come first, of themselves."""

    facts: TextFacts | None = None
    tokens: list[int] = []
    text: str = ""
    stop: str = ""
    refused: str = ""
    do: str | None = None


class TextLost(Exception):
    """The process has ended or was killed. The text says why."""


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
        """Start one for the files of a model. Raises UsageError: they cannot be read; RemoteProtocolError:
        they are no such files; TextLost."""
        files = read_files(data)
        scratch = await trio.to_thread.run_sync(Scratch)
        try:
            await trio.to_thread.run_sync(_write_files, Path(scratch.path), files)
            process = _start(scratch.path, len(files[TOKENIZER]), allow_unfenced=allow_unfenced)
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
        if len(messages) > MESSAGES_MAX:
            raise UsageError(f"{len(messages):,} messages; at most {MESSAGES_MAX:,}", "a shorter chat")
        turns = [dict(each) for each in messages]
        return (await self._ask(Render(turns, [dict(tool) for tool in tools]))).tokens

    async def push(
        self, stream: int, tokens: Sequence[int], stops: Sequence[str], *, is_last: bool = False
    ) -> tuple[str, str]:
        """Return what the next tokens of an answer add to its text, and which of `stops` ended it, if one
        did. Raises TextLost, UsageError."""
        said = await self._ask(Push(stream, list(tokens), list(stops), is_last))
        return said.text, said.stop

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
            with trio.fail_after(ANSWER_SECONDS):
                await self._process.send(msgspec.json.encode(question) + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self.aclose()
            raise TextLost("it has ended") from None
        except trio.TooSlowError:
            await self.aclose()
            raise TextLost(_TOO_SLOW) from None
        return await self._listen(ANSWER_SECONDS)

    async def _listen(self, seconds: float) -> _Said:
        line: bytes | None = None
        with trio.move_on_after(seconds):
            line = await self._line()
        if line is None:
            await self.aclose()
            raise TextLost(_TOO_SLOW)
        try:
            said = msgspec.json.decode(line, type=_Said)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            await self.aclose()
            raise TextLost("it has ended, or says what cannot be understood") from None
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
    """What the process knows."""

    def __init__(self, folder: Path) -> None:
        self._known = Tokens(folder / TOKENIZER)
        special, template = tokenizer_facts(folder)
        self._template = ChatTemplate(template, folder, special) if template else None
        self._streams: dict[int, TextStream] = {}
        self.facts = read_facts(folder, self._known.count, has_template=bool(template))

    def answer(self, question: _Question) -> _Said:
        """Answer one. Raises UsageError."""
        match question:
            case Encode(text=text):
                return _Said(tokens=list(self._known.encode(text, special=True).ids))
            case Render():
                return _Said(tokens=self._render(question))
            case Push():
                return self._push(question)

    def _render(self, asked: Render) -> list[int]:
        if self._template is None:
            raise UsageError("the model has no chat template", "`peerloom generate` takes a text as it is")
        try:
            text = self._template.render(asked.messages, prompts=True, tools=asked.tools)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return list(self._known.encode(text).ids)

    def _push(self, question: Push) -> _Said:
        stream = self._streams.get(question.stream)
        if stream is None:
            if len(self._streams) >= STREAMS_MAX:
                del self._streams[next(iter(self._streams))]
            stream = self._streams[question.stream] = TextStream(self._decode, question.stops)
        pieces = [stream.push(token) for token in question.tokens]
        if question.is_last:
            pieces.append(stream.finish())
            del self._streams[question.stream]
        return _Said(text="".join(pieces), stop=stream.stopped_by)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._known.decode(list(ids))


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
    try:
        sandbox.enter(
            scratch=os.getcwd(), device="cpu", memory_bytes=memory_bytes, allow_unfenced=bool(allow_unfenced)
        )
    except sandbox.NotFenced as error:
        _say(_Said(refused=f"no process can be fenced in to read a service's tokenizer: {error}"))
        return
    try:
        texts = _Texts(Path("."))
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
        _say(said)


def _refusal(error: UsageError) -> _Said:
    what, do = error.written
    return _Said(refused=what.removeprefix(f"{TOKENIZER}: ") or "it cannot be read", do=do)


def _say(said: _Said) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
