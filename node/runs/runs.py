"""All runs that this node knows, and its part in each: requester, planner, trainer, replica.

Messages of a step arrive at `node.runs.inbox`, requests at `node.runs.server`. Membership reports dead and
leaving members (`member_lost`), so runs need no timer of their own for that. Only a run without any message
is given up after a time, so that a lease cannot be held for ever.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trio

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from crypto.noise import Data
from node.containment import keep_running
from node.content import datasets as datasets
from node.content.dataset_store import DataFiles, Lanes
from node.content.graphs import Models
from node.errors import RunFailed, Unreachable
from node.events import (
    RunReleased,
)
from node.pipeline.links import Links
from node.pipeline.spans import Spans
from node.placement.admission import Machine
from node.placement.leases import PlacementFailed, release, start
from node.protocols import calls
from node.protocols import runs as wire
from node.protocols.manifest import Run, run_text
from node.protocols.uploads import Body
from node.runs.announcements import run_accepted, run_ended, run_planned, stage_leased
from node.runs.archive import ArchiveShell
from node.runs.audits import Audits
from node.runs.chain import RunEntry, chain_name, history_name
from node.runs.checkpointing import newest_name
from node.runs.context import RunMembership
from node.runs.inbox import PipelineInbox
from node.runs.kept import note_guests
from node.runs.local_mode import LocalMode
from node.runs.member import RunMember
from node.runs.member_news import MemberNews
from node.runs.needs import Beside, RunHost, SwarmView
from node.runs.occupancy import Occupancy
from node.runs.outside import RunsOutside
from node.runs.own_data import OwnDataSets
from node.runs.placing import place_run
from node.runs.queue import Queue
from node.runs.readiness import Readiness
from node.runs.receipts import Receipts
from node.runs.recovery import forget_files, recover, run_name
from node.runs.revising import Revising
from node.runs.server import RunServer
from node.runs.stopping import Stopping
from node.runs.tasks import RunTasks
from node.runs.traces import Traces
from node.seams import Seams
from partition.plan.history import History, first_history
from partition.plan.plan import Plan, plan_hash
from partition.run.decliners import Decliners
from partition.run.reliability import RunLosses


class Runs:
    """The runs service. `run` owns its tasks; it announces all news through `publish`."""

    def __init__(
        self,
        seams: Seams,
        signer: Signer,
        swarm: SwarmView,
        host: RunHost,
        beside: Beside,
        local: Callable[["Runs", ArchiveShell], LocalMode],
    ) -> None:
        self.seams = seams
        self.signer = signer
        self.settings, self.limits = host.settings, host.limits
        self.live, self.gone = swarm.live, swarm.gone
        self.offers, self.search = swarm.offers, swarm.search
        self.refuse, self.provide = swarm.refuse, swarm.provide
        self.publish, self.accepts = host.publish, host.accepts
        self._machine = host.machine
        self.checkpoints, self.copies = beside.checkpoints, beside.copies
        self.guests, self.places = beside.guests, beside.places
        self.averaging, self.measurements = beside.averaging, beside.measurements
        self.sends_less: Callable[[], bool] = lambda: False
        self.models = seams.part(Models)(seams, self._graphs_needed, self.guests, self.limits.graphs)
        self.receipts = Receipts(
            seams,
            signer,
            self.models,
            rate=host.rate,
            refuse=self.refuse,
            issued_bytes_min=self.limits.issued_bytes_min,
        )
        self.copies.came = self.receipts.checkpoint_came
        self.averaging.averaged = self._averaged
        self.members: dict[bytes, RunMember] = {}
        self._tasks = RunTasks(self)
        self.start_task, self.containing = self._tasks.start, self._tasks.containing
        self.occupancy = Occupancy(self, host.slots)
        self.measurements.is_computing = self.occupancy.is_computing
        self.slots = self.occupancy.slots
        self.queue = Queue(self, host.slots)
        self.losses = RunLosses()
        self.spans = Spans()
        self.traces = Traces(seams, self.spans, self.refuse)
        self.audits = Audits(self)
        self._observe = host.observe
        self.inbox = PipelineInbox(self)
        self.archive = ArchiveShell(seams, signer.peer)
        self.own_data = OwnDataSets(seams, host.own_data)
        self.local = local(self, self.archive)
        self.outside = RunsOutside(self, signer.peer)
        self.stopping = Stopping(self)
        self.revising = Revising(self)
        self.data = self._make_data()
        self.news = MemberNews(self)
        self.readiness = Readiness(self, self.members.values, self.limits.spares)
        self.decliners = Decliners()
        self._requests = RunServer(self)
        self.links = self._make_links(swarm.suspect)
        self.left: dict[str, bool] = {}

    def _make_data(self) -> DataFiles:
        return DataFiles(
            self.seams,
            self.checkpoints.store.blobs,
            refuse=self.refuse,
            start_task=partial(self.start_task, of=None),
            needed=lambda: [run.manifest.data for run in self._going],
            came=self._data_came,
            served=self.receipts.served,
        )

    def _make_links(self, suspect: Callable[[PeerId], None]) -> Links:
        return self.seams.part(Links)(
            self.seams.network,
            wire.PIPELINE_PROTOCOL,
            self.seams.clock,
            deliver=self.inbox.deliver,
            on_reconnected=self.news.reconnected,
            on_stuck=suspect,
            on_broken=partial(self.news.link_broken, suspect),
        )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then end every stage that this node hosts."""
        try:
            async with trio.open_nursery() as nursery:
                self._tasks.nursery = nursery
                await nursery.start(self.links.run)
                await nursery.start(self.local.run)
                nursery.start_soon(keep_running, "receipts", self.receipts.run)
                nursery.start_soon(keep_running, "frames for audits", self.audits.run)
                await self.archive.load()
                await recover(self)
                await self.local.resume()
                for event in self.archive.remembered():
                    self.publish(event)
                # Not earlier, because the archive must first know which runs have ended.
                network = self.seams.network
                network.handle(wire.PIPELINE_PROTOCOL, self.inbox.serve, wire.PIPELINE_STREAMS)
                network.handle(wire.RUNS_PROTOCOL, self._requests.serve)
                self.data.exchange.serve()
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.seams.executor.keep_stage_ready(None)
            with trio.CancelScope(shield=True):
                for member in list(self.members.values()):
                    await member.close_stage()

    @property
    def machine(self) -> Machine:
        """The machine that a slot gives to a stage that is opened now."""
        return self._machine()

    def _graphs_needed(self) -> list[bytes]:
        going = [run.manifest.graph_hash for run in self._going]
        return [*going, *self.occupancy.beside().values(), *self.checkpoints.store.graphs]

    @property
    def _going(self) -> list[Run]:
        exact = [member.run for member in self.members.values()]
        return exact + [member.run for member in self.local.members.values()]

    def _data_came(self, data: bytes, peer: PeerId, size_bytes: int) -> None:
        """Count pieces of a data set for their run, if all runs with this data have the same requester."""
        runs = [run for run in self._going if run.manifest.data == data.hex()]
        if len({run.requester for run in runs}) == 1:
            self.receipts.came("data", runs[-1].id, runs[-1].requester, peer, size_bytes)

    def _averaged(self, key: bytes, came: Mapping[PeerId, int], sent_bytes: int) -> None:
        """Count the tensors that other peers sent in a completed averaging round. They count for the run's
        requester. If nobody requested the run, they count for this node, which takes part voluntarily."""
        run, requester = self.local.run_of(key) or (key, self.signer.peer)
        for peer, size_bytes in came.items():
            self.receipts.came("averaging", run, requester, peer, size_bytes)
            self.receipts.served(peer, sent_bytes)

    def is_ours(self, run: bytes) -> bool:
        """Return whether this node requested a run, so that the run's files are its own."""
        member = self.members.get(run)
        return member is not None and member.run.requester == self.signer.peer

    def is_member(self, run: bytes, peer: PeerId) -> bool:
        """Return whether `peer` is admitted to a run that this node is in."""
        member = self.members.get(run)
        return member is not None and member.plan is not None and peer in member.plan.roster

    async def save(self, run: str) -> int:
        """Have the committer save a checkpoint after the current step; return the step. Raises RunFailed."""
        for member in self.members.values():
            if member.run.text == run:
                return await member.save()
        raise RunFailed(f"run {run[:8]} is not active here")

    @property
    def has_slot(self) -> bool:
        """Whether a stage may be placed here."""
        return self.slots.free > 0

    # As the requester

    async def load_data(
        self, run: Run, holders: Sequence[PeerId], lanes: Lanes | None = None
    ) -> datasets.Dataset:
        """Return the run's data, from this node or from other members: all of it, or the part for some lanes.
        Raises UsageError or Unreachable."""
        return await self.data.load(run.manifest, holders, lanes)

    async def submit(self, run: Run, *, wait_seconds: float = 0.0) -> None:
        """Plan a run that this node requests, and have all members start. Raises PlacementFailed if a part of
        it found no peer within `wait_seconds` of the first attempt."""
        if run.manifest.local is not None:
            self.stopping.asked(run)
            await self.local.submit(run, wait_seconds=wait_seconds)
            return
        member = self.accept(run)
        self.stopping.asked(run)
        member.place()
        try:
            plan = await place_run(self, run, wait_seconds, member.steering)
        except PlacementFailed as error:
            await member.end("failed", str(error), "")
            raise
        if self.is_over(run.id):  # the run was stopped meanwhile
            await release(run, plan, plan.members, self.ask, self.settings)
            return
        self.enter(member, plan, history := first_history(self.signer, plan))
        others = [peer for peer in plan.members if peer != self.signer.peer]
        for peer, reason in (await start(run, plan, history, others, self.ask, self.settings)).items():
            member.absent(peer, reason)

    def enter(self, member: RunMember, plan: Plan, history: History) -> None:
        """Enter a run with the first of its plans that this node learns; `history` is that plan's history."""
        with self.containing(member.run, "begin"):
            self._enter(member, plan, history)

    def _enter(self, member: RunMember, plan: Plan, history: History) -> None:
        self.outside.drop(member.run.id)
        # A member that returns under a new plan starts afresh, because its earlier promises belong to an old
        # chain.
        self.seams.storage.delete(chain_name(member.run.text))
        self.seams.storage.write(run_name(member.run.text), encode(member.run.fact))
        entered = RunEntry(history, plan.height, plan_hash(plan))
        self.seams.storage.write(history_name(member.run.text), encode(entered))
        member.begin(plan, entered)

    async def ask(self, peer: PeerId, request: wire.Request, seconds: float) -> wire.Reply:
        """Send a request to a member, or handle it directly if the member is this node; return the reply.
        Raises Unreachable."""
        if peer != self.signer.peer:
            return await calls.ask(self.seams.network, peer, request, seconds=seconds)
        try:
            reply = await self._requests.answer(peer, request)
        except RemoteProtocolError as error:  # a request that others would refuse is not a bug of this node
            raise Unreachable("refused", f"no answer: {error}") from None
        assert not isinstance(reply, Body), "blobs are fetched over their own protocol"
        return reply

    def known(self) -> list[str]:
        """Return the short ids of the runs in memory."""
        return [run_text(run) for run in (*self.members, *self.local.members)]

    # Leaving

    async def leave(self) -> None:
        """Hand over this node's part in every run before the node stops, within a time limit. `left` records
        for each run whether it was handed over."""
        await self.local.leave()
        self.left = {member.run.text: False for member in self.members.values()}

        async def leave(member: RunMember) -> None:
            self.left[member.run.text] = await member.leave()

        async with trio.open_nursery() as nursery:
            for member in list(self.members.values()):
                nursery.start_soon(self._tasks.run, member.run, leave, member)

    # Messages of a step

    def send(self, peer: PeerId, message: Any, *payload: Data) -> None:
        """Queue a pipeline message on the link to `peer`; a frame's payload is sent after the message."""
        self._observe(message)
        self.links.send(peer, encode(message), *payload)

    def link_rate(self, peer: PeerId) -> float | None:
        """Return the bytes per second to a peer as measured with frames, or else with probes of the link;
        None if neither is known."""
        return self.links.rate(peer) or self.measurements.links.core.sent_rate(peer) or None

    # Bookkeeping

    def is_over(self, run: bytes) -> bool:
        """Return whether a run has ended here."""
        return self.archive.is_over(run)

    def following(self, plan: bytes) -> RunMember | None:
        """Return the member of the run in which this plan is in force."""
        member = self.inbox.dispatch.plans.get(plan)
        return member if member is not None and member.plan_hash == plan else None

    def follow(self, plan: bytes, member: RunMembership) -> None:
        """Pass messages of this plan to `member`, and no longer those of its previous plan."""
        self.inbox.dispatch.forget(member)
        known = self.members.get(member.run.id)
        if known is None or known is not member:
            return
        # This also releases slots promised for a different successor of the previous plan, which can no
        # longer be decided.
        self.slots.release_run(member.run.id)
        self.readiness.look()
        self.inbox.follow(plan, known)

    def accept(self, run: Run) -> RunMember:
        """Return this node's membership in a run, creating it if there is none."""
        member = self.members.get(run.id)
        if member is None:
            member = self.members[run.id] = self.seams.part(RunMember)(self, run)
            self.note_guests()
            self.publish(run_accepted(self.seams.clock.wall(), run))
        return member

    def forgotten(self, member: RunMembership) -> None:
        """End this node's membership in a run that continues. The node may be asked to join again, so it
        keeps the newest checkpoint, which the run may have to restore. It will still learn how the run
        ends."""
        known = self.members.pop(member.run.id, None)
        if known is not None and known.plan is not None:
            self.outside.follow(known)
        elif not self.outside.has(member.run.id):
            forget_files(self.seams, member.run.text)
        self.inbox.dispatch.forget(member)
        self.readiness.over()

    def released(self, member: RunMembership) -> None:
        """Leave a run, because the plan that was to include this node was not decided."""
        self.forgotten(member)
        self.publish(RunReleased(at=self.seams.clock.wall(), run=member.run.text))

    async def ended(
        self, membership: RunMembership, outcome: str, detail: str, weights: str, *, is_here: bool
    ) -> None:
        """End a run here: store how it ended and whether its result `is_here`, forget its plans, and announce
        the end."""
        member = self.members.get(membership.run.id)
        if member is None or member is not membership:
            return  # it has already ended in a different way
        del self.members[member.run.id]
        await self.archive.note(
            member.run,
            member.shown,
            outcome,
            detail,
            weights,
            is_here=is_here,
            stop=member.stopped_by,
            for_all=member.is_over_for_all,
            keeps=member.plan is not None,  # a run that was never placed is not kept
        )
        forget_files(self.seams, member.run.text)
        self.receipts.ended(member.run.id)
        self.stopping.over(member.run.text)
        self.seams.storage.delete(newest_name(member.run.text))
        self.inbox.dispatch.forget(member)
        self.readiness.over()
        if member.plan is not None:
            needed = {peer for other in self.members.values() if other.plan for peer in other.plan.members}
            for peer in member.plan.members:
                if peer not in needed:
                    self.links.forget(peer)
        at = self.seams.clock.wall()
        self.publish(run_ended(at, member.run, outcome, detail, weights, is_here=is_here))
        if is_here and self._tasks.nursery is not None:
            self.start_task(self.provide, member.run.text, weights, of=None)

    def note_guests(self) -> None:
        """Protect the files that runs here need from eviction, and report evicted results."""
        note_guests(self, self._going, self._graphs_needed())

    def publish_plan(self, run: Run, plan: Plan) -> None:
        """Announce that a plan is in force here."""
        self.audits.admit(run, plan)
        # a requester without a stage may collect the others' spans, even after the end
        self.spans.admit(plan)
        self.publish(run_planned(self.seams.clock.wall(), run, plan))

    def publish_lease(self, run: Run, plan: Plan, stage: int) -> None:
        """Announce that a stage is being opened here."""
        self.publish(stage_leased(self.seams.clock.wall(), run, plan, stage))
