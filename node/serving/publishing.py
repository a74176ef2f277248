"""The services that this node publishes: begun, revived when all of their members are gone, and ended."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Protocol

import trio

from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from node.errors import RunFailed, Unreachable, UsageError
from node.protocols import services as wire
from node.protocols.services import Service, ServiceManifest
from node.seams import Seams
from node.serving.finding import Finder, Routes
from node.serving.hosting import ServiceHost
from node.serving.recruiting import MachineKind
from partition.serve.messages import ServiceRow

LOAD_SECONDS_MAX = 180.0
"""The time for all stages to load, from other peers too."""
READY_LOOK_SECONDS = 0.2
KEEP_SECONDS = 5.0
"""How often a publisher that holds no stage itself asks whether its service has members."""
OWN_LOOK_SECONDS = 0.5
"""How often it checks whether it holds a stage itself: if that was the last, answers wait for the next."""


class PublisherOwner(Protocol):
    """The part of `node.serving.serving.Serving` that this file uses."""

    seams: Seams
    signer: Signer
    hosting: ServiceHost
    finder: Finder

    async def routes(self, service: Service) -> Routes: ...
    def stopped(self, stop: Fact) -> wire.Reply: ...
    def start_task(self, task: Callable[..., Any], *arguments: object) -> None: ...


class PublishedServices:
    """Those of one node."""

    def __init__(self, owner: PublisherOwner) -> None:
        self._owner = owner
        self._published: set[bytes] = set()
        """The services whose members are replaced when none is left."""

    async def begin(self, manifest: ServiceManifest, peers: Sequence[PeerId] = ()) -> Service:
        """Publish a service and place its stages, the first replicas at these peers if they accept; it
        answers a little later (`await_ready`). Raises RunFailed: no node takes one of its stages."""
        service = wire.make_service(self._owner.signer, manifest)
        rows: list[ServiceRow] = []
        recruiter = self._owner.hosting.recruiter
        for replica in range(manifest.replicas):
            for number in range(manifest.stages):
                taken = {row.peer for row in rows}
                first = peers[number] if number < len(peers) and not replica else None
                peer, reason = await recruiter.place(service, number, rows, taken, first)
                if peer is not None:
                    rows.append(ServiceRow(peer, number, False))
                elif not replica:
                    await self._stop_at(service, [PeerId(row.peer) for row in rows])
                    raise RunFailed(
                        f"nobody takes stage {number + 1} of {manifest.stages}: {reason}",
                        "start a node with a free slot, or ask for fewer stages: `peerloom peers`",
                    )
        for row in rows:  # the first were asked before the others were found
            await recruiter.ask_to_host(PeerId(row.peer), service, row.stage, rows)
        self._owner.finder.note(service, [PeerId(row.peer) for row in rows])
        self._published.add(service.id)
        self._owner.start_task(self._keep, service, recruiter.usual_kind(rows))
        return service

    async def await_ready(self, service: Service, seconds: float = LOAD_SECONDS_MAX) -> Routes:
        """Wait until every stage of a service has a member that answers. Raises RunFailed."""
        clock = self._owner.seams.clock
        until = clock.monotonic() + seconds
        while True:
            routes = await self._owner.routes(service)
            if len(routes) == service.manifest.stages:
                return routes
            if clock.monotonic() > until:
                missing = next(n + 1 for n in range(service.manifest.stages) if n not in routes)
                raise RunFailed(
                    f"{service.manifest.name}: nobody answers for stage {missing} after {seconds:.0f} s",
                    "the screens of its nodes say why",
                )
            await trio.sleep(READY_LOOK_SECONDS)

    async def stop(self, service: Service) -> int:
        """End a service of this node's own; return how many members were told. Raises UsageError: another
        node published it."""
        if service.publisher != self._owner.signer.peer:
            raise UsageError(
                f"{service.manifest.name}: another node published it", "ask there, or let its nodes leave"
            )
        self._published.discard(service.id)
        await self._owner.routes(service)
        return await self._stop_at(service, self._owner.finder.members(service.id))

    def leave(self) -> None:
        """Replace no members any more: this node leaves."""
        self._published.clear()

    async def _stop_at(self, service: Service, peers: Sequence[PeerId]) -> int:
        stop, told = wire.make_stop(self._owner.signer, service.id), 0
        for peer in dict.fromkeys([*peers, self._owner.signer.peer]):
            if peer == self._owner.signer.peer:
                self._owner.stopped(stop)
                continue
            with suppress(Unreachable):
                await self._owner.hosting.recruiter.ask(peer, wire.StopService(stop))
                told += 1
        return told

    async def _keep(self, service: Service, kind: MachineKind | None) -> None:
        """Place the stages of this node's own service again when all of its members are gone, preferably on
        machines of the previous `kind`, so that waiting answers continue with the same bits."""
        recruiter = self._owner.hosting.recruiter
        clock = self._owner.seams.clock
        asked_at = clock.monotonic()
        while service.id in self._published:
            await trio.sleep(OWN_LOOK_SECONDS)
            if self._owner.hosting.of(service.id):
                asked_at = -inf
                continue
            if clock.monotonic() - asked_at < KEEP_SECONDS or service.id not in self._published:
                continue
            asked_at = clock.monotonic()
            await self._owner.routes(service)
            me, rows = self._owner.signer.peer, list[ServiceRow]()
            if any(peer != me for peer in self._owner.finder.members(service.id)):
                continue  # this node was a member itself, and no longer is
            for number in range(service.manifest.stages):
                taken = {row.peer for row in rows}
                peer, _ = await recruiter.place(service, number, rows, taken, kind=kind)
                if peer is not None:
                    rows.append(ServiceRow(peer, number, False))
            for row in rows:
                await recruiter.ask_to_host(PeerId(row.peer), service, row.stage, rows)
            if rows:
                kind = recruiter.usual_kind(rows) or kind
                self._owner.finder.note(service, [PeerId(row.peer) for row in rows])
