"""Drives this node's door, that is, the core that asks services: each generation is an iterator over
tokens."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import RunFailed
from node.events import Event
from node.protocols.services import Service
from node.runs.receipts import MeasuredWork
from node.seams import Seams
from node.serving.finding import Routes
from node.serving_events import GenerationEnded, GenerationMoved
from partition.codecs.base import Array
from partition.model.graph import LAYERS_MAX
from partition.plan.observed import Knowledge
from partition.serve.door import (
    GENERATIONS_MAX,
    ComputedFor,
    Door,
    Embedded,
    GenerationOver,
    GenerationWish,
    HiddenRead,
    Misbehaved,
    RouteTaken,
    RouteWanted,
    Sampled,
    Shape,
)
from partition.serve.messages import Sends

NEWEST_MAX = 64
"""Maximum number of services whose newest answer is remembered."""


class DoorOwner(Protocol):
    """The part of `node.serving.serving.Serving` that this file uses."""

    seams: Seams
    publish: Callable[[Event], None]
    refuse: Callable[[PeerId, RemoteProtocolError], None]
    learn: Callable[[Collection[PeerId]], Awaitable[Knowledge]]
    answered: Callable[[bytes, MeasuredWork, PeerId, tuple[int, int], int], None]

    def start_task(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None: ...
    def send(self, sends: Sends) -> None: ...
    def act(self) -> None: ...
    async def routes(self, service: Service) -> Routes: ...
    def loading(self, service: Service) -> frozenset[int]: ...


@dataclass(frozen=True)
class Token:
    """One token of a generation."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def _not_masked(_allowed: Array) -> None:
    raise AssertionError("a generation without a mask")


class Generation:
    """A running generation. `finish` is set when it has ended, and says how."""

    def __init__(self, service: Service, now: float, prompt_tokens: int) -> None:
        self.service = service
        self.prompt_tokens = prompt_tokens
        self.route: tuple[PeerId, ...] = ()
        self.is_following = False
        """Whether it began without a route, because another generation is already reading their common
        beginning."""
        self.moves = 0
        self.lost = ""
        """Why it left its previous route."""
        self.is_exact = True
        """Whether every move was to machines of the same bit classes as before."""
        self.shared = 0
        """Number of first tokens of its prompt that did not have to be read again."""
        self.count = 0
        self.began_at = now
        self.first_at: float | None = None
        self.newest_at: float | None = None
        self.finish: GenerationOver | None = None
        self.permit: Callable[[Array], None] = _not_masked
        """Sets the tokens that may come next, if the wish has a rule."""
        self.vector: Array | None = None
        """The answer of an encoder."""
        self.hidden: Array | None = None
        """The hidden states of the prompt, if requested."""
        # Unbounded, so that nothing waits: a generation has at most `tokens_max` tokens.
        self._send, self._receive = trio.open_memory_channel[Token](1 << 24)

    def put(self, now: float, event: Sampled) -> None:
        if self.first_at is None:
            self.first_at = now
        self.newest_at = now
        self.count += 1
        self._send.send_nowait(Token(event.token, event.logprob, event.top))

    def end(self, event: GenerationOver) -> None:
        self.finish = event
        self._send.close()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Token:
        """Return the next token when it arrives. Raises RunFailed if the generation cannot continue."""
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            pass
        if self.finish is not None and self.finish.reason == "failed":
            name = self.service.manifest.name
            raise RunFailed(
                f"{name}: the answer broke off after {self.count} tokens: {self.finish.detail}",
                "see who answers: `peerloom services`; then ask again",
            )
        raise StopAsyncIteration


class Generations:
    """All generations of one node."""

    def __init__(self, owner: DoorOwner, me: PeerId) -> None:
        self.door = Door(me, owner.seams.entropy)
        self._me = me
        self._owner = owner
        self._going: dict[int, Generation] = {}
        self._services: dict[bytes, Service] = {}
        self.newest: dict[bytes, GenerationEnded] = {}
        """The figures of the newest answer of each service here, for `services`."""
        self.watch: Callable[[str, float], None] = lambda _name, _seconds: None
        """Called with a service's name and the seconds between two tokens of an answer."""

    @asynccontextmanager
    async def generating(
        self, service: Service, wish: GenerationWish, width: int = 0
    ) -> AsyncIterator[Generation]:
        """Yield a generation, which ends with the context; every stage then forgets it. `width` is the width
        of the hidden states, if they are requested. Raises RunFailed if there are too many generations."""
        owner, clock = self._owner, self._owner.seams.clock
        if self.door.generations >= GENERATIONS_MAX:
            raise RunFailed(f"this node is already receiving {GENERATIONS_MAX} answers", "wait for some")
        manifest = service.manifest
        row = width or manifest.vector or manifest.vocabulary
        shape = Shape(service.id, manifest.stages, row, manifest.context)
        self._services[service.id] = service
        routes = await owner.routes(service)
        self.door.learn(clock.monotonic(), service.id, routes, owner.loading(service))
        found = Generation(service, clock.monotonic(), len(wish.prompt))
        number, sends = self.door.begin(clock.monotonic(), shape, wish)
        found.is_following = self.door.is_following(number)
        self._going[number] = found
        self._services[service.id] = service  # the service's previous answer may have ended meanwhile
        if wish.is_masked:
            found.permit = partial(self._permit, number)
        self._learn_links(service)
        try:
            owner.send(sends)
            owner.act()
            yield found
        finally:
            owner.send(self.door.cancel(clock.monotonic(), number))
            owner.act()
            self._going.pop(number, None)
            if not any(each.service.id == service.id for each in self._going.values()):
                self._services.pop(service.id, None)

    def _permit(self, number: int, allowed: Array) -> None:
        self._owner.send(self.door.permit(self._owner.seams.clock.monotonic(), number, allowed))
        self._owner.act()

    def _served(self, event: ComputedFor) -> None:
        """Issue receipts to the members that computed."""
        service = self._services.get(event.service)
        if service is None:
            return
        manifest = service.manifest
        bounds = (0, *manifest.cuts, LAYERS_MAX)
        work = MeasuredWork(self._me, manifest.graph, (1, 1, manifest.context), event.route)
        for peer, layers in zip(event.route, pairwise(bounds), strict=True):
            self._owner.answered(service.id, work, peer, layers, event.tokens)

    def _learn_links(self, service: Service) -> None:
        """Look up the measurements of the service's members, for the next choice of a route."""
        members = [each.peer for rows in self.door.replicas(service.id) for each in rows]
        self._owner.start_task(self._owner.learn, members)

    def act(self) -> None:
        """Carry out the core's actions."""
        now = self._owner.seams.clock.monotonic()
        events, self.door.events = self.door.events, []
        for event in events:
            match event:
                case Sampled():
                    self._sampled(now, event)
                case Embedded() | HiddenRead():
                    self._read(event)
                case GenerationOver():
                    self._ended(now, event)
                case RouteTaken():
                    self._moved(event)
                case RouteWanted():
                    if (service := self._services.get(event.service)) is not None:
                        self._owner.start_task(self._look, service)
                case ComputedFor():
                    self._served(event)
                case Misbehaved():
                    self._owner.refuse(event.peer, RemoteProtocolError(event.reason))

    def _read(self, event: Embedded | HiddenRead) -> None:
        found = self._going.get(event.generation)
        if found is not None and isinstance(event, Embedded):
            found.vector = event.vector
        elif found is not None and isinstance(event, HiddenRead):
            found.hidden = event.rows

    def _sampled(self, now: float, event: Sampled) -> None:
        found = self._going.get(event.generation)
        if found is None:
            return
        if found.newest_at is not None:
            self.watch(found.service.manifest.name, now - found.newest_at)
        found.put(now, event)

    async def _look(self, service: Service) -> None:
        routes = await self._owner.routes(service)
        now, loading = self._owner.seams.clock.monotonic(), self._owner.loading(service)
        self._owner.send(self.door.learn(now, service.id, routes, loading))
        self._owner.act()

    def _moved(self, event: RouteTaken) -> None:
        found = self._going.get(event.generation)
        if found is None:
            return
        found.route = event.route
        if found.first_at is None:  # if it moves before the first token, it reads the prompt again
            found.shared = min(event.shared, found.prompt_tokens)
        if not event.lost:
            return
        found.moves += 1
        found.lost = event.lost
        found.is_exact = found.is_exact and event.is_exact
        self._owner.publish(
            GenerationMoved(
                at=self._owner.seams.clock.wall(),
                service=found.service.text,
                name=found.service.manifest.name,
                reason=event.lost,
                route=event.route,
                is_exact=event.is_exact,
            )
        )

    def _ended(self, now: float, event: GenerationOver) -> None:
        found = self._going.get(event.generation)
        if found is None:
            return
        found.end(event)
        first = found.first_at
        ended = GenerationEnded(
            at=self._owner.seams.clock.wall(),
            service=found.service.text,
            name=found.service.manifest.name,
            outcome=event.reason,
            detail=event.detail,
            tokens=found.count,
            moves=found.moves,
            first_seconds=None if first is None else first - found.began_at,
            tokens_per_second=None if first is None or now <= first else (found.count - 1) / (now - first),
            route=found.route,
            prompt_tokens=found.prompt_tokens,
        )
        self.newest.pop(found.service.id, None)
        self.newest[found.service.id] = ended
        while len(self.newest) > NEWEST_MAX:
            del self.newest[next(iter(self.newest))]
        self._owner.publish(ended)
