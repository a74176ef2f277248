"""The stages of services that this node holds: accepted, loaded, kept at the wished number of replicas,
released.

A stage takes a slot like a run's stage does, and the owner's rules say whose stages are accepted. A further
stage of the same service takes a slot of its own. If no slot is free, it takes the memory that the first
stage leaves in its slot; stages in the same slot compute one at a time. `partition.serve.upkeep` handles the
messages between members. `node.serving.recruiting` finds a node for a missing stage and asks it.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Protocol

import trio
from blake3 import blake3

from crypto.encoding import encode
from crypto.facts import Signer
from crypto.identity import PeerId
from node.containment import contain
from node.content.graphs import Models
from node.errors import StageFailed, Unreachable
from node.events import Event
from node.placement.admission import Machine
from node.placement.leases import Offer
from node.placement.slots import LeaseSlots
from node.protocols.services import (
    ALL_PURPOSE,
    NAMED_PURPOSE,
    Declined,
    Listing,
    Service,
)
from node.runs.receipts import Receipts
from node.seams import Seams
from node.services.discovery import Discovery
from node.serving.recruiting import StageRecruiter
from node.serving.stage import HeldStage
from node.serving.texts import Texts
from node.serving_events import ServiceChanged
from node.text import seconds_text
from partition.plan.observed import Knowledge
from partition.run.messages import REASON_LENGTH_MAX
from partition.serve.backoff import StageBackoff
from partition.serve.messages import CloseCode, Roll, Sends, ServiceRow
from partition.serve.provider import Event as ProviderEvent
from partition.serve.provider import SessionProvider
from partition.serve.routes import StagePace
from partition.serve.taking import further_refusal, has_other, is_member, others, stopgaps
from partition.serve.timeouts import LEAVE_SECONDS_MAX
from partition.serve.upkeep import Recruit, Relieved, RosterChanged, ServiceUpkeep

LOOK_SECONDS = 0.1
IDLE_LOOK_SECONDS = 1.0
"""How often an idle stage is probed, because an answer could not move to a stage whose process has ended.
Members exchange messages at the same interval."""
BACKOFF_COUNT_MAX = 256
"""Maximum number of ended stages that are remembered: far more than a node holds at a time, some hundred
bytes each."""
GONE_RECORD_SECONDS = 1.0
"""Lifetime of the record that replaces the DHT record of a service that this node has left."""


class HostingOwner(Protocol):
    """The part of `node.serving.serving.Serving` that this file uses."""

    seams: Seams
    signer: Signer
    models: Models
    discovery: Discovery
    slots: LeaseSlots
    provider: SessionProvider
    texts: Texts

    @property
    def machine(self) -> Machine: ...

    offers: Callable[[], Sequence[Offer]]
    accepts: Callable[[Service], str | None]
    live: Callable[[], Collection[PeerId]]
    publish: Callable[[Event], None]
    expect_stage: Callable[[], None]
    receipts: Receipts
    knowledge: Callable[[], Knowledge]
    learn: Callable[[Collection[PeerId]], Awaitable[Knowledge]]

    def link_seconds(self, peers: Collection[PeerId]) -> Mapping[tuple[PeerId, PeerId], float]: ...

    def start_task(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None: ...
    def send(self, sends: Sends) -> None: ...
    def act(self) -> None: ...


class ServiceMembership:
    """One stage of a service that this node holds. `beside` is another such stage whose slot it shares."""

    def __init__(
        self,
        owner: HostingOwner,
        service: Service,
        number: int,
        rows: Sequence[ServiceRow],
        *,
        slot: bytes,
        machine: Machine,
        beside: "ServiceMembership | None" = None,
        is_stopgap: bool = False,
    ) -> None:
        self.service = service
        self.number = number
        self.slot = slot
        """The name under which its slot is taken."""
        self.machine = machine
        self.turn: trio.Lock = trio.Lock() if beside is None else beside.turn
        """Stages that share a slot compute one at a time, because the owner gave the slot a fixed number of
        threads."""
        self.stage: HeldStage | None = None
        self.scope = trio.CancelScope()
        self.ready = trio.Event()
        self.ready_since: float | None = None
        self.pace = StagePace()
        self.asked: deque[ProviderEvent] = deque()
        """The queue of work for the stage."""
        self.is_working = False
        self.roster: tuple[tuple[PeerId, ...], ...] = ()
        self.offering: frozenset[PeerId] = frozenset()
        """Nodes that had a free slot when a stage was last offered, but did not accept it."""
        now = owner.seams.clock.monotonic()
        manifest = service.manifest
        self.upkeep = ServiceUpkeep(
            now, owner.signer.peer, service.id, manifest.stages, manifest.replicas, number, rows,
            is_stopgap=is_stopgap,
        )  # fmt: skip


class ServiceHost:
    """All service stages of one node."""

    def __init__(self, owner: HostingOwner) -> None:
        self._owner = owner
        self.members: dict[tuple[bytes, int], ServiceMembership] = {}
        """The stages here, by service and stage number."""
        self._backoff: StageBackoff[tuple[bytes, int]] = StageBackoff(BACKOFF_COUNT_MAX)
        self.recruiter = StageRecruiter(owner, self.take)
        self.is_leaving = False
        """Whether this node is leaving, and accepts no further stages."""

    def of(self, service: bytes) -> list[ServiceMembership]:
        """Return the stages of a service that are here, the permanent one first."""
        found = [member for member in self.members.values() if member.service.id == service]
        return sorted(found, key=lambda member: member.upkeep.is_stopgap)

    # Accepting a stage

    def take(self, service: Service, number: int, rows: Sequence[ServiceRow], asker: PeerId) -> str | None:
        """Begin to load a stage for `asker`. Return the reason for a refusal, or None if loading has
        begun."""
        owner = self._owner
        if number >= service.manifest.stages:
            return "the service has no such stage"
        here = self.of(service.id)
        cores = [each.upkeep for each in here]
        is_owner = asker in (service.publisher, owner.signer.peer)
        for core in cores if is_owner or is_member(cores, asker) else ():
            core.introduce(owner.seams.clock.monotonic(), rows)
        if self.is_leaving:
            return "the node leaves"
        if (service.id, number) in self.members:
            owner.act()  # tell the other members about those in `rows`
            return None
        reason = further_refusal(cores, number, asker, is_owner=is_owner) if here else None
        if reason is not None or (reason := self._refusal(service, number)) is not None:
            return reason
        member = self._further(service, number, rows, here) if here else None
        if isinstance(member, str):
            return member
        if member is None:
            if not owner.slots.is_free_for(service.id):
                return "no free slot"
            member = ServiceMembership(owner, service, number, rows, slot=service.id, machine=owner.machine)
        self.members[service.id, number] = member
        owner.receipts.begun(service.id)
        owner.expect_stage()  # its process loads while the graph is fetched
        owner.start_task(self._hold, member)
        owner.act()  # the other members learn of it while it loads
        return None

    def _refusal(self, service: Service, number: int) -> str | None:
        """Return why this node does not accept a stage of this service, or not this stage; None if it
        does."""
        owner = self._owner
        if not service.manifest.may_hold(owner.signer.peer):
            return "the service is restricted to other peers"
        if (reason := owner.accepts(service)) is not None:
            return reason
        if rest := self._backoff.rest_left(owner.seams.clock.monotonic(), (service.id, number)):
            return f"the stage ended here too often lately: try again in {seconds_text(rest)}"
        if service.manifest.threads > owner.machine.threads:
            return f"it computes with {service.manifest.threads} threads, but a slot here has fewer"
        return None

    def _further(
        self, service: Service, number: int, rows: Sequence[ServiceRow], here: Sequence[ServiceMembership]
    ) -> ServiceMembership | str:
        """Return the membership for a further stage of a service that is already here, or why there is no
        room for it."""
        owner = self._owner
        own = blake3(service.id + number.to_bytes(2)).digest()
        if owner.slots.is_free_for(own):
            return ServiceMembership(
                owner, service, number, rows, slot=own, machine=owner.machine, is_stopgap=True
            )
        beside = here[0]
        sharers = [each for each in here if each.slot == beside.slot]
        if any(each.stage is None for each in sharers):
            return "another stage of the service is still being loaded here"
        needed = sum(each.stage.needed_bytes for each in sharers if each.stage is not None)
        if (left := owner.machine.memory_bytes - needed) <= 0:
            return "the stage that is here leaves no memory for another one"
        return ServiceMembership(
            owner, service, number, rows, slot=beside.slot, beside=beside, is_stopgap=True,
            machine=replace(owner.machine, memory_bytes=left),
        )  # fmt: skip

    async def _hold(self, member: ServiceMembership) -> None:
        """Load a stage and answer with it, until it is released or its process ends."""
        owner, service = self._owner, member.service
        with member.scope:
            try:
                member.stage = await owner.seams.part(HeldStage).open(
                    owner.seams,
                    service,
                    member.number,
                    member.machine,
                    owner.models,
                    partial(self.holders, member),
                    owner.signer.peer,
                )
            except StageFailed as error:
                await self.let_go(member, "failed", str(error))
                return
        if member.scope.cancelled_caught or not self._has(member):
            if member.stage is not None:
                await member.stage.aclose()
            return
        manifest = service.manifest
        room = 0 if member.stage is None else member.stage.tokens_max
        owner.provider.hold(service.id, member.number, manifest.stages, manifest.context, room)
        member.ready.set()
        member.ready_since = owner.seams.clock.monotonic()
        owner.send(list(member.upkeep.ready(owner.seams.clock.monotonic())))
        owner.act()
        if manifest.text == "tokenizer":
            owner.start_task(self._keep_text, member)
        # These measurements (the machines of each bit class) are needed when another node must take over the
        # stage.
        owner.start_task(owner.learn, [each.peer for each in owner.offers()])
        owner.start_task(self._watch, member)
        await self._advertise(service, encode(service.fact), None)

    async def _watch(self, member: ServiceMembership) -> None:
        """Release a stage whose process ends while it is idle."""
        try:
            while (stage := member.stage) is not None and self._has(member):
                if not member.is_working:
                    await stage.try_process()
                await trio.sleep(IDLE_LOOK_SECONDS)
        except StageFailed as error:
            await self.let_go(member, "failed", str(error)[:REASON_LENGTH_MAX])

    def _has(self, member: ServiceMembership) -> bool:
        """Return whether a stage is still held."""
        return self.members.get((member.service.id, member.number)) is member

    async def _keep_text(self, member: ServiceMembership) -> None:
        """Keep the service's tokenizer too, because doors fetch it from members when the publisher is
        gone."""
        with suppress(Unreachable):
            await self._owner.texts.bring(member.service, self.holders(member))

    def holders(self, member: ServiceMembership) -> list[PeerId]:
        """Return the peers that may have a stage's parts: first the members with the same stage, then the
        other members and the publisher."""
        rows = sorted(member.upkeep.rows(), key=lambda row: row.stage != member.number)
        me = self._owner.signer.peer
        others = [row for each in self.of(member.service.id) for row in each.upkeep.rows()]
        found = [PeerId(row.peer) for row in (*rows, *others) if row.peer != me]
        return list(dict.fromkeys([*found, member.service.publisher]))

    async def _advertise(self, service: Service, value: bytes, seconds: float | None) -> None:
        discovery = self._owner.discovery
        with contain("record of a service"):
            await discovery.publish_for(NAMED_PURPOSE, service.manifest.name.encode(), value, seconds)
            await discovery.publish_for(ALL_PURPOSE, service.id[:0], value, seconds)

    async def let_go(self, member: ServiceMembership, code: CloseCode, reason: str) -> None:
        """Stop serving a stage, and inform doors and members."""
        owner, service = self._owner, member.service
        if not self._has(member):
            return
        del self.members[service.id, member.number]
        now, since = owner.seams.clock.monotonic(), member.ready_since
        self._backoff.note_sound(now, (service.id, member.number), since)
        if code == "failed":
            self._backoff.note_end(now, (service.id, member.number), since)
        member.scope.cancel()
        owner.send(owner.provider.release(service.id, member.number, code, reason))
        owner.send(list(member.upkeep.leave()))
        left = self.of(service.id)
        if left and left[0].upkeep.is_stopgap:
            left[0].upkeep.stay(owner.seams.clock.monotonic())
        owner.publish(
            ServiceChanged(
                at=owner.seams.clock.wall(),
                service=service.text,
                name=service.manifest.name,
                stage=member.number,
                is_held=False,
                detail=reason,
            )
        )
        owner.act()
        if member.stage is not None:
            await member.stage.aclose()
        if not left:
            owner.start_task(self._advertise, service, b"", GONE_RECORD_SECONDS)

    async def leave(self) -> None:
        """Release all stages, after their sessions have moved elsewhere."""
        self.is_leaving = True
        async with trio.open_nursery() as nursery:
            for member in list(self.members.values()):
                nursery.start_soon(self._hand_over, member)

    async def _hand_over(self, member: ServiceMembership) -> None:
        """Release a stage. If its sessions would have to wait, first wait until another node answers for
        it."""
        owner, service, number = self._owner, member.service, member.number
        if owner.provider.sessions_of(service.id) and not self._has_other(member):
            with trio.move_on_after(LEAVE_SECONDS_MAX):
                rows = member.upkeep.rows()
                peer, _ = await self.recruiter.place(service, number, rows, {row.peer for row in rows})
                if peer is None:
                    members = others(rows, owner.signer.peer)
                    peer = await self.recruiter.double_up(service, number, rows, members)
                if peer is not None:
                    row = ServiceRow(peer, number, False)
                    member.upkeep.introduce(owner.seams.clock.monotonic(), (row,))
                    owner.act()
                while peer is not None and not self._has_other(member):  # noqa: ASYNC110 - told once a second
                    await trio.sleep(LOOK_SECONDS)
        await self.let_go(member, "leaving", "the node leaves")

    def _has_other(self, member: ServiceMembership) -> bool:
        """Return whether another member answers for the same stage."""
        return has_other(member.roster, member.number, self._owner.signer.peer)

    # Messages from members

    @property
    def upkeeps(self) -> list[ServiceUpkeep]:
        """Return the cores of all members."""
        return [member.upkeep for member in self.members.values()]

    deadline = inf
    """No deadline of its own: it wakes together with any other core."""

    def wake(self, now: float) -> Sends:
        """Tell waiting members about new offers, before their own cores wake."""
        for member in self.members.values():
            if member.upkeep.is_paused and not self._offering() <= member.offering:
                member.upkeep.offered(now)
        return []

    def _offering(self) -> frozenset[PeerId]:
        return frozenset(each.peer for each in self._owner.offers() if each.has_slot)

    def receive(self, now: float, sender: PeerId, message: Roll) -> Sends:
        """Handle a member's message. A message about a service that is not here is ignored."""
        members = self.of(message.service)
        return [send for member in members for send in member.upkeep.receive(now, sender, message)]

    def lost(self, now: float, peer: PeerId) -> Sends:
        return [send for member in self.members.values() for send in member.upkeep.lost(now, peer)]

    def knows(self, peer: PeerId) -> bool:
        """Return whether a peer shares a service with this node."""
        return any(row.peer == peer for member in self.members.values() for row in member.upkeep.rows())

    def act(self) -> None:
        """Carry out the cores' actions."""
        owner = self._owner
        for member in list(self.members.values()):
            events, member.upkeep.events = member.upkeep.events, []
            for event in events:
                match event:
                    case Recruit():
                        owner.start_task(self._recruit, member, event)
                    case Relieved():
                        owner.start_task(self.let_go, member, "leaving", "another node holds the stage again")
                    case RosterChanged():
                        member.roster = event.ready
                        owner.publish(
                            ServiceChanged(
                                at=owner.seams.clock.wall(),
                                service=member.service.text,
                                name=member.service.manifest.name,
                                stage=member.number,
                                ready=tuple(map(len, event.ready)),
                                wished=event.wished,
                            )
                        )

    async def _recruit(self, member: ServiceMembership, wanted: Recruit) -> None:
        found: PeerId | None = None
        try:
            member.offering = self._offering()
            taken = {row.peer for row in member.upkeep.rows()} | set(wanted.members)
            rows = member.upkeep.rows()
            found, _ = await self.recruiter.place(member.service, wanted.stage, rows, taken | wanted.failed)
            if found is None:
                able = stopgaps(wanted, self._owner.signer.peer)
                found = await self.recruiter.double_up(member.service, wanted.stage, rows, able)
        finally:
            member.upkeep.recruited(self._owner.seams.clock.monotonic(), wanted.stage, found)
            self._owner.act()

    # Statements to others

    def own(self) -> list[tuple[Service, Listing]]:
        """Return the services of which this node is a member, one entry for each stage."""
        return [(member.service, self.listing(member)) for member in self.members.values()]

    def ready_of(self, service: bytes) -> tuple[tuple[PeerId, ...], ...]:
        """Return the members that answer for each stage, as far as this node knows."""
        members = self.of(service)
        return members[0].roster if members else ()

    def listing(self, member: ServiceMembership) -> Listing:
        """Return this node's statement about a service of which it is a member."""
        provider, name = self._owner.provider, member.service.id
        room = member.stage.tokens_max if member.stage is not None else 0
        return Listing(
            member.service.fact,
            member.upkeep.rows(),
            provider.sessions_of(name),
            provider.tokens_of(name, member.number),
            room,
            b"" if member.stage is None else member.stage.bits,
            int(member.pace.decode_seconds * 1e6),
            int(member.pace.read_seconds * 1e9),
        )


def declined(reason: object) -> Declined:
    """Return a refusal, shortened to the maximum length."""
    return Declined(str(reason)[:REASON_LENGTH_MAX])
