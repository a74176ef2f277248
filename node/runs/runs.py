"""All runs this node knows, and the part it plays in each: requester, planner, trainer, replica.

Messages of a step come in here, are checked and go to the run they name; requests come in at
`node.runs.serving`. Who is gone comes from membership (`member_lost`), never from a timer of our own; only a
run that nobody speaks of any more is given up by silence, so that a lease cannot be held for ever.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from node.errors import StreamClosed, Unreachable
from node.events import Event, RunAccepted, RunEnded, RunPlanned, StageLeased
from node.runs import data as datasets
from node.runs import requests as wire
from node.runs.admission import Machine
from node.runs.links import Links
from node.runs.manifest import Run, run_text
from node.runs.member import RunMember
from node.runs.models import Models
from node.runs.placement import NotPlaced, Offer
from node.runs.serving import Requests
from node.runs.slot import Slot
from node.seams import Seams, Stream
from partition.plan.plan import HASH_BYTES, Plan, plan_hash
from partition.steps.frames import Frame, open_frame

SUBMIT_SECONDS_MAX = 300.0
PIPELINE_IDLE_SECONDS_MAX = 120.0
"""A stream that brings nothing for so long is closed, unless its peer is in a run with this node."""
OVER_MAX = 1_024
"""Runs remembered as ended, so that a late or repeated Start does not begin them again."""


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
        machine: Machine,
    ) -> None:
        self.seams = seams
        self.signer = signer
        self.live = live
        self.publish = publish
        self.machine = machine
        self.offers = offers
        self.accepts = accepts
        self.refuse = refuse
        self.models = Models(
            seams, lambda: [member.run.manifest.graph_hash for member in self.members.values()]
        )
        self.slot = Slot(seams.clock)
        self.members: dict[bytes, RunMember] = {}
        self._provide = provide
        self._plans: dict[bytes, RunMember] = {}
        self._over: dict[bytes, None] = {}
        self._data: dict[str, tuple[Path, int]] = {}
        self._requests = Requests(self)
        self.links = Links(
            seams.network,
            wire.PIPELINE_PROTOCOL,
            deliver=self._deliver,
            on_reconnected=self._reconnected,
            on_stuck=suspect,
        )
        self.nursery: trio.Nursery | None = None
        seams.network.handle(wire.PIPELINE_PROTOCOL, self._serve_pipeline)
        seams.network.handle(wire.RUNS_PROTOCOL, self._requests.serve)

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
                for member in list(self.members.values()):
                    await member.close_stage()

    @property
    def has_slot(self) -> bool:
        """Whether a stage may be placed here."""
        return self.slot.is_free and not any(member.hosts for member in self.members.values())

    # The requester's side

    def learn_data(self, digest: str, path: Path, window: int) -> None:
        """Remember where data of this hash lies, so that this node can train on it."""
        self._data[digest] = path, window

    def load_data(self, run: Run) -> datasets.Dataset:
        """The run's data, read from disk. Raises UsageError or NotPlaced."""
        if run.manifest.data == datasets.DIGITS_NAME:
            return datasets.load_digits()
        if run.manifest.data not in self._data:
            raise NotPlaced("this node does not have the run's data")
        path, window = self._data[run.manifest.data]
        return datasets.load_path(path, window=window)

    async def submit(self, run: Run, planner: PeerId) -> None:
        """Have a run placed. Raises NotPlaced or Unreachable."""
        member = self.accept(run)
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
            reply = await self._requests.answer(peer, request)
        except RemoteProtocolError as error:  # what others would refuse is no bug of this node
            raise Unreachable("refused", f"no answer: {error}") from None
        assert not isinstance(reply, bytes), "blobs are fetched, not asked for"
        return reply

    def known(self) -> list[str]:
        """Short ids of the runs in memory."""
        return [run_text(run) for run in self.members]

    def start_task(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run `task(*arguments)` beside the service, until it ends or the node does."""
        assert self.nursery is not None, "Runs.run was not started"
        self.nursery.start_soon(task, *arguments)

    # What membership says

    def member_lost(self, peer: PeerId) -> None:
        """A member is dead or has left."""
        self.slot.release(peer)
        for member in list(self.members.values()):
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
        return any(
            member.plan is not None and peer in member.plan.members for member in self.members.values()
        )

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
            self.refuse(sender, error)

    def _reconnected(self, peer: PeerId) -> None:
        for member in self.members.values():
            member.reconnected(peer)

    # Bookkeeping

    def is_over(self, run: bytes) -> bool:
        """Whether a run has ended here."""
        return run in self._over

    def following(self, plan: bytes) -> RunMember | None:
        """The member of the run in which this plan is in force."""
        member = self._plans.get(plan)
        return member if member is not None and member.plan_hash == plan else None

    def follow(self, plan: bytes, member: RunMember) -> None:
        """Messages of this plan are for `member`, and of the one it followed before no more."""
        self._plans = {key: other for key, other in self._plans.items() if other is not member}
        self._plans[plan] = member

    def accept(self, run: Run) -> RunMember:
        """This node's membership in a run, which begins if it has not."""
        member = self.members.get(run.id)
        if member is None:
            member = self.members[run.id] = RunMember(self, run)
            manifest = run.manifest
            self.publish(
                RunAccepted(
                    at=self.seams.clock.wall(),
                    run=run.text,
                    model=manifest.model,
                    data=manifest.data,
                    steps=manifest.steps,
                    requester=run.requester,
                    metrics=manifest.metrics,
                )
            )
        return member

    def ended(self, member: RunMember, outcome: str, detail: str, weights: str) -> None:
        """A run is over here: forget its plans, say so."""
        self.members.pop(member.run.id, None)
        self._over = dict(list({**self._over, member.run.id: None}.items())[-OVER_MAX:])
        self._plans = {plan: other for plan, other in self._plans.items() if other is not member}
        if member.plan is not None:
            needed = {peer for other in self.members.values() if other.plan for peer in other.plan.members}
            for peer in member.plan.members:
                if peer not in needed:
                    self.links.forget(peer)
        self.publish(self._ended(member.run.id, outcome, detail, weights))
        if outcome == "done" and not detail and self.nursery is not None:
            self.nursery.start_soon(self._provide, member.run.text, weights)

    def _ended(self, run: bytes, outcome: str, detail: str, weights: str = "") -> RunEnded:
        at = self.seams.clock.wall()
        return RunEnded(at=at, run=run_text(run), outcome=outcome, detail=detail, weights=weights)

    def publish_plan(self, run: Run, plan: Plan) -> None:
        """Say that a plan is in force here."""
        self.publish(
            RunPlanned(
                at=self.seams.clock.wall(),
                run=run.text,
                plan=plan_hash(plan).hex()[:16],
                height=plan.height,
                trainer=PeerId(plan.trainer),
                planner=PeerId(plan.planner),
                layers=tuple((stage.first_layer, stage.last_layer) for stage in plan.stages),
                stages=tuple(tuple(PeerId(peer) for peer in stage.replicas) for stage in plan.stages),
            )
        )

    def publish_lease(self, run: Run, plan: Plan, stage: int) -> None:
        """Say that a stage is being opened here."""
        row = plan.stages[stage]
        layers = (row.first_layer, row.last_layer)
        self.publish(StageLeased(at=self.seams.clock.wall(), run=run.text, stage=stage, layers=layers))
