"""The parent of a sandboxed process that converts texts to tokens and tokens to texts: `FencedText`.

The process (`node.content.text_process`) has the files of one model (`node.content.text_files`), which may be
untrusted. Neither Jinja's sandbox nor a tokenizer's rules limit the time and memory that they use. So each
answer has a time limit, after which the process is killed, and the kernel limits its memory. Prompts and
answers go through pipes (`node.content.text_questions`) and are written nowhere else. The process is kept
while a service is in use, because it takes a second to start.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio

from node.content.calls.rules import AnswerRule
from node.content.model_folder import TOKENIZER
from node.content.text_files import read_files
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
from node.errors import UsageError
from node.stages import sandbox
from node.stages.piped import PipedProcess
from node.stages.scratch import Scratch

MEMORY_BYTES = 256 << 20
"""Memory allowed in addition to Python, the libraries, and the tokenizer's tables: a chat as text and as
tokens."""
TABLES_RATIO = 24
"""Memory allowed for the tables of a tokenizer, relative to the size of its tokenizer.json: 11 MB take
120."""
START_SECONDS = 60.0
"""Time limit for the start. Python and the libraries take a second and a tokenizer of 35 MB a few more, and
the machine may be busy."""
ANSWER_SECONDS = 10.0
"""Time limit for rendering and tokenizing a chat. A normal chat of a million characters takes a second."""
LINE_BYTES_MAX = 1 << 24
"""Maximum size of one answer: the tokens of a long prompt."""
MESSAGES_MAX = 4_096
_ROOT = str(Path(__file__).parents[2])


class RenderedChat(msgspec.Struct, frozen=True):
    """The tokens of a chat, and the last characters of its text."""

    tokens: list[int]
    tail: str = ""


class TokenMask(msgspec.Struct, frozen=True):
    """The tokens that may come next, one bit each. The mask is empty if the answer `is_over`."""

    bits: bytes
    is_over: bool


class TextLost(Exception):
    """The process has ended or was killed. The message says why. `is_own` means that it ended because of the
    caller's own question."""

    def __init__(self, reason: str, *, is_own: bool = False) -> None:
        super().__init__(reason)
        self.is_own = is_own


class FencedText:
    """A process for one model. `open` starts it, `aclose` ends it."""

    def __init__(self, process: PipedProcess, scratch: Scratch, answer_seconds: float) -> None:
        self.facts = TextFacts((), 0, False)
        self.is_lost = False
        self._process = process
        self._scratch = scratch
        self._answer_seconds = answer_seconds
        self._buffer = bytearray()
        self._turn = trio.Lock()

    @classmethod
    async def open(
        cls, data: bytes, *, allow_unfenced: bool, answer_seconds: float = ANSWER_SECONDS
    ) -> "FencedText":
        """Start a process for the files of a model, or for a byte model, which has no files. If an answer
        takes longer than `answer_seconds`, the process is ended. Raises UsageError if the files cannot be
        read; RemoteProtocolError if they are malformed; TextLost."""
        files = read_files(data) if data else {}
        scratch = await trio.to_thread.run_sync(Scratch)
        try:
            await trio.to_thread.run_sync(_write_files, Path(scratch.path), files)
            process = _start(scratch.path, len(files.get(TOKENIZER, b"")), allow_unfenced=allow_unfenced)
            found = cls(process, scratch, answer_seconds)
        except BaseException:
            scratch.remove()
            raise
        try:
            said = await found._listen(START_SECONDS)
            if said.facts is None:
                raise TextLost("it did not report the tokenizer's facts")
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
        """Return the tokens of a chat, up to the beginning of the answer. Raises UsageError if there is no
        template, it refuses the messages, or they are too many; TextLost."""
        return (await self.render_chat(messages, tools)).tokens

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Like `render`, with `options` for the template; also returns the end of the text."""
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
        """Return the text that the next tokens add to an answer, and the one of `stops` that ended it, if
        any. Raises TextLost, UsageError."""
        said = await self._ask(Push(stream, list(tokens), list(stops), is_last, is_marked))
        return said.text, said.stop

    async def spell(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token. Raises TextLost, UsageError."""
        return (await self._ask(Spell(list(tokens)))).parts

    async def begin_rule(
        self, stream: int, rule: AnswerRule, tokens: Sequence[int], stops: Sequence[int]
    ) -> TokenMask:
        """Begin to apply a rule to an answer that already has `tokens`; return which tokens may follow.
        Raises UsageError if the rule cannot be followed; TextLost."""
        said = await self._ask(BeginRule(stream, rule, list(tokens), list(stops)))
        return TokenMask(said.mask, said.is_over)

    async def advance_rule(self, stream: int, token: int) -> TokenMask:
        """Return which tokens may come after this one. Raises UsageError, TextLost."""
        said = await self._ask(AdvanceRule(stream, token))
        return TokenMask(said.mask, said.is_over)

    async def end_rule(self, stream: int) -> None:
        """Forget an answer's rule. Raises TextLost."""
        await self._ask(EndRule(stream))

    async def _ask(self, question: TextQuestion) -> TextAnswer:
        # Shielded and with a time limit, because a partial question or an unread answer would corrupt the
        # next exchange.
        async with self._turn:
            said: TextAnswer | None = None
            with trio.CancelScope(shield=True):
                said = await self._asked(question)
            assert said is not None, "nobody cancels it"
            return said

    async def _asked(self, question: TextQuestion) -> TextAnswer:
        if self.is_lost:
            raise TextLost("it has ended")
        try:
            line = msgspec.json.encode(question) + b"\n"
        except RecursionError:
            raise UsageError(TOO_DEEP) from None
        try:
            with trio.fail_after(self._answer_seconds):
                await self._process.send(line)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self.aclose()
            raise TextLost("it has ended") from None  # it ended before it had the whole question
        except trio.TooSlowError:
            await self.aclose()
            raise TextLost(_too_slow(self._answer_seconds)) from None
        return await self._listen(self._answer_seconds)

    async def _listen(self, seconds: float) -> TextAnswer:
        line: bytes | None = None
        with trio.move_on_after(seconds):
            line = await self._line()
        is_own = not self.is_lost  # otherwise another task has ended it meanwhile
        if line is None:
            await self.aclose()
            raise TextLost(_too_slow(seconds), is_own=is_own)
        try:
            said = msgspec.json.decode(line, type=TextAnswer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            await self.aclose()
            raise TextLost("it has ended, or its answer cannot be decoded", is_own=is_own) from None
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
        """End the process. May be called more than once."""
        self.is_lost = True
        with trio.CancelScope(shield=True):
            await self._process.aclose()
            await trio.to_thread.run_sync(self._scratch.remove)


def _too_slow(seconds: float) -> str:
    return f"it took longer than {seconds:.0f} s"


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
        [sys.executable, "-P", "-m", "node.content.text_process", *arguments],
        cwd=scratch,
        env=environment | {"TOKENIZERS_PARALLELISM": "false"},
    )
