"""All runs this node knows, and the part it plays in each: requester, planner, trainer, replica.

Messages come in here, are checked and go to the run they name. Who is gone comes from membership
(`member_lost`), never from a timer of our own; only a run that nobody speaks of any more is given up
by silence, so that a lease cannot be held for ever.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from node.errors import StageFailed, StreamClosed, Unreachable
from node.events import Event, RunAccepted, RunEnded, RunPlanned, StageLeased
from node.runs import data as datasets
from node.runs import requests as wire
from node.runs.admission import check_plan, make_specification, misfit
from node.runs.links import Links
from node.runs.manifest import Run, check_run, run_text
from node.runs.member import RunMember
from node.runs.placement import NotPlaced, NotStarted, Offer, place
from node.runs.slot import Slot
from node.runs.weights import FETCH_SECONDS_MAX, weights_name
from node.seams import Seams, Stream
from partition.plan.plan import HASH_BYTES, Plan, plan_hash
from partition.stage import StageSpecification
from partition.steps.frames import Frame, open_frame

SUBMIT_SECONDS_MAX = 300.0
HEARSAY_SECONDS = 1.0
"""News of a newcomer may reach the planner so much later than the requester: some rounds of gossip."""
PIPELINE_IDLE_SECONDS_MAX = 120.0
"""A stream that brings nothing for so long is closed, unless its peer is in a run with this node."""
RUNS_MAX = 64
"""Runs that have not ended; a stranger's manifests must not fill the memory."""
OVER_MAX = 1_024
"""Runs remembered as ended, so that a late or repeated Start does not begin them again."""
PLACEMENTS_MAX = 8
"""Runs that this node places at once; each may wait minutes for silent providers."""
UPLOADS_MAX = 4
"""Weights on their way out at once; each lies in memory."""
REQUEST_SECONDS_MAX = 20.0
"""From a stream's opening to its request."""


class Runs:
    """The service. `run` owns its tasks; everything it learns goes out by `publish`."""

    def __init__(
        self,
        seams: Seams,
        signer: Signer,
        *,
        offers: Callable[[], Sequence[Offer]],
        live: Callable[[], Sequence[PeerId]],
        accepts: Callable[[Run], str | None],
        publish: Callable[[Event], None],
        refuse: Callable[[PeerId, RemoteProtocolError], None],
        suspect: Callable[[PeerId], None],
        provide: Callable[[str, str], Awaitable[None]],
        threads: int,
        device: str,
        memory_bytes: int,
    ) -> None:
        self.seams = seams
        self.signer = signer
        self.live = live
        self.publish = publish
        self.threads = threads
        self.device = device
        self._memory_bytes = memory_bytes
        self._offers = offers
        self._accepts = accepts
        self._refuse = refuse
        self._provide = provide
        self._runs: dict[bytes, RunMember] = {}
        self._plans: dict[bytes, RunMember] = {}
        self._over: dict[bytes, None] = {}
        self._slot = Slot(seams.clock)
        self._placements = self._uploads = 0
        self._folders: dict[str, Path] = {}
        self.links = Links(
            seams.network,
            wire.PIPELINE_PROTOCOL,
            deliver=self._deliver,
            on_reconnected=self._reconnected,
            on_stuck=suspect,
        )
        self.nursery: trio.Nursery | None = None
        seams.network.handle(wire.PIPELINE_PROTOCOL, self._serve_pipeline)
        seams.network.handle(wire.RUNS_PROTOCOL, self._serve_request)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then end every stage this node hosts."""
        try:
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                await nursery.start(self.links.run)
                task_status.started()
                await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                for member in list(self._runs.values()):
                    await member.close_stage()

    @property
    def has_slot(self) -> bool:
        """Whether a stage may be placed here."""
        return self._slot.is_free and not any(member.hosts for member in self._runs.values())

    # The requester's side

    def learn_folder(self, digest: str, folder: Path) -> None:
        """Remember where data of this hash lies, so that this node can train on it."""
        self._folders[digest] = folder

    def load_data(self, run: Run) -> datasets.Dataset:
        """The run's data, read from disk. Raises UsageError or NotPlaced."""
        if run.manifest.data == datasets.DIGITS_NAME:
            return datasets.load_digits()
        if run.manifest.data not in self._folders:
            raise NotPlaced("this node does not have the run's data folder")
        return datasets.load_folder(self._folders[run.manifest.data])

    async def submit(self, run: Run, planner: PeerId) -> None:
        """Have a run placed. Raises NotPlaced or Unreachable."""
        member = self._accept(run)
        try:
            reply = await self.ask(planner, wire.Submit(run.fact), SUBMIT_SECONDS_MAX)
        except Unreachable as error:
            if member.begun:
                return  # the planner is gone, but not before it had done its part
            await member.end("failed", f"the planner did not answer: {error.detail}", "")
            raise
        if isinstance(reply, wire.Declined):
            await member.end("failed", reply.reason, "")
            raise NotPlaced(reply.reason)

    async def ask(self, peer: PeerId, request: wire.Request, seconds: float) -> wire.Reply:
        """A request to a member, or to this node itself. Raises Unreachable."""
        if peer != self.signer.peer:
            return await wire.ask(self.seams.network, peer, request, seconds=seconds)
        try:
            reply = await self._answer(peer, request)
        except RemoteProtocolError as error:  # what others would refuse is no bug of this node
            raise Unreachable("refused", f"no answer: {error}") from None
        assert not isinstance(reply, bytes), "blobs are fetched, not asked for"
        return reply

    def known(self) -> list[str]:
        """Short ids of the runs in memory."""
        return [run_text(run) for run in self._runs]

    def start_task(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run `task(*arguments)` beside the service, until it ends or the node does."""
        assert self.nursery is not None, "Runs.run was not started"
        self.nursery.start_soon(task, *arguments)

    # What membership says

    def member_lost(self, peer: PeerId) -> None:
        """A member is dead or has left."""
        self._slot.release(peer)
        for member in list(self._runs.values()):
            member.member_lost(peer)

    # Messages of a step

    def send(self, peer: PeerId, message: Any) -> None:
        """Queue a pipeline message on the link to `peer`."""
        self.links.send(peer, encode(message))

    async def _serve_pipeline(self, stream: Stream) -> None:
        try:
            while True:
                message = None
                with trio.move_on_after(PIPELINE_IDLE_SECONDS_MAX):
                    message = await stream.receive()
                if message is not None:
                    await self._deliver(stream.peer, message)
                elif not self._is_partner(stream.peer):
                    return
        except StreamClosed:
            return

    def _is_partner(self, peer: PeerId) -> bool:
        """Whether `peer` has a part in a plan that is in force here."""
        return any(member.plan is not None and peer in member.plan.members for member in self._runs.values())

    async def _deliver(self, sender: PeerId, data: bytes) -> None:
        try:
            message: Any = decode(data, wire.PipelineMessage, bytes_max=wire.PIPELINE_BYTES_MAX)
            if isinstance(message, Frame):
                message = open_frame(self.signer, sender, message)
                plan = message.header.plan
            elif isinstance(message, wire.GroupPart):
                message = message.part
                plan = message.key[:HASH_BYTES]
            else:
                plan = message.plan
            member = self._plans.get(plan)
            if member is not None:
                member.receive(self.seams.clock.monotonic(), sender, message)
        except RemoteProtocolError as error:
            self._refuse(sender, error)

    def _reconnected(self, peer: PeerId) -> None:
        for member in self._runs.values():
            member.reconnected(peer)

    # Requests

    async def _serve_request(self, stream: Stream) -> None:
        try:
            data = b""
            with trio.move_on_after(REQUEST_SECONDS_MAX):
                data = await stream.receive()
            request: wire.Request = decode(data, wire.Request, bytes_max=wire.REQUEST_BYTES_MAX)
            if isinstance(request, wire.FetchWeights | wire.ExportStage):
                await self._upload(stream, request)
            else:
                reply = await self._answer(stream.peer, request)
                assert not isinstance(reply, bytes), "blobs are uploaded"
                await stream.send(encode(reply))
        except StreamClosed:
            return
        except RemoteProtocolError as error:
            self._refuse(stream.peer, error)

    async def _upload(self, stream: Stream, request: wire.Request) -> None:
        """Answer by a blob: a few at once, each in bounded time, for every one lies in memory."""
        if self._uploads >= UPLOADS_MAX:
            await stream.send(encode(wire.Declined("busy: too many fetch at once")))
            return
        self._uploads += 1
        try:
            with trio.move_on_after(FETCH_SECONDS_MAX):
                reply = await self._answer(stream.peer, request)
                if isinstance(reply, bytes):
                    await wire.send_blob(stream, reply)
                else:
                    await stream.send(encode(reply))
        finally:
            self._uploads -= 1

    async def _answer(self, peer: PeerId, request: wire.Request) -> wire.Reply | bytes:
        match request:
            case wire.Submit():
                return await self._on_submit(peer, request)
            case wire.LeaseRequest():
                return self._on_lease(peer, request)
            case wire.Release():
                return await self._on_release(peer, request)
            case wire.Renew():
                return self._on_renew(peer, request)
            case wire.Start():
                return await self._on_start(peer, request)
            case wire.Begin():
                return await self._on_begin(peer, request)
            case wire.ExportStage():
                return await self._on_export(peer, request)
            case wire.End():
                return await self._on_end(peer, request)
            case wire.FetchWeights():
                return await self._on_fetch(request)

    async def _on_submit(self, peer: PeerId, request: wire.Submit) -> wire.Reply:
        run = check_run(self.signer, request.manifest)
        if run.requester != peer:
            raise RemoteProtocolError("a run submitted by another than its requester")
        if self._placements >= PLACEMENTS_MAX or len(self._runs) >= RUNS_MAX:
            return wire.Declined("busy: too many runs")
        self._placements += 1
        try:
            return wire.Placed(encode(await self._place(run)))
        except NotPlaced as error:
            return wire.Declined(str(error)[: wire.REASON_LENGTH_MAX])
        finally:
            self._placements -= 1

    async def _place(self, run: Run) -> Plan:
        """Place a run; again, where this node has just heard of peers that its requester knew already."""
        while True:
            offers = self._offers()
            try:
                return await place(run, self.signer, offers, self.ask, self.seams.executor)
            except NotStarted:
                raise
            except NotPlaced:
                await trio.sleep(HEARSAY_SECONDS)
                known = {offer.peer for offer in offers}
                if all(offer.peer in known for offer in self._offers()):
                    raise

    def _on_lease(self, peer: PeerId, request: wire.LeaseRequest) -> wire.Reply:
        run, plan = check_plan(self.signer, request.manifest, request.plan, peer)
        if plan.stage_of(self.signer.peer) != request.stage or plan.height:
            raise RemoteProtocolError("a lease for a stage that the plan does not give to this node")
        if not self.has_slot:
            return wire.Declined("busy")
        if run.id in self._over:
            return wire.Declined("the run is over")
        reason = self._accepts(run) or misfit(run, plan, request.stage, self._memory_bytes)
        if reason is not None:
            return wire.Declined(reason[: wire.REASON_LENGTH_MAX])
        body = wire.LeaseBody(run.id, plan_hash(plan), request.stage, int(RunMember.SILENCE_SECONDS_MAX))
        self._slot.promise(body, peer)
        return wire.Leased(self.signer.sign(wire.LEASE_PURPOSE, encode(body)))

    async def _on_release(self, peer: PeerId, request: wire.Release) -> wire.Reply:
        self._slot.release(peer, request.plan)
        member = self._following(request.plan)
        if (
            member is not None
            and member.plan is not None
            and member.plan.planner == peer
            and not member.begun
        ):
            await member.end("failed", "the planner gave the placement up", "")
        return wire.Done()

    async def _on_start(self, peer: PeerId, request: wire.Start) -> wire.Reply:
        run, plan = check_plan(self.signer, request.manifest, request.plan, peer)
        if run.id in self._over:
            return wire.Declined("the run is over")
        member = self._runs.get(run.id)
        stage = plan.stage_of(self.signer.peer)
        is_new_host = stage is not None and (member is None or not member.hosts)
        if stage is not None and is_new_host and not self._slot.holds(run.id, plan_hash(plan), stage):
            return wire.Declined("no lease for this stage")
        if member is None:
            if stage is None and peer != self.signer.peer:
                return wire.Declined("no part in this run was asked of this node")
            member = self._accept(run)
        if not member.may_follow(plan):
            return wire.Declined("another plan is in force")
        if stage is not None and is_new_host:
            self._publish_lease(run, plan, stage)
        self._plans = {key: other for key, other in self._plans.items() if other is not member}
        self._plans[plan_hash(plan)] = member
        try:
            await member.start(plan)
        except StageFailed as error:
            await member.end("failed", str(error), "")
            return wire.Declined(str(error)[: wire.REASON_LENGTH_MAX])
        finally:
            self._slot.release(peer, plan_hash(plan))
        self.publish(self._planned(run, plan))
        return wire.Done()

    async def _on_begin(self, peer: PeerId, request: wire.Begin) -> wire.Reply:
        member = self._following(request.plan)
        if member is None or member.plan is None or member.plan.planner != peer:
            return wire.Declined("no such plan here")
        reason = await member.begin()
        return wire.Done() if reason is None else wire.Declined(reason[: wire.REASON_LENGTH_MAX])

    async def _on_export(self, peer: PeerId, request: wire.ExportStage) -> wire.Reply | bytes:
        member = self._following(request.plan)
        if member is None or member.plan is None or member.plan.trainer != peer:
            return wire.Declined("no such plan here")
        try:
            return await member.export()
        except StageFailed as error:
            return wire.Declined(str(error)[: wire.REASON_LENGTH_MAX])

    def _on_renew(self, peer: PeerId, request: wire.Renew) -> wire.Reply:
        member = self._following(request.plan)
        if member is None or member.plan is None or member.plan.trainer != peer:
            return wire.Declined("no such plan here")
        member.heard()
        return wire.Done()

    async def _on_end(self, peer: PeerId, request: wire.End) -> wire.Reply:
        member = self._following(request.plan)
        if member is None or member.plan is None:
            return wire.Declined("no such plan here")
        if peer not in (member.plan.trainer, member.plan.planner):
            raise RemoteProtocolError("a run ended by a peer that is neither its trainer nor its planner")
        await member.end(request.outcome, request.detail, request.weights, source=peer)
        return wire.Done()

    async def _on_fetch(self, request: wire.FetchWeights) -> wire.Reply | bytes:
        data = await self.seams.executor.run(lambda: self.seams.storage.read(weights_name(request.run)))
        return wire.Declined("these weights are not here") if data is None else data

    # Bookkeeping

    def _following(self, plan: bytes) -> RunMember | None:
        """The member of the run in which this plan is in force."""
        member = self._plans.get(plan)
        return member if member is not None and member.plan_hash == plan else None

    def _accept(self, run: Run) -> RunMember:
        member = self._runs.get(run.id)
        if member is None:
            member = self._runs[run.id] = RunMember(self, run)
            manifest = run.manifest
            self.publish(
                RunAccepted(
                    at=self.seams.clock.wall(),
                    run=run.text,
                    model=manifest.model,
                    data=manifest.data,
                    steps=manifest.steps,
                    requester=run.requester,
                )
            )
        return member

    def ended(self, member: RunMember, outcome: str, detail: str, weights: str) -> None:
        """A run is over here: forget its plans, say so."""
        self._runs.pop(member.run.id, None)
        self._over = dict(list({**self._over, member.run.id: None}.items())[-OVER_MAX:])
        self._plans = {plan: other for plan, other in self._plans.items() if other is not member}
        if member.plan is not None:
            needed = {peer for other in self._runs.values() if other.plan for peer in other.plan.members}
            for peer in member.plan.members:
                if peer not in needed:
                    self.links.forget(peer)
        self.publish(self._ended(member.run.id, outcome, detail, weights))
        if outcome == "done" and not detail and self.nursery is not None:
            self.nursery.start_soon(self._provide, member.run.text, weights)

    def _ended(self, run: bytes, outcome: str, detail: str, weights: str = "") -> RunEnded:
        at = self.seams.clock.wall()
        return RunEnded(at=at, run=run_text(run), outcome=outcome, detail=detail, weights=weights)

    def _planned(self, run: Run, plan: Plan) -> RunPlanned:
        return RunPlanned(
            at=self.seams.clock.wall(),
            run=run.text,
            plan=plan_hash(plan).hex()[:16],
            height=plan.height,
            trainer=PeerId(plan.trainer),
            planner=PeerId(plan.planner),
            layers=tuple((stage.first_layer, stage.last_layer) for stage in plan.stages),
            stages=tuple(tuple(PeerId(peer) for peer in stage.replicas) for stage in plan.stages),
        )

    def _publish_lease(self, run: Run, plan: Plan, stage: int) -> None:
        row = plan.stages[stage]
        layers = (row.first_layer, row.last_layer)
        self.publish(StageLeased(at=self.seams.clock.wall(), run=run.text, stage=stage, layers=layers))

    def specification(self, run: Run, plan: Plan, stage: int) -> StageSpecification:
        """What a stage process needs to know."""
        return make_specification(run, plan, stage, threads=self.threads, device=self.device)
