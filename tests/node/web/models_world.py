"""A page on a real socket whose node's service is a made-up model of bytes: the driver without a swarm.

It says `ANSWER` over and over, from the place that the prompt's length says. With a tokenizer
a conversation becomes its turns, a line each.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import trio

from node.config import Web
from node.content.fenced_text import TextFacts
from node.errors import RunFailed, UsageError
from node.serving.generations import Token
from node.serving.texts import TextPieces
from partition.serve.door import GenerationOver, Wish
from tests.node.web.world import Served, Told, served

ANSWER = "Grüße, 世界! "
SAID = ANSWER.encode()
NAME = "words"
CONTEXT = 4_096


class SaidText:
    """As a fenced process that knows a template: a conversation is its turns, a line each."""

    facts = TextFacts((), 256, has_template=True)

    async def encode(self, text: str) -> list[int]:
        await trio.lowlevel.checkpoint()
        return list(text.encode())

    async def render(self, turns: Sequence[Any], tools: Sequence[Any] = ()) -> list[int]:
        await trio.lowlevel.checkpoint()
        lines = [f"{turn['role']}: {turn['content']}{turn.get('tool_calls', '')}" for turn in turns]
        return list("\n".join([*lines, *map(str, tools)]).encode())


class SaidGeneration:
    """An answer that comes a byte at a time, `seconds` apart."""

    def __init__(self, world: "SaidServing", wish: Wish) -> None:
        self.route: tuple[bytes, ...] = (b"someone",) if world.answers else ()
        self.finish: GenerationOver | None = None
        self._world = world
        self._wish = wish
        self._made = 0

    def __aiter__(self) -> "SaidGeneration":
        return self

    async def __anext__(self) -> Token:
        number, self._made = self._made, self._made + 1
        if number == self._wish.tokens_max:
            self.finish = GenerationOver(1, "length")
            raise StopAsyncIteration
        if number == self._world.breaks_after:
            raise RunFailed("words: the answer broke off")
        await trio.sleep(self._world.seconds)
        top = tuple((token, -1.0 - token) for token in range(self._wish.sampling.top))
        return Token(SAID[number % len(SAID)], -0.5, top)


class SaidServing:
    """In the place of `node.serving.serving.Serving`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.breaks_after: int | None = None
        self.answers = True
        self.going = 0
        self.wishes: list[Wish] = []
        self.finder = self
        self.seams = SimpleNamespace(entropy=bytes)
        self.texts = self
        self.service = SimpleNamespace(
            manifest=SimpleNamespace(
                name=NAME, text="bytes", vocabulary=256, context=CONTEXT, stops=(), at_milliseconds=1
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
    async def pieces(self, _text: Any, stops: Sequence[str]) -> AsyncIterator[TextPieces]:
        await trio.lowlevel.checkpoint()
        yield TextPieces(None, 1, stops)

    @asynccontextmanager
    async def reading(self, _service: Any) -> AsyncIterator[SaidText]:
        await trio.lowlevel.checkpoint()
        yield SaidText()

    @asynccontextmanager
    async def answer(self, service: Any, wish: Wish) -> AsyncIterator[SaidGeneration]:
        await trio.lowlevel.checkpoint()
        self.going += 1
        self.wishes.append(wish)
        try:
            yield SaidGeneration(self, wish)
        finally:
            self.going -= 1


@asynccontextmanager
async def models(
    *, text: str = "tokenizer", web: Web | None = None, **settings: Any
) -> AsyncGenerator[tuple[Served, SaidServing, str], None]:
    """A page whose node serves the model, the model, and a key."""
    said = SaidServing()
    for name, value in settings.items():
        setattr(said, name, value)
    said.service.manifest.text = text
    node = Told(serving=said)
    if web is not None:
        node.config = replace(node.config, web=web)
    async with served(node) as page:
        page.page.models._answers._asking = said  # type: ignore[attr-defined]  # lists the services
        made: Any = await page.page.models.keys.handlers["keys.new"]({}, ignore)
        yield page, said, made["key"]


async def ignore(_event: object) -> None:
    return
