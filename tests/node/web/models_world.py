"""A page on a real socket whose node serves an invented model of bytes, without a swarm.

The model repeats `ANSWER`, or a text that a test gives once. With a tokenizer a conversation becomes its
turns, one per line. Under a rule the model writes any allowed text, drawn by the seed of the wish.
"""

import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import trio

from node.config import Web
from node.content.fenced_text import FencedText, RenderedChat
from node.content.text_questions import TextFacts
from node.errors import RunFailed, UsageError
from node.serving.generations import Token
from node.serving.texts import TextPieces
from node.web.settings import WebSettings
from partition.serve.door import GenerationOver, GenerationWish
from tests.node.web.world import Served, Told, served

ANSWER = "Grüße, 世界! "
SAID = ANSWER.encode()
NAME = "words"
CONTEXT = 4_096


class SaidText:
    """A sandboxed process that knows a template: a conversation becomes its turns, one per line."""

    tail = ""
    facts = TextFacts((), 256, has_template=True)

    async def encode(self, text: str) -> list[int]:
        await trio.lowlevel.checkpoint()
        return list(text.encode())

    async def render_chat(
        self, turns: Sequence[Any], tools: Sequence[Any] = (), options: Any = None
    ) -> RenderedChat:
        await trio.lowlevel.checkpoint()
        lines = [f"{turn['role']}: {turn['content']}{turn.get('tool_calls', '')}" for turn in turns]
        lines += [str(turn["reasoning_content"]) for turn in turns if "reasoning_content" in turn]
        lines += [str(options)] if options else []
        return RenderedChat(list("\n".join([*lines, *map(str, tools)]).encode()), self.tail)

    async def render(self, turns: Sequence[Any], tools: Sequence[Any] = ()) -> list[int]:
        return (await self.render_chat(turns, tools)).tokens

    async def spell(self, tokens: Sequence[int]) -> list[bytes]:
        await trio.lowlevel.checkpoint()
        return [bytes([token]) for token in tokens]


class SaidGeneration:
    """An answer that arrives one byte at a time, `seconds` apart."""

    def __init__(self, world: "SaidServing", wish: GenerationWish) -> None:
        self.route: tuple[bytes, ...] = (b"someone",) if world.answers else ()
        self.is_following, self.shared = False, world.shared
        self.finish: GenerationOver | None = None
        self._world = world
        self._wish = wish
        self._made = 0
        self._is_free = True
        self._allowed: Any = ()
        self._random = random.Random(wish.sampling.seed)

    def __aiter__(self) -> "SaidGeneration":
        return self

    async def __anext__(self) -> Token:
        number, self._made = self._made, self._made + 1
        says = self._world.says
        if number == self._wish.tokens_max:
            self.finish = GenerationOver(1, "length")
            raise StopAsyncIteration
        if number == self._world.breaks_after:
            raise RunFailed("words: the answer broke off")
        await trio.sleep(self._world.seconds)
        if self._wish.is_masked:
            return await self._allowed_token()
        if says and number == len(says):
            self.finish = GenerationOver(1, "stop")
            raise StopAsyncIteration
        top = tuple((token, -1.0 - token) for token in range(self._wish.sampling.top))
        return Token((says or SAID)[number % len(says or SAID)], -0.5, top)

    def permit(self, allowed: Any) -> None:
        self._allowed = allowed

    async def _allowed_token(self) -> Token:
        allowed = np.flatnonzero(self._allowed).tolist()
        if not allowed:
            self.finish = GenerationOver(1, "stop")
            raise StopAsyncIteration
        says = self._world.says
        if says and self._is_free:
            if self._made > len(says):
                self.finish = GenerationOver(1, "stop")
                raise StopAsyncIteration
            if says[self._made - 1] in allowed:
                return Token(says[self._made - 1], -0.5)
            self._is_free = False  # the model's own text is not allowed, so it writes any allowed byte
        closing = [token for token in allowed if token in b'"}]0123456789']
        return Token(self._random.choice(closing or allowed), -0.5)


class SaidServing:
    """A replacement for `node.serving.serving.Serving`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.breaks_after: int | None = None
        self.says = b""
        self.rules: FencedText | None = None
        self.text_kind: type[FencedText] = FencedText
        self.rules_opened = 0
        self.streams = 0
        self.facts = SaidText.facts
        self.tail = ""
        self.answers = True
        self.shared = 0
        """The number of cached prompt tokens."""
        self.going = 0
        self.wishes: list[GenerationWish] = []
        self.finder = self
        self.seams = SimpleNamespace(entropy=bytes)
        self.texts = self
        self.generations = SimpleNamespace(newest={})
        self.hosting = SimpleNamespace(own=list)
        self.service = SimpleNamespace(
            manifest=SimpleNamespace(
                name=NAME,
                text="bytes",
                vocabulary=256,
                context=CONTEXT,
                stops=(),
                at_milliseconds=1,
                vector=0,
            )
        )

    async def find(self, name: str) -> Any:
        await trio.lowlevel.checkpoint()
        if name != NAME:
            raise UsageError(f"no service is called {name!r}")
        return self.service

    async def services(self) -> Any:
        await trio.lowlevel.checkpoint()
        row = {"name": NAME, "publisher": "12D3", "service": "ab", "context": CONTEXT, "text": "bytes"}
        return {"services": [row | {"stages": [], "at_milliseconds": 1_700_000_000_000}]}

    @asynccontextmanager
    async def pieces(
        self, _text: Any, stops: Sequence[str], *, is_marked: bool = False
    ) -> AsyncIterator[TextPieces]:
        await trio.lowlevel.checkpoint()
        yield TextPieces(None, 1, stops)

    @asynccontextmanager
    async def reading(self, _service: Any, purpose: str = "") -> AsyncIterator[Any]:
        if purpose:  # the real class, for a model of bytes
            if self.rules is None or self.rules.is_lost:
                self.rules = await self.text_kind.open(b"", allow_unfenced=True)
                self.rules_opened += 1
            yield self.rules
            return
        await trio.lowlevel.checkpoint()
        text = SaidText()
        text.facts, text.tail = self.facts, self.tail
        yield text

    def next_stream(self) -> int:
        self.streams += 1
        return self.streams

    @asynccontextmanager
    async def answer(self, service: Any, wish: GenerationWish) -> AsyncIterator[SaidGeneration]:
        await trio.lowlevel.checkpoint()
        self.going += 1
        self.wishes.append(wish)
        try:
            yield SaidGeneration(self, wish)
        finally:
            self.going -= 1


@asynccontextmanager
async def models(
    *, text: str = "tokenizer", web: Web | None = None, limits: WebSettings | None = None, **settings: Any
) -> AsyncGenerator[tuple[Served, SaidServing, str], None]:
    """Yield a page whose node serves the model, the model, and a key."""
    said = SaidServing()
    for name, value in settings.items():
        setattr(said, name, value)
    said.service.manifest.text = text
    node = Told(serving=said)
    if web is not None:
        node.config = replace(node.config, web=web)
    async with served(node, limits) as page:
        page.page.models._answers._asking = said  # type: ignore[attr-defined]  # lists the services
        made: Any = await page.page.models.keys.handlers["keys.new"]({}, ignore)
        try:
            yield page, said, made["key"]
        finally:
            if said.rules is not None:
                await said.rules.aclose()


async def ignore(_event: object) -> None:
    return
