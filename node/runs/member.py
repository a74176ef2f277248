"""This node's membership in one run: the plan in force, and the roles it gives to this node.

A member may be a stage's replica, the trainer, both, or only follow (requester, planner). When the
trainer dies, the live member with the lowest id plans on (the placeholder of `placement`), and the
new trainer begins from the step that the replicas have reached.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import trio

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from node.errors import PeerloomError, Unreachable
from node.events import Event
from node.runs.data import Batches, Dataset
from node.runs.manifest import Run
from node.runs.placement import NotPlaced, plan_without, start_all
from node.runs.replica import ReplicaShell
from node.runs.requests import REASON_LENGTH_MAX, End, Notice, Reply, Request
from node.runs.trainer import RunEvent, TrainerShell
from node.runs.weights import collect, fetch_weights, keep
from node.seams import Seams
from partition.plan.plan import Plan, plan_hash, planner_of
from partition.stage import StageSpecification
from partition.steps.messages import ReplicaMessage

END_SECONDS_MAX = 60.0
"""A member fetches the weights before it answers an End."""


class Service(Protocol):
    """What a member needs of `node.runs.runs.Runs`."""

    seams: Seams
    signer: Signer
    live: Callable[[], Sequence[PeerId]]
    publish: Callable[[Event], None]
    nursery: trio.Nursery | None

    def send(self, peer: PeerId, message: Any) -> None: ...
    def load_data(self, run: Run) -> Dataset: ...
    def specification(self, run: Run, plan: Plan, stage: int) -> StageSpecification: ...
    def ended(self, member: "RunMember", outcome: str, detail: str, weights: str) -> None: ...
    async def ask(self, peer: PeerId, request: Request, seconds: float) -> Reply: ...


class RunMember:
    """One run on this node, from its manifest to its end."""

    SILENCE_SECONDS_MAX: ClassVar[float] = 180.0
    """Nothing heard of a run for so long: its stage is closed and its slot is free again."""

    def __init__(self, service: Service, run: Run) -> None:
        self.run = run
        self.plan: Plan | None = None
        self.begun = False
        self._service = service
        self._me = service.signer.peer
        self._replica: ReplicaShell | None = None
        self._replica_scope = trio.CancelScope()
        self._trainer: TrainerShell | None = None
        self._trainer_scope = trio.CancelScope()
        self._heard = service.seams.clock.monotonic()
        self._is_ended = False
        self._is_replanning = False

    @property
    def hosts(self) -> bool:
        """Whether a stage of this run is open here."""
        return self._replica is not None

    # Plans

    def may_follow(self, plan: Plan) -> bool:
        """Whether `plan` is the next link of this run's chain, or the one in force."""
        if self.plan is None:
            return True  # a member joins the chain at the plan that names it first
        return plan == self.plan or (plan.height, plan.parent) == (self.plan.height + 1, plan_hash(self.plan))

    async def start(self, plan: Plan) -> None:
        """The plan comes into force here: open this node's stage, if it has one. Raises StageFailed."""
        if plan == self.plan:
            return
        self._trainer_scope.cancel()
        self._trainer = None
        first = self.plan is None
        self.plan, self.begun = plan, False
        self._heard = self._service.seams.clock.monotonic()
        stage = plan.stage_of(self._me)
        if stage is None:
            await self.close_stage()
        elif self._replica is not None:
            self._replica.adopt(plan)
        else:
            await self._open_stage(plan, stage)
        if first:
            self._start_task(self._give_up_on_silence)

    async def _open_stage(self, plan: Plan, stage: int) -> None:
        service = self._service
        specification = service.specification(self.run, plan, stage)
        opened = await service.seams.executor.open_stage(encode(specification))
        shell = ReplicaShell(
            service.signer, plan, specification, opened, service.seams.executor, service.send
        )
        self._replica = shell
        self._replica_scope = trio.CancelScope()
        self._start_task(lambda: self._host(shell, self._replica_scope))

    async def _host(self, shell: ReplicaShell, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(shell.run)
                await shell.dropped.wait()
                nursery.cancel_scope.cancel()
        if self._replica is shell:
            await self.close_stage()

    async def close_stage(self) -> None:
        """End this node's stage process, if there is one."""
        shell, self._replica = self._replica, None
        if shell is not None:
            self._replica_scope.cancel()
            with trio.CancelScope(shield=True):
                await shell.aclose()

    async def begin(self) -> str | None:
        """As the trainer of the plan in force: start feeding. Returns why it cannot, if so."""
        plan, service = self.plan, self._service
        if plan is None or plan.trainer != self._me:
            return "this node is not the trainer of the plan"
        if self.begun:
            return None
        manifest = self.run.manifest
        try:
            dataset = await service.seams.executor.run(lambda: service.load_data(self.run))
        except (PeerloomError, NotPlaced) as error:
            return str(error)
        batches = Batches(dataset, microbatch=manifest.microbatch, seed=manifest.seed, dtype=manifest.dtype)
        shell = TrainerShell(
            service.signer,
            self.run,
            plan,
            batches,
            service.seams.executor,
            service.seams.clock,
            service.send,
            self._publish_and_notify,
        )
        self._trainer, self.begun = shell, True
        self._trainer_scope = scope = trio.CancelScope()
        self._start_task(lambda: self._train(shell, plan, scope))
        return None

    async def _train(self, shell: TrainerShell, plan: Plan, scope: trio.CancelScope) -> None:
        with scope:
            self._drop_the_dead(shell, plan)
            reason = await shell.run()
            if reason is not None:
                await self._finish(plan, "failed", reason, "")
                return
            try:
                live = [peer for peer in self._service.live() if peer not in shell.core.dropped]
                seams = self._service.seams
                data = await self._collect(plan, live)
                digest = await seams.executor.run(lambda: keep(seams.storage, self.run.text, data))
            except Unreachable as error:
                await self._finish(plan, "failed", error.detail, "")
                return
            await self._finish(plan, "done", "", digest)

    async def _collect(self, plan: Plan, live: Sequence[PeerId]) -> bytes:
        own = None if self._replica is None else await self._replica.export()
        return await collect(self.run, plan, live, self._me, own, self._service.seams)

    def _drop_the_dead(self, shell: TrainerShell, plan: Plan) -> None:
        """Who died between the plan and its beginning was announced to nobody's trainer."""
        live = self._service.live()
        for peer in plan.members:
            if peer not in live:
                shell.drop(peer)

    # The end

    async def _finish(self, plan: Plan, outcome: str, detail: str, weights: str) -> None:
        """As trainer or planner: tell every live member, then end here."""
        message = End(plan_hash(plan), outcome, detail[:REASON_LENGTH_MAX], weights)
        others = [peer for peer in plan.members if peer != self._me and peer in self._service.live()]

        async def tell(peer: PeerId) -> None:
            try:
                await self._service.ask(peer, message, END_SECONDS_MAX)
            except Unreachable:
                return  # it will give the run up by silence, and find the weights by the DHT

        async with trio.open_nursery() as nursery:
            for peer in others:
                nursery.start_soon(tell, peer)
        await self.end(outcome, detail, weights)

    async def end(self, outcome: str, detail: str, weights: str, *, source: PeerId | None = None) -> None:
        """The run is over here: fetch the result from `source`, close the stage, say so."""
        if self._is_ended:
            return
        self._is_ended = True
        seams = self._service.seams
        if outcome == "done" and source is not None:
            try:
                data = await fetch_weights(seams.network, self.run.text, [source], weights)
                await seams.executor.run(lambda: keep(seams.storage, self.run.text, data))
            except Unreachable as error:
                detail = f"the weights are not here: {error.detail}"
        await self.close_stage()
        self._service.ended(self, outcome, detail, weights)
        if source is not None:
            self._trainer_scope.cancel()

    async def export(self) -> bytes:
        """This node's stage as a safetensors file."""
        assert self._replica is not None
        return await self._replica.export()

    async def _give_up_on_silence(self) -> None:
        clock = self._service.seams.clock
        while not self._is_ended:
            left = self._heard + self.SILENCE_SECONDS_MAX - clock.monotonic()
            if self._trainer is not None:
                left = self.SILENCE_SECONDS_MAX
            elif left <= 0:
                seconds = self.SILENCE_SECONDS_MAX
                await self.end("failed", f"nothing was heard of the run for {seconds:.0f} s", "")
                return
            await trio.sleep(left)

    # What comes in

    def receive(self, now: float, sender: PeerId, message: Any) -> None:
        """A pipeline message of the plan in force, or one before it. Raises RemoteProtocolError."""
        self._heard = now
        if isinstance(message, Notice):
            if self.plan is None or sender != self.plan.trainer or message.event.run != self.run.text:
                raise RemoteProtocolError("a notice from a peer that is not the run's trainer")
            self._service.publish(message.event)
        elif isinstance(message, ReplicaMessage):
            if self._trainer is not None:
                self._trainer.receive(now, sender, message)
        elif self._replica is not None:
            self._replica.receive(now, sender, message)

    def reconnected(self, peer: PeerId) -> None:
        """A link to `peer` was opened anew."""
        if self._replica is not None:
            self._replica.reconnected(peer)
        if self._trainer is not None:
            self._trainer.reconnected(peer)

    def member_lost(self, peer: PeerId) -> None:
        """A member is dead or has left; `service.live()` no longer holds it."""
        if self.plan is None or peer not in self.plan.members:
            return
        if self._trainer is not None:
            self._trainer.drop(peer)
        live = [other for other in self.plan.members if other in self._service.live()]
        if self.plan.trainer not in live and live and planner_of(live) == self._me:
            self._start_task(self._replan)

    async def _replan(self) -> None:
        """As the planner after a trainer's death: another trainer, the same stages."""
        if self._is_replanning or self._is_ended:
            return
        self._is_replanning = True
        try:
            await self._find_trainer()
        finally:
            self._is_replanning = False

    async def _find_trainer(self) -> None:
        assert self.plan is not None
        old = self.plan
        reason = "no member could train on"
        for candidate in sorted(old.members, key=lambda peer: (old.stage_of(peer) is not None, peer)):
            live = [peer for peer in old.members if peer in self._service.live()]
            if candidate not in live:
                continue
            try:
                plan = plan_without(self.plan, self._me, candidate, live)
                await start_all(self.run, plan, self._service.ask, live)
                return
            except NotPlaced as error:
                reason = str(error)
        await self._finish(self.plan, "failed", f"the trainer is gone: {reason}", "")

    # Bookkeeping

    def _publish_and_notify(self, event: RunEvent) -> None:
        assert self.plan is not None
        self._service.publish(event)
        notice = Notice(plan_hash(self.plan), event)
        live = self._service.live()
        for peer in self.plan.members:
            if peer != self._me and peer in live:
                self._service.send(peer, notice)

    def _start_task(self, task: Callable[[], Any]) -> None:
        assert self._service.nursery is not None
        self._service.nursery.start_soon(task)
