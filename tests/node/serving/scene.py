"""Whole nodes in virtual time that serve a function of the tokens, so the serving code runs without torch."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import trio

from crypto.identity import PeerId
from node.errors import StageFailed
from node.offering import Offering
from node.protocols.services import Service, ServiceManifest
from node.runtime import Node
from node.seams import Parts
from node.serving.stage import HeldStage, Outcome
from node.serving.tensors import check_ids
from partition.codecs.codec import Typed
from partition.serve.door import GenerationWish
from partition.serve.messages import UnitWork
from partition.serve.provider import ComputeBatch, ForkSession
from sim.network.model import NetworkModel
from tests.partition.serve.world import CONTEXT, VOCABULARY, StageOfTokens
from tests.stack import Swarm, swarm

STAGE_SECONDS = 0.05


class TokensServed:
    """A replacement for `node.serving.stage.HeldStage`. `anew` makes a new class for each test."""

    opened: ClassVar[list[tuple[PeerId, int]]]
    seconds = STAGE_SECONDS
    load_seconds = 0.5
    tokens_max = 10_000
    needed_bytes = 1_000
    bits = b"x"
    broken: ClassVar[set[PeerId]]

    @classmethod
    def anew(cls) -> "type[TokensServed]":
        """Return a class without open or broken stages."""
        return type(cls.__name__, (cls,), {"opened": [], "broken": set()})

    def __init__(self, service: Service, number: int, me: PeerId) -> None:
        self.service = service
        self.number = number
        self.me = me
        self.stage = StageOfTokens(number == service.manifest.stages - 1)
        self.is_closed = False

    @classmethod
    async def open(cls, _seams: Any, service: Service, number: int, *others: Any) -> "TokensServed":
        await trio.sleep(cls.load_seconds)
        if others[-1] in cls.broken:
            raise StageFailed("no such weights")
        cls.opened.append((others[-1], number))
        return cls(service, number, others[-1])

    async def read_stored(self, _offset: int, _length: int, _executor: object) -> bytes | None:
        return None

    def check(self, work: UnitWork, arrays: Sequence[Typed]) -> None:
        check_ids(work, arrays, VOCABULARY)

    async def compute(self, asked: ComputeBatch, _executor: Any) -> Outcome:
        await trio.sleep(self.seconds)
        if self.is_closed:
            raise StageFailed("its process was ended")
        return self.stage.compute(asked)

    async def fork(self, session: bytes, base: bytes, tokens: int) -> None:
        self.stage.obey(ForkSession(self.service.id, self.number, session, base, tokens))

    async def forget(self, session: bytes) -> None:
        self.stage.kept.pop(session, None)

    async def try_process(self) -> None:
        if self.is_closed:
            raise StageFailed("its process was ended")

    async def aclose(self) -> None:
        self.is_closed = True
        self.stage.kept.clear()


def served_by(stages: type[TokensServed] | None = None) -> Parts:
    """Return the classes of nodes that serve tokens instead of models, with a stage class of their own by
    default."""
    return {HeldStage: stages or TokensServed.anew()}


def manifest(**changes: Any) -> ServiceManifest:
    fields: dict[str, Any] = {
        "version": 1,
        "name": "tokens",
        "graph": bytes(32),
        "cuts": (1,),
        "replicas": 1,
        "vocabulary": VOCABULARY,
        "context": CONTEXT,
        "threads": 1,
        "at_milliseconds": 1,
    }
    return ServiceManifest(**(fields | changes))


async def ask(node: Node, service: Service, wish: GenerationWish, seen: list[int] | None = None) -> list[int]:
    """Return all tokens of an answer; they are also appended to `seen` as they arrive."""
    found: list[int] = [] if seen is None else seen
    async with node.serving.answer(service, wish) as generation:
        async for token in generation:
            found.append(token.token)
    return found


@asynccontextmanager
async def serving(
    names: str,
    at: str = "a",
    *,
    network: NetworkModel | None = None,
    offer: Offering | None = None,
    stages: type[TokensServed] | None = None,
    parts: Parts | None = None,
    **changes: Any,
) -> AsyncIterator[tuple[Swarm, Service]]:
    """Yield a swarm, and a service that node `at` published and that is ready."""
    served = {**served_by(stages), **(parts or {})}
    async with swarm(names, network=network, offer=offer, parts=served) as group:
        service = await group.nodes[at].serving.published.begin(manifest(**changes), [group.nodes[at].peer])
        await group.nodes[at].serving.published.await_ready(service)
        yield group, service


def holders(group: Swarm) -> dict[str, int]:
    """Return the stage that each live node holds, keyed by the node's name."""
    return {
        name: member.number
        for name, node in group.nodes.items()
        for member in node.serving.hosting.members.values()
        if not group.scopes[name].cancel_called
    }


async def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until `holds` returns True."""
    with trio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110 - virtual time: waiting costs nothing
            await trio.sleep(0.02)
