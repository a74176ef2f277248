"""A page whose node finds one service of two stages for a chat. Its answers move and fail as a test sets."""

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import trio

from crypto.identity import PeerId
from node.serving.generations import Token
from node.serving.questions import Question
from node.web.settings import WebSettings
from partition.serve.door import GenerationWish, StageReplica
from tests.node.web.models_world import NAME, SaidGeneration, SaidServing, SaidText
from tests.node.web.world import Served, Told, joined, peer, served, started

SERVICE = "ab" * 8


class MovingGeneration(SaidGeneration):
    """An answer that moves to a different route after `moves_after` tokens, without an error."""

    def __init__(self, world: "ChatServing", wish: GenerationWish) -> None:
        super().__init__(world, wish)
        self.service = world.service
        self.route: tuple[PeerId, ...] = (peer(1), peer(2))
        self.is_following = False
        self.moves, self.lost, self.is_exact, self.shared = 0, "", True, 0
        self.count, self.began_at = 0, trio.current_time()
        self.first_at: float | None = None
        self._chat = world

    async def __anext__(self) -> Token:
        if self.count == self._chat.moves_after:
            self.route, self.moves, self.lost = (peer(1), peer(3)), 1, "its stream broke"
            await trio.sleep(self._chat.pause_seconds)
        token = await super().__anext__()
        self.first_at = self.first_at or trio.current_time()
        self.count += 1
        return token


class ChatServing(SaidServing):
    """Return a service of two stages at four peers."""

    def __init__(self) -> None:
        super().__init__()
        self.moves_after = -1
        self.pause_seconds = 0.3
        self.is_there = True
        self.holders: dict[int, list[int]] = {0: [1], 1: [2, 3]}
        self.seams = SimpleNamespace(entropy=bytes, clock=SimpleNamespace(monotonic=trio.current_time))
        vars(self.service).update(id=b"x", text=SERVICE, publisher=peer(1))
        vars(self.service.manifest).update(
            stages=2, cuts=(4,), graph=b"g", replicas=2, run=b"", step=0, holders=()
        )

    async def find(self, name: str) -> Any:
        return await super().find(NAME if name == SERVICE else name)

    async def all(self) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return [self.service] if self.is_there else []

    async def routes(self, _service: Any) -> Mapping[int, Sequence[StageReplica]]:
        await trio.lowlevel.checkpoint()
        return {
            stage: [StageReplica(peer(each), 0, 0.0) for each in rows] for stage, rows in self.holders.items()
        }

    def usage(self, _service: bytes) -> dict[PeerId, Any]:
        return {}

    def members(self, _service: bytes) -> list[PeerId]:
        return []

    @asynccontextmanager
    async def reading(  # type: ignore[override]  # it stands for the node's texts too, which take holders
        self, _service: Any, _holders: Any = (), purpose: str = ""
    ) -> AsyncIterator[SaidText]:
        await trio.lowlevel.checkpoint()
        yield SaidText()

    @asynccontextmanager
    async def answer(self, service: Any, wish: GenerationWish) -> AsyncIterator[SaidGeneration]:
        async with super().answer(service, wish):
            yield MovingGeneration(self, wish)


@asynccontextmanager
async def chats(
    *, limits: WebSettings | None = None, **settings: Any
) -> AsyncGenerator[tuple[Served, ChatServing], None]:
    """Yield a page whose node finds the service."""
    said = ChatServing()
    for name, value in settings.items():
        setattr(said, name, value)
    said.service.manifest.text = "tokenizer"
    node = Told(serving=said)
    for event in [started(), *(joined(number) for number in range(1, 4))]:
        node.publish(event)
    async with served(node, limits) as page:
        yield page, said


@contextmanager
def page_of_chats(**settings: Any) -> Iterator[tuple[str, ChatServing]]:
    """Serve the same page by a thread for a browser, and yield its link."""
    ready, end = threading.Event(), trio.Event()
    held: list[Any] = []

    async def serve() -> None:
        async with chats(**settings) as (page, said):
            held.extend((page.page.link, said, trio.lowlevel.current_trio_token()))
            ready.set()
            await end.wait()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert ready.wait(20)
    try:
        yield held[0], held[1]
    finally:
        held[2].run_sync_soon(end.set)
        thread.join()


def question(text: str = "hi", tokens: int = 24) -> dict[str, Any]:
    """Return the page's request."""
    asked = Question(messages=({"role": "user", "content": text},), tokens_max=tokens)
    return {"service": SERVICE, "question": {"messages": asked.messages, "tokens_max": asked.tokens_max}}
