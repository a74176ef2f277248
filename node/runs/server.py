"""Answers requests of a run's members, and of unknown peers, on `/peerloom/runs/2`.

Each stream carries one request. It is checked against its run and plan before it changes anything;
`node.protocols.runs` defines who may send which request.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from node.checkpoints.weights import weights_name
from node.content.dataset_store import DataFiles
from node.content.graphs import Models
from node.errors import StageFailed, StreamClosed, Unreachable
from node.placement.admission import Machine, check_plan
from node.placement.lease_checks import LeaseChecks
from node.placement.slots import LeaseSlots
from node.protocols import runs as wire
from node.protocols.manifest import Run, check_run
from node.protocols.permits import Permits
from node.protocols.uploads import Body, send_blob, whole
from node.runs.local_mode import LocalMode
from node.runs.member import RunMember
from node.runs.outside import RunsOutside
from node.runs.queue import Queue
from node.runs.readiness import Readiness
from node.runs.revising import Revising
from node.runs.stopping import Stopping
from node.runs.vacating import is_standby, make_room
from node.seams import Seams, Stream
from partition.plan.history import History
from partition.plan.plan import Plan
from partition.run.asks import Declined, Done
from partition.run.completion import answer_end
from partition.run.messages import REASON_LENGTH_MAX
from partition.run.provider import BUSY, OVER, KnownRun, StageProvider
from partition.run.settings import RunSettings

RUNS_MAX = 64
"""Maximum number of active runs, so that an unknown peer's manifests cannot fill the memory."""
FILES_MAX = 64
"""Maximum number of files of each kind that are sent at once; each takes a descriptor and a chunk of
memory."""
FILES_PER_PEER_MAX = 4
EXPORTS_MAX = 4
"""Maximum number of stages sent to committers at once; each is in memory."""
RANGES_MAX = 16
"""Maximum number of ranges of a state sent at once; each has 16 MiB, in memory."""
RANGES_PER_PEER_MAX = 4
"""A newcomer requests two at once."""
PATIENCE_SECONDS = 2.0
"""How long a stalled receiver keeps its slot if another peer wants it."""
UPLOAD_SECONDS_MAX = 3_600.0
"""Time limit for one whole answer: enough for 12 GB at 30 Mbit/s."""
REQUEST_SECONDS_MAX = 20.0
"""Time limit from a stream's opening to its request."""
Upload = wire.FetchWeights | wire.ExportStage | wire.FetchModel | wire.FetchRange | wire.FetchState
"""Requests that are answered with a blob."""


class ServerService(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    seams: Seams
    settings: RunSettings
    signer: Signer
    models: Models
    slots: LeaseSlots
    queue: Queue
    readiness: Readiness

    @property
    def machine(self) -> Machine: ...

    members: dict[bytes, RunMember]
    stopping: Stopping
    revising: Revising
    outside: RunsOutside
    local: LocalMode
    data: DataFiles
    accepts: Callable[[Run], str | None]
    gone: Callable[[], Collection[PeerId]]
    refuse: Callable[[PeerId, RemoteProtocolError], None]

    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...
    def is_over(self, run: bytes) -> bool: ...
    def following(self, plan: bytes) -> RunMember | None: ...
    def accept(self, run: Run) -> RunMember: ...
    def enter(self, member: RunMember, plan: Plan, history: History) -> None: ...
    def containing(self, run: Run, place: str) -> AbstractContextManager[None]: ...


class RunServer:
    """The server of one node's runs."""

    def __init__(self, runs: ServerService) -> None:
        self._runs = runs
        self._replaying = trio.Lock()
        self._checks = LeaseChecks(
            runs.signer.peer, runs.seams.executor, runs.seams.clock, lambda: runs.machine
        )
        files = partial(
            Permits, FILES_MAX, FILES_PER_PEER_MAX, patience_seconds=PATIENCE_SECONDS, clock=runs.seams.clock
        )
        self._permits: dict[type, Permits] = {
            kind: files() for kind in (wire.FetchWeights, wire.FetchModel, wire.FetchRange)
        }
        self._permits[wire.ExportStage] = Permits(
            EXPORTS_MAX, 1, patience_seconds=PATIENCE_SECONDS, clock=runs.seams.clock
        )
        self._permits[wire.FetchState] = Permits(
            RANGES_MAX, RANGES_PER_PEER_MAX, patience_seconds=PATIENCE_SECONDS, clock=runs.seams.clock
        )
        self._provider = StageProvider(
            runs.signer.peer, runs.slots.core, self._witnessing, runs.gone, runs.settings
        )

    async def serve(self, stream: Stream) -> None:
        """Answer the one request of a stream."""
        try:
            data = b""
            with trio.move_on_after(REQUEST_SECONDS_MAX):
                data = await stream.receive()
            request: wire.Request = decode(data, wire.Request, bytes_max=wire.REQUEST_BYTES_MAX)
            if isinstance(request, Upload):
                await self._upload(stream, request)
            else:
                reply = await self.answer(stream.peer, request)
                assert not isinstance(reply, Body), "blobs are uploaded"
                await stream.send(encode(reply))
        except StreamClosed:
            return
        except RemoteProtocolError as error:
            self._runs.refuse(stream.peer, error)

    async def _upload(self, stream: Stream, request: Upload) -> None:
        """Answer with a blob, if there is a permit, for as long as the peer receives it."""
        with self._permits[type(request)].take(stream.peer) as permit:
            if permit is None:
                with trio.move_on_after(REQUEST_SECONDS_MAX):
                    await stream.send(encode(Declined("busy: too many peers are fetching", is_busy=True)))
                return
            with trio.move_on_after(UPLOAD_SECONDS_MAX):
                reply = await self.answer(stream.peer, request)
                if isinstance(reply, Body):
                    await send_blob(stream, reply, permit, self._runs.seams.executor)
                else:
                    permit.waits(REQUEST_SECONDS_MAX)
                    await stream.send(encode(reply))

    async def answer(self, peer: PeerId, request: wire.Request) -> wire.Reply | Body:
        """Return the reply to one request of `peer`; a Body if the reply is a blob. Raises
        RemoteProtocolError."""
        match request:
            case wire.LeaseRequest():
                return await self._on_lease(peer, request)
            case wire.Release():
                return await self._on_release(peer, request)
            case wire.WithdrawRun() | wire.EnterQueue():
                return self._on_queue(peer, request)
            case wire.Join():
                return await self._runs.local.join(peer, request)
            case wire.PrepareStage():
                return await self._on_prepare(peer, request)
            case wire.Renew():
                return self._on_renew(peer, request)
            case wire.Start():
                return await self._on_start(peer, request)
            case wire.End():
                return await self._on_end(peer, request)
            case wire.Stop():
                return await self._runs.stopping.take(request.stop)
            case wire.Revise():
                return await self._runs.revising.take(peer, request.revision)
            case wire.Describe():
                return self._runs.revising.describe(request.run)
            case _:
                return await self._blob(peer, request)

    async def _blob(self, peer: PeerId, request: Upload) -> wire.Reply | Body:
        match request:
            case wire.FetchState():
                return await self._on_state(peer, request)
            case wire.ExportStage():
                return await self._on_export(peer, request)
            case wire.FetchWeights():
                return await self._on_fetch(request)
            case wire.FetchModel():
                return await self._on_model(request)
            case wire.FetchRange():
                return await self._on_range(request)

    async def _on_lease(self, peer: PeerId, request: wire.LeaseRequest) -> wire.Reply:
        runs = self._runs
        run, plan = await self._check_plan(peer, request)
        superseded = self._provider.supersede(peer, plan, self._known(run))
        runs.slots.note(bool(superseded))
        for name in superseded:
            await self._unprepare(run.id, name)
        if (declined := await self._make_room(run, plan, request.stage)) is not None:
            return declined
        turn = partial(runs.queue.ask, peer, run, request.revision, is_contested=not plan.height)
        hold = self._provider.on_hold(runs.slots.now, peer, plan, request.stage, self._known(run), turn)
        if isinstance(hold, Declined):
            return hold
        reason = await self._unfit(peer, run, plan, request.stage)
        if reason is not None:
            return _declined(reason)
        promise = self._provider.promise(runs.slots.now, hold)
        if isinstance(promise, Declined):
            return promise
        if request.stage is not None:
            runs.readiness.expect()
            await runs.slots.promise(promise)
            runs.queue.begin(run, request.revision)
        body = wire.LeaseBody(run.id, promise.plan, promise.stage, int(runs.settings.silence_seconds_max))
        return wire.Leased(runs.signer.sign(wire.LEASE_PURPOSE, encode(body)))

    def _on_queue(self, peer: PeerId, request: wire.WithdrawRun | wire.EnterQueue) -> wire.Reply:
        runs = self._runs
        if isinstance(request, wire.WithdrawRun):
            runs.queue.withdraw(peer, request.run)
            return Done()
        run = check_run(runs.signer, request.manifest)
        if peer != run.requester:
            raise RemoteProtocolError("the run's requester is another peer")
        if runs.is_over(run.id):
            return Declined(OVER)
        if (reason := runs.accepts(run)) is not None:
            return _declined(reason)
        waits = runs.queue.ask(peer, run, request.revision)
        if waits is None and not runs.slots.is_free_for(run.id):
            return Declined(BUSY)
        return waits or Done()

    async def _make_room(self, run: Run, plan: Plan, stage: int | None) -> Declined | None:
        """If this node is a standby of another run, close that stage to make room for a stage that it
        computes. A stage for which it would only be a standby displaces nothing."""
        runs, me = self._runs, self._runs.signer.peer
        if stage is None or plan.stage_of(me) != stage or not runs.slots.is_free_for(run.id):
            return None
        if me not in plan.standbys:
            await make_room(runs, me, run.id, runs.slots.free)
            return None
        following = sum(is_standby(member, me) for member in runs.members.values())
        return Declined(BUSY) if following >= runs.slots.free else None

    async def _unfit(self, peer: PeerId, run: Run, plan: Plan, stage: int | None) -> str | None:
        """Return why the owner or the machine cannot grant the request; None if both can."""
        runs = self._runs
        if (reason := runs.accepts(run)) is not None or stage is None:
            return reason
        if (reason := self._checks.known(run, plan, stage)) is not None:
            return reason
        try:
            graph = await runs.models.get(run.manifest.graph_hash, [peer, run.requester])
        except Unreachable as error:
            return str(error)
        return await self._checks.rejection_reason(peer, run, graph, plan, stage)

    def _known(self, run: Run) -> KnownRun:
        return KnownRun(run.requester, self._runs.is_over(run.id), self._runs.members.get(run.id))

    def _witnessing(self) -> int:
        return sum(member.is_witness for member in self._runs.members.values())

    async def _on_release(self, peer: PeerId, request: wire.Release) -> wire.Reply:
        self._runs.slots.note(self._provider.on_release(peer, request.plan))
        await self._unprepare(request.run, request.plan)
        return Done()

    async def _unprepare(self, run: bytes, plan: bytes) -> None:
        """Close the stage that was opened for a plan that was not decided."""
        member = self._runs.members.get(run)
        if member is not None:
            with self._runs.containing(member.run, "release"):
                await member.unprepare(plan)

    async def _on_start(self, peer: PeerId, request: wire.Start) -> wire.Reply:
        runs = self._runs
        run, plan = await self._check_plan(peer, request)
        known = self._known(run)
        answer = self._provider.on_start(runs.slots.now, peer, plan, known)
        if answer is not None:
            return answer
        if len(runs.members) >= RUNS_MAX:
            return Declined("busy: too many runs")
        runs.enter(runs.accept(run), plan, request.history)
        return Done()

    async def _check_plan(
        self, peer: PeerId, request: wire.LeaseRequest | wire.PrepareStage | wire.Start
    ) -> tuple[Run, Plan]:
        """Check a request's plan with `check_plan`. Replay histories off the event loop, one at a time."""
        runs = self._runs
        check = partial(
            check_plan,
            runs.signer,
            request.manifest,
            request.plan,
            request.history,
            peer,
            is_in_force=isinstance(request, wire.Start),
        )
        if request.history is None or not request.history.segments:
            return check()
        async with self._replaying:
            return await runs.seams.executor.run(check)

    async def _on_prepare(self, peer: PeerId, request: wire.PrepareStage) -> wire.Reply:
        runs = self._runs
        run, plan = await self._check_plan(peer, request)
        answer = self._provider.on_open(runs.slots.now, peer, plan, self._known(run))
        if answer is not None:
            return answer
        reason = await runs.accept(run).prepare(plan, peer)
        return Done() if reason is None else _declined(reason)

    async def _on_state(self, peer: PeerId, request: wire.FetchState) -> wire.Reply | Body:
        member = self._runs.following(request.plan)
        if member is None or member.plan is None or member.plan.stage_of(peer) is None:
            return Declined("no such plan here")
        if member.plan.stage_of(peer) != member.plan.stage_of(self._runs.signer.peer):
            return Declined("a different stage is held here")
        try:
            data = await member.read_state(request)
        except StageFailed as error:
            return _declined(error)
        return Declined("the state is that of a different step") if data is None else data

    async def _on_export(self, peer: PeerId, request: wire.ExportStage) -> wire.Reply | Body:
        member = self._runs.following(request.plan)
        if member is None or member.plan is None or member.plan.committer != peer:
            return Declined("no such plan here")
        try:
            return await member.export()
        except StageFailed as error:
            return _declined(error)

    def _on_renew(self, peer: PeerId, request: wire.Renew) -> wire.Reply:
        member = self._runs.members.get(request.run)
        if member is None:
            return Declined("no such run here")
        return member.renewed(peer, request.plan)

    async def _on_end(self, peer: PeerId, request: wire.End) -> wire.Reply:
        runs = self._runs
        member = runs.following(request.plan) or runs.outside.by_plan(request.plan)
        declined = None if member is None else answer_end(member.plan, peer, request.plan)
        if member is None or declined is not None:
            return Declined("no such plan here")
        if request.outcome == "done" and not request.weights:
            raise RemoteProtocolError("a run that is done must have a result")
        refusal = ""
        why = runs.accepts(member.run) if member.run.requester != runs.signer.peer else None
        if runs.outside.recall(member.run.id) is not None and request.outcome == "done" and why is not None:
            # The owner has this machine back, so nothing more is fetched for other peers' runs.
            refusal = f"the weights are not here: {why}"
        with runs.containing(member.run, "end"):
            await member.end(request.outcome, request.detail, request.weights, source=peer, refusal=refusal)
        return Done()

    async def _on_fetch(self, request: wire.FetchWeights) -> wire.Reply | Body:
        seams = self._runs.seams
        file = await seams.executor.run(lambda: whole(seams.storage.open(weights_name(request.run))))
        return Declined("these weights are not here") if file is None else file

    async def _on_model(self, request: wire.FetchModel) -> wire.Reply | Body:
        file = await self._runs.models.open(request.graph)
        return Declined("this graph is not here") if file is None else file

    async def _on_range(self, request: wire.FetchRange) -> wire.Reply | Body:
        part = await self._runs.models.open_range(request.graph, request.offset, request.length)
        return Declined("these first values are not here") if part is None else part


def _declined(reason: object) -> Declined:
    return Declined(str(reason)[:REASON_LENGTH_MAX])
