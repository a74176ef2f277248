"""What members of a run, and strangers, ask of this node on `/peerloom/runs/1`, and what it answers.

One request a stream. Each is checked against the run and the plan it names before it changes anything; who
may ask for what is said in `node.protocols.runs`.
"""

from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from node.checkpoints.weights import weights_name
from node.content.dataset_store import DataFiles
from node.content.graphs import Models
from node.errors import StageFailed, StreamClosed, Unreachable
from node.local.service import LocalRuns
from node.placement.admission import Machine, check_plan
from node.placement.lease_checks import LeaseChecks
from node.placement.slots import Slots
from node.placement.witnesses import WITNESSED_MAX, WitnessPromises
from node.protocols import runs as wire
from node.protocols.manifest import Run
from node.protocols.permits import Permits
from node.protocols.uploads import Body, send_blob, whole
from node.runs.member import RunMember
from node.runs.outside import RunsOutside
from node.runs.queue import Queue
from node.runs.revising import Revising
from node.runs.stopping import Stopping
from node.seams import Seams, Stream
from partition.plan.history import History
from partition.plan.plan import Plan, plan_hash
from partition.run import timeouts
from partition.run.asks import Declined, Done
from partition.run.messages import REASON_LENGTH_MAX

RUNS_MAX = 64
"""Runs that have not ended; a stranger's manifests must not fill the memory."""
RELEASED_MAX = 256
"""Plans given up lately."""
FILES_MAX = 64
"""Files on their way out at once, of each kind: a descriptor and a chunk each."""
FILES_PER_PEER_MAX = 4
EXPORTS_MAX = 4
"""Stages on their way to a committer: each lies in memory."""
RANGES_MAX = 16
"""Ranges of a state, of 16 MiB each, which lie in memory."""
RANGES_PER_PEER_MAX = 4
"""A newcomer asks for two at once."""
PATIENCE_SECONDS = 2.0
"""How long a peer that takes nothing keeps a place that another wants."""
UPLOAD_SECONDS_MAX = 3_600.0
"""For all of one answer: 12 GB at 30 Mbit/s."""
REQUEST_SECONDS_MAX = 20.0
"""From a stream's opening to its request."""
Upload = wire.FetchWeights | wire.ExportStage | wire.FetchModel | wire.FetchRange | wire.FetchState
"""Requests that are answered by a blob."""


class Service(Protocol):
    """What is needed of `node.runs.runs.Runs`."""

    seams: Seams
    signer: Signer
    models: Models
    slots: Slots
    queue: Queue

    @property
    def machine(self) -> Machine: ...

    members: dict[bytes, RunMember]
    stopping: Stopping
    revising: Revising
    outside: RunsOutside
    local: LocalRuns
    data: DataFiles
    accepts: Callable[[Run], str | None]
    gone: Callable[[], Collection[PeerId]]
    refuse: Callable[[PeerId, RemoteProtocolError], None]

    def is_over(self, run: bytes) -> bool: ...
    def following(self, plan: bytes) -> RunMember | None: ...
    def accept(self, run: Run) -> RunMember: ...
    def enter(self, member: RunMember, plan: Plan, history: History) -> None: ...
    def containing(self, run: Run, place: str) -> AbstractContextManager[None]: ...


class Requests:
    """Serves them for one node."""

    def __init__(self, runs: Service) -> None:
        self._runs = runs
        self._replaying = trio.Lock()
        self._checks = LeaseChecks(
            runs.signer.peer, runs.seams.executor, runs.seams.clock, lambda: runs.machine
        )
        files = partial(Permits, FILES_MAX, FILES_PER_PEER_MAX, patience_seconds=PATIENCE_SECONDS)
        self._permits: dict[type, Permits] = {
            kind: files() for kind in (wire.FetchWeights, wire.FetchModel, wire.FetchRange)
        }
        self._permits[wire.ExportStage] = Permits(EXPORTS_MAX, 1, patience_seconds=PATIENCE_SECONDS)
        self._permits[wire.FetchState] = Permits(
            RANGES_MAX, RANGES_PER_PEER_MAX, patience_seconds=PATIENCE_SECONDS
        )
        self._witnessed = WitnessPromises()
        # A lease that took long to think about may be given up by its planner before it was given.
        self._released: deque[bytes] = deque(maxlen=RELEASED_MAX)

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
        """Answer by a blob, where there is a permit, as long as the peer takes what is sent."""
        with self._permits[type(request)].take(stream.peer) as permit:
            if permit is None:
                with trio.move_on_after(REQUEST_SECONDS_MAX):
                    await stream.send(encode(wire.Declined("busy: too many fetch at once", is_busy=True)))
                return
            with trio.move_on_after(UPLOAD_SECONDS_MAX):
                reply = await self.answer(stream.peer, request)
                if isinstance(reply, Body):
                    await send_blob(stream, reply, permit, self._runs.seams.executor)
                else:
                    permit.waits(REQUEST_SECONDS_MAX)
                    await stream.send(encode(reply))

    async def answer(self, peer: PeerId, request: wire.Request) -> wire.Reply | Body:
        """Return what one request of `peer` comes to, a body for a blob. Raises RemoteProtocolError."""
        match request:
            case wire.LeaseRequest():
                return await self._on_lease(peer, request)
            case wire.Release():
                return await self._on_release(peer, request)
            case wire.Join():
                return await self._runs.local.join(peer, request)
            case wire.Prepare():
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
        if plan.stage_of(runs.signer.peer) != request.stage:
            raise RemoteProtocolError("a lease for a stage that the plan does not give to this node")
        if runs.is_over(run.id):
            return wire.Declined("the run is over")
        if request.stage is not None:
            await self._supersede(run, peer, plan.height)
        waits = None if request.stage is None else runs.queue.ask(run, request.revision)
        if waits is not None or not (request.stage is None or runs.slots.is_free_for(run.id)):
            return waits or wire.Declined("busy")
        if self._is_behind(run.id, plan, peer):
            return wire.Declined("it does not know yet how the run went on")
        if request.stage is None:
            return self._agree_to_witness(peer, run, plan)
        reason = runs.accepts(run) or self._checks.known(run, plan, request.stage)
        if reason is not None:
            return wire.Declined(reason[:REASON_LENGTH_MAX])
        name = plan_hash(plan)
        before, was_gone = self._released.count(name), peer in runs.gone()
        try:
            graph = await runs.models.get(run.manifest.graph_hash, [peer, run.requester])
        except Unreachable as error:
            return _declined(error)
        reason = await self._checks.rejection_reason(peer, run, graph, plan, request.stage)
        if reason is not None:
            return wire.Declined(reason[:REASON_LENGTH_MAX])
        is_awaited = self._released.count(name) == before and (was_gone or peer not in runs.gone())
        if not is_awaited or not runs.slots.is_free_for(run.id):
            return wire.Declined("busy")  # somebody else was given it meanwhile, or nobody waits any more
        body = wire.LeaseBody(run.id, name, request.stage, int(timeouts.SILENCE_SECONDS_MAX))
        await runs.slots.promise(body, peer, plan.height)
        runs.queue.begin(run, request.revision)
        return wire.Leased(runs.signer.sign(wire.LEASE_PURPOSE, encode(body)))

    async def _supersede(self, run: Run, planner: PeerId, height: int) -> None:
        """Give back what is held for plans of this run that cannot come about, now that `planner` asks for
        one at `height`."""
        for promise in self._runs.slots.supersede(run.id, planner, height):
            member = self._runs.members.get(run.id)
            if member is not None:
                with self._runs.containing(run, "superseded"):
                    await member.unprepare(promise.plan)

    def _agree_to_witness(self, peer: PeerId, run: Run, plan: Plan) -> wire.Reply:
        runs = self._runs
        reason = runs.accepts(run)
        if reason is not None:
            return wire.Declined(reason[:REASON_LENGTH_MAX])
        if self._witnesses_enough:
            return wire.Declined("busy: a witness of too many runs")
        name, seconds = plan_hash(plan), timeouts.SILENCE_SECONDS_MAX
        self._witnessed.promise(runs.seams.clock.monotonic(), run.id, name, peer, seconds)
        body = wire.LeaseBody(run.id, name, None, int(seconds))
        return wire.Leased(runs.signer.sign(wire.LEASE_PURPOSE, encode(body)))

    @property
    def _witnesses_enough(self) -> bool:
        return sum(member.is_witness for member in self._runs.members.values()) >= WITNESSED_MAX

    def _has_agreed(self, run: Run, plan: Plan) -> bool:
        """Return whether this node has agreed to be a member by `plan` without a stage."""
        runs = self._runs
        now = runs.seams.clock.monotonic()
        return runs.signer.peer == run.requester or self._witnessed.holds(now, run.id, plan_hash(plan))

    async def _on_release(self, peer: PeerId, request: wire.Release) -> wire.Reply:
        self._runs.slots.release(request.plan, peer)
        self._witnessed.release(request.plan, peer)
        self._released.append(request.plan)
        member = self._runs.members.get(request.run)
        if member is not None:
            with self._runs.containing(member.run, "release"):
                await member.unprepare(request.plan)
        return wire.Done()

    async def _on_start(self, peer: PeerId, request: wire.Start) -> wire.Reply:
        runs = self._runs
        run, plan = await self._check_plan(peer, request)
        if runs.is_over(run.id):
            return wire.Declined("the run is over")
        member = runs.members.get(run.id)
        answer = None if member is None else member.started(peer, plan)
        if answer is not None:
            return _on_the_wire(answer)
        stage = plan.stage_of(runs.signer.peer)
        if stage is not None and not runs.slots.holds(run.id, plan_hash(plan), stage):
            return wire.Declined("no lease for this stage")
        if stage is None and member is None and not self._has_agreed(run, plan):
            return wire.Declined("no part in this run was asked of this node")
        # What was promised before others began counts only now.
        is_full = (
            stage is None and member is None and runs.signer.peer != run.requester and self._witnesses_enough
        )
        if len(runs.members) >= RUNS_MAX or is_full:
            return wire.Declined("busy: too many runs")
        runs.enter(member or runs.accept(run), plan, request.history)
        return wire.Done()

    async def _check_plan(
        self, peer: PeerId, request: wire.LeaseRequest | wire.Prepare | wire.Start
    ) -> tuple[Run, Plan]:
        """See `check_plan`: how a plan came about is played again beside the event loop, one at a time."""
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

    async def _on_prepare(self, peer: PeerId, request: wire.Prepare) -> wire.Reply:
        runs = self._runs
        run, plan = await self._check_plan(peer, request)
        stage = plan.stage_of(runs.signer.peer)
        if runs.is_over(run.id):
            return wire.Declined("the run is over")
        if self._is_behind(run.id, plan, peer):
            return wire.Declined("it does not know yet how the run went on")
        if stage is None and self._has_agreed(run, plan):
            return wire.Done()
        if stage is None or not runs.slots.holds(run.id, plan_hash(plan), stage):
            return wire.Declined("no lease for this stage")
        reason = await runs.accept(run).prepare(plan, peer)
        return wire.Done() if reason is None else wire.Declined(reason[:REASON_LENGTH_MAX])

    def _is_behind(self, run: bytes, plan: Plan, peer: PeerId) -> bool:
        """Return whether this node is in the run under an older plan than that before `plan`; it asks
        `peer`."""
        member = self._runs.members.get(run)
        return member is not None and member.is_behind(peer, plan)

    async def _on_state(self, peer: PeerId, request: wire.FetchState) -> wire.Reply | Body:
        member = self._runs.following(request.plan)
        if member is None or member.plan is None or member.plan.stage_of(peer) is None:
            return wire.Declined("no such plan here")
        if member.plan.stage_of(peer) != member.plan.stage_of(self._runs.signer.peer):
            return wire.Declined("another stage is held here")
        try:
            data = await member.read_state(request)
        except StageFailed as error:
            return _declined(error)
        return wire.Declined("the state is that of another step") if data is None else data

    async def _on_export(self, peer: PeerId, request: wire.ExportStage) -> wire.Reply | Body:
        member = self._runs.following(request.plan)
        if member is None or member.plan is None or member.plan.committer != peer:
            return wire.Declined("no such plan here")
        try:
            return await member.export()
        except StageFailed as error:
            return _declined(error)

    def _on_renew(self, peer: PeerId, request: wire.Renew) -> wire.Reply:
        member = self._runs.members.get(request.run)
        if member is None:
            return wire.Declined("no such run here")
        return _on_the_wire(member.renewed(peer, request.plan))

    async def _on_end(self, peer: PeerId, request: wire.End) -> wire.Reply:
        runs = self._runs
        member = runs.following(request.plan) or runs.outside.by_plan(request.plan)
        declined = None if member is None else member.core.on_end(peer, request.plan)
        if member is None or declined is not None:
            return wire.Declined("no such plan here")
        if request.outcome == "done" and not request.weights:
            raise RemoteProtocolError("a run that is done without a result")
        detail = request.detail
        source: PeerId | None = peer
        why = runs.accepts(member.run) if member.run.requester != runs.signer.peer else None
        if runs.outside.recall(member.run.id) is not None and request.outcome == "done" and why is not None:
            # Its owner has this machine back: nothing is fetched any more for a run of others.
            detail, source = f"the weights are not here: {why}", None
        with runs.containing(member.run, "end"):
            await member.end(request.outcome, detail, request.weights, source=source)
        return wire.Done()

    async def _on_fetch(self, request: wire.FetchWeights) -> wire.Reply | Body:
        seams = self._runs.seams
        file = await seams.executor.run(lambda: whole(seams.storage.open(weights_name(request.run))))
        return wire.Declined("these weights are not here") if file is None else file

    async def _on_model(self, request: wire.FetchModel) -> wire.Reply | Body:
        file = await self._runs.models.open(request.graph)
        return wire.Declined("this graph is not here") if file is None else file

    async def _on_range(self, request: wire.FetchRange) -> wire.Reply | Body:
        part = await self._runs.models.open_range(request.graph, request.offset, request.length)
        return wire.Declined("these first values are not here") if part is None else part


def _on_the_wire(answer: Done | Declined) -> wire.Reply:
    return wire.Done() if isinstance(answer, Done) else wire.Declined(answer.reason)


def _declined(error: Exception) -> wire.Declined:
    return wire.Declined(str(error)[:REASON_LENGTH_MAX])
