"""Services on this node: the stages that it holds, and the answers that it requests.

    await serving.published.begin(manifest)          publish a service, and place its stages
    async with serving.answer(service, wish) as it   tokens of a service, wherever it is held

The logic is in cores (`partition.serve`): a door, which asks services; a provider, which computes; and for
each service the upkeep of its replicas.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

import trio
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from crypto.token_buckets import prefix_of
from node.containment import contain, keep_running
from node.content.graphs import Models
from node.errors import StageFailed, StreamClosed, UsageError
from node.placement.admission import Machine
from node.planning.peers import LINKED_PEERS_MAX
from node.protocols import services as wire
from node.protocols.services import Service
from node.runs.receipts import MeasuredWork, Receipts
from node.seams import Seams, Stream
from node.serving.finding import Finder, Routes
from node.serving.generations import Generation, Generations
from node.serving.hosting import ServiceHost, ServiceMembership, declined
from node.serving.needs import ServingMachine, ServingSwarm
from node.serving.publishing import PublishedServices
from node.serving.sources import ServedFiles
from node.serving.stage import BatchRefused, HeldStage
from node.serving.streams import ServingStreams
from node.serving.tensors import read_tensors
from node.serving.texts import Texts
from node.storage.blobs import Blobs
from node.waker import CoreGroup, Timed, Waker
from partition.serve.door import GenerationWish
from partition.serve.messages import (
    REASON_LENGTH_MAX,
    Alive,
    Answer,
    Carried,
    LeaveSession,
    Message,
    OpenSession,
    RestSession,
    Roll,
    Sends,
    SessionClosed,
    SessionOpened,
    UnitWork,
)
from partition.serve.provider import (
    ComputeBatch,
    ForgetSession,
    ForkSession,
    SessionProvider,
)
from partition.serve.provider import Event as ProviderEvent

REQUEST_SECONDS_MAX = 10.0
NO_PAYLOAD = memoryview(b"")

RunFiles = Callable[[str], AbstractAsyncContextManager[ServedFiles]]


class Serving:
    """Everything about services on one node.

    `run` owns its tasks; `send` queues messages for sending.
    """

    def __init__(
        self,
        seams: Seams,
        signer: Signer,
        swarm: ServingSwarm,
        host: ServingMachine,
        *,
        models: Models,
        blobs: Blobs,
        receipts: Receipts,
    ) -> None:
        self.seams = seams
        self.signer = signer
        self.models = models
        self.discovery = swarm.discovery
        self.live, self.named, self.offers = swarm.live, swarm.named, swarm.offers
        self.knowledge, self.learn = swarm.knowledge, swarm.learn
        self._round_trip_seconds = swarm.round_trip_seconds
        self.refuse = swarm.refuse
        self.slots = host.slots
        self._machine = host.machine
        self.accepts, self.expect_stage = host.accepts, host.expect_stage
        self.publish = host.publish
        self.receipts = receipts
        self.answered: Callable[[bytes, MeasuredWork, PeerId, tuple[int, int], int], None] = receipts.answered
        self.run_files: RunFiles = _no_runs
        """Returns the files of a run's weights, by the run's id."""
        self.provider = seams.part(SessionProvider)(
            source_of=self._source_of, weight_of=receipts.weight, bounds_of=host.bounds_of
        )
        self.hosting = ServiceHost(self)
        self.generations = Generations(self, signer.peer)
        self._streams = ServingStreams(
            seams,
            receive=self._receive,
            lost=self._lost,
            is_working_with=self._is_working_with,
            note_former=self.generations.door.note_former,
            refuse=self.refuse,
        )
        self.send = self._streams.send
        self._nursery: trio.Nursery | None = None
        self._cores = CoreGroup(self._timed)
        self._waker = Waker(seams.clock, lambda: self._cores.deadline)
        self._over: dict[bytes, None] = {}
        """Services that were ended, the latest at the end."""
        self.finder = Finder(self)
        self.published = PublishedServices(self)
        self.texts = Texts(self, blobs, signer.peer)
        models.beside = self._values_served

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Then end every stage that this node holds."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await nursery.start(self._streams.run)
                self.seams.network.handle(wire.SERVICES_PROTOCOL, self._answer_request)
                nursery.start_soon(keep_running, "serving", self._keep_awake)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None  # from now on, a stream that breaks starts no task
            with trio.CancelScope(shield=True):
                await self.texts.aclose()
                for member in self.hosting.members.values():
                    if member.stage is not None:
                        await member.stage.aclose()

    def start_task(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run a task concurrently with the node's other tasks."""
        if self._nursery is None:
            return

        async def contained() -> None:
            with contain("serving"):
                await task(*arguments)

        self._nursery.start_soon(contained)

    @property
    def machine(self) -> Machine:
        """Return the resources of a slot, for a stage that is opened now."""
        return self._machine()

    async def _values_served(self, graph: bytes, offset: int, length: int) -> bytes | None:
        """Return values of a graph from a stage that is served here."""
        for member in list(self.hosting.members.values()):
            is_here = member.service.manifest.graph == graph and member.ready.is_set()
            if is_here and member.stage is not None:
                data = await member.stage.read_stored(offset, length, self.seams.executor)
                if data is not None:
                    return data
        return None

    def round_trip_seconds(self, peer: PeerId) -> float:
        """Return the round trip time to a peer, or 0 if it was not measured."""
        return self._round_trip_seconds(peer) or 0.0

    def link_seconds(self, peers: Collection[PeerId]) -> dict[tuple[PeerId, PeerId], float]:
        """Return the time of a message between two of these peers, for pairs with a known time: measured by
        one of them, or by this node to one of them."""
        me = self.signer.peer
        found = {}
        if len(peers) <= LINKED_PEERS_MAX:
            found = {pair: link.nanoseconds / 1e9 for pair, link in self.knowledge().links(peers).items()}
        for peer in peers:
            if peer != me and (seconds := self._round_trip_seconds(peer)) is not None:
                found[me, peer] = found[peer, me] = seconds / 2
        return found

    def hosted(self) -> dict[bytes, bytes]:
        """Return the services and further stages that have a slot here, with their graphs."""
        return {member.slot: member.service.manifest.graph for member in self.hosting.members.values()}

    async def leave(self) -> None:
        """Release all stages, after their sessions have moved elsewhere."""
        self.published.leave()
        await self.hosting.leave()

    def _source_of(self, peer: PeerId) -> bytes:
        host = self.seams.network.host_of(peer)
        return prefix_of(host) if host is not None else peer

    # Messages

    def _is_working_with(self, peer: PeerId) -> bool:
        """Return whether a peer shares a session or a service with this node."""
        return self.provider.knows(peer) or self.generations.door.knows(peer) or self.hosting.knows(peer)

    def _receive(self, now: float, sender: PeerId, message: Message, payload: memoryview) -> None:
        door, sends = self.generations.door, list[Any]()
        match message:
            case UnitWork():
                sends = self._take_unit(now, sender, message, payload)
            case Answer():
                arrays = read_tensors(message.tensors, payload)
                sends = door.receive(now, sender, Carried(replace(message, tensors=()), arrays))
            case SessionOpened() | SessionClosed():
                sends = door.receive(now, sender, message)
            case OpenSession() | LeaveSession() | RestSession():
                sends = self.provider.receive(now, sender, message)
            case Alive():
                sends = [*self.provider.receive(now, sender, message), *door.receive(now, sender, message)]
            case Roll():
                sends = self.hosting.receive(now, sender, message)
        self.send(sends)
        self.act()

    def _take_unit(self, now: float, sender: PeerId, work: UnitWork, payload: memoryview) -> Sends:
        if not self.provider.knows_session(work.session):
            return []
        key = self.provider.stage_of(work)
        member = None if key is None else self.hosting.members.get(key)
        if member is None or member.stage is None:
            raise RemoteProtocolError("a unit of a session for a stage that does not serve it")
        try:
            arrays = read_tensors(work.tensors, payload)
            member.stage.check(work, arrays)
        except RemoteProtocolError as error:
            self.refuse(sender, error)
            return self.provider.reject(sender, work.session, str(error))
        return self.provider.receive(now, sender, Carried(replace(work, tensors=()), arrays))

    def _lost(self, peer: PeerId) -> None:
        """Handle a peer to or from which a stream ended, or could not be opened."""
        now = self.seams.clock.monotonic()
        self.provider.lost(peer)
        self.send([*self.generations.door.lost(now, peer), *self.hosting.lost(now, peer)])
        self.act()

    # Actions of the cores

    def act(self) -> None:
        """Carry out the cores' actions, and recompute their deadlines."""
        events = self.provider.events[:]
        self.provider.events.clear()  # in place, because the provider's parts hold the same list
        for event in events:
            if (member := self.hosting.members.get((event.service, event.stage))) is not None:
                member.asked.append(event)
                if not member.is_working:
                    member.is_working = True
                    self.start_task(self._work, member)
        self.hosting.act()
        self.generations.act()
        self._waker.stir()

    async def _keep_awake(self) -> None:
        """Wake the cores at their deadlines."""
        await self._waker.run(self._cores, self._woken)

    def _woken(self, sends: Sends) -> None:
        self.send(sends)
        self.act()

    def _timed(self) -> tuple[Timed[Iterable[tuple[PeerId, Message | Carried]]], ...]:
        """Return the cores that wake at their deadlines."""
        return (self.provider, self.generations.door, self.hosting, *self.hosting.upkeeps)

    async def _work(self, member: ServiceMembership) -> None:
        """Let a stage do its queued work in order, until the queue is empty."""
        try:
            while member.asked and member.stage is not None:
                await self._do(member, member.stage, member.asked.popleft())
        except StageFailed as error:
            await self.hosting.let_go(member, "failed", _short(error))
        finally:
            member.is_working = False

    async def _do(self, member: ServiceMembership, stage: HeldStage, asked: ProviderEvent) -> None:
        """Do one item of a stage's work. Raises StageFailed if its process is gone."""
        match asked:
            case ComputeBatch():
                async with member.turn:
                    await self._compute(member, stage, asked)
            case ForgetSession():
                await stage.forget(asked.session)
            case ForkSession():
                await stage.fork(asked.session, asked.base, asked.tokens)

    async def _compute(self, member: ServiceMembership, stage: HeldStage, asked: ComputeBatch) -> None:
        clock = self.seams.clock
        began = clock.monotonic()
        try:
            outcome = await stage.compute(asked, self.seams.executor)
            member.pace.note([unit.work.tokens for unit in asked.units], clock.monotonic() - began)
        except BatchRefused as error:
            now = clock.monotonic()
            sends = self.provider.failed(
                now, asked.service, asked.batch, error.code, _short(error), error.session
            )
        else:
            sends = self.provider.computed(clock.monotonic(), asked.service, asked.batch, outcome)
        self.send(sends)
        self.act()

    # Requests

    async def _answer_request(self, stream: Stream) -> None:
        """Answer the one request of a stream."""
        try:
            data = b""
            with trio.move_on_after(REQUEST_SECONDS_MAX):
                data = await stream.receive()
            request: wire.Request = decode(data, wire.Request, bytes_max=wire.REQUEST_BYTES_MAX)
            with trio.move_on_after(REQUEST_SECONDS_MAX):
                await stream.send(encode(self._answered(stream.peer, request)))
        except StreamClosed:
            return
        except RemoteProtocolError as error:
            self.refuse(stream.peer, error)

    def _answered(self, sender: PeerId, request: wire.Request) -> wire.Reply:
        match request:
            case wire.Host():
                service = wire.check_service(self.signer, request.manifest)
                if service.id in self._over:
                    return declined("its publisher has ended this service")
                reason = self.hosting.take(service, request.stage, request.rows, sender)
                return wire.Done() if reason is None else declined(reason)
            case wire.Find():
                members = self.hosting.members.values()
                wanted = [each for each in members if request.service in (b"", each.service.id)]
                return wire.make_found(map(self.hosting.listing, wanted))
            case wire.StopService():
                return self.stopped(request.stop)

    def stopped(self, stop: Fact) -> wire.Reply:
        """Release a service that its publisher has ended. Raises RemoteProtocolError."""
        name, author = wire.check_stop(self.signer, stop)
        members = self.hosting.of(name)
        if not members:
            return wire.Done()
        if author != members[0].service.publisher:
            raise RemoteProtocolError("only a service's publisher can end it")
        self._over[name] = None
        while len(self._over) > wire.ENDED_MAX:
            del self._over[next(iter(self._over))]
        for member in members:
            self.start_task(self.hosting.let_go, member, "leaving", "its publisher ended the service")
        return wire.Done()

    # Requests of this node

    async def routes(self, service: Service) -> Routes:
        """Return the members that answer for each stage of a service now. A stage without any is absent."""
        return await self.finder.routes(service)

    def loading(self, service: Service) -> frozenset[int]:
        """Return the stages that some member was loading when the members were last asked."""
        return self.finder.loading(service.id)

    def answer(
        self, service: Service, wish: GenerationWish, width: int = 0
    ) -> AbstractAsyncContextManager[Generation]:
        """Yield an answer of a service; see `Generations.generating`."""
        return self.generations.generating(service, wish, width)


def _no_runs(name: str) -> AbstractAsyncContextManager[ServedFiles]:
    raise UsageError(f"run {name}: this node has no runs")


def _short(error: object) -> str:
    return str(error)[:REASON_LENGTH_MAX]
