"""Finds services and the members that answer for their stages. The members' peer ids come from the DHT.

A service is believed only with its publisher's signature. Each member states itself what it holds. A member
that is only named by others, and does not answer, is left out.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import trio

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId, short_peer
from node.errors import Unreachable, UsageError
from node.protocols.services import (
    ALL_PURPOSE,
    NAMED_PURPOSE,
    Find,
    Listing,
    Reply,
    Service,
    ServicesFound,
    check_service,
    read_record,
)
from node.services.discovery import Discovery
from node.serving.recruiting import StageRecruiter
from node.suggest import did_you_mean
from partition.serve.door import StageReplica

Routes = dict[int, list[StageReplica]]
Held = tuple[PeerId, int]
"""A member, and a stage that it holds."""

ASKED_MAX = 16
"""Maximum number of members of one service that are queried."""
ANSWER_SECONDS_MAX = 1.0
"""Time limit for a member's answer. A slower member is left out, because it would be as slow for each
token."""
KNOWN_MAX = 64
"""Maximum number of services whose members this node remembers; the oldest is forgotten."""


@dataclass(frozen=True)
class CacheUse:
    """The number of tokens whose keys and values a member keeps, and the number for which it has room; 0 if
    it does not state them."""

    tokens: int
    tokens_max: int


class MemberAsking(Protocol):
    """The part of `node.serving.hosting.ServiceHost` that this file uses."""

    recruiter: StageRecruiter

    def own(self) -> Sequence[tuple[Service, Listing]]: ...
    def ready_of(self, service: bytes) -> Sequence[Collection[PeerId]]: ...


class FinderOwner(Protocol):
    """The part of `node.serving.serving.Serving` that this file uses."""

    signer: Signer
    discovery: Discovery

    @property
    def hosting(self) -> MemberAsking: ...

    refuse: Callable[[PeerId, RemoteProtocolError], None]

    def round_trip_seconds(self, peer: PeerId) -> float: ...
    def link_seconds(self, peers: Collection[PeerId]) -> Mapping[tuple[PeerId, PeerId], float]: ...


class Finder:
    """Finds services and members for one node."""

    def __init__(self, owner: FinderOwner) -> None:
        self._owner = owner
        self._members: dict[bytes, dict[PeerId, None]] = {}
        self._usage: dict[bytes, dict[Held, CacheUse]] = {}
        """The members' latest statements, for the services whose members are known."""
        self._loading: dict[bytes, frozenset[int]] = {}

    def usage(self, service: bytes) -> Mapping["Held", "CacheUse"]:
        """Return the use of memory that members of a service, including this node, have stated."""
        found = dict(self._usage.get(service, {}))
        for each, listing in self._owner.hosting.own():
            if each.id == service:
                held = self._owner.signer.peer, listing.rows[0].stage
                found[held] = CacheUse(listing.tokens, listing.tokens_max)
        return found

    def note(self, service: Service, members: Sequence[PeerId]) -> None:
        """Record members of a service, confirmed or reported by others."""
        known = self._members.pop(service.id, {})
        self._members[service.id] = dict.fromkeys([*members, *known][:ASKED_MAX])
        while len(self._members) > KNOWN_MAX:
            oldest = next(iter(self._members))
            del self._members[oldest]
            self._usage.pop(oldest, None)
            self._loading.pop(oldest, None)

    def loading(self, service: bytes) -> frozenset[int]:
        """Return the stages that some member was loading when the members were last asked."""
        return self._loading.get(service, frozenset())

    def members(self, service: bytes) -> list[PeerId]:
        """Return the known members."""
        return list(self._members.get(service, {}))

    async def find(self, name: str) -> Service:
        """Return the service with this name or id. Raises UsageError if there is none, or more than one."""
        found = {each.id: each for each, _ in self._owner.hosting.own()}
        found = {key: each for key, each in found.items() if name in (each.manifest.name, each.text)}
        if not found:
            found = {each.id: each for each in await self._recorded(NAMED_PURPOSE, name.encode())}
            found = {key: each for key, each in found.items() if each.manifest.name == name}
        if not found:
            every = await self.all()
            found = {each.id: each for each in every if name in (each.text, each.id.hex())}
            if not found:
                names = sorted(each.manifest.name for each in every)
                raise UsageError(
                    f"no service is called {name!r}{did_you_mean(name, names)}",
                    "`peerloom services` lists those that answer",
                )
        publishers = {each.publisher for each in found.values()}
        if len(publishers) > 1:
            ids = ", ".join(f"{each.text} by {short_peer(each.publisher)}" for each in found.values())
            raise UsageError(
                f"{len(publishers)} nodes publish a service called {name}: {ids}", "name one by its id"
            )
        return max(found.values(), key=lambda each: (each.manifest.at_milliseconds, each.id))

    async def all(self) -> list[Service]:
        """Return all known services, the newest first."""
        found = {each.id: each for each in await self._recorded(ALL_PURPOSE, b"")}
        found |= {each.id: each for each, _ in self._owner.hosting.own()}
        return sorted(found.values(), key=lambda each: (-each.manifest.at_milliseconds, each.id))

    async def _recorded(self, purpose: str, name: bytes) -> list[Service]:
        services = []
        for record in await self._owner.discovery.find(purpose, name):
            if (service := read_record(self._owner.signer, record.value)) is not None:
                self.note(service, [record.publisher])
                services.append(service)
        return services

    async def routes(self, service: Service) -> Routes:
        """Return the members that answer for each stage now. A stage without any is absent."""
        routes = await self._ask_members(service)
        if len(routes) < service.manifest.stages:
            await self._recorded(NAMED_PURPOSE, service.manifest.name.encode())
            routes = await self._ask_members(service)
        return routes

    async def _ask_members(self, service: Service) -> Routes:
        owner = self._owner
        me = owner.signer.peer
        said: dict[Held, Listing | None] = {}
        silent: set[PeerId] = set()
        asked: set[PeerId] = {me}
        own = {
            listing.rows[0].stage: listing for each, listing in owner.hosting.own() if each.id == service.id
        }
        loading = {row.stage for listing in own.values() for row in listing.rows if not row.is_ready}
        for stage, peers in enumerate(owner.hosting.ready_of(service.id)):
            said |= {(peer, stage): own.get(stage) if peer == me else None for peer in peers}
            # Only the members themselves state their bit class.
            self.note(service, [peer for peer in peers if peer != me])

        async def ask(peer: PeerId) -> None:
            listings = await self._listings(peer, service)
            if not listings:
                silent.add(peer)
            for listing in listings:
                others = [PeerId(row.peer) for row in listing.rows if row.peer != peer]
                self.note(service, [peer, *others])
                row = next((row for row in listing.rows if row.peer == peer), None)
                if row is None or row.stage >= service.manifest.stages:
                    continue
                use = CacheUse(listing.tokens, listing.tokens_max)
                self._usage.setdefault(service.id, {})[peer, row.stage] = use
                if row.is_ready:
                    said[peer, row.stage] = listing
                else:
                    loading.add(row.stage)

        # Members that are named by other members are queried too: two rounds reach all of them.
        for _ in range(2):
            new = [peer for peer in self.members(service.id) if peer not in asked][:ASKED_MAX]
            asked |= set(new)
            async with trio.open_nursery() as nursery:
                for peer in new:
                    nursery.start_soon(ask, peer)
        for peer in silent:
            self._members.get(service.id, {}).pop(peer, None)
        said = {held: listing for held, listing in said.items() if held[0] not in silent}
        self._note_said(service, said.keys(), loading)
        return self._routes_of(service, said)

    def _note_said(self, service: Service, said: Collection[Held], loading: Collection[int]) -> None:
        if (told_of := self._usage.pop(service.id, None)) is not None and service.id in self._members:
            self._usage[service.id] = {held: use for held, use in told_of.items() if held in said}
        if loading and service.id in self._members:
            self._loading[service.id] = frozenset(loading)
        else:
            self._loading.pop(service.id, None)

    def _routes_of(self, service: Service, said: Mapping[Held, Listing | None]) -> Routes:
        owner, me = self._owner, self._owner.signer.peer
        links = owner.link_seconds({peer for peer, _ in said})
        routes: Routes = {}
        for (peer, stage), told in said.items():
            if not service.manifest.may_hold(peer):
                continue  # it claims to be a member itself
            seconds = 0.0 if peer == me else owner.round_trip_seconds(peer)
            row = StageReplica(peer, 0, seconds, links=_after(links, peer))
            if told is not None:
                decode, read = told.decode_microseconds / 1e6, told.read_nanoseconds / 1e9
                row = replace(row, sessions=told.sessions, decode_seconds=decode, read_seconds=read)
                row = replace(row, bits=told.bits)
            routes.setdefault(stage, []).append(row)
        return routes

    async def _listings(self, peer: PeerId, service: Service) -> list[Listing]:
        """Return a member's statements about a service, one for each stage that it holds."""
        reply: Reply | None = None
        with trio.move_on_after(ANSWER_SECONDS_MAX), suppress(Unreachable):
            reply = await self._owner.hosting.recruiter.ask(peer, Find(service.id))
        if not isinstance(reply, ServicesFound):
            return []
        found = []
        for listing in reply.listings:
            try:
                if check_service(self._owner.signer, listing.manifest).id == service.id:
                    found.append(listing)
            except RemoteProtocolError as error:
                self._owner.refuse(peer, error)
        return found


def _after(links: Mapping[tuple[PeerId, PeerId], float], peer: PeerId) -> dict[PeerId, float]:
    return {other: seconds for (one, other), seconds in links.items() if one == peer}
